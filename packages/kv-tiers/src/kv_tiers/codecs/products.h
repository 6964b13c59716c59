/* Products of whole numbers, for `transform.c`. */
#ifndef KV_PRODUCTS_H
#define KV_PRODUCTS_H

#include "kernels.h"

enum {
    TILE = 64,           /* columns: tokens that are worked on at a time */
    MOST_CHANNELS = 256  /* rows at the most */
};

/* matrix: [block][block], numbers: [block / 2][TILE][2], sums: [block][TILE]. block: even. */
void kv_multiply(const i16 *matrix, size_t block, const int16_t *numbers, int32_t *restrict sums);

/* Whether the next one works here, with such blocks. */
int kv_multiplies_bytes(size_t block);
#define ALIGNED __attribute__((aligned(64))) /* no load is of two lines of the cache */

/* The same of bytes, twice as fast. matrix: [block][block, to a multiple of four], with zeros behind the block's end;
 * numbers: [block / 4, rounded up][TILE][4], each of them 128 too large. */
void kv_multiply_bytes(const i8 *matrix, size_t block, const u8 *numbers, int32_t *restrict sums);

#endif
