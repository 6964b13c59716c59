/* Rows of whole numbers into the codes of asymmetric numeral systems and back: a vector of 64 lanes in plain C, eight lanes at a time
 * with AVX2, which is 1.4 times as fast in all, or all of them at once with AVX-512's instructions for bytes, twice as fast again. A
 * code's tables are then in registers. All compute the same.
 *
 * A payload may be anything: what it says leads no access beyond a buffer, and what cannot be is KV_DAMAGED. Codes are
 * this program's own: only their arrays' sizes, and what leads elsewhere, are checked.
 */
#include "rows.h"

enum { MOST_TOKENS = 1 << 17, MOST_ROWS_OF_A_BLOCK = 256, MEAN_UNIT = 1 << 12 };

int kv_are_codes(Codes *codes, size_t low_bits_bytes, size_t shares_bytes, size_t starts_bytes, size_t symbols_bytes) {
    codes->count = low_bits_bytes;
    if (!low_bits_bytes || low_bits_bytes >= ALL_ZERO || shares_bytes != SYMBOLS * low_bits_bytes ||
        starts_bytes != shares_bytes || symbols_bytes != SHARES * low_bits_bytes)
        return 0;
    for (size_t i = 0; i < low_bits_bytes; i++)
        if (codes->low_bits[i] > MOST_LOW_BITS)
            return 0;
    for (size_t i = 0; i < symbols_bytes; i++)
        if (codes->symbols[i] >= SYMBOLS)
            return 0;
    for (size_t i = 0; i < low_bits_bytes; i++) { /* symbols that are not escaped are next to each other */
        const u8 *own = codes->shares + i * SYMBOLS;
        int runs = 0;
        for (int symbol = 0; symbol < ESCAPED; symbol++)
            runs += own[symbol] && !(symbol && own[symbol - 1]);
        if (runs != 1)
            return 0;
    }
    return 1;
}

/* Which lanes of a vector have a number: so many components, of so many tokens. */
INLINE uint64_t active_lanes(size_t components, size_t tokens) {
    if (components >= TOGETHER && tokens >= VECTOR / TOGETHER)
        return UINT64_MAX;
    uint64_t of_token = components < TOGETHER ? (1u << components) - 1 : 15, lanes = 0;
    for (size_t t = 0; t < VECTOR / TOGETHER && t < tokens; t++)
        lanes |= of_token << TOGETHER * t;
    return lanes;
}

INLINE unsigned largest_of(const u8 *symbols) {
    u8 largest = 0;
    for (size_t lane = 0; lane < VECTOR; lane++)
        largest = symbols[lane] > largest ? symbols[lane] : largest;
    return largest;
}

/* ---- decoding ---- */

/* For each lower byte of a state, from bit 0 on the symbol, from bit 8 on how far in its share the byte is, and from bit 16 on the
 * share. */
INLINE void make_slots(const Code *code, uint32_t *restrict slots) {
    for (uint32_t low = 0; low < SHARES; low++) {
        uint32_t symbol = code->symbols[low];
        slots[low] = symbol | ((low - code->starts[symbol]) & 255) << 8 | (uint32_t)code->shares[symbol] << 16;
    }
}

#ifdef KV_X86
enum {
    EIGHT = 8,
    HALF = VECTOR / 2,
    SLACK = VECTOR /* what is read or written beyond a vector's bytes */
};

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

AVX2 static inline __m128i to_words(__m256i numbers) {
    return _mm_packus_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
}

AVX2 static inline __m128i eight_bytes(const u8 *at) { return _mm_loadl_epi64((const __m128i_u *)at); }

/* The symbols of a vector, all of whose lanes have numbers, and where the next byte is. At least VECTOR + 8 bytes can be read. slots: as
 * `make_slots` makes them. */
AVX2 static const u8 *decode_eights(uint16_t *restrict states, const uint32_t *restrict slots, const u8 *restrict at,
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

/* Decodes some of the n vectors, all of whose lanes have numbers, and of which the first is its set's first. States of a set are in two
 * registers, those of the even lanes and those of the odd ones, of 16 bits each. first: the place of its first number in `bytes`. Returns
 * how many: a multiple of SETS. */
VBMI static size_t decode_vectors(Decoder *decoder, const Code *code, size_t n, size_t first, u8 *restrict bytes, Far **far) {
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
#endif

/* The symbols of a vector's lanes, of which each may read a byte. 0: there is none. */
INLINE int decode_symbols(Decoder *decoder, uint16_t *restrict states, const uint32_t *restrict slots, uint64_t active,
                          u8 *restrict symbols) {
    const u8 *restrict at = decoder->at;
#ifdef KV_X86
    if (active == UINT64_MAX && decoder->end - at >= VECTOR + 8 && has_avx2()) {
        decoder->at = decode_eights(states, slots, at, symbols);
        return 1;
    }
#endif
    if (active == UINT64_MAX && decoder->end - at >= VECTOR) {
        for (int i = 0; i < VECTOR; i++) { /* without branches, as none of them could be predicted */
            uint32_t state = states[i], slot = slots[state & 255];
            state = (slot >> 16) * (state >> 8) + (slot >> 8 & 255);
            uint32_t reads = (state - LEAST_STATE) >> 31;
            states[i] = (uint16_t)(state << 8 * reads | (*at & (0 - reads)));
            at += reads;
            symbols[lane_of(i)] = (u8)slot;
        }
    } else {
        for (int i = 0; i < VECTOR; i++) {
            symbols[lane_of(i)] = ZERO_SYMBOL;
            if (!(active >> lane_of(i) & 1))
                continue;
            uint32_t state = states[i], slot = slots[state & 255];
            state = (slot >> 16) * (state >> 8) + (slot >> 8 & 255);
            if (state < LEAST_STATE) {
                if (at == decoder->end)
                    return 0;
                state = state << 8 | *at++;
            }
            states[i] = (uint16_t)state;
            symbols[lane_of(i)] = (u8)slot;
        }
    }
    decoder->at = at;
    return 1;
}

/* Adds the lower bits of each number. */
INLINE void add_low_bits(const u8 *planes, unsigned low_bits, int32_t *restrict numbers) {
    for (unsigned bit = 0; bit < low_bits; bit++) {
        uint64_t plane;
        memcpy(&plane, planes + LOW_BYTES * bit, LOW_BYTES);
        for (int lane = 0; lane < VECTOR; lane++)
            numbers[lane] += (int32_t)(plane >> lane & 1) << bit;
    }
}

/* One vector. place: of its first byte. NULL: damaged. */
INLINE Far *decode_vector(Decoder *decoder, const Code *code, const uint32_t *slots, uint64_t active, uint32_t place,
                          u8 *restrict bytes, Far *restrict far) {
    u8 symbols[VECTOR];
    const u8 *planes = decoder->at;
    if ((size_t)(decoder->end - planes) < LOW_BYTES * code->low_bits)
        return NULL;
    decoder->at += LOW_BYTES * code->low_bits;
    if (!decode_symbols(decoder, decoder->states[decoder->vector % SETS], slots, active, symbols))
        return NULL;
    decoder->vector++;
    int is_escaped = largest_of(symbols) == ESCAPED;
    u8 *restrict own = bytes + place;
    if (!code->low_bits && !is_escaped) {
        for (size_t lane = 0; lane < VECTOR; lane++)
            own[lane] = (u8)(symbols[lane] + FAR_OFFSET - ZERO_SYMBOL);
        return far;
    }
    int32_t numbers[VECTOR];
    for (int lane = 0; lane < VECTOR; lane++)
        numbers[lane] = (int32_t)((uint32_t)(symbols[lane] - ZERO_SYMBOL) << code->low_bits);
    add_low_bits(planes, code->low_bits, numbers);
    if (!is_escaped && code->low_bits <= BYTE_LOW_BITS) {
        for (size_t lane = 0; lane < VECTOR; lane++)
            own[lane] = (u8)(numbers[lane] + FAR_OFFSET);
        return far;
    }
    for (uint32_t lane = 0; lane < VECTOR; lane++) {
        if (symbols[lane] == ESCAPED) {
            if (decoder->end - decoder->at < 2)
                return NULL;
            int16_t stored;
            memcpy(&stored, decoder->at, 2);
            decoder->at += 2;
            numbers[lane] = stored;
        }
        int is_far = numbers[lane] < -FAR_OFFSET || numbers[lane] >= FAR_OFFSET;
        own[lane] = (u8)(is_far ? FAR_OFFSET : numbers[lane] + FAR_OFFSET);
        if (is_far && active >> lane & 1)
            *far++ = (Far){place + lane, 0, numbers[lane]};
    }
    return far;
}

VERSIONS static Far *decode_some(Decoder *decoder, const Layout *layout, size_t components, const Code *code, size_t from,
                                 uint32_t place, u8 *restrict bytes, Far *restrict far) {
    uint32_t slots[SHARES];
    if (from < layout->vectors)
        make_slots(code, slots);
    for (size_t vector = from; far && vector < layout->vectors; vector++, place += VECTOR) {
        uint64_t active = active_lanes(components, layout->tokens - vector * (VECTOR / TOGETHER));
        far = decode_vector(decoder, code, slots, active, place, bytes, far);
    }
    return far;
}

#ifdef KV_X86
/* Whether whole vectors of these rows are decoded and encoded at once. */
INLINE int is_for_vectors(const Layout *layout, size_t components) {
    return layout->tokens % VECTOR == 0 && components >= TOGETHER && has_vbmi();
}
#endif

Far *kv_decode_block(Decoder *decoder, const Layout *layout, const Codes *codes, const u8 *unit_codes, size_t place,
                     u8 *restrict bytes, Far *far) {
    for (size_t four = 0; far && four < layout->fours; four++) {
        size_t number = unit_codes[four / layout->unit_fours], first = place + four * layout->vectors * VECTOR;
        size_t components = layout->channels - TOGETHER * four, done = 0;
        if (number == ALL_ZERO) {
            memset(bytes + first, FAR_OFFSET, layout->vectors * VECTOR);
            decoder->vector += layout->vectors;
            continue;
        }
        if (number >= codes->count)
            return NULL;
        Code code = code_of(codes, number);
#ifdef KV_X86
        if (is_for_vectors(layout, components))
            done = decode_vectors(decoder, &code, layout->vectors, first, bytes, &far);
#endif
        far = decode_some(decoder, layout, components, &code, done, (uint32_t)(first + done * VECTOR), bytes, far);
    }
    return far;
}

int kv_ends_well(const Decoder *decoder) {
    int is_well = decoder->at == decoder->end;
    for (int set = 0; set < SETS; set++)
        for (int i = 0; i < VECTOR; i++)
            is_well &= decoder->states[set][i] == LEAST_STATE;
    return is_well;
}

/* ---- encoding: the last number first ---- */

typedef struct {
    uint16_t states[SETS][VECTOR]; /* in the order in which lanes read */
    u8 *at, *end;                  /* where the next byte of the stream, the last one first, is written to */
} Encoder;

#ifdef KV_X86
/* Of a table of SYMBOLS bytes. */
AVX2 static inline __m256i looked_up(const u8 *table, __m256i symbols) {
    __m256i first = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u *)table));
    __m256i second = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i_u *)(table + 16)));
    __m256i is_second = _mm256_slli_epi16(symbols, 3); /* the symbol's bit 4 in its byte's bit 7 */
    return _mm256_blendv_epi8(_mm256_shuffle_epi8(first, symbols), _mm256_shuffle_epi8(second, symbols), is_second);
}

/* The reverse of `decode_eights`, from the last lane to the first. There is room for VECTOR + 8 bytes. */
AVX2 static u8 *encode_eights(uint16_t *restrict states, const Code *code, const u8 *restrict symbols, u8 *restrict at) {
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

/* The numbers of four rows of so many tokens, a multiple of VECTOR, a token's side by side. Returns the sum of their distances from
 * 0. */
VBMI static uint64_t take_vectors(const i16 *rows, size_t tokens, int16_t *restrict numbers) {
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

/* Encodes some of the n vectors before the end of `numbers`, the last one first, under the same conditions as `decode_vectors`. Returns
 * how many. */
VBMI static size_t encode_vectors(Encoder *encoder, const Code *code, size_t n, const int16_t *numbers) {
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
#endif

/* 0: there is no room. */
INLINE int put_byte(Encoder *encoder, unsigned byte) {
    if (encoder->at == encoder->end)
        return 0;
    *encoder->at++ = (u8)byte;
    return 1;
}

/* Of each symbol its share, and what a product with it is worth a division: ⌈2^32 ÷ share⌉, exact for states of 16 bits. first,
 * last: of those that are not escaped. */
typedef struct {
    uint64_t inverses[SYMBOLS];
    uint32_t shares[SYMBOLS], starts[SYMBOLS];
    int first, last;
} Dividing;

static void make_dividing(const Code *code, Dividing *restrict dividing) {
    dividing->first = dividing->last = -1;
    for (int symbol = 0; symbol < SYMBOLS; symbol++) {
        uint32_t share = code->shares[symbol] ? code->shares[symbol] : 1;
        dividing->inverses[symbol] = (((uint64_t)1 << 32) + share - 1) / share;
        dividing->shares[symbol] = share;
        dividing->starts[symbol] = code->starts[symbol];
        if (!code->shares[symbol] || symbol == ESCAPED)
            continue;
        dividing->first = dividing->first < 0 ? symbol : dividing->first;
        dividing->last = symbol;
    }
}

/* The codes of a vector's lanes, the last one first. 0: there is no room. */
INLINE int encode_symbols(Encoder *encoder, uint16_t *restrict states, const Code *code, const Dividing *restrict dividing,
                          uint64_t active, const u8 *restrict symbols) {
    u8 *restrict at = encoder->at;
    int has_room = encoder->end - at >= VECTOR + 8;
#ifdef KV_X86
    if (active == UINT64_MAX && has_room && has_avx2()) {
        encoder->at = encode_eights(states, code, symbols, at);
        return 1;
    }
#endif
    (void)code;
    for (int i = VECTOR; i--;) {
        int lane = lane_of(i);
        if (!(active >> lane & 1))
            continue;
        uint32_t share = dividing->shares[symbols[lane]];
        uint32_t state = states[i], writes = (((share << 8) - 1) - state) >> 31; /* without a branch */
        if (!has_room && writes && at == encoder->end)
            return 0;
        if (has_room || writes)
            *at = (u8)state;
        at += writes;
        state >>= 8 * writes;
        uint32_t whole = (uint32_t)(state * dividing->inverses[symbols[lane]] >> 32);
        states[i] = (uint16_t)(state + whole * (SHARES - share) + dividing->starts[symbols[lane]]);
    }
    encoder->at = at;
    return 1;
}

#ifdef KV_X86
/* The lower bits of a vector's numbers: of each bit, a plane with those of all lanes. */
AVX2 static void take_low_bits(const int16_t *numbers, unsigned low_bits, uint64_t *restrict planes) {
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
#endif

/* One vector. 0: there is no room. */
VERSIONS static int encode_vector(Encoder *encoder, uint16_t *restrict states, const Code *code, const Dividing *dividing,
                                  uint64_t active, const int16_t *restrict numbers) {
    u8 symbols[VECTOR];
    uint64_t planes[MOST_LOW_BITS] = {0}, escaped = 0;
    const unsigned low_bits = code->low_bits;
    const int16_t first = (int16_t)(dividing->first - ZERO_SYMBOL), last = (int16_t)(dividing->last - ZERO_SYMBOL);
    int16_t own[VECTOR]; /* not in `symbols` at once: loops over two widths are not vectorised */
    for (size_t lane = 0; lane < VECTOR; lane++) {
        int16_t high = (int16_t)(numbers[lane] >> low_bits);
        own[lane] = (int16_t)((high < first) | (high > last) ? ESCAPED - ZERO_SYMBOL : high);
    }
    for (size_t lane = 0; lane < VECTOR; lane++)
        symbols[lane] = (u8)(own[lane] + ZERO_SYMBOL);
    if (largest_of(symbols) == ESCAPED)
        for (int lane = 0; lane < VECTOR; lane++)
            escaped |= (uint64_t)(symbols[lane] == ESCAPED) << lane;
    for (uint64_t left = escaped & active; left;) {
        int lane = VECTOR - 1 - __builtin_clzll(left);
        left &= ~((uint64_t)1 << lane);
        if (!put_byte(encoder, (unsigned)numbers[lane] >> 8) || !put_byte(encoder, (unsigned)numbers[lane]))
            return 0;
    }
    if (!encode_symbols(encoder, states, code, dividing, active, symbols))
        return 0;
#ifdef KV_X86
    if (has_avx2())
        take_low_bits(numbers, low_bits, planes);
    else
#endif
        for (unsigned bit = 0; bit < low_bits; bit++)
            for (int lane = 0; lane < VECTOR; lane++)
                planes[bit] |= (uint64_t)(numbers[lane] >> bit & 1) << lane;
    for (unsigned byte = LOW_BYTES * low_bits; byte--;)
        if (!put_byte(encoder, (unsigned)((planes[byte / LOW_BYTES] & active & ~escaped) >> 8 * (byte % LOW_BYTES))))
            return 0;
    return 1;
}

/* The numbers of up to four rows, a token's side by side. Returns the sum of their distances from 0. */
VERSIONS static uint64_t take_rows(const Layout *layout, const i16 *rows, size_t components, int16_t *restrict numbers) {
    uint64_t sum = 0;
    memset(numbers, 0, 2 * VECTOR * layout->vectors);
    for (size_t i = 0; i < components && i < TOGETHER; i++)
        for (size_t t = 0; t < layout->tokens; t++) {
            int16_t number = rows[i * layout->tokens + t];
            numbers[TOGETHER * t + i] = number;
            sum += (uint32_t)(number < 0 ? -number : number);
        }
    return sum;
}

/* The first code that is for numbers of this mean distance from 0. limits: of each code. */
INLINE size_t chosen_code(uint64_t sum, size_t count, const u8 *limits, size_t codes) {
    int64_t mean = (int64_t)((sum * MEAN_UNIT + count - 1) / count), limit;
    size_t first = 0, end = codes - 1; /* the last one is for all */
    while (first < end) {
        size_t middle = (first + end) / 2;
        memcpy(&limit, limits + 8 * middle, 8);
        if (mean <= limit)
            end = middle;
        else
            first = middle + 1;
    }
    return first;
}

/* A unit of a block. rows: the block's. 0: there is no room. */
static int encode_unit(Encoder *encoder, const Layout *layout, const i16 *rows, size_t unit, size_t vector,
                       const Codes *codes, const u8 *limits, int16_t *restrict numbers, u8 *restrict chosen) {
    size_t first = unit * layout->unit_fours, end = first + layout->unit_fours, count = 0;
    end = end < layout->fours ? end : layout->fours;
    uint64_t sum = 0;
    for (size_t four = first; four < end; four++) {
        size_t components = layout->channels - TOGETHER * four;
        const i16 *from = rows + TOGETHER * four * layout->tokens;
        int16_t *to = numbers + (four - first) * layout->vectors * VECTOR;
#ifdef KV_X86
        if (is_for_vectors(layout, components))
            sum += take_vectors(from, layout->tokens, to);
        else
#endif
            sum += take_rows(layout, from, components, to);
        count += (components < TOGETHER ? components : TOGETHER) * layout->tokens;
    }
    *chosen = ALL_ZERO;
    if (!sum)
        return 1;
    size_t number = chosen_code(sum, count, limits, codes->count);
    *chosen = (u8)number;
    Code code = code_of(codes, number);
    Dividing dividing;
    int has_dividing = 0;
    for (size_t four = end; four-- > first;) {
        size_t components = layout->channels - TOGETHER * four;
        const int16_t *own = numbers + (four - first) * layout->vectors * VECTOR;
        size_t left = layout->vectors;
        while (left) {
#ifdef KV_X86
            if (is_for_vectors(layout, components) && left % SETS == 0)
                left -= encode_vectors(encoder, &code, left, own + left * VECTOR);
#endif
            if (!left--)
                break;
            if (!has_dividing)
                make_dividing(&code, &dividing);
            has_dividing = 1;
            uint64_t active = active_lanes(components, layout->tokens - left * (VECTOR / TOGETHER));
            uint16_t *states = encoder->states[(vector + (four - first) * layout->vectors + left) % SETS];
            if (!encode_vector(encoder, states, &code, &dividing, active, own + left * VECTOR))
                return 0;
        }
    }
    return 1;
}

static void reverse(u8 *bytes, size_t n) {
    size_t i = 0;
    for (; 2 * i + 16 <= n; i += 8) {
        uint64_t first, last;
        memcpy(&first, bytes + i, 8);
        memcpy(&last, bytes + n - i - 8, 8);
        first = __builtin_bswap64(first);
        last = __builtin_bswap64(last);
        memcpy(bytes + i, &last, 8);
        memcpy(bytes + n - i - 8, &first, 8);
    }
    for (; 2 * i + 1 < n; i++) {
        u8 byte = bytes[i];
        bytes[i] = bytes[n - 1 - i];
        bytes[n - 1 - i] = byte;
    }
}

/* How many bytes of `out` the rows take, or KV_FULL. shape: tokens, and rows of a block. rows: [rows, tokens], int16. limits: of
 * each code, int64. scratch: 2 bytes for each number of a unit, to whole vectors. */
EXPORT int64_t kv_encode_rows(const int64_t *shape, size_t shape_bytes, const u8 *rows, size_t rows_bytes,
                              const u8 *low_bits, size_t low_bits_bytes, const u8 *shares, size_t shares_bytes,
                              const u8 *starts, size_t starts_bytes, const u8 *symbols, size_t symbols_bytes,
                              const u8 *limits, size_t limits_bytes, u8 *restrict scratch, size_t scratch_bytes,
                              u8 *restrict out, size_t out_bytes) {
    Codes codes = {low_bits, shares, starts, symbols, 0};
    if (shape_bytes != 16 || shape[0] < 1 || shape[0] > MOST_TOKENS || shape[1] < 1 || shape[1] > MOST_ROWS_OF_A_BLOCK ||
        !kv_are_codes(&codes, low_bits_bytes, shares_bytes, starts_bytes, symbols_bytes) ||
        limits_bytes != 8 * codes.count || (uintptr_t)scratch % 2)
        return KV_MISFIT;
    Layout layout = layout_of((size_t)shape[1], (size_t)shape[0]);
    size_t of_block = layout.channels * layout.tokens, blocks = rows_bytes / 2 / of_block;
    if (rows_bytes != 2 * of_block * blocks || !blocks || scratch_bytes != 2 * VECTOR * layout.vectors * layout.unit_fours)
        return KV_MISFIT;
    size_t units = blocks * layout.units, stream = units + STATES_BYTES;
    if (out_bytes < stream)
        return KV_FULL;
    Encoder encoder = {.at = out + stream, .end = out + out_bytes};
    for (int set = 0; set < SETS; set++)
        for (int i = 0; i < VECTOR; i++)
            encoder.states[set][i] = LEAST_STATE;
    for (size_t unit = units; unit--;) {
        size_t block = unit / layout.units, own = unit % layout.units;
        size_t vector = (block * layout.fours + own * layout.unit_fours) * layout.vectors;
        const u8 *first = rows + 2 * (block * layout.channels + own * layout.unit_fours * TOGETHER) * layout.tokens;
        size_t next_bytes = 2 * layout.unit_fours * TOGETHER * layout.tokens, left = (size_t)(first - rows);
        for (size_t byte = 0; byte < next_bytes && byte < left; byte += 64)
            __builtin_prefetch(first - 1 - byte); /* of the unit before, which is the next one */
        if (!encode_unit(&encoder, &layout, (const i16 *)rows + block * of_block, own, vector, &codes, limits,
                         (int16_t *)scratch, out + unit))
            return KV_FULL;
    }
    memcpy(out + units, encoder.states, STATES_BYTES);
    reverse(out + stream, (size_t)(encoder.at - out) - stream);
    return encoder.at - out;
}
