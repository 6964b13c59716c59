/* The symbols of 64 lanes and back with AVX2, eight at a time: the same as rows.c computes, for processors that rows_vbmi.c is not
 * for. */
#include "rows.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,popcnt")))

enum { EIGHT = 8, HALF = VECTOR / 2 };

/* For each mask of eight lanes: which byte each of its lanes reads; and where the bytes of its lanes are among words, the last one
 * first. */
static u8 read_by[256][EIGHT], written_by[256][EIGHT];

__attribute__((constructor)) static void make_masks(void) {
    for (unsigned mask = 0; mask < 256; mask++)
        for (unsigned lane = 0, before = 0; lane < EIGHT; lane++)
            if (mask >> lane & 1) {
                read_by[mask][lane] = (u8)before++;
                written_by[mask][(unsigned)__builtin_popcount(mask) - before] = (u8)(2 * lane);
            }
}

int kv_has_eights(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt"); }

AVX2 static inline __m128i to_words(__m256i numbers) {
    return _mm_packus_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
}

AVX2 static inline __m128i eight_bytes(const u8 *at) { return _mm_loadl_epi64((const __m128i_u *)at); }

AVX2 const u8 *kv_decode_eights(uint16_t *restrict states, const uint32_t *restrict slots, const u8 *restrict at,
                                u8 *restrict symbols) {
    const __m256i low_byte = _mm256_set1_epi32(255), least = _mm256_set1_epi32(LEAST_STATE);
    __m128i found[VECTOR / EIGHT];
    for (int i = 0; i < VECTOR / EIGHT; i++) {
        __m256i state = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)(states + EIGHT * i)));
        const uint16_t *own = states + EIGHT * i;
        __m256i slot = _mm256_setr_epi32((int)slots[own[0] & 255], (int)slots[own[1] & 255], (int)slots[own[2] & 255],
                                         (int)slots[own[3] & 255], (int)slots[own[4] & 255], (int)slots[own[5] & 255],
                                         (int)slots[own[6] & 255], (int)slots[own[7] & 255]); /* faster than a gather */
        __m256i after = _mm256_madd_epi16(_mm256_srli_epi32(slot, 16), _mm256_srli_epi32(state, 8));
        after = _mm256_add_epi32(after, _mm256_and_si256(_mm256_srli_epi32(slot, 8), low_byte));
        __m256i reads = _mm256_cmpgt_epi32(least, after);
        unsigned mask = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(reads));
        __m256i read = _mm256_cvtepu8_epi32(_mm_shuffle_epi8(eight_bytes(at), eight_bytes(read_by[mask])));
        after = _mm256_blendv_epi8(after, _mm256_or_si256(_mm256_slli_epi32(after, 8), read), reads);
        at += __builtin_popcount(mask);
        _mm_storeu_si128((__m128i_u *)(states + EIGHT * i), to_words(after));
        found[i] = to_words(_mm256_and_si256(slot, low_byte));
    }
    for (int i = 0; i < 2; i++) {
        __m128i even = _mm_packus_epi16(found[2 * i], found[2 * i + 1]);
        __m128i odd = _mm_packus_epi16(found[4 + 2 * i], found[5 + 2 * i]);
        _mm_storeu_si128((__m128i_u *)(symbols + HALF * i), _mm_unpacklo_epi8(even, odd));
        _mm_storeu_si128((__m128i_u *)(symbols + HALF * i + 16), _mm_unpackhi_epi8(even, odd));
    }
    return at;
}

/* Of a table of SYMBOLS bytes. */
AVX2 static inline __m256i looked_up(const u8 *table, __m256i symbols) {
    __m256i first = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u *)table));
    __m256i second = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u *)(table + 16)));
    __m256i is_second = _mm256_slli_epi16(symbols, 3); /* the symbol's bit 4 in its byte's bit 7 */
    return _mm256_blendv_epi8(_mm256_shuffle_epi8(first, symbols), _mm256_shuffle_epi8(second, symbols), is_second);
}

AVX2 u8 *kv_encode_eights(uint16_t *restrict states, const Code *code, const u8 *restrict symbols, u8 *restrict at) {
    u8 shares[VECTOR], starts[VECTOR];
    const __m256i low_bytes = _mm256_set1_epi16(255);
    __m256i some[2] = {_mm256_loadu_si256((const __m256i_u *)symbols), _mm256_loadu_si256((const __m256i_u *)(symbols + HALF))};
    for (int i = 0; i < 2; i++) { /* first the even lanes, then the odd ones */
        __m256i one = i ? _mm256_srli_epi16(some[0], 8) : _mm256_and_si256(some[0], low_bytes);
        __m256i other = i ? _mm256_srli_epi16(some[1], 8) : _mm256_and_si256(some[1], low_bytes);
        __m256i own = _mm256_permute4x64_epi64(_mm256_packus_epi16(one, other), 0xd8);
        _mm256_storeu_si256((__m256i_u *)(shares + HALF * i), looked_up(code->shares, own));
        _mm256_storeu_si256((__m256i_u *)(starts + HALF * i), looked_up(code->starts, own));
    }
    for (int i = VECTOR / EIGHT; i--;) {
        __m128i words = _mm_loadu_si128((const __m128i_u *)(states + EIGHT * i));
        __m256i state = _mm256_cvtepu16_epi32(words), share = _mm256_cvtepu8_epi32(eight_bytes(shares + EIGHT * i));
        __m256i writes = _mm256_cmpgt_epi32(state, _mm256_sub_epi32(_mm256_slli_epi32(share, 8), _mm256_set1_epi32(1)));
        unsigned mask = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(writes));
        _mm_storel_epi64((__m128i_u *)at, _mm_shuffle_epi8(words, eight_bytes(written_by[mask])));
        at += __builtin_popcount(mask);
        state = _mm256_blendv_epi8(state, _mm256_srli_epi32(state, 8), writes);
        /* Exact: no quotient of 16 bits by 8 is so near to the next whole number. */
        __m256i whole = _mm256_cvttps_epi32(_mm256_div_ps(_mm256_cvtepi32_ps(state), _mm256_cvtepi32_ps(share)));
        state = _mm256_add_epi32(state, _mm256_madd_epi16(whole, _mm256_sub_epi32(_mm256_set1_epi32(SHARES), share)));
        state = _mm256_add_epi32(state, _mm256_cvtepu8_epi32(eight_bytes(starts + EIGHT * i)));
        _mm_storeu_si128((__m128i_u *)(states + EIGHT * i), to_words(state));
    }
    return at;
}

AVX2 void kv_take_low_bits(const int16_t *numbers, unsigned low_bits, uint64_t *restrict planes) {
    for (unsigned bit = 0; bit < low_bits; bit++) {
        const __m128i to_sign = _mm_cvtsi32_si128(15 - (int)bit);
        planes[bit] = 0;
        for (int i = 0; i < 2; i++) {
            __m256i first = _mm256_sll_epi16(_mm256_loadu_si256((const __m256i_u *)(numbers + HALF * i)), to_sign);
            __m256i second = _mm256_sll_epi16(_mm256_loadu_si256((const __m256i_u *)(numbers + HALF * i + 16)), to_sign);
            __m256i signs = _mm256_permute4x64_epi64(_mm256_packs_epi16(_mm256_srai_epi16(first, 15), _mm256_srai_epi16(second, 15)), 0xd8);
            planes[bit] |= (uint64_t)(uint32_t)_mm256_movemask_epi8(signs) << HALF * i;
        }
    }
}

#else /* no such processor */
void kv_take_low_bits(const int16_t *numbers, unsigned low_bits, uint64_t *restrict planes) {
    (void)numbers, (void)low_bits, (void)planes;
}
int kv_has_eights(void) { return 0; }
const u8 *kv_decode_eights(uint16_t *restrict states, const uint32_t *restrict slots, const u8 *restrict at,
                           u8 *restrict symbols) {
    return (void)states, (void)slots, (void)symbols, at;
}
u8 *kv_encode_eights(uint16_t *restrict states, const Code *code, const u8 *restrict symbols, u8 *restrict at) {
    return (void)states, (void)code, (void)symbols, at;
}
#endif
