/* The codec `progressive` with AVX-512's instructions for bytes: what progressive.c computes. */
#include "progressive.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#include <immintrin.h>
#define VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,gfni,popcnt")))

enum { AT_ONCE = 64 };

static int has_vbmi(void) {
    return HAS_AVX512("vbmi") && HAS_AVX512("vbmi2") && HAS_AVX512("bw") && HAS_AVX512("dq") && HAS_AVX512("vl") &&
           __builtin_cpu_supports("gfni");
}

/* ---- the way there ---- */

typedef struct {
    __m512i codes, nibbles, missing; /* 16 bits each */
} Cut;

VBMI static inline Cut cut32(__m512i word, __m512i step_and_4) {
    const __m512i one = _mm512_set1_epi16(1), escape = _mm512_set1_epi16(ESCAPED_CODE);
    __m512i exponent = _mm512_and_si512(_mm512_srli_epi16(word, 7), _mm512_set1_epi16(0xff));
    __m512i down = _mm512_min_epu16(_mm512_subs_epu16(step_and_4, exponent), _mm512_set1_epi16(ALL_MISSING + 1));
    __m512i up = _mm512_min_epu16(_mm512_subs_epu16(exponent, step_and_4), _mm512_set1_epi16(8));
    __m512i sixteenths = _mm512_and_si512(_mm512_slli_epi16(word, 1), _mm512_set1_epi16(0xfe));
    sixteenths = _mm512_srlv_epi16(_mm512_or_si512(sixteenths, _mm512_set1_epi16(0x100)), down);
    __m512i codes = _mm512_add_epi16(_mm512_srli_epi16(sixteenths, 4), _mm512_slli_epi16(up, 4));
    return (Cut){_mm512_min_epu16(codes, escape), _mm512_and_si512(sixteenths, _mm512_set1_epi16(15)),
                 _mm512_subs_epu16(down, one)};
}

/* The lower bytes of 64 words. */
VBMI static inline __m512i lower(__m512i first, __m512i second) {
    u8 places[AT_ONCE];
    for (size_t i = 0; i < AT_ONCE; i++)
        places[i] = (u8)(2 * i);
    return _mm512_permutex2var_epi8(first, _mm512_loadu_si512(places), second);
}

/* Of 64 numbers: codes and nibbles, of four bits each. *long_codes: behind their long ones. */
typedef struct {
    __m512i codes, nibbles;
} Fours;

VBMI static inline Fours cut64(Cutting *all, size_t at, u8 **long_codes) {
    const __m512i step_and_4 = _mm512_set1_epi16((short)(all->exponents[at / SCALED] + 4));
    const __m512i long_code = _mm512_set1_epi8(LONG_CODE), escape = _mm512_set1_epi8(ESCAPED_CODE);
    __m512i word = _mm512_loadu_si512(all->words + at), other = _mm512_loadu_si512(all->words + at + AT_ONCE / 2);
    Cut first = cut32(word, step_and_4), second = cut32(other, step_and_4);
    __m512i codes = lower(first.codes, second.codes), missing = lower(first.missing, second.missing);
    uint64_t signs = _mm512_movepi16_mask(word) | (uint64_t)_mm512_movepi16_mask(other) << 32;
    memcpy(all->signs + at / 8, &signs, sizeof signs);
    __mmask64 longs = _mm512_cmpge_epu8_mask(codes, long_code), escaped = _mm512_cmpeq_epi8_mask(codes, escape);
    _mm512_storeu_si512(*long_codes, _mm512_maskz_compress_epi8(longs, codes));
    *long_codes += __builtin_popcountll(longs);
    missing = _mm512_mask_mov_epi8(missing, escaped, _mm512_set1_epi8(ESCAPED));
    _mm512_storeu_si512(all->missing + at, missing);
    all->escaped += (uint64_t)__builtin_popcountll(escaped);
    all->whole += (uint64_t)__builtin_popcountll(_mm512_cmpeq_epi8_mask(missing, _mm512_set1_epi8(ALL_MISSING)));
    return (Fours){_mm512_min_epu8(codes, long_code), lower(first.nibbles, second.nibbles)};
}

VBMI static void cut_vbmi(Cutting *all) {
    for (size_t block = 0; block < all->n / SCALED; block++) {
        __m512i sum = _mm512_setzero_si512();
        for (size_t i = 0; i < SCALED; i += AT_ONCE / 2) {
            __m512i word = _mm512_loadu_si512(all->words + block * SCALED + i);
            word = _mm512_and_si512(_mm512_srli_epi16(word, 7), _mm512_set1_epi16(0xff));
            sum = _mm512_add_epi64(sum, _mm512_sad_epu8(word, _mm512_setzero_si512()));
        }
        all->exponents[block] = step_exponent(all->offset + (uint32_t)_mm512_reduce_add_epi64(sum));
    }
    size_t half = all->n / 2;
    u8 *low_longs = all->long_codes, *high_longs = all->long_codes + half; /* 64 bytes of room behind each, as numbers are left */
    for (size_t at = 0; at < half; at += AT_ONCE) {
        Fours low = cut64(all, at, &low_longs), high = cut64(all, half + at, &high_longs);
        _mm512_storeu_si512(all->codes + at, _mm512_or_si512(low.codes, _mm512_slli_epi16(high.codes, 4)));
        _mm512_storeu_si512(all->nibbles + at, _mm512_or_si512(low.nibbles, _mm512_slli_epi16(high.nibbles, 4)));
    }
    join_long_codes(all, (size_t)(low_longs - all->long_codes), (size_t)(high_longs - all->long_codes) - half);
}

/* ---- and back ---- */

VBMI static inline __m512i small_table(const u8 *bytes) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i_u *)bytes));
}

/* The missing bits of 64 numbers, from a bit on, of which 63 bytes can be read, and others above them. lacking: how many of
 * each, at most 7. Each eight numbers have 56 bits at most, which any eight bytes have from any bit on. */
VBMI static inline __m512i missing_bits(const u8 *packed, __m512i lacking, size_t *bit) {
    __m512i starts = _mm512_mullo_epi64(lacking, _mm512_set1_epi64(0x0101010101010100)); /* of each among its eight: sums before it */
    __m128i eights = _mm512_cvtepi64_epi16(_mm512_sad_epu8(lacking, _mm512_setzero_si512())); /* where each eight end */
    eights = _mm_add_epi16(eights, _mm_slli_si128(eights, 2));
    eights = _mm_add_epi16(eights, _mm_slli_si128(eights, 4));
    eights = _mm_add_epi16(eights, _mm_slli_si128(eights, 8));
    __m128i firsts = _mm_add_epi16(_mm_slli_si128(eights, 2), _mm_set1_epi16((short)(*bit % 8)));
    const __m512i low_bytes = _mm512_set_epi64(0x0e0e0e0e0e0e0e0e, 0x0c0c0c0c0c0c0c0c, 0x0a0a0a0a0a0a0a0a, 0x0808080808080808,
                                               0x0606060606060606, 0x0404040404040404, 0x0202020202020202, 0);
    __m512i bytes = _mm512_permutexvar_epi8(low_bytes, _mm512_castsi128_si512(_mm_srli_epi16(firsts, 3)));
    __m512i bits = _mm512_permutexvar_epi8(low_bytes, _mm512_castsi128_si512(_mm_and_si128(firsts, _mm_set1_epi16(7))));
    bytes = _mm512_add_epi8(bytes, _mm512_set1_epi64(0x0706050403020100));
    __m512i found = _mm512_permutexvar_epi8(bytes, _mm512_loadu_si512(packed + *bit / 8));
    found = _mm512_multishift_epi64_epi8(_mm512_add_epi8(bits, starts), found);
    *bit += (size_t)_mm_extract_epi16(eights, 7);
    return found;
}

/* The next 64 long codes, or those that are left. */
VBMI static inline __m512i next_codes(const Restoring *all) {
    size_t left = all->longs < all->long_count ? all->long_count - all->longs : 0;
    if (__builtin_expect(left >= AT_ONCE, 1))
        return _mm512_loadu_si512(all->long_codes + all->longs);
    return left ? _mm512_maskz_loadu_epi8(first_of(left), all->long_codes + all->longs) : _mm512_setzero_si512();
}

/* 32 numbers, and in their places those that are stored as they are. */
VBMI static inline __m512i placed(Stored *stored, __mmask32 here, __m512i words) {
    size_t left = stored->used < stored->count ? stored->count - stored->used : 0;
    __m512i next = _mm512_setzero_si512();
    if (__builtin_expect(left >= AT_ONCE / 2, 1))
        next = _mm512_loadu_si512(stored->words + stored->used);
    else if (left)
        next = _mm512_maskz_loadu_epi16((__mmask32)first_of(left), stored->words + stored->used);
    stored->used += (size_t)__builtin_popcount(here);
    return _mm512_mask_expand_epi16(words, here, next);
}

VBMI static inline __m512i four_bits(const u8 *plane, size_t at, size_t half) {
    __m512i both = _mm512_loadu_si512(plane + (at < half ? at : at - half));
    return _mm512_and_si512(at < half ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
}

/* Short codes and nibbles are bytes together, in sixteenths of a step. Moved up until their leading one is the highest bit, which is
 * by as many bits as are missing, all below it is the number's. Of long codes, from 16 on, the lower four bits are all that follow
 * the leading one, as they have it implied. */
VBMI static void restore_vbmi(Restoring *all) {
    static const u8 lacking_of_code[16] = {0, 3, 2, 2, 1, 1, 1, 1}, powers[16] = {1, 2, 4, 8, 16, 32, 64, 128};
    static const u8 lacking_of_nibble[16] = {ALL_MISSING, 7, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4, 4};
    const __m512i of_code = small_table(lacking_of_code), of_nibble = small_table(lacking_of_nibble);
    const __m512i two_to = small_table(powers), middle = _mm512_set1_epi8(all->parts == 2 ? -1 : 0);
    __m512i eight = _mm512_set1_epi8(8), fifteen = _mm512_set1_epi8(15), sign_bit = _mm512_set1_epi16(-32768);
    __m512i one = _mm512_set1_epi8(1), escape = _mm512_set1_epi8(ESCAPED_CODE);
    /* The compiler would make these again at each use, from a general register. */
    __asm__("" : "+v"(eight), "+v"(fifteen), "+v"(sign_bit), "+v"(one), "+v"(escape));
    __m512i pairs[2]; /* of bytes of one register and of another */
    for (size_t k = 0; k < 2; k++) {
        u8 places[AT_ONCE];
        for (size_t i = 0; i < AT_ONCE; i++)
            places[i] = (u8)(AT_ONCE / 2 * k + i / 2 + AT_ONCE * (i % 2));
        pairs[k] = _mm512_loadu_si512(places);
    }
    size_t half = all->n / 2;
    for (size_t at = 0; at < all->n; at += HALF_SCALED) {
        const __m512i step_and_3 = _mm512_set1_epi8((char)(all->exponents[at / SCALED] + 3));
        u8 room[HALF_SCALED];
        const u8 *packed = all->parts == 3 ? bits_at(all, room) : NULL;
        size_t first = all->bits % 8, bit = first;
        for (size_t i = at; i < at + HALF_SCALED; i += AT_ONCE) {
            uint64_t signs;
            memcpy(&signs, all->signs + i / 8, sizeof signs);
            __m512i codes = four_bits(all->codes, i, half), nibbles = eight;
            if (all->parts > 1)
                nibbles = four_bits(all->nibbles, i, half);
            __mmask64 none = _mm512_testn_epi8_mask(codes, codes), is_long = _mm512_cmpeq_epi8_mask(codes, fifteen);
            if (is_long) {
                codes = _mm512_mask_expand_epi8(codes, is_long, next_codes(all));
                all->longs += (size_t)__builtin_popcountll(is_long);
            }
            __mmask64 is_short = _mm512_cmple_epu8_mask(codes, fifteen);
            __m512i lacking = _mm512_maskz_shuffle_epi8(is_short, of_code, codes);
            lacking = _mm512_mask_shuffle_epi8(lacking, none, of_nibble, nibbles);
            __m512i power = _mm512_shuffle_epi8(two_to, lacking), exponent = _mm512_sub_epi8(step_and_3, lacking);
            __m512i sixteenths = _mm512_ternarylogic_epi32(_mm512_slli_epi16(codes, 4), fifteen, nibbles, 0xba); /* a & ~b | c */
            __m512i low = _mm512_gf2p8mul_epi8(sixteenths, power); /* below 256: a product */
            low = _mm512_ternarylogic_epi32(_mm512_add_epi8(low, low), power, middle, 0xf8); /* a | b & c */
            low = _mm512_mask_mov_epi8(sixteenths, is_short, low);
            exponent = _mm512_mask_add_epi8(exponent, _knot_mask64(is_short), exponent,
                                            _mm512_and_si512(_mm512_srli_epi16(codes, 4), fifteen));
            if (packed) {
                __m512i found = missing_bits(packed, _mm512_andnot_si512(eight, lacking), &bit);
                found = _mm512_and_si512(found, _mm512_sub_epi8(power, one));
                low = _mm512_or_si512(low, _mm512_add_epi8(found, found));
            }
            /* Exponent and bits together, half as large, and the sign before them. */
            __m512i one_half = _mm512_srli_epi16(_mm512_permutex2var_epi8(low, pairs[0], exponent), 1);
            __m512i other_half = _mm512_srli_epi16(_mm512_permutex2var_epi8(low, pairs[1], exponent), 1);
            one_half = _mm512_mask_add_epi16(one_half, (__mmask32)signs, one_half, sign_bit);
            other_half = _mm512_mask_add_epi16(other_half, (__mmask32)(signs >> 32), other_half, sign_bit);
            __mmask64 is_whole = packed ? _mm512_test_epi8_mask(lacking, eight) : 0;
            if (is_whole) {
                one_half = placed(&all->whole, (__mmask32)is_whole, one_half);
                other_half = placed(&all->whole, (__mmask32)(is_whole >> 32), other_half);
            }
            __mmask64 is_escaped = _mm512_mask_cmpeq_epi8_mask(is_long, codes, escape);
            if (__builtin_expect(is_escaped != 0, 0)) {
                one_half = placed(&all->escaped, (__mmask32)is_escaped, one_half);
                other_half = placed(&all->escaped, (__mmask32)(is_escaped >> 32), other_half);
            }
            _mm512_storeu_si512(all->words + i, one_half);
            _mm512_storeu_si512(all->words + i + AT_ONCE / 2, other_half);
        }
        all->bits += bit - first;
    }
}
#endif

int kv_cut_vbmi(Cutting *all) {
#ifdef VBMI
    if (has_vbmi()) {
        cut_vbmi(all);
        return 1;
    }
#endif
    (void)all;
    return 0;
}

int kv_restore_vbmi(Restoring *all) {
#ifdef VBMI
    if (has_vbmi()) {
        restore_vbmi(all);
        return 1;
    }
#endif
    (void)all;
    return 0;
}
