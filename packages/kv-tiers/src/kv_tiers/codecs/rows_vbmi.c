/* The writing of prefix codes with AVX-512's instructions for bytes: 64 bytes' codes are found at once, in tables that are kept
 * in registers, and joined in eights, or in fours where these are long, so that few are written one after the other. */
#include "rows.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#include <immintrin.h>
#define VBMI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi")))

enum { AT_ONCE = 64, LONGEST_JOINED = 56 }; /* beside 7 bits that wait */

VBMI static void split(CodeTable *table) {
    for (size_t i = 0; i < 256; i += 16) {
        __m512i coded = _mm512_loadu_si512(table->coded + i);
        _mm_storeu_si128((__m128i *)(table->lengths + i), _mm512_cvtepi32_epi8(coded));
        _mm_storeu_si128((__m128i *)(table->low + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(coded, 8)));
        _mm_storeu_si128((__m128i *)(table->high + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(coded, 16)));
    }
}

void kv_make_table(CodeTable *table, const u32 *coded) {
    table->coded = coded;
    table->is_split = HAS_AVX512("vbmi") && HAS_AVX512("bw") && HAS_AVX512("vl");
    if (table->is_split)
        split(table);
}

VBMI static inline __m512i looked_up(const u8 *table, __m512i bytes, __mmask64 upper) {
    const __m512i *quarters = (const __m512i *)table;
    __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(quarters), bytes, _mm512_loadu_si512(quarters + 1));
    __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(quarters + 2), bytes, _mm512_loadu_si512(quarters + 3));
    return _mm512_mask_mov_epi8(low, upper, high);
}

typedef struct {
    __m512i codes, lengths;
} Codes;

/* Of 32 codes of 16 bits, each four as one of 64 bits. */
VBMI static inline Codes joined_fours(Codes of) {
    __m512i first = _mm512_maskz_mov_epi16(0x55555555, of.codes), length = _mm512_maskz_mov_epi16(0x55555555, of.lengths);
    __m512i pairs = _mm512_or_si512(first, _mm512_sllv_epi32(_mm512_srli_epi32(of.codes, 16), length));
    __m512i lengths = _mm512_madd_epi16(of.lengths, _mm512_set1_epi16(1));
    first = _mm512_maskz_mov_epi32(0x5555, pairs), length = _mm512_maskz_mov_epi32(0x5555, lengths);
    return (Codes){_mm512_or_si512(first, _mm512_sllv_epi64(_mm512_srli_epi64(pairs, 32), length)),
                   _mm512_add_epi64(length, _mm512_srli_epi64(lengths, 32))};
}

/* At most LONGEST_JOINED bits. */
INLINE void put_joined(Putting *now, uint64_t code, uint64_t length) {
    now->waiting |= code << now->filled;
    now->filled += (uint32_t)length;
    put_whole_bytes(now);
}

VBMI uint32_t kv_put_split(Putting *now, const u8 *bytes, uint32_t first, uint32_t n, const CodeTable *table) {
    uint64_t codes[2][8], lengths[2][8];
    const __m512i zero = _mm512_setzero_si512(), length_bits = _mm512_set1_epi8(CODE_LENGTH);
    Putting own = *now; /* what is written could change `now`, as far as the compiler knows */
    uint32_t done = 0;
    for (; n - done >= AT_ONCE; done += AT_ONCE) {
        __m512i these = _mm512_loadu_si512(bytes + done);
        __mmask64 upper = _mm512_movepi8_mask(these);
        __m512i length = looked_up(table->lengths, these, upper);
        __m512i low = looked_up(table->low, these, upper), high = looked_up(table->high, these, upper);
        for (uint64_t left = _mm512_movepi8_mask(length); left; left &= left - 1)
            *own.escaped++ = first + done + (uint32_t)__builtin_ctzll(left);
        length = _mm512_and_si512(length, length_bits);
        /* Unpacking takes the first eight of each sixteen, or the others. */
        Codes one = joined_fours((Codes){_mm512_unpacklo_epi8(low, high), _mm512_unpacklo_epi8(length, zero)});
        Codes other = joined_fours((Codes){_mm512_unpackhi_epi8(low, high), _mm512_unpackhi_epi8(length, zero)});
        Codes even = {_mm512_unpacklo_epi64(one.codes, other.codes), _mm512_unpacklo_epi64(one.lengths, other.lengths)};
        Codes odd = {_mm512_unpackhi_epi64(one.codes, other.codes), _mm512_unpackhi_epi64(one.lengths, other.lengths)};
        Codes both = {_mm512_or_si512(even.codes, _mm512_sllv_epi64(odd.codes, even.lengths)),
                      _mm512_add_epi64(even.lengths, odd.lengths)};
        int are_short = !_mm512_cmpgt_epi64_mask(both.lengths, _mm512_set1_epi64(LONGEST_JOINED));
        _mm512_storeu_si512(codes[0], are_short ? both.codes : even.codes);
        _mm512_storeu_si512(lengths[0], are_short ? both.lengths : even.lengths);
        if (are_short) {
            for (size_t i = 0; i < 8; i++)
                put_joined(&own, codes[0][i], lengths[0][i]);
            continue;
        }
        _mm512_storeu_si512(codes[1], odd.codes);
        _mm512_storeu_si512(lengths[1], odd.lengths);
        for (size_t i = 0; i < 16; i++)
            put_joined(&own, codes[i % 2][i / 2], lengths[i % 2][i / 2]);
    }
    *now = own;
    return done;
}

#else
void kv_make_table(CodeTable *table, const u32 *coded) {
    table->coded = coded;
    table->is_split = 0;
}

uint32_t kv_put_split(Putting *now, const u8 *bytes, uint32_t first, uint32_t n, const CodeTable *table) {
    (void)now, (void)bytes, (void)first, (void)n, (void)table;
    return 0;
}
#endif
