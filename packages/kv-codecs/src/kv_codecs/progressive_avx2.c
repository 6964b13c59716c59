/* The codec `progressive` with AVX2, and with BMI2's instructions for the bits of eight numbers: what progressive.c computes. */
#include "progressive.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#include <immintrin.h>
#define BMI2 __attribute__((target("avx2,bmi,bmi2,popcnt")))

int kv_has_bmi2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}

BMI2 u8 *kv_put_codes_bmi2(const u8 *restrict signed_codes, u8 *restrict signs, u8 *restrict codes, u8 *restrict long_codes) {
    const __m256i low7 = _mm256_set1_epi8(127), long_code = _mm256_set1_epi8(LONG_CODE);
    for (size_t i = 0; i < HALF_SCALED; i += 32) {
        __m256i own = _mm256_loadu_si256((const __m256i_u *)(signed_codes + i));
        int negative = _mm256_movemask_epi8(_mm256_slli_epi16(own, 7)); /* of bytes the highest bits, which were the lowest */
        memcpy(signs + i / 8, &negative, sizeof negative);
        own = _mm256_and_si256(_mm256_srli_epi16(own, 1), low7);
        __m256i shorter = _mm256_min_epu8(own, long_code);
        _mm256_storeu_si256((__m256i_u *)(codes + i), shorter);
        uint32_t longs = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(shorter, long_code));
        for (; longs; longs &= longs - 1)
            *long_codes++ = signed_codes[i + (size_t)__builtin_ctz(longs)] >> 1;
    }
    return long_codes;
}

/* Eight bits of each of 32 numbers, of which the lowest are set: as many as it misses. By table, as shifts by as many bits
 * as each says take 32 bits a number. */
BMI2 static inline __m256i masks_of(__m256i missing) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 3, 7, 15, 31, 63, 127, 0, 0, 0, 0, 0, 0, 0, 0));
    return _mm256_shuffle_epi8(all, missing);
}

BMI2 size_t kv_pack_bmi2(const u16 *restrict words, const u8 *restrict missing, size_t n, u8 *restrict out) {
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

/* Both halves of a register hold the same table, of which a byte with its highest bit set is given a zero. */
BMI2 static inline __m256i by_table(__m128i table, __m256i index) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), index);
}

/* Of 32 numbers. */
BMI2 static inline __m256i four_bits(const u8 *plane, size_t at, size_t half) {
    __m256i both = _mm256_loadu_si256((const __m256i_u *)(plane + (at < half ? at : at - half)));
    return _mm256_and_si256(at < half ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
}

BMI2 static inline uint32_t equal_of(u8 value, __m256i bytes) {
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8((char)value)));
}

/* From tables instead of floating point: what a number misses is 7 less than the place of its leading one, and
 * two to that power moves the leading one to its place. */
BMI2 void kv_restore_bmi2(Restoring *all) {
    const __m128i of_steps = _mm_setr_epi8(0, 3, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i of_nibble = _mm_setr_epi8(ALL_MISSING, 7, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4, 4);
    const __m128i powers = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i halves = _mm_setr_epi8(0, 1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0);
    const __m256i zero = _mm256_setzero_si256(), fifteen = _mm256_set1_epi8(15), low7 = _mm256_set1_epi8(0x7f);
    const __m256i top = _mm256_set1_epi8(-128), eight = _mm256_set1_epi8(8);
    const __m256i byte_of_sign = _mm256_setr_epi64x(0, 0x0202020202020202, 0x0101010101010101, 0x0303030303030303);
    const __m256i bit_of_sign = _mm256_set1_epi64x((long long)0x8040201008040201);
    const __m256i middle = all->parts == 2 ? _mm256_set1_epi8(-1) : zero;
    size_t half = all->n / 2;
    for (size_t at = 0; at < all->n; at += HALF_SCALED) {
        u8 codes[HALF_SCALED], masks[HALF_SCALED], room[HALF_SCALED];
        uint32_t longs[HALF_SCALED / 32], whole[HALF_SCALED / 32];
        u16 *words = all->words + at;
        int has_escaped = 0;
        for (size_t i = 0; i < HALF_SCALED; i += 32) {
            __m256i own = four_bits(all->codes, at + i, half);
            _mm256_storeu_si256((__m256i_u *)(codes + i), own);
            longs[i / 32] = equal_of(LONG_CODE, own);
        }
        for (size_t i = 0; i < HALF_SCALED; i += MASK)
            has_escaped |= take_long_codes(all, longs[i / 32] | (uint64_t)longs[i / 32 + 1] << 32, 0, codes + i);
        const __m256i step = _mm256_set1_epi16((short)((all->exponents[at / SCALED] - 6) << 7));
        for (size_t i = 0; i < HALF_SCALED; i += 32) {
            __m256i steps = _mm256_loadu_si256((const __m256i_u *)(codes + i)), nibbles = eight;
            int signs;
            memcpy(&signs, all->signs + (at + i) / 8, sizeof signs);
            if (all->parts > 1)
                nibbles = four_bits(all->nibbles, at + i, half);
            /* Quarters in the order 0, 2, 1, 3, so that what becomes 16 bits is in order. */
            steps = _mm256_permute4x64_epi64(steps, 0xd8);
            nibbles = _mm256_permute4x64_epi64(nibbles, 0xd8);
            __m256i sign = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(signs), byte_of_sign), bit_of_sign);
            sign = _mm256_and_si256(_mm256_cmpeq_epi8(sign, bit_of_sign), top);
            __m256i places = _mm256_and_si256(_mm256_srli_epi16(steps, 4), fifteen); /* one more than they stand up, or 0 */
            __m256i up = _mm256_subs_epu8(places, _mm256_set1_epi8(1));
            steps = _mm256_sub_epi8(steps, _mm256_slli_epi16(up, 4)); /* below 32 */
            __m256i large = _mm256_cmpgt_epi8(steps, fifteen), any = _mm256_cmpgt_epi8(steps, zero);
            __m256i lacking = _mm256_or_si256(by_table(of_steps, _mm256_or_si256(steps, _mm256_and_si256(large, top))),
                                              by_table(of_nibble, _mm256_or_si256(nibbles, any)));
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
            whole[i / 32] = equal_of(ALL_MISSING, lacking);
            _mm256_storeu_si256((__m256i_u *)(masks + i), masks_of(lacking));
        }
        const u8 *packed = all->parts == 3 ? bits_at(all, room) : NULL;
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
        for (size_t i = 0; i < HALF_SCALED; i += MASK) {
            if (packed)
                place(&all->whole, whole[i / 32] | (uint64_t)whole[i / 32 + 1] << 32, words + i);
            if (has_escaped)
                place(&all->escaped, equal(ESCAPED_CODE, codes + i), words + i);
        }
    }
}

#else /* no such processor */
int kv_has_bmi2(void) { return 0; }
u8 *kv_put_codes_bmi2(const u8 *restrict signed_codes, u8 *restrict signs, u8 *restrict codes, u8 *restrict long_codes) {
    return (void)signed_codes, (void)signs, (void)codes, long_codes;
}
size_t kv_pack_bmi2(const u16 *restrict words, const u8 *restrict missing, size_t n, u8 *restrict out) {
    return (void)words, (void)missing, (void)out, n;
}
void kv_restore_bmi2(Restoring *all) { (void)all; }
#endif
