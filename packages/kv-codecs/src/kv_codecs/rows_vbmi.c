/* Vectors of 64 numbers into the codes of asymmetric numeral systems and back with AVX-512's instructions for bytes: the same as
 * rows.c computes. A code's tables are in registers, where each instruction looks 64 symbols up.
 *
 * States of a set are in two registers, those of the even lanes and those of the odd ones, of 16 bits each.
 */
#include "rows.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#include <immintrin.h>
#define VBMI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,bmi2,popcnt")))

enum {
    HALF = VECTOR / 2,
    SLACK = VECTOR /* what is read or written beyond a vector's bytes */
};

int kv_has_vectors(void) {
    return HAS_AVX512("f") && HAS_AVX512("bw") && HAS_AVX512("vl") && HAS_AVX512("vbmi") && HAS_AVX512("vbmi2");
}

/* The escaped numbers of a vector. */
static const u8 *read_escaped(const u8 *at, uint64_t escaped, size_t place, u8 *restrict bytes, Far **far) {
    for (; escaped; escaped &= escaped - 1, at += 2) {
        size_t lane = (size_t)__builtin_ctzll(escaped);
        int16_t number;
        memcpy(&number, at, 2);
        int is_far = number < -FAR_OFFSET || number >= FAR_OFFSET;
        bytes[place + lane] = (u8)(is_far ? FAR_OFFSET : number + FAR_OFFSET);
        if (is_far)
            *(*far)++ = (Far){(uint32_t)(place + lane), 0, number};
    }
    return at;
}

VBMI size_t kv_decode_vectors(Decoder *decoder, const Code *code, size_t n, size_t first, u8 *restrict bytes, Far **far) {
    if (code->low_bits > BYTE_LOW_BITS || decoder->vector % SETS)
        return 0;
    const __m512i low_byte = _mm512_set1_epi16(255), least = _mm512_set1_epi16(LEAST_STATE);
    const __m512i escape = _mm512_set1_epi8(ESCAPED);
    const __m512i symbols[4] = {_mm512_loadu_si512(code->symbols), _mm512_loadu_si512(code->symbols + 64),
                                _mm512_loadu_si512(code->symbols + 128), _mm512_loadu_si512(code->symbols + 192)};
    const __m512i shares = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i_u *)code->shares));
    const __m512i starts = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i_u *)code->starts));
    /* Of each symbol the least number, as a byte. */
    u8 least_numbers[VECTOR] = {0};
    for (int i = 0; i < SYMBOLS; i++)
        least_numbers[i] = (u8)(((i - ZERO_SYMBOL) * (1 << code->low_bits)) + FAR_OFFSET);
    const __m512i numbers = _mm512_loadu_si512(least_numbers);
    __m512i even[SETS], odd[SETS];
    for (int set = 0; set < SETS; set++) {
        even[set] = _mm512_loadu_si512(decoder->states[set]);
        odd[set] = _mm512_loadu_si512(decoder->states[set] + HALF);
    }
    const u8 *at = decoder->at;
    size_t done = 0;
    for (; done < n && decoder->end - at >= SETS * VECTOR_BYTES + SLACK; done += SETS) {
#pragma GCC unroll 4
        for (int set = 0; set < SETS; set++) {
            size_t place = first + (done + (size_t)set) * VECTOR;
            __m512i low = _mm512_ternarylogic_epi32(low_byte, even[set], _mm512_slli_epi16(odd[set], 8), 0xea); /* a & b | c */
            __m512i symbol = _mm512_mask_blend_epi8(_mm512_movepi8_mask(low), _mm512_permutex2var_epi8(symbols[0], low, symbols[1]),
                                                    _mm512_permutex2var_epi8(symbols[2], low, symbols[3]));
            __m512i share = _mm512_permutexvar_epi8(symbol, shares);
            __m512i rest = _mm512_sub_epi8(low, _mm512_permutexvar_epi8(symbol, starts));
            __m512i number = _mm512_permutexvar_epi8(symbol, numbers);
            uint64_t escaped = _mm512_cmpeq_epi8_mask(symbol, escape);
            __m512i e = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_and_si512(share, low_byte), _mm512_srli_epi16(even[set], 8)),
                                         _mm512_and_si512(rest, low_byte));
            __m512i o = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_srli_epi16(share, 8), _mm512_srli_epi16(odd[set], 8)),
                                         _mm512_srli_epi16(rest, 8));
            for (unsigned bit = 0; bit < code->low_bits; bit++, at += LOW_BYTES) {
                uint64_t plane;
                memcpy(&plane, at, LOW_BYTES);
                number = _mm512_mask_add_epi8(number, plane, number, _mm512_set1_epi8((char)(1 << bit)));
            }
            __mmask32 reads = _mm512_cmplt_epu16_mask(e, least);
            __m512i read = _mm512_maskz_expand_epi16(reads, _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i_u *)at)));
            even[set] = _mm512_or_si512(_mm512_mask_slli_epi16(e, reads, e, 8), read);
            at += __builtin_popcount(reads);
            reads = _mm512_cmplt_epu16_mask(o, least);
            read = _mm512_maskz_expand_epi16(reads, _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i_u *)at)));
            odd[set] = _mm512_or_si512(_mm512_mask_slli_epi16(o, reads, o, 8), read);
            at += __builtin_popcount(reads);
            _mm512_storeu_si512(bytes + place, number);
            if (__builtin_expect(escaped != 0, 0))
                at = read_escaped(at, escaped, place, bytes, far);
        }
    }
    for (int set = 0; set < SETS; set++) {
        _mm512_storeu_si512(decoder->states[set], even[set]);
        _mm512_storeu_si512(decoder->states[set] + HALF, odd[set]);
    }
    decoder->at = at;
    decoder->vector += done;
    return done;
}

VBMI uint64_t kv_take_vectors(const i16 *rows, size_t tokens, int16_t *restrict numbers) {
    const __m512i ones = _mm512_set1_epi16(1);
    __m512i sums = _mm512_setzero_si512(); /* of 64 bits each */
    for (size_t t = 0; t < tokens; t += HALF, numbers += TOGETHER * HALF) {
        __m512i own[TOGETHER], pairs[TOGETHER], fours[TOGETHER], some = _mm512_setzero_si512();
        for (int i = 0; i < TOGETHER; i++) {
            own[i] = _mm512_loadu_si512(rows + (size_t)i * tokens + t);
            /* The farthest one, -32768, is 32768 without a sign only: its upper and its lower byte are summed apart. */
            __m512i distance = _mm512_abs_epi16(own[i]);
            some = _mm512_add_epi32(some, _mm512_madd_epi16(_mm512_srli_epi16(distance, 8), _mm512_set1_epi16(256)));
            some = _mm512_add_epi32(some, _mm512_madd_epi16(_mm512_and_si512(distance, _mm512_set1_epi16(255)), ones));
        }
        sums = _mm512_add_epi64(sums, _mm512_and_si512(some, _mm512_set1_epi64(0xffffffff)));
        sums = _mm512_add_epi64(sums, _mm512_srli_epi64(some, 32));
        for (int i = 0; i < 2; i++) {
            pairs[2 * i] = _mm512_unpacklo_epi16(own[2 * i], own[2 * i + 1]);
            pairs[2 * i + 1] = _mm512_unpackhi_epi16(own[2 * i], own[2 * i + 1]);
        }
        for (int i = 0; i < 2; i++) {
            fours[2 * i] = _mm512_unpacklo_epi32(pairs[i], pairs[2 + i]);
            fours[2 * i + 1] = _mm512_unpackhi_epi32(pairs[i], pairs[2 + i]);
        }
        /* Of each of eight tokens two are in a quarter: 4 x 4 quarters, transposed. */
        for (int i = 0; i < 2; i++) {
            pairs[2 * i] = _mm512_shuffle_i64x2(fours[2 * i], fours[2 * i + 1], 0x44);
            pairs[2 * i + 1] = _mm512_shuffle_i64x2(fours[2 * i], fours[2 * i + 1], 0xee);
        }
        for (int i = 0; i < 2; i++) {
            _mm512_storeu_si512(numbers + 2 * i * HALF, _mm512_shuffle_i64x2(pairs[i], pairs[2 + i], 0x88));
            _mm512_storeu_si512(numbers + (2 * i + 1) * HALF, _mm512_shuffle_i64x2(pairs[i], pairs[2 + i], 0xdd));
        }
    }
    return (uint64_t)_mm512_reduce_add_epi64(sums);
}

/* The codes of 32 lanes, the last one first. Returns their states; *at: behind the bytes that they wrote. */
VBMI static inline __m512i encode_half(__m512i states, __m512i share, __m512i start, __m512i inverse, u8 **at) {
    __mmask32 writes = _mm512_cmpge_epu16_mask(_mm512_srli_epi16(states, 8), share);
    __m256i written = _mm256_maskz_compress_epi8(writes, _mm512_cvtepi16_epi8(states));
    _mm256_storeu_si256((__m256i_u *)*at, written);
    *at += __builtin_popcount(writes);
    states = _mm512_mask_srli_epi16(states, writes, states, 8);
    /* The whole part of states / share, or one less. */
    __m512i whole = _mm512_mulhi_epu16(states, inverse);
    __m512i rest = _mm512_sub_epi16(states, _mm512_mullo_epi16(whole, share));
    __mmask32 is_less = _mm512_cmpge_epu16_mask(rest, share);
    whole = _mm512_mask_add_epi16(whole, is_less, whole, _mm512_set1_epi16(1));
    rest = _mm512_mask_sub_epi16(rest, is_less, rest, share);
    return _mm512_add_epi16(_mm512_add_epi16(_mm512_slli_epi16(whole, 8), rest), start);
}

/* 2**16 / share, or 2**16 - 1; exact, as no such quotient is so near to the next whole number. */
VBMI static inline __m256i inverses_of(const u8 *shares) {
    __m512 divisors = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i_u *)shares)));
    return _mm512_cvtusepi32_epi16(_mm512_cvttps_epu32(_mm512_div_ps(_mm512_set1_ps(65536), divisors)));
}

VBMI size_t kv_encode_vectors(Encoder *encoder, const Code *code, size_t n, const int16_t *numbers) {
    /* Of each half the last lane first, as that is the order of what they write. */
    const __m512i symbols = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10,
                                             9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i reversed = _mm512_sub_epi16(_mm512_set1_epi16(HALF - 1), symbols);
    const __m512i evens = _mm512_slli_epi16(reversed, 1), odds = _mm512_add_epi16(evens, _mm512_set1_epi16(1));
    const __m512i shares = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i_u *)code->shares));
    const __m512i starts = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i_u *)code->starts));
    const __m512i inverse = _mm512_inserti64x4(_mm512_castsi256_si512(inverses_of(code->shares)), inverses_of(code->shares + 16), 1);
    const __m512i zero_symbol = _mm512_set1_epi16(ZERO_SYMBOL), escape = _mm512_set1_epi16(ESCAPED);
    const __m512i owns = _mm512_mask_mov_epi16(escape, _mm512_test_epi16_mask(shares, shares), symbols);
    const __m128i low_bits = _mm_cvtsi32_si128((int)code->low_bits);
    __m512i even[SETS], odd[SETS];
    for (int set = 0; set < SETS; set++) {
        even[set] = _mm512_permutexvar_epi16(reversed, _mm512_loadu_si512(encoder->states[set]));
        odd[set] = _mm512_permutexvar_epi16(reversed, _mm512_loadu_si512(encoder->states[set] + HALF));
    }
    u8 *at = encoder->at;
    size_t done = 0;
    for (; done < n && encoder->end - at >= SETS * VECTOR_BYTES + SLACK; done += SETS) {
#pragma GCC unroll 4
        for (int set = SETS - 1; set >= 0; set--) {
            numbers -= VECTOR;
            __m512i first = _mm512_loadu_si512(numbers), last = _mm512_loadu_si512(numbers + HALF);
            __m512i e = _mm512_permutex2var_epi16(first, evens, last), o = _mm512_permutex2var_epi16(first, odds, last);
            e = _mm512_min_epu16(_mm512_add_epi16(_mm512_sra_epi16(e, low_bits), zero_symbol), escape);
            o = _mm512_min_epu16(_mm512_add_epi16(_mm512_sra_epi16(o, low_bits), zero_symbol), escape);
            e = _mm512_permutexvar_epi16(e, owns);
            o = _mm512_permutexvar_epi16(o, owns);
            uint64_t escaped = _mm512_cmpeq_epi16_mask(e, escape) | (uint64_t)_mm512_cmpeq_epi16_mask(o, escape) << HALF;
            if (__builtin_expect(escaped != 0, 0)) {
                /* From the order of the registers, where the last one is first, to that of the lanes. */
                uint64_t lanes = 0;
                for (int bit = 0; bit < HALF; bit++) {
                    lanes |= (escaped >> (HALF - 1 - bit) & 1) << 2 * bit;
                    lanes |= (escaped >> (VECTOR - 1 - bit) & 1) << (2 * bit + 1);
                }
                escaped = lanes;
                for (uint64_t left = escaped; left;) {
                    int lane = VECTOR - 1 - __builtin_clzll(left);
                    left &= ~((uint64_t)1 << lane);
                    *at++ = (u8)((uint16_t)numbers[lane] >> 8);
                    *at++ = (u8)numbers[lane];
                }
            }
            odd[set] = encode_half(odd[set], _mm512_permutexvar_epi16(o, shares), _mm512_permutexvar_epi16(o, starts),
                                   _mm512_permutexvar_epi16(o, inverse), &at);
            even[set] = encode_half(even[set], _mm512_permutexvar_epi16(e, shares), _mm512_permutexvar_epi16(e, starts),
                                    _mm512_permutexvar_epi16(e, inverse), &at);
            for (unsigned bit = code->low_bits; bit--; at += LOW_BYTES) {
                const __m512i own_bit = _mm512_set1_epi16((short)(1 << bit));
                uint64_t plane = _mm512_test_epi16_mask(first, own_bit) | (uint64_t)_mm512_test_epi16_mask(last, own_bit) << HALF;
                plane = __builtin_bswap64(plane & ~escaped);
                memcpy(at, &plane, LOW_BYTES);
            }
        }
    }
    for (int set = 0; set < SETS; set++) {
        _mm512_storeu_si512(encoder->states[set], _mm512_permutexvar_epi16(reversed, even[set]));
        _mm512_storeu_si512(encoder->states[set] + HALF, _mm512_permutexvar_epi16(reversed, odd[set]));
    }
    encoder->at = at;
    return done;
}

#else /* no such processor */
uint64_t kv_take_vectors(const i16 *rows, size_t tokens, int16_t *restrict numbers) {
    return (void)rows, (void)tokens, (void)numbers, 0;
}
int kv_has_vectors(void) { return 0; }
size_t kv_decode_vectors(Decoder *decoder, const Code *code, size_t n, size_t first, u8 *restrict bytes, Far **far) {
    return (void)decoder, (void)code, (void)n, (void)first, (void)bytes, (void)far, 0;
}
size_t kv_encode_vectors(Encoder *encoder, const Code *code, size_t n, const int16_t *numbers) {
    return (void)encoder, (void)code, (void)n, (void)numbers, 0;
}
#endif
