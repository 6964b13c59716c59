/* What the sources of the codec `progressive` share. */
#ifndef KV_PROGRESSIVE_H
#define KV_PROGRESSIVE_H

#include "kernels.h"

enum {
    SCALED = 256,          /* numbers that share a step */
    HALF_SCALED = 128,     /* what is worked on at a time, as half a section is a whole number of these */
    LEAST_EXPONENT = 8,    /* of a step */
    MOST_EXPONENT = 240,
    ESCAPED = 255,         /* the symbol of a number that is stored as it is */
    ALL_MISSING = 8        /* of a number that is stored as it is, as its bits are in neither of the first parts */
};

typedef struct {
    const u16 *words;
    size_t n;
    uint32_t offset;
    u8 *exponents, *symbols, *nibbles, *missing;
    uint64_t escaped, whole; /* counts that are made */
} Cutting;

typedef struct {
    const u8 *symbols, *nibbles, *exponents, *packed; /* nibbles: NULL where they are not known */
    size_t n, packed_bytes;
    int to_middle;
    u16 *words;
    u8 *missing;
    uint64_t escaped, whole, bits; /* counts that are made */
} Restoring;

/* Of numbers whose exponents have this sum and an offset. */
INLINE u8 step_exponent(uint32_t sum) {
    sum /= SCALED;
    return (u8)(sum < LEAST_EXPONENT ? LEAST_EXPONENT : sum > MOST_EXPONENT ? MOST_EXPONENT : sum);
}

/* Where the missing bits of the next HALF_SCALED numbers begin: in `packed`, or in `room`, with zeros behind its end, where
 * reading them could lead beyond. */
INLINE const u8 *bits_at(const Restoring *all, u8 *restrict room) {
    size_t at = all->bits / 8, left = at < all->packed_bytes ? all->packed_bytes - at : 0;
    if (left >= HALF_SCALED)
        return all->packed + at;
    memset(room, 0, HALF_SCALED);
    if (left)
        memcpy(room, all->packed + at, left);
    return room;
}

/* Both ways with AVX-512's byte instructions, in a fraction of the time. 0: this processor has them not. */
int kv_cut_vbmi(Cutting *all);
int kv_restore_vbmi(Restoring *all);

#endif
