/* What the sources of the codec `kvtc`'s transform share. */
#ifndef KV_TRANSFORM_H
#define KV_TRANSFORM_H

#include "products.h"
#include "rows.h"

enum {
    KEYS_AND_VALUES = 2,
    MATRIX_BITS = 14,     /* of the forward matrix, below one */
    FINEST = 4,           /* numbers are rounded to 1 / 2**4 of a step, */
    COARSEST = -2,        /* or to 2**2 steps, if they are so far from their means */
    LARGEST = 7 << 10,    /* so rounded; products' sums are thereby below 2**31, of MOST_CHANNELS too */
    LARGEST_STEPS = 32767,
    MOST_BLOCKS = 64      /* of a part */
};

#define NO_FAR UINT32_MAX

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

enum { BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3 };

/* Of a chunk. exact: how many of its first tokens have no steps. */
typedef struct {
    int64_t dtype, layers, tokens, heads, head_dim, block, exact, tables;
} Shape;

typedef struct {
    size_t channels, blocks, tokens, item; /* of a plane; in all; of a chunk; bytes of a number */
} Sizes;

/* Whether there are such shapes, and the sizes that they have. */
int kv_is_shape(const Shape *shape, size_t shape_bytes, Sizes *sizes);
/* Whether the arrays that both ways have are of these sizes, and lead nowhere else. */
int kv_fits(const Shape *shape, const Sizes *sizes, size_t words_bytes, size_t turns_bytes, const u8 *tables,
            size_t tables_bytes, size_t means_bytes);

/* [tokens][channels] to [channels][TILE], and back: a rows × columns matrix, transposed. */
void kv_transpose16(const u16 *from, size_t from_stride, size_t rows, size_t columns, u16 *restrict to, size_t to_stride);

INLINE void transpose32(const u32 *from, size_t from_stride, size_t rows, size_t columns, u32 *restrict to,
                        size_t to_stride) {
    for (size_t row = 0; row < rows; row++)
        for (size_t column = 0; column < columns; column++)
            to[column * to_stride + row] = from[row * from_stride + column];
}

/* Turns the two channels of a frequency. cos: of these tokens; sin lies so many numbers behind it. back: -1 to position 0,
 * or 1. */
INLINE void turn(const f32 *restrict cos, size_t to_sin, float back, float *restrict low, float *restrict high) {
    for (int t = 0; t < TILE; t++) {
        float x = low[t], y = high[t], s = cos[to_sin + (size_t)t] * back;
        low[t] = x * cos[t] - y * s;
        high[t] = y * cos[t] + x * s;
    }
}

/* How far it is from a frequency's cosines to the next one's: tables go on to a whole tile. */
INLINE size_t turns_stride(const Sizes *sizes) { return (sizes->tokens + TILE - 1) / TILE * TILE; }

/* Cosines of a plane's first frequency from a tile on. NULL: its numbers are not turned. */
INLINE const f32 *cosines_of(const Shape *shape, const Sizes *sizes, const u8 *turns, const u8 *tables, size_t plane,
                             size_t first) {
    if (plane >= (size_t)shape->layers)
        return NULL;
    size_t table = (size_t)((const int32_t *)tables)[plane];
    return (const f32 *)turns + table * (size_t)shape->head_dim * turns_stride(sizes) + first;
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

/* The product with a matrix, in whole steps: each row `stride` behind the one before. 0: one of them is beyond
 * LARGEST_STEPS. */
int kv_tile_to_rows(const i16 *matrix, size_t block, const int16_t *pairs, int bits, i16 *restrict rows, size_t stride,
                    const Ahead *ahead);

/* Tokens of a block, of whole heads, from its decoded steps. vectors: of four rows. matrix: as for kv_multiply_bytes. far_tiles:
 * of each tile, NO_FAR if all of its steps are bytes; else it is left alone. turns: of each token the cosines of all
 * frequencies, then the sines; NULL: they are not turned. words: of the plane's first token and the block's first channel.
 * ahead: what is read next. */
void kv_block_to_words(const Part *part, const u8 *bytes, size_t vectors, const i8 *matrix, const f32 *scales, const f32 *means,
                       const f32 *turns, const uint32_t *far_tiles, u16 *words, size_t tokens, const Ahead *ahead);

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
/* Of whole 32 rows and eight columns, which are lines of the cache when they are stored. */
void kv_transpose_lines(const u16 *from, size_t from_stride, size_t rows, size_t columns, u16 *restrict to, size_t to_stride);
#endif

#endif
