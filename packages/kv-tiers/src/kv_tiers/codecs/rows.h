/* What the sources of the codec `kvtc`'s prefix codes share. */
#ifndef KV_ROWS_H
#define KV_ROWS_H

#include "kernels.h"

enum {
    CODE_LENGTH = 63, /* the bits of an entry of a table that hold its code's length */
    IS_ESCAPED = 128  /* beside it */
};

/* The code of each byte. coded: as in row_codes.py. lengths, low, high: the same if `is_split`, in separate tables of bytes: each
 * code's length with its mark, its lower eight bits, and its upper ones. */
typedef struct {
    const u32 *coded;
    int is_split;
    u8 lengths[256], low[256], high[256];
} CodeTable;

typedef struct {
    uint64_t bits;      /* not yet written, */
    unsigned bit_count; /* and how many they are */
    uint32_t *escaped;  /* where the number of the next escaped byte goes */
    u8 *out;
} BitWriter;

INLINE void write_code(BitWriter *writer, uint32_t code, uint32_t number) {
    writer->bits |= (uint64_t)(code >> 8) << writer->bit_count;
    writer->bit_count += code & CODE_LENGTH;
    if (code & IS_ESCAPED)
        *writer->escaped++ = number;
}

/* Writes whole bytes: fewer than 8 bits remain. */
INLINE void flush_bytes(BitWriter *writer) {
    memcpy(writer->out, &writer->bits, 8);
    writer->out += writer->bit_count / 8;
    writer->bits >>= writer->bit_count & ~7u;
    writer->bit_count &= 7;
}

/* Splits it if this processor has AVX-512's instructions for bytes. */
void kv_make_table(CodeTable *table, const u32 *coded);
/* Writes the codes of the first of n bytes, as many as are a multiple of 64, with the split tables. first: the number of the
 * first byte. Returns how many bytes were coded. */
uint32_t kv_write_split(BitWriter *writer, const u8 *bytes, uint32_t first, uint32_t n, const CodeTable *table);

#endif
