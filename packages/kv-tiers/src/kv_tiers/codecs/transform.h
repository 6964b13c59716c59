/* What the sources of the codec `kvtc`'s transform share. */
#ifndef KV_TRANSFORM_H
#define KV_TRANSFORM_H

#include "products.h"

enum {
    KEYS_AND_VALUES = 2,
    MATRIX_BITS = 14,     /* of the forward matrix, below one */
    FINEST = 4,           /* numbers are rounded to 1 / 2**4 of a step, */
    COARSEST = -2,        /* or to 2**2 steps, if they are so far from their means */
    LARGEST = 7 << 10,    /* so rounded; products' sums are thereby below 2**31, of MOST_CHANNELS too */
    LARGEST_STEPS = 32767,
    MOST_BLOCKS = 64      /* of a part */
};

/* A block's numbers are multiplied by this, to whole numbers of so many bits of a step. */
typedef struct {
    int bits;
    float unit; /* 2**bits; 0: one of them is too far from its mean */
} Unit;

INLINE float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE uint32_t bits_of_float(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

/* farthest: of a block's numbers, in steps. */
INLINE Unit unit_of(float farthest) {
    int bits = FINEST;
    float unit = 1 << FINEST;
    for (; bits > COARSEST && farthest * unit > LARGEST; bits--)
        unit *= 0.5f;
    return (Unit){bits, farthest * unit <= LARGEST ? unit : 0.0f};
}

/* Whole tiles of bfloat16 with AVX-512, which take a fraction of the time: what transform.c computes, with as few passes as
 * there can be. Channels from `first` on, of a plane of `n`; half: of a head's channels. cosines: of the channels' first
 * frequency, and NULL: they are not turned; the next one's are `stride` behind. */
typedef struct {
    size_t n, half, block, first, channels;
    const f32 *cosines;
    size_t stride;
} Part;

/* Whether these work here, for such channels. */
int kv_has_tiles(size_t head_dim, size_t block, size_t n);

/* words: the tile's, of the plane's first channel. numbers: [channels][TILE], in steps from their means. farthest: of each
 * block. */
void kv_tile_to_steps(const Part *part, const u16 *words, const f32 *means, const f32 *steps, f32 *restrict numbers,
                      f32 *restrict farthest);

/* [block][TILE] to [block / 2][TILE][2], whole. */
void kv_tile_to_pairs(const f32 *restrict numbers, size_t block, float unit, int16_t *restrict pairs);

/* The product with a matrix, in whole steps: each row `stride` behind the place before. 0: one of them is beyond
 * LARGEST_STEPS. */
int kv_tile_to_rows(const i16 *matrix, size_t block, const int16_t *pairs, int bits, const int32_t *places, i16 *restrict rows,
                    size_t stride, const Ahead *ahead);

/* A block's steps, four of 8 bits side by side, 128 too large. Whether 8 bits are enough. */
int kv_tile_to_fours(const i16 *rows, size_t stride, const int32_t *restrict places, size_t block, u8 *restrict bytes);

/* sums: [channels][TILE], of the part. scales, means: of the plane's. words: as above. */
void kv_tile_from_sums(const Part *part, const int32_t *restrict sums, const f32 *scales, const f32 *means, u16 *words);

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
/* Of whole 32 rows and eight columns, which are lines of the cache when they are stored. */
void kv_transpose_lines(const u16 *from, size_t from_stride, size_t rows, size_t columns, u16 *restrict to, size_t to_stride);
#endif

#endif
