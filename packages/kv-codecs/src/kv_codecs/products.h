/* Products of whole numbers, for `transform.c`. */
#ifndef KV_PRODUCTS_H
#define KV_PRODUCTS_H

#include "kernels.h"

enum {
    TILE = 64,           /* columns: tokens that are worked on at a time */
    MOST_CHANNELS = 256  /* rows at the most */
};

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

/* matrix: [block][block], numbers: [block / 2][TILE][2], sums: [block][TILE]. block: even. */
void kv_multiply(const i16 *matrix, size_t block, const int16_t *numbers, int32_t *restrict sums);

/* Whether the next one works here, with such blocks. */
int kv_multiplies_bytes(size_t block);
#define ALIGNED __attribute__((aligned(64))) /* no load is of two lines of the cache */

/* The same of bytes, twice as fast. matrix: [block / 4, rounded up][block][4], with zeros beyond the block; numbers: [block / 4,
 * rounded up] times TILE times four, `stride` bytes apart, each of them 128 too large. */
void kv_multiply_bytes(const i8 *matrix, size_t block, const u8 *numbers, size_t stride, int32_t *restrict sums);

#endif
