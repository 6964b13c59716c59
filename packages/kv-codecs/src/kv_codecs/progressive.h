/* What the sources of the codec `progressive` share. */
#ifndef KV_PROGRESSIVE_H
#define KV_PROGRESSIVE_H

#include "kernels.h"

enum {
    SCALED = 256,          /* numbers that share a step */
    HALF_SCALED = 128,     /* what is worked on at a time, as half a section is a whole number of these */
    LEAST_EXPONENT = 8,    /* of a step */
    MOST_EXPONENT = 240,
    LONG_CODE = 15,        /* the least code of steps that does not fit into four bits: these then are 15 */
    ESCAPED_CODE = 127,    /* the code of a number that the first part has as it is */
    ALL_MISSING = 8,       /* of a number that the last part has as it is, as its leading one is in neither of the first two */
    ESCAPED = 16           /* instead of how many bits are missing */
};

/* Two planes, of the first half of a section and of the second, share bytes: four bits of each. */
typedef struct {
    const u16 *words;
    size_t n;
    uint32_t offset;
    u8 *exponents, *signs, *codes, *long_codes, *nibbles, *missing;
    uint64_t longs, escaped, whole; /* counts that are made */
} Cutting;

/* Numbers that are stored as they are. */
typedef struct {
    const u16 *words;
    size_t count, used; /* or needed */
} Stored;

/* A section. */
typedef struct {
    int parts; /* that are known: nibbles from 2 on, whole numbers and packed bits from 3 on */
    size_t n;
    u16 *words;
    const u8 *exponents, *signs, *codes, *nibbles;
    const u8 *packed, *long_codes;
    size_t packed_bytes, long_count, bits, longs; /* there are, and how many were used, or are needed */
    Stored escaped, whole;
} Restoring;

enum { EIGHT = 8, MASK = 64 };              /* bytes of a register of general use, and bits of a mask of numbers */
#define ONES ((uint64_t)0x0101010101010101) /* times a byte: eight of these */

INLINE uint64_t eight_bytes(const u8 *at) {
    uint64_t bytes;
    memcpy(&bytes, at, EIGHT);
    return bytes;
}

/* Of eight bytes below 128, the highest bit of those that are not 0. */
INLINE uint64_t nonzero(uint64_t bytes) { return (bytes + 127 * ONES) & 128 * ONES; }

/* The lowest bits of eight bytes, side by side. */
INLINE uint64_t low_bits(uint64_t bytes) { return (bytes & ONES) * 0x0102040810204080 >> 56; }

/* Which of 64 bytes, all below 128, are this one. A loop over the few bits of such a mask mispredicts its end once; over eight bytes
 * at a time it would do so eight times. */
INLINE uint64_t equal(u8 value, const u8 *restrict bytes) {
    uint64_t mask = 0;
    for (int i = 0; i < MASK; i += EIGHT)
        mask |= low_bits(~nonzero(eight_bytes(bytes + i) ^ value * ONES) >> 7) << i;
    return mask;
}

/* Of numbers whose exponents have this sum and an offset. */
INLINE u8 step_exponent(uint32_t sum) {
    sum /= SCALED;
    return (u8)(sum < LEAST_EXPONENT ? LEAST_EXPONENT : sum > MOST_EXPONENT ? MOST_EXPONENT : sum);
}

/* Long codes of the second half are written from the middle of their room on, as both halves are cut side by side. */
INLINE void join_long_codes(Cutting *all, size_t low, size_t high) {
    memmove(all->long_codes + low, all->long_codes + all->n / 2, high);
    all->longs = low + high;
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

/* Sets the codes of 64 numbers that are long, twice as large where there are signs below them. Returns whether there are escaped
 * ones among them. */
INLINE int take_long_codes(Restoring *all, uint64_t longs, unsigned sign_bits, u8 *restrict codes) {
    int has_escaped = 0;
    for (; longs; longs &= longs - 1, all->longs++) {
        u8 *own = codes + __builtin_ctzll(longs), code = all->longs < all->long_count ? all->long_codes[all->longs] : 0;
        *own = (u8)(code << sign_bits | (*own & sign_bits));
        has_escaped |= code == ESCAPED_CODE;
    }
    return has_escaped;
}

/* Sets those of 64 numbers that are stored as they are. */
INLINE void place(Stored *stored, uint64_t marked, u16 *restrict words) {
    for (; marked; marked &= marked - 1, stored->used++)
        if (stored->used < stored->count)
            words[__builtin_ctzll(marked)] = stored->words[stored->used];
}

/* Whether this processor has AVX2 and BMI2. */
int kv_has_bmi2(void);
/* What progressive.c has, in a fraction of the time, on such a processor. */
u8 *kv_put_codes_bmi2(const u8 *restrict signed_codes, u8 *restrict signs, u8 *restrict codes, u8 *restrict long_codes);
size_t kv_pack_bmi2(const u16 *restrict words, const u8 *restrict missing, size_t n, u8 *restrict out);
void kv_restore_bmi2(Restoring *all);
/* Both ways with AVX-512's byte instructions, in a fraction of the time. 0: this processor has them not. */
int kv_cut_vbmi(Cutting *all);
int kv_restore_vbmi(Restoring *all);

#endif
