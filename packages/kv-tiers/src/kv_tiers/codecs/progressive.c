/* The passes over numbers of the codec `progressive`: into symbols, nibbles and missing bits, and back. kernels.c says what
 * holds for all such passes. */
#include "progressive.h"

enum { SECTION = 1 << 17 }; /* the most numbers of a section */

static int is_section(size_t numbers) { return numbers % SCALED == 0 && numbers <= SECTION; }

/* How many of half a block's bytes are this one: a byte counts them. */
INLINE uint32_t equal_to(u8 value, const u8 *restrict bytes) {
    uint8_t count = 0;
    for (int i = 0; i < HALF_SCALED; i++)
        count += bytes[i] == value;
    return count;
}

/* 16 bits a number throughout, as 32 would take longer. Hence the casts, and a shift for each bit of the distance. */
INLINE void cut(const u16 *restrict words, int step, u8 *restrict symbols, u8 *restrict nibbles,
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
        symbols[i] = (u8)(steps >= ESCAPED >> 1 ? ESCAPED : steps << 1 | word >> 15);
        nibbles[i] = (u8)(sixteenths & 15);
        missing[i] = (u8)(down > 0 ? down - 1 : 0);
    }
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
    for (size_t at = 0; at < half; at += HALF_SCALED) {
        u8 low[HALF_SCALED], high[HALF_SCALED];
        u8 *symbols = all->symbols + at, *missing = all->missing + at;
        cut(in + at, all->exponents[at / SCALED], symbols, low, missing);
        cut(in + half + at, all->exponents[(half + at) / SCALED], symbols + half, high, missing + half);
        for (int i = 0; i < HALF_SCALED; i++)
            all->nibbles[at + (size_t)i] = (u8)(low[i] | high[i] << 4);
        all->escaped += equal_to(ESCAPED, symbols) + equal_to(ESCAPED, symbols + half);
        all->whole += equal_to(ALL_MISSING, missing) + equal_to(ALL_MISSING, missing + half);
    }
}

/* counts: how many numbers are escaped, and how many miss all their bits. */
EXPORT int64_t kv_cut(int64_t offset, const u8 *words, size_t words_bytes, u8 *restrict exponents,
                      size_t exponents_bytes, u8 *restrict symbols, size_t symbols_bytes, u8 *restrict nibbles,
                      size_t nibbles_bytes, u8 *restrict missing, size_t missing_bytes, int64_t *restrict counts,
                      size_t counts_bytes) {
    size_t n = symbols_bytes;
    if (!is_section(n) || words_bytes != 2 * n || exponents_bytes != n / SCALED || nibbles_bytes != n / 2 ||
        missing_bytes != n || counts_bytes != 2 * sizeof *counts || offset < 0 || offset > 1 << 16)
        return KV_MISFIT;
    Cutting all = {(const u16 *)words, n, (uint32_t)offset, exponents, symbols, nibbles, missing, 0, 0};
    if (!kv_cut_vbmi(&all))
        cut_anywhere(&all);
    counts[0] = (int64_t)all.escaped;
    counts[1] = (int64_t)all.whole;
    return 0;
}

/* Missing bits, one number's behind the other's from bit 0 up. */

static size_t pack(const u16 *restrict words, const u8 *restrict missing, size_t n, u8 *restrict out) {
    uint64_t waiting = 0;
    unsigned filled = 0; /* bits that wait: 7 at most between two turns, and 63 within one */
    size_t at = 0;
    for (size_t i = 0; i < n; i += 8) {
        for (int j = 0; j < 8; j++) {
            unsigned bits = missing[i + j] & 7; /* 8 are none */
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

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#include <immintrin.h>
/* BMI2 has an instruction for eight numbers at a time: packing again, in a quarter of the time. */
#define BMI2 __attribute__((target("avx2,bmi,bmi2,popcnt")))

/* Eight bits of each of 32 numbers, of which the lowest are set: as many as it misses. By table, as shifts by as many bits
 * as each says take 32 bits a number. */
BMI2 static inline __m256i masks_of(__m256i missing) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 3, 7, 15, 31, 63, 127, 0, 0, 0, 0, 0, 0, 0, 0));
    return _mm256_shuffle_epi8(all, missing);
}

BMI2 static size_t pack_bmi2(const u16 *restrict words, const u8 *restrict missing, size_t n, u8 *restrict out) {
    uint64_t waiting = 0;
    unsigned filled = 0;
    size_t at = 0;
    for (size_t start = 0; start < n; start += SCALED) {
        u8 masks[SCALED], low[SCALED];
        for (int i = 0; i < SCALED; i += 32) {
            __m256i own = masks_of(_mm256_loadu_si256((const __m256i_u *)(missing + start + (size_t)i)));
            _mm256_storeu_si256((__m256i_u *)(masks + i), own);
        }
        for (int i = 0; i < SCALED; i++)
            low[i] = (u8)words[start + i];
        for (int i = 0; i < SCALED; i += 8) {
            uint64_t mask, bytes;
            memcpy(&mask, masks + i, 8);
            memcpy(&bytes, low + i, 8);
            waiting |= __builtin_ia32_pext_di(bytes, mask) << filled;
            filled += (unsigned)__builtin_popcountll(mask);
            memcpy(out + at, &waiting, 8);
            at += filled / 8;
            waiting >>= filled & ~7u;
            filled &= 7;
        }
    }
    return at + (filled > 0);
}

static int has_bmi2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}
#endif

/* How many bytes of `out` the missing bits take. `out` has 7 bits for each number and 8 bytes besides. */
EXPORT int64_t kv_pack(const u8 *words, size_t words_bytes, const u8 *missing, size_t missing_bytes, u8 *restrict out,
                       size_t out_bytes) {
    size_t n = missing_bytes;
    if (!is_section(n) || words_bytes != 2 * n || out_bytes != n / 8 * 7 + 8)
        return KV_MISFIT;
#ifdef BMI2
    if (has_bmi2())
        return (int64_t)pack_bmi2((const u16 *)words, missing, n, out);
#endif
    return (int64_t)pack((const u16 *)words, missing, n, out);
}

/* ---- and back ---- */

INLINE void restore_plain(const u8 *restrict symbols, const u8 *restrict nibbles, uint32_t step, float middle,
                          u16 *restrict words, u8 *restrict missing) {
    for (int i = 0; i < HALF_SCALED; i++) {
        int32_t symbol = symbols[i];
        int32_t steps = symbol >> 1;
        int32_t up = steps >> 4 > 0 ? (steps >> 4) - 1 : 0;
        /* A whole number below 512 and perhaps a half: exact in float32, whose leading one is where ours shall be. */
        float sixteenths = (float)((steps - (up << 4)) << 4 | nibbles[i]) + middle;
        sixteenths = sixteenths < 0.25f ? 0.25f : sixteenths;
        uint32_t bits;
        memcpy(&bits, &sixteenths, sizeof bits);
        int32_t high = (int32_t)(bits >> 16);
        int32_t lacking = ALL_MISSING + 126 - (high >> 7);
        missing[i] = (u8)(lacking < 0 ? 0 : lacking > ALL_MISSING ? ALL_MISSING : lacking);
        words[i] = (uint16_t)(((uint32_t)high + ((uint32_t)up << 7) + ((step - 131) << 7)) | (uint32_t)symbol << 15);
    }
}

VERSIONS static void restore_anywhere(Restoring *all) {
    size_t half = all->n / 2;
    for (size_t at = 0; at < all->n; at += HALF_SCALED) {
        u8 nibbles[HALF_SCALED], *missing = all->missing + at, room[HALF_SCALED];
        u16 *words = all->words + at;
        memset(nibbles, 8, sizeof nibbles);
        if (all->nibbles)
            for (int i = 0; i < HALF_SCALED; i++)
                nibbles[i] = at < half ? all->nibbles[at + (size_t)i] & 15 : all->nibbles[at - half + (size_t)i] >> 4;
        restore_plain(all->symbols + at, nibbles, all->exponents[at / SCALED], all->to_middle ? 0.5f : 0.0f, words, missing);
        const u8 *packed = bits_at(all, room);
        size_t first = all->bits % 8, bit = first;
        for (size_t i = 0; i < HALF_SCALED; i += 8) {
            uint64_t next;
            memcpy(&next, packed + bit / 8, 8); /* 57 bits of it at least, of which eight numbers need 56 at most */
            next >>= bit % 8;
            for (int j = 0; j < 8; j++) {
                unsigned bits = missing[i + (size_t)j] & 7;
                words[i + (size_t)j] |= (uint16_t)(next & ((1u << bits) - 1));
                next >>= bits;
                bit += bits;
            }
        }
        all->bits += bit - first;
        all->escaped += equal_to(ESCAPED, all->symbols + at);
        all->whole += equal_to(ALL_MISSING, missing);
    }
}

#ifdef BMI2
/* Both halves of a register hold the same table, of which a byte with its highest bit set is given a zero. */
BMI2 static inline __m256i by_table(__m128i table, __m256i index) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), index);
}

/* The same, from tables instead of floating point: what a number misses is 7 less than the place of its leading one, and
 * two to that power moves the leading one to its place. */
BMI2 static void restore_bmi2(Restoring *all) {
    const __m128i of_steps = _mm_setr_epi8(0, 3, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i of_nibble = _mm_setr_epi8(ALL_MISSING, 7, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4, 4);
    const __m128i powers = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i halves = _mm_setr_epi8(0, 1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0);
    const __m256i zero = _mm256_setzero_si256(), fifteen = _mm256_set1_epi8(15), low7 = _mm256_set1_epi8(0x7f);
    const __m256i top = _mm256_set1_epi8(-128), eight = _mm256_set1_epi8(8);
    const __m256i middle = all->to_middle ? _mm256_set1_epi8(-1) : zero;
    size_t half = all->n / 2;
    for (size_t at = 0; at < all->n; at += HALF_SCALED) {
        u8 masks[HALF_SCALED], room[HALF_SCALED];
        u8 *missing = all->missing + at;
        u16 *words = all->words + at;
        __m256i escaped = zero, whole = zero;
        const __m256i step = _mm256_set1_epi16((short)((all->exponents[at / SCALED] - 6) << 7));
        for (size_t i = 0; i < HALF_SCALED; i += 32) {
            __m256i symbols = _mm256_loadu_si256((const __m256i_u *)(all->symbols + at + i)), nibbles = eight;
            if (all->nibbles) {
                nibbles = _mm256_loadu_si256((const __m256i_u *)(all->nibbles + (at < half ? at : at - half) + i));
                nibbles = _mm256_and_si256(at < half ? nibbles : _mm256_srli_epi16(nibbles, 4), fifteen);
            }
            escaped = _mm256_sub_epi8(escaped, _mm256_cmpeq_epi8(symbols, _mm256_set1_epi8(-1)));
            /* Quarters in the order 0, 2, 1, 3, so that what becomes 16 bits is in order. */
            symbols = _mm256_permute4x64_epi64(symbols, 0xd8);
            nibbles = _mm256_permute4x64_epi64(nibbles, 0xd8);
            __m256i steps = _mm256_and_si256(_mm256_srli_epi16(symbols, 1), low7);
            __m256i places = _mm256_and_si256(_mm256_srli_epi16(steps, 4), fifteen); /* one more than they stand up, or 0 */
            __m256i up = _mm256_subs_epu8(places, _mm256_set1_epi8(1));
            steps = _mm256_sub_epi8(steps, _mm256_slli_epi16(up, 4)); /* below 32 */
            __m256i large = _mm256_cmpgt_epi8(steps, fifteen), any = _mm256_cmpgt_epi8(steps, zero);
            __m256i lacking = _mm256_or_si256(by_table(of_steps, _mm256_or_si256(steps, _mm256_and_si256(large, top))),
                                              by_table(of_nibble, _mm256_or_si256(nibbles, any)));
            whole = _mm256_sub_epi8(whole, _mm256_cmpeq_epi8(lacking, eight));
            /* Steps × 16 × the power and nibbles × the power; of five bits' steps, half of each. */
            __m256i power = by_table(powers, lacking);
            __m256i of_step = _mm256_andnot_si256(fifteen, _mm256_slli_epi16(power, 4));
            of_step = _mm256_sub_epi8(of_step, _mm256_and_si256(large, eight));
            __m256i halved = _mm256_and_si256(_mm256_srli_epi16(nibbles, 1), fifteen);
            nibbles = _mm256_blendv_epi8(nibbles, halved, large);
            __m256i add = _mm256_and_si256(by_table(halves, lacking), middle);
            __m256i exponent = _mm256_add_epi8(_mm256_sub_epi8(places, lacking), eight);
            __m256i exponent_low = _mm256_and_si256(_mm256_slli_epi16(exponent, 7), top);
            __m256i exponent_high = _mm256_and_si256(_mm256_srli_epi16(exponent, 1), low7);
            __m256i sign = _mm256_slli_epi16(symbols, 7); /* its highest bit alone is wanted */
            sign = _mm256_and_si256(sign, top);
            for (int k = 0; k < 2; k++) {
#define WIDE(one, other) (k ? _mm256_unpackhi_epi8(one, other) : _mm256_unpacklo_epi8(one, other))
                __m256i word = _mm256_maddubs_epi16(WIDE(of_step, power), WIDE(steps, nibbles));
                word = _mm256_add_epi16(word, WIDE(add, zero));
                word = _mm256_add_epi16(word, WIDE(exponent_low, exponent_high));
                word = _mm256_or_si256(_mm256_add_epi16(word, step), WIDE(zero, sign));
                _mm256_storeu_si256((__m256i_u *)(words + i + 16 * (size_t)k), word);
#undef WIDE
            }
            lacking = _mm256_permute4x64_epi64(lacking, 0xd8);
            _mm256_storeu_si256((__m256i_u *)(missing + i), lacking);
            _mm256_storeu_si256((__m256i_u *)(masks + i), masks_of(lacking));
        }
        for (size_t i = 0; !all->packed_bytes && i < HALF_SCALED; i += 8) {
            uint64_t mask;
            memcpy(&mask, masks + i, 8);
            all->bits += (unsigned)__builtin_popcountll(mask);
        }
        const u8 *packed = all->packed_bytes ? bits_at(all, room) : NULL;
        size_t first = all->bits % 8, bit = first;
        for (size_t i = 0; packed && i < HALF_SCALED; i += 16) {
            uint64_t low[2];
            for (int j = 0; j < 2; j++) {
                uint64_t mask, bits;
                memcpy(&mask, masks + i + 8 * (size_t)j, 8);
                memcpy(&bits, packed + bit / 8, 8);
                low[j] = __builtin_ia32_pdep_di(bits >> bit % 8, mask);
                bit += (unsigned)__builtin_popcountll(mask);
            }
            __m256i *own = (__m256i *)(words + i);
            __m256i more = _mm256_cvtepu8_epi16(_mm_set_epi64x((long long)low[1], (long long)low[0]));
            _mm256_storeu_si256(own, _mm256_or_si256(_mm256_loadu_si256(own), more));
        }
        all->bits += bit - first;
        __m256i sums = _mm256_sad_epu8(escaped, zero), more = _mm256_sad_epu8(whole, zero);
        for (int i = 0; i < 4; i++) {
            all->escaped += (uint64_t)((const long long *)&sums)[i];
            all->whole += (uint64_t)((const long long *)&more)[i];
        }
    }
}
#endif

/* Whether an encoder chooses such steps. */
static int are_steps(const u8 *exponents, size_t n) {
    u8 are = 1;
    for (size_t i = 0; i < n; i++)
        are &= (exponents[i] >= LEAST_EXPONENT) & (exponents[i] <= MOST_EXPONENT);
    return are;
}

/* nibbles: of size 0 where they are not known: each is then taken to be 8. to_middle: half a nibble is added. packed: the
 * missing bits, or more than these; those that it lacks are 0. counts: how many numbers are escaped, how many miss all
 * their bits, and how many bits the others miss together. */
EXPORT int64_t kv_restore(int64_t to_middle, const u8 *symbols, size_t symbols_bytes, const u8 *nibbles,
                          size_t nibbles_bytes, const u8 *exponents, size_t exponents_bytes, const u8 *packed,
                          size_t packed_bytes, u8 *restrict words, size_t words_bytes, u8 *restrict missing,
                          size_t missing_bytes, int64_t *restrict counts, size_t counts_bytes) {
    size_t n = symbols_bytes;
    if (!is_section(n) || words_bytes != 2 * n || exponents_bytes != n / SCALED ||
        (nibbles_bytes != n / 2 && nibbles_bytes != 0) || missing_bytes != n || counts_bytes != 3 * sizeof *counts)
        return KV_MISFIT;
    Restoring all = {symbols, nibbles_bytes ? nibbles : NULL, exponents, packed, n, packed_bytes, to_middle != 0,
                     (u16 *)words, missing, 0, 0, 0};
    if (!are_steps(exponents, exponents_bytes))
        return KV_DAMAGED;
    if (!kv_restore_vbmi(&all)) {
#ifdef BMI2
        if (has_bmi2())
            restore_bmi2(&all);
        else
#endif
            restore_anywhere(&all);
    }
    counts[0] = (int64_t)all.escaped;
    counts[1] = (int64_t)all.whole;
    counts[2] = (int64_t)all.bits;
    return 0;
}
