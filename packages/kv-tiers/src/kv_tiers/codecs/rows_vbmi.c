/* Writes prefix codes with AVX-512's instructions for bytes: the codes of 64 bytes are found at once, in tables kept in registers,
 * and joined in eights, or in fours where they are long, so that few are written one after the other. */
#include "rows.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#include <immintrin.h>
#define VBMI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi")))

enum { AT_ONCE = 64, LONGEST_JOINED = 56 /* bits, beside 7 that are not yet written */ };

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

VBMI static inline __m512i looked_up(const u8 *table, __m512i bytes, __mmask64 upper_half) {
    const __m512i *quarters = (const __m512i *)table;
    __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(quarters), bytes, _mm512_loadu_si512(quarters + 1));
    __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(quarters + 2), bytes, _mm512_loadu_si512(quarters + 3));
    return _mm512_mask_mov_epi8(low, upper_half, high);
}

typedef struct {
    __m512i codes, lengths;
} Codes;

/* Joins 32 codes of 16 bits each in fours: 8 codes of 64 bits. */
VBMI static inline Codes joined_in_fours(Codes codes) {
    __m512i first = _mm512_maskz_mov_epi16(0x55555555, codes.codes), length = _mm512_maskz_mov_epi16(0x55555555, codes.lengths);
    __m512i pairs = _mm512_or_si512(first, _mm512_sllv_epi32(_mm512_srli_epi32(codes.codes, 16), length));
    __m512i lengths = _mm512_madd_epi16(codes.lengths, _mm512_set1_epi16(1));
    first = _mm512_maskz_mov_epi32(0x5555, pairs), length = _mm512_maskz_mov_epi32(0x5555, lengths);
    return (Codes){_mm512_or_si512(first, _mm512_sllv_epi64(_mm512_srli_epi64(pairs, 32), length)),
                   _mm512_add_epi64(length, _mm512_srli_epi64(lengths, 32))};
}

/* At most LONGEST_JOINED bits. */
INLINE void write_joined(BitWriter *writer, uint64_t code, uint64_t length) {
    writer->bits |= code << writer->bit_count;
    writer->bit_count += (uint32_t)length;
    flush_bytes(writer);
}

VBMI uint32_t kv_write_split(BitWriter *writer, const u8 *bytes, uint32_t first, uint32_t n, const CodeTable *table) {
    uint64_t codes[2][8], lengths[2][8];
    const __m512i zero = _mm512_setzero_si512(), length_bits = _mm512_set1_epi8(CODE_LENGTH);
    BitWriter local = *writer; /* in registers: stores to its output might change `writer`, as far as the compiler knows */
    uint32_t done = 0;
    for (; n - done >= AT_ONCE; done += AT_ONCE) {
        __m512i symbols = _mm512_loadu_si512(bytes + done);
        __mmask64 upper_half = _mm512_movepi8_mask(symbols);
        __m512i length = looked_up(table->lengths, symbols, upper_half);
        __m512i lower = looked_up(table->low, symbols, upper_half), upper = looked_up(table->high, symbols, upper_half);
        for (uint64_t escaped = _mm512_movepi8_mask(length); escaped; escaped &= escaped - 1)
            *local.escaped++ = first + done + (uint32_t)__builtin_ctzll(escaped);
        length = _mm512_and_si512(length, length_bits);
        /* Unpacking takes the first eight bytes of each sixteen, or the last eight. */
        Codes low = joined_in_fours((Codes){_mm512_unpacklo_epi8(lower, upper), _mm512_unpacklo_epi8(length, zero)});
        Codes high = joined_in_fours((Codes){_mm512_unpackhi_epi8(lower, upper), _mm512_unpackhi_epi8(length, zero)});
        Codes even = {_mm512_unpacklo_epi64(low.codes, high.codes), _mm512_unpacklo_epi64(low.lengths, high.lengths)};
        Codes odd = {_mm512_unpackhi_epi64(low.codes, high.codes), _mm512_unpackhi_epi64(low.lengths, high.lengths)};
        Codes eights = {_mm512_or_si512(even.codes, _mm512_sllv_epi64(odd.codes, even.lengths)),
                      _mm512_add_epi64(even.lengths, odd.lengths)};
        int are_short = !_mm512_cmpgt_epi64_mask(eights.lengths, _mm512_set1_epi64(LONGEST_JOINED));
        _mm512_storeu_si512(codes[0], are_short ? eights.codes : even.codes);
        _mm512_storeu_si512(lengths[0], are_short ? eights.lengths : even.lengths);
        if (are_short) {
            for (size_t i = 0; i < 8; i++)
                write_joined(&local, codes[0][i], lengths[0][i]);
            continue;
        }
        _mm512_storeu_si512(codes[1], odd.codes);
        _mm512_storeu_si512(lengths[1], odd.lengths);
        for (size_t i = 0; i < 16; i++)
            write_joined(&local, codes[i % 2][i / 2], lengths[i % 2][i / 2]);
    }
    *writer = local;
    return done;
}

#else
void kv_make_table(CodeTable *table, const u32 *coded) {
    table->coded = coded;
    table->is_split = 0;
}

uint32_t kv_write_split(BitWriter *writer, const u8 *bytes, uint32_t first, uint32_t n, const CodeTable *table) {
    (void)writer, (void)bytes, (void)first, (void)n, (void)table;
    return 0;
}
#endif
