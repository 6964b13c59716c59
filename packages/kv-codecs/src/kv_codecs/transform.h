/* What both ways of the codec `kvtc`'s transform share: sizes, turns, and products of whole numbers. */
#ifndef KV_TRANSFORM_H
#define KV_TRANSFORM_H

#include "rows.h"

enum {
    TILE = 64,            /* tokens that are worked on at a time */
    MOST_CHANNELS = 256,  /* of a block */
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

#define ALIGNED __attribute__((aligned(64))) /* no load is of two lines of the cache */

/* Channels from `first` on, of a plane of `n`, which are worked on at a time; half: of a head's channels. cosines: of the channels' first
 * frequency, and NULL: they are not turned; the next one's are `stride` behind. */
typedef struct {
    size_t n, half, block, first, channels;
    const f32 *cosines;
    size_t stride;
} Part;

/* What will be read next, and is brought into the cache while a product is computed: places that are `stride` bytes apart; of
 * each so many bytes. */
typedef struct {
    const u8 *from;
    size_t stride, count, bytes;
} Ahead;

INLINE void read_ahead(const Ahead *ahead, size_t done, size_t of) {
    size_t first = ahead->count * done / of, end = ahead->count * (done + 1) / of;
    for (size_t i = first; i < end; i++) {
        const u8 *at = ahead->from + i * ahead->stride;
        for (size_t byte = 0; byte < ahead->bytes; byte += 64)
            __builtin_prefetch(at + byte, 0, 2);
    }
}

/* sums[row][t] = Σ matrix[row][i] × numbers[i][t], whose order does not matter. matrix: [block][block], numbers: [block / 2][TILE][2],
 * sums: [block][TILE]. block: even. */
void kv_multiply(const i16 *matrix, size_t block, const int16_t *numbers, int32_t *restrict sums);

#ifdef KV_X86
enum {
    LINE = 32,      /* words of a line of the cache */
    LANES = 16,     /* numbers of a register */
    REGISTERS = TILE / LANES,
    STEP_ROWS = 5,  /* whose sums are in registers at a time, beside constants; the last of a block may be computed twice */
    SUM_ROWS = 6    /* where there are no constants */
};

INLINE size_t sum_rows_from(size_t row, size_t block) { return row + SUM_ROWS <= block ? row : block - SUM_ROWS; }

/* Whether whole tiles of bfloat16, of such channels, are worked on with AVX-512: in as few passes as there can be, where sums become steps
 * in registers and what is read next is fetched while a product is computed. It takes two thirds of the time of a compiler's loops. */
INLINE int has_tiles(const Shape *shape, const Sizes *sizes) {
    size_t head = (size_t)shape->head_dim, block = (size_t)shape->block;
    return shape->dtype == BFLOAT16 && head % (2 * LINE) == 0 && block >= STEP_ROWS && block % 4 == 0 &&
           (block % head == 0 || sizes->channels / block <= MOST_BLOCKS) && has_vnni();
}
#endif

#endif
