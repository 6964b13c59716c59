/* What the sources of the codec `kvtc`'s prefix codes share. */
#ifndef KV_ROWS_H
#define KV_ROWS_H

#include "kernels.h"

enum {
    CODE_LENGTH = 63, /* the bits of an entry of a table that hold its code's length */
    IS_ESCAPED = 128  /* beside it */
};

/* Of each byte its code: row_codes.py has it as `coded`. lengths, low, high: the same, a byte each, with each code's lower eight
 * bits apart from the others, if `is_split`. */
typedef struct {
    const u32 *coded;
    int is_split;
    u8 lengths[256], low[256], high[256];
} CodeTable;

typedef struct {
    uint64_t waiting;  /* bits that are not yet written, */
    unsigned filled;   /* so many of them */
    uint32_t *escaped; /* where the next byte that is escaped is noted */
    u8 *out;
} Putting;

INLINE void put_code(Putting *now, uint32_t code, uint32_t number) {
    now->waiting |= (uint64_t)(code >> 8) << now->filled;
    now->filled += code & CODE_LENGTH;
    if (code & IS_ESCAPED)
        *now->escaped++ = number;
}

/* Less than 8 bits are waiting afterwards. */
INLINE void put_whole_bytes(Putting *now) {
    memcpy(now->out, &now->waiting, 8);
    now->out += now->filled / 8;
    now->waiting >>= now->filled & ~7u;
    now->filled &= 7;
}

/* Splits it if this processor has AVX-512's instructions for bytes. */
void kv_make_table(CodeTable *table, const u32 *coded);
/* The codes of some of the first of n bytes, by tables that are kept in registers, in half the time. Returns how many. */
uint32_t kv_put_split(Putting *now, const u8 *bytes, uint32_t first, uint32_t n, const CodeTable *table);

#endif
