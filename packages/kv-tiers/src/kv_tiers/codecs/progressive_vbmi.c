/* The codec `progressive` with AVX-512's instructions for bytes: what progressive.c computes, from tables of 128 bytes that are
 * kept in registers. */
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
    __m512i symbols, nibbles, missing; /* 16 bits each */
} Cut;

VBMI static inline Cut cut32(const u16 *words, __m512i step_and_4) {
    const __m512i one = _mm512_set1_epi16(1), all = _mm512_set1_epi16(ESCAPED);
    __m512i word = _mm512_loadu_si512(words), exponent = _mm512_and_si512(_mm512_srli_epi16(word, 7), all);
    __m512i down = _mm512_min_epu16(_mm512_subs_epu16(step_and_4, exponent), _mm512_set1_epi16(ALL_MISSING + 1));
    __m512i up = _mm512_min_epu16(_mm512_subs_epu16(exponent, step_and_4), _mm512_set1_epi16(8));
    __m512i sixteenths = _mm512_and_si512(_mm512_slli_epi16(word, 1), _mm512_set1_epi16(0xfe));
    sixteenths = _mm512_srlv_epi16(_mm512_or_si512(sixteenths, _mm512_set1_epi16(0x100)), down);
    __m512i steps = _mm512_add_epi16(_mm512_srli_epi16(sixteenths, 4), _mm512_slli_epi16(up, 4));
    __m512i symbols = _mm512_or_si512(_mm512_slli_epi16(steps, 1), _mm512_srli_epi16(word, 15));
    symbols = _mm512_mask_mov_epi16(symbols, _mm512_cmpge_epu16_mask(steps, _mm512_set1_epi16(ESCAPED >> 1)), all);
    return (Cut){symbols, _mm512_and_si512(sixteenths, _mm512_set1_epi16(15)), _mm512_subs_epu16(down, one)};
}

/* The lower bytes of 64 words. */
VBMI static inline __m512i lower(__m512i first, __m512i second) {
    u8 places[AT_ONCE];
    for (size_t i = 0; i < AT_ONCE; i++)
        places[i] = (u8)(2 * i);
    return _mm512_permutex2var_epi8(first, _mm512_loadu_si512(places), second);
}

/* Of 64 numbers. Their nibbles. */
VBMI static inline __m512i cut64(const Cutting *all, size_t at, size_t *escaped, size_t *whole) {
    const __m512i step_and_4 = _mm512_set1_epi16((short)(all->exponents[at / SCALED] + 4));
    Cut first = cut32(all->words + at, step_and_4), second = cut32(all->words + at + AT_ONCE / 2, step_and_4);
    __m512i symbols = lower(first.symbols, second.symbols), missing = lower(first.missing, second.missing);
    _mm512_storeu_si512(all->symbols + at, symbols);
    _mm512_storeu_si512(all->missing + at, missing);
    *escaped += (size_t)__builtin_popcountll(_mm512_cmpeq_epi8_mask(symbols, _mm512_set1_epi8(-1)));
    *whole += (size_t)__builtin_popcountll(_mm512_cmpeq_epi8_mask(missing, _mm512_set1_epi8(ALL_MISSING)));
    return lower(first.nibbles, second.nibbles);
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
    size_t half = all->n / 2, escaped = 0, whole = 0;
    for (size_t at = 0; at < half; at += AT_ONCE) {
        __m512i low = cut64(all, at, &escaped, &whole), high = cut64(all, half + at, &escaped, &whole);
        _mm512_storeu_si512(all->nibbles + at, _mm512_or_si512(low, _mm512_slli_epi16(high, 4)));
    }
    all->escaped = escaped;
    all->whole = whole;
}

/* ---- and back ---- */

/* What is known of a number by its steps' code and, where that is 0, by its nibble. All but the last are of 8 bits:
 * exponents in relation to the step's, bits behind the leading one twice as large, what a nibble is to be multiplied
 * with for these, and how many bits are missing. */
typedef struct {
    u8 exponents[128], bits[128], powers[128], lacking[128];
    u8 nibble_exponents[16], nibble_bits[16], nibble_lacking[16];
} Tables;

static void fill(Tables *tables, int to_middle) {
    *tables = (Tables){.nibble_lacking = {ALL_MISSING}, .nibble_exponents = {(u8)(to_middle ? -5 : -6)}};
    for (unsigned steps = 1; steps < 128; steps++) {
        unsigned up = steps >> 4 ? (steps >> 4) - 1 : 0, five = steps - (up << 4);
        unsigned place = 31 - (unsigned)__builtin_clz(five), lacking = place < 4 ? 3 - place : 0;
        tables->exponents[steps] = (u8)(place + up);
        tables->bits[steps] = (u8)(five << (8 - place) | (to_middle && place < 4 ? 1u << lacking : 0));
        tables->powers[steps] = (u8)(16 >> place);
        tables->lacking[steps] = (u8)lacking;
    }
    for (unsigned nibble = 1; nibble < 16; nibble++) {
        unsigned place = 31 - (unsigned)__builtin_clz(nibble), lacking = 7 - place;
        tables->nibble_exponents[nibble] = (u8)(place - 4);
        tables->nibble_bits[nibble] = (u8)(nibble << (8 - place) | (to_middle ? 1u << lacking : 0));
        tables->nibble_lacking[nibble] = (u8)lacking;
    }
}

typedef struct {
    __m512i low, high;
} Table;

VBMI static inline Table table_of(const u8 *bytes) {
    return (Table){_mm512_loadu_si512(bytes), _mm512_loadu_si512(bytes + AT_ONCE)};
}

/* By the lower seven bits. */
VBMI static inline __m512i by_table(Table table, __m512i index) {
    return _mm512_permutex2var_epi8(table.low, index, table.high);
}

VBMI static inline __m512i small_table(const u8 *bytes) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i_u *)bytes));
}

/* The missing bits of 64 numbers, from a bit on, of which 63 bytes can be read. lacking: how many of each, at most 7. Each
 * eight numbers have 56 bits at most, which any eight bytes have from any bit on. */
VBMI static inline __m512i missing_bits(const u8 *packed, __m512i lacking, size_t *bit) {
    static const u8 of_missing[16] = {0, 1, 3, 7, 15, 31, 63, 127};
    __m512i ends = _mm512_mullo_epi64(lacking, _mm512_set1_epi8(1)); /* of each among its eight: sums up to it */
    __m128i eights = _mm512_cvtepi64_epi16(_mm512_srli_epi64(ends, 56)); /* where each eight end */
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
    found = _mm512_multishift_epi64_epi8(_mm512_add_epi8(bits, _mm512_slli_epi64(ends, 8)), found);
    *bit += (size_t)_mm_extract_epi16(eights, 7);
    return _mm512_and_si512(found, _mm512_shuffle_epi8(small_table(of_missing), lacking));
}

VBMI static void restore_vbmi(Restoring *all) {
    Tables tables;
    fill(&tables, all->to_middle);
    const Table exponents = table_of(tables.exponents), bits = table_of(tables.bits);
    const Table powers = table_of(tables.powers), lackings = table_of(tables.lacking);
    const __m512i nibble_exponents = small_table(tables.nibble_exponents), nibble_bits = small_table(tables.nibble_bits);
    const __m512i nibble_lackings = small_table(tables.nibble_lacking);
    __m512i fifteen = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
    __m512i all_but_sign = _mm512_set1_epi8(-2), escape = _mm512_set1_epi8(-1);
    /* The compiler would make these again at each use, from a general register. */
    __asm__("" : "+v"(fifteen), "+v"(eight), "+v"(all_but_sign), "+v"(escape));
    __m512i pairs[2]; /* of bytes of one register and of another */
    for (size_t k = 0; k < 2; k++) {
        u8 places[AT_ONCE];
        for (size_t i = 0; i < AT_ONCE; i++)
            places[i] = (u8)(AT_ONCE / 2 * k + i / 2 + AT_ONCE * (i % 2));
        pairs[k] = _mm512_loadu_si512(places);
    }
    const u8 *in = all->symbols, *nibbled = all->nibbles;
    u16 *words = all->words;
    u8 *missing = all->missing;
    size_t half = all->n / 2, escaped = 0;
    __m512i lacked = _mm512_setzero_si512(), whole = _mm512_setzero_si512();
    for (size_t at = 0; at < all->n; at += HALF_SCALED) {
        const __m512i step = _mm512_set1_epi8((char)all->exponents[at / SCALED]);
        u8 room[HALF_SCALED];
        const u8 *packed = all->packed_bytes ? bits_at(all, room) : NULL;
        size_t first = all->bits % 8, bit = first;
        __m512i whole_here = _mm512_setzero_si512(); /* 8 for each number that misses all its bits */
        for (size_t i = at; i < at + HALF_SCALED; i += AT_ONCE) {
            __m512i symbols = _mm512_loadu_si512(in + i), nibbles = eight;
            if (nibbled) {
                nibbles = _mm512_loadu_si512(nibbled + (at < half ? i : i - half));
                nibbles = _mm512_and_si512(at < half ? nibbles : _mm512_srli_epi16(nibbles, 4), fifteen);
            }
            __m512i steps = _mm512_srli_epi16(symbols, 1); /* whose highest bit is another's, and is not looked at */
            __mmask64 none = _mm512_testn_epi8_mask(symbols, all_but_sign);
            __m512i lacking = _mm512_mask_shuffle_epi8(by_table(lackings, steps), none, nibble_lackings, nibbles);
            __m512i exponent = _mm512_mask_shuffle_epi8(by_table(exponents, steps), none, nibble_exponents, nibbles);
            __m512i low = _mm512_mask_shuffle_epi8(by_table(bits, steps), none, nibble_bits, nibbles);
            low = _mm512_or_si512(low, _mm512_gf2p8mul_epi8(nibbles, by_table(powers, steps))); /* below 256: a product */
            __m512i of_packed = _mm512_andnot_si512(eight, lacking);
            if (packed) {
                __m512i found = missing_bits(packed, of_packed, &bit);
                low = _mm512_or_si512(low, _mm512_add_epi8(found, found));
            } else {
                lacked = _mm512_add_epi64(lacked, _mm512_sad_epu8(of_packed, _mm512_setzero_si512()));
            }
            exponent = _mm512_add_epi8(exponent, step);
            /* Exponent and bits together, half as large, and the sign before them. */
            for (size_t k = 0; k < 2; k++) {
                __m512i both = _mm512_permutex2var_epi8(low, pairs[k], exponent);
                __m512i signs = _mm512_permutexvar_epi8(pairs[k], symbols);
                _mm512_storeu_si512(words + i + AT_ONCE / 2 * k, _mm512_shrdi_epi16(both, signs, 1));
            }
            _mm512_storeu_si512(missing + i, lacking);
            escaped += (size_t)__builtin_popcountll(_mm512_cmpeq_epi8_mask(symbols, escape));
            whole_here = _mm512_add_epi8(whole_here, _mm512_and_si512(lacking, eight));
        }
        whole = _mm512_add_epi64(whole, _mm512_sad_epu8(whole_here, _mm512_setzero_si512()));
        all->bits += bit - first;
    }
    all->escaped = escaped;
    all->whole = (uint64_t)_mm512_reduce_add_epi64(whole) / 8;
    all->bits += (uint64_t)_mm512_reduce_add_epi64(lacked);
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
