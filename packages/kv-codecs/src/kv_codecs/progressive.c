/* The passes over numbers of the codec `progressive`: into signs, codes, nibbles and missing bits, and back. kernels.c says what
 * holds for all such passes. */
#include "progressive.h"

enum { SECTION = 1 << 17 }; /* the most numbers of a section */

static int is_section(size_t numbers) { return numbers % SCALED == 0 && numbers <= SECTION; }

/* How many of half a block's bytes are this one; the compiler counts them in bytes side by side. */
INLINE uint32_t count_of(u8 value, const u8 *restrict bytes) {
    uint8_t count = 0;
    for (int i = 0; i < HALF_SCALED; i++)
        count += bytes[i] == value;
    return count;
}

/* 16 bits a number throughout, as 32 would take longer. Hence the casts, and a shift for each bit of the distance. signed_codes:
 * twice the code of steps, plus 1 for a negative number. */
INLINE void cut(const u16 *restrict words, int step, u8 *restrict signed_codes, u8 *restrict nibbles,
                u8 *restrict missing) {
    for (int i = 0; i < HALF_SCALED; i++) {
        uint16_t word = words[i];
        int16_t moved = (int16_t)(step + 4 - (word >> 7 & 0xff));
        uint16_t up = moved < 0 ? (uint16_t)-moved : 0;
        uint16_t down = moved < 0 ? 0 : moved > ALL_MISSING + 1 ? ALL_MISSING + 1 : (uint16_t)moved;
        uint16_t sixteenths = (uint16_t)(((word & 0x7f) | 0x80) << 1);
        sixteenths = down & 8 ? sixteenths >> 8 : sixteenths;
        sixteenths = down & 4 ? sixteenths >> 4 : sixteenths;
        sixteenths = down & 2 ? sixteenths >> 2 : sixteenths;
        sixteenths = down & 1 ? sixteenths >> 1 : sixteenths;
        uint16_t steps = (uint16_t)((sixteenths >> 4) + (up << 4));
        uint16_t code = steps < ESCAPED_CODE ? steps : ESCAPED_CODE;
        signed_codes[i] = (u8)(code << 1 | word >> 15);
        nibbles[i] = (u8)(sixteenths & 15);
        missing[i] = (u8)(code == ESCAPED_CODE ? ESCAPED : down > 0 ? down - 1 : 0);
    }
}

/* Signs, and codes of four bits, of half a block from codes with signs. Returns the end of the long ones. */
static u8 *put_codes(const u8 *restrict signed_codes, u8 *restrict signs, u8 *restrict codes, u8 *restrict long_codes) {
    for (int at = 0; at < HALF_SCALED; at += MASK) {
        uint64_t longs = 0;
        for (int i = 0; i < MASK; i += EIGHT) {
            uint64_t own = eight_bytes(signed_codes + at + i), code = own >> 1 & 127 * ONES;
            signs[(at + i) / EIGHT] = (u8)low_bits(own);
            memcpy(codes + at + i, &code, EIGHT);
            longs |= low_bits((code + (128 - LONG_CODE) * ONES) >> 7) << i;
        }
        for (; longs; longs &= longs - 1) {
            u8 *code = codes + at + __builtin_ctzll(longs);
            *long_codes++ = *code;
            *code = LONG_CODE;
        }
    }
    return long_codes;
}

VERSIONS static void cut_anywhere(Cutting *all) {
    const u16 *in = all->words;
    size_t half = all->n / 2;
    for (size_t block = 0; block < all->n / SCALED; block++) {
        uint32_t sum = all->offset;
        for (int i = 0; i < SCALED; i++)
            sum += in[block * SCALED + (size_t)i] >> 7 & 0xff;
        all->exponents[block] = step_exponent(sum);
    }
    u8 *(*put)(const u8 *restrict, u8 *restrict, u8 *restrict, u8 *restrict) = kv_has_bmi2() ? kv_put_codes_bmi2 : put_codes;
    u8 *longs = all->long_codes, *high_longs = all->long_codes + half;
    for (size_t at = 0; at < half; at += HALF_SCALED) {
        u8 signed_codes[HALF_SCALED], codes[2][HALF_SCALED], nibbles[2][HALF_SCALED], *missing = all->missing + at;
        cut(in + at, all->exponents[at / SCALED], signed_codes, nibbles[0], missing);
        longs = put(signed_codes, all->signs + at / 8, codes[0], longs);
        cut(in + half + at, all->exponents[(half + at) / SCALED], signed_codes, nibbles[1], missing + half);
        high_longs = put(signed_codes, all->signs + (half + at) / 8, codes[1], high_longs);
        for (size_t i = 0; i < HALF_SCALED; i++) {
            all->codes[at + i] = (u8)(codes[0][i] | codes[1][i] << 4);
            all->nibbles[at + i] = (u8)(nibbles[0][i] | nibbles[1][i] << 4);
        }
        all->escaped += count_of(ESCAPED, missing) + count_of(ESCAPED, missing + half);
        all->whole += count_of(ALL_MISSING, missing) + count_of(ALL_MISSING, missing + half);
    }
    join_long_codes(all, (size_t)(longs - all->long_codes), (size_t)(high_longs - all->long_codes) - half);
}

/* long_codes: has room for as many as there are numbers. counts: how many of these there are, how many numbers are escaped, and
 * how many miss all their bits. */
EXPORT int64_t kv_cut(int64_t offset, const u8 *words, size_t words_bytes, u8 *restrict exponents,
                      size_t exponents_bytes, u8 *restrict signs, size_t signs_bytes, u8 *restrict codes,
                      size_t codes_bytes, u8 *restrict long_codes, size_t long_bytes, u8 *restrict nibbles,
                      size_t nibbles_bytes, u8 *restrict missing, size_t missing_bytes, int64_t *restrict counts,
                      size_t counts_bytes) {
    size_t n = missing_bytes;
    if (!is_section(n) || words_bytes != 2 * n || exponents_bytes != n / SCALED || signs_bytes != n / 8 ||
        codes_bytes != n / 2 || long_bytes != n || nibbles_bytes != n / 2 || counts_bytes != 3 * sizeof *counts ||
        offset < 0 || offset > 1 << 16)
        return KV_MISFIT;
    Cutting all = {(const u16 *)words, n, (uint32_t)offset, exponents, signs, codes, long_codes, nibbles, missing, 0, 0, 0};
    if (!kv_cut_vbmi(&all))
        cut_anywhere(&all);
    counts[0] = (int64_t)all.longs;
    counts[1] = (int64_t)all.escaped;
    counts[2] = (int64_t)all.whole;
    return 0;
}

/* Missing bits, one number's behind the other's from bit 0 up. */

static size_t pack(const u16 *restrict words, const u8 *restrict missing, size_t n, u8 *restrict out) {
    uint64_t waiting = 0;
    unsigned filled = 0; /* bits that wait: 7 at most between two turns, and 63 within one */
    size_t at = 0;
    for (size_t i = 0; i < n; i += 8) {
        for (int j = 0; j < 8; j++) {
            unsigned bits = missing[i + j] & 7; /* 8 and 16 are none */
            waiting |= (uint64_t)(words[i + j] & ((1u << bits) - 1)) << filled;
            filled += bits;
        }
        memcpy(out + at, &waiting, 8);
        at += filled / 8;
        waiting >>= filled & ~7u;
        filled &= 7;
    }
    return at + (filled > 0);
}

/* How many bytes of `out` the missing bits take. `out` has 7 bits for each number and 8 bytes besides. */
EXPORT int64_t kv_pack(const u8 *words, size_t words_bytes, const u8 *missing, size_t missing_bytes, u8 *restrict out,
                       size_t out_bytes) {
    size_t n = missing_bytes;
    if (!is_section(n) || words_bytes != 2 * n || out_bytes != n / 8 * 7 + 8)
        return KV_MISFIT;
    if (kv_has_bmi2())
        return (int64_t)kv_pack_bmi2((const u16 *)words, missing, n, out);
    return (int64_t)pack((const u16 *)words, missing, n, out);
}

/* ---- and back ---- */

/* Codes with signs of half a block. Returns as `take_long_codes`. */
INLINE int take_codes(Restoring *all, size_t at, u8 *restrict signed_codes) {
    size_t half = all->n / 2;
    const u8 *codes = all->codes + (at < half ? at : at - half), *signs = all->signs + at / 8;
    unsigned shift = at < half ? 0 : 4;
    int has_escaped = 0;
    for (int first = 0; first < HALF_SCALED; first += MASK) {
        uint64_t longs = 0;
        for (int i = first; i < first + MASK; i += EIGHT) {
            uint64_t code = eight_bytes(codes + i) >> shift & 15 * ONES;
            uint64_t sign = nonzero(signs[i / EIGHT] * ONES >> 1 & 0x4020100804020100) >> 7; /* a bit each, but the first one */
            uint64_t own = code << 1 | sign | (signs[i / EIGHT] & 1);
            memcpy(signed_codes + i, &own, EIGHT);
            longs |= low_bits(~nonzero(code ^ LONG_CODE * ONES) >> 7) << (i - first);
        }
        has_escaped |= take_long_codes(all, longs, 1, signed_codes + first);
    }
    return has_escaped;
}

INLINE void restore_plain(const u8 *restrict signed_codes, const u8 *restrict nibbles, uint32_t step, float middle,
                          u16 *restrict words, u8 *restrict missing) {
    for (int i = 0; i < HALF_SCALED; i++) {
        int32_t steps = signed_codes[i] >> 1;
        int32_t up = steps >> 4 > 0 ? (steps >> 4) - 1 : 0;
        /* A whole number below 512 and perhaps a half: exact in float32, whose leading one is where ours shall be. */
        float sixteenths = (float)((steps - (up << 4)) << 4 | nibbles[i]) + middle;
        sixteenths = sixteenths < 0.25f ? 0.25f : sixteenths;
        uint32_t bits;
        memcpy(&bits, &sixteenths, sizeof bits);
        int32_t high = (int32_t)(bits >> 16);
        int32_t lacking = ALL_MISSING + 126 - (high >> 7);
        missing[i] = (u8)(lacking < 0 ? 0 : lacking > ALL_MISSING ? ALL_MISSING : lacking);
        words[i] = (uint16_t)(((uint32_t)high + ((uint32_t)up << 7) + ((step - 131) << 7)) | (uint32_t)signed_codes[i] << 15);
    }
}

VERSIONS static void restore_anywhere(Restoring *all) {
    size_t half = all->n / 2;
    for (size_t at = 0; at < all->n; at += HALF_SCALED) {
        u8 signed_codes[HALF_SCALED], nibbles[HALF_SCALED], missing[HALF_SCALED], room[HALF_SCALED];
        u16 *words = all->words + at;
        int has_escaped = take_codes(all, at, signed_codes);
        memset(nibbles, 8, sizeof nibbles);
        if (all->parts > 1)
            for (int i = 0; i < HALF_SCALED; i++)
                nibbles[i] = at < half ? all->nibbles[at + (size_t)i] & 15 : all->nibbles[at - half + (size_t)i] >> 4;
        restore_plain(signed_codes, nibbles, all->exponents[at / SCALED], all->parts == 2 ? 0.5f : 0.0f, words, missing);
        if (all->parts == 3) {
            const u8 *packed = bits_at(all, room);
            size_t first = all->bits % 8, bit = first;
            for (size_t i = 0; i < HALF_SCALED; i += 8) {
                /* 57 bits of it at least, of which eight numbers need 56 at most */
                uint64_t next = eight_bytes(packed + bit / 8) >> bit % 8;
                for (int j = 0; j < 8; j++) {
                    unsigned bits = missing[i + (size_t)j] & 7;
                    words[i + (size_t)j] |= (uint16_t)(next & ((1u << bits) - 1));
                    next >>= bits;
                    bit += bits;
                }
            }
            all->bits += bit - first;
        }
        for (int i = 0; i < HALF_SCALED; i++)
            signed_codes[i] >>= 1;
        for (int i = 0; i < HALF_SCALED; i += MASK) {
            if (all->parts == 3)
                place(&all->whole, equal(ALL_MISSING, missing + i), words + i);
            if (has_escaped)
                place(&all->escaped, equal(ESCAPED_CODE, signed_codes + i), words + i);
        }
    }
}

/* Whether an encoder chooses such steps. */
static int are_steps(const u8 *exponents, size_t n) {
    u8 are = 1;
    for (size_t i = 0; i < n; i++)
        are &= (exponents[i] >= LEAST_EXPONENT) & (exponents[i] <= MOST_EXPONENT);
    return are;
}

static void restore(Restoring *all) {
    if (kv_restore_vbmi(all))
        return;
    if (kv_has_bmi2())
        kv_restore_bmi2(all);
    else
        restore_anywhere(all);
}

/* Of whole sections, and perhaps a smaller one behind them. parts: how many are known; what only others have is of size 0.
 * long_codes, words that are stored as they are, and packed bits: what these numbers need, and perhaps more; missing bits that
 * `packed` lacks are 0. counts: how many long codes, escaped numbers, numbers that missed all their bits, and bytes of packed bits
 * were used. */
EXPORT int64_t kv_restore(int64_t parts, const u8 *exponents, size_t exponents_bytes, const u8 *signs, size_t signs_bytes,
                          const u8 *codes, size_t codes_bytes, const u8 *long_codes, size_t long_bytes, const u8 *escaped,
                          size_t escaped_bytes, const u8 *nibbles, size_t nibbles_bytes, const u8 *whole, size_t whole_bytes,
                          const u8 *packed, size_t packed_bytes, u8 *restrict words, size_t words_bytes,
                          int64_t *restrict counts, size_t counts_bytes) {
    size_t n = words_bytes / 2, used_bytes = 0;
    if (parts < 1 || parts > 3 || n % SCALED || words_bytes != 2 * n || exponents_bytes != n / SCALED ||
        signs_bytes != n / 8 || codes_bytes != n / 2 || escaped_bytes % 2 || nibbles_bytes != (parts > 1 ? n / 2 : 0) ||
        whole_bytes % 2 || (parts < 3 && (whole_bytes || packed_bytes)) || counts_bytes != 4 * sizeof *counts)
        return KV_MISFIT;
    if (!are_steps(exponents, exponents_bytes))
        return KV_DAMAGED;
    Restoring all = {.parts = (int)parts, .long_codes = long_codes, .long_count = long_bytes,
                     .escaped = {(const u16 *)escaped, escaped_bytes / 2, 0}, .whole = {(const u16 *)whole, whole_bytes / 2, 0}};
    for (size_t at = 0; at < n; at += all.n) {
        all.n = n - at < SECTION ? n - at : SECTION;
        all.words = (u16 *)words + at;
        all.exponents = exponents + at / SCALED;
        all.signs = signs + at / 8;
        all.codes = codes + at / 2;
        all.nibbles = parts > 1 ? nibbles + at / 2 : NULL;
        size_t used = used_bytes < packed_bytes ? used_bytes : packed_bytes;
        all.packed = packed + used;
        all.packed_bytes = packed_bytes - used;
        all.bits = 0;
        restore(&all);
        used_bytes += (all.bits + 7) / 8;
    }
    if (all.longs > all.long_count || all.escaped.used > all.escaped.count || all.whole.used > all.whole.count)
        return KV_DAMAGED;
    counts[0] = (int64_t)all.longs;
    counts[1] = (int64_t)all.escaped.used;
    counts[2] = (int64_t)all.whole.used;
    counts[3] = (int64_t)used_bytes;
    return 0;
}
