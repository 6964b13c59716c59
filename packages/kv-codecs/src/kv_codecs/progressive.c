/* The passes over numbers of the codec `progressive`: into signs, codes, nibbles and missing bits, and back. kernels.c says what
 * holds for all such passes. Each way is here in plain C, with AVX2 and with AVX-512's instructions for bytes, which take a fraction
 * of the time: a processor without AVX-512 takes 0.4 of the speed at which it decodes without the second, one with it 0.7 without the
 * third. All compute the same. */
#include "kernels.h"

enum {
    SECTION = 1 << 17,     /* the most numbers of a section */
    SCALED = 256,          /* numbers that share a step */
    HALF_SCALED = 128,     /* what is worked on at a time, as half a section is a whole number of these */
    LEAST_EXPONENT = 8,    /* of a step */
    MOST_EXPONENT = 240,
    LONG_CODE = 15,        /* the least code of steps that does not fit into four bits: these then are 15 */
    ESCAPED_CODE = 127,    /* the code of a number that the first part has as it is */
    ALL_MISSING = 8,       /* of a number that the last part has as it is, as its leading one is in neither of the first two */
    ESCAPED = 16           /* instead of how many bits are missing */
};

/* Two planes, of the first half of a section and of the second, share bytes: four bits of each. */
typedef struct {
    const u16 *words;
    size_t n;
    uint32_t offset;
    u8 *exponents, *signs, *codes, *long_codes, *nibbles, *missing;
    uint64_t longs, escaped, whole; /* counts that are made */
} Cutting;

/* Numbers that are stored as they are. */
typedef struct {
    const u16 *words;
    size_t count, used; /* or needed */
} Stored;

/* A section. */
typedef struct {
    int parts; /* that are known: nibbles from 2 on, whole numbers and packed bits from 3 on */
    size_t n;
    u16 *words;
    const u8 *exponents, *signs, *codes, *nibbles;
    const u8 *packed, *long_codes;
    size_t packed_bytes, long_count, bits, longs; /* there are, and how many were used, or are needed */
    Stored escaped, whole;
} Restoring;

enum { EIGHT = 8, MASK = 64 };              /* bytes of a register of general use, and bits of a mask of numbers */
#define ONES ((uint64_t)0x0101010101010101) /* times a byte: eight of these */

INLINE uint64_t eight_bytes(const u8 *at) {
    uint64_t bytes;
    memcpy(&bytes, at, EIGHT);
    return bytes;
}

/* Of eight bytes below 128, the highest bit of those that are not 0. */
INLINE uint64_t nonzero(uint64_t bytes) { return (bytes + 127 * ONES) & 128 * ONES; }

/* The lowest bits of eight bytes, side by side. */
INLINE uint64_t low_bits(uint64_t bytes) { return (bytes & ONES) * 0x0102040810204080 >> 56; }

/* Which of 64 bytes, all below 128, are this one. A loop over the few bits of such a mask mispredicts its end once; over eight bytes
 * at a time it would do so eight times. */
INLINE uint64_t equal(u8 value, const u8 *restrict bytes) {
    uint64_t mask = 0;
    for (int i = 0; i < MASK; i += EIGHT)
        mask |= low_bits(~nonzero(eight_bytes(bytes + i) ^ value * ONES) >> 7) << i;
    return mask;
}

/* Of numbers whose exponents have this sum and an offset. */
INLINE u8 step_exponent(uint32_t sum) {
    sum /= SCALED;
    return (u8)(sum < LEAST_EXPONENT ? LEAST_EXPONENT : sum > MOST_EXPONENT ? MOST_EXPONENT : sum);
}

/* Long codes of the second half are written from the middle of their room on, as both halves are cut side by side. */
INLINE void join_long_codes(Cutting *all, size_t low, size_t high) {
    memmove(all->long_codes + low, all->long_codes + all->n / 2, high);
    all->longs = low + high;
}

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
    u8 *longs = all->long_codes, *high_longs = all->long_codes + half;
    for (size_t at = 0; at < half; at += HALF_SCALED) {
        u8 signed_codes[HALF_SCALED], codes[2][HALF_SCALED], nibbles[2][HALF_SCALED], *missing = all->missing + at;
        cut(in + at, all->exponents[at / SCALED], signed_codes, nibbles[0], missing);
        longs = put_codes(signed_codes, all->signs + at / 8, codes[0], longs);
        cut(in + half + at, all->exponents[(half + at) / SCALED], signed_codes, nibbles[1], missing + half);
        high_longs = put_codes(signed_codes, all->signs + (half + at) / 8, codes[1], high_longs);
        for (size_t i = 0; i < HALF_SCALED; i++) {
            all->codes[at + i] = (u8)(codes[0][i] | codes[1][i] << 4);
            all->nibbles[at + i] = (u8)(nibbles[0][i] | nibbles[1][i] << 4);
        }
        all->escaped += count_of(ESCAPED, missing) + count_of(ESCAPED, missing + half);
        all->whole += count_of(ALL_MISSING, missing) + count_of(ALL_MISSING, missing + half);
    }
    join_long_codes(all, (size_t)(longs - all->long_codes), (size_t)(high_longs - all->long_codes) - half);
}

#ifdef KV_X86
enum { AT_ONCE = 64 };

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
#endif

static void cut_here(Cutting *all) {
#ifdef KV_X86
    if (has_vbmi()) {
        cut_vbmi(all);
        return;
    }
#endif
    cut_anywhere(all);
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
    cut_here(&all);
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

#ifdef KV_X86
/* Eight bits of each of 32 numbers, of which the lowest are set: as many as it misses. By table, as shifts by as many bits
 * as each says take 32 bits a number. */
AVX2 static inline __m256i masks_of(__m256i missing) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 3, 7, 15, 31, 63, 127, 0, 0, 0, 0, 0, 0, 0, 0));
    return _mm256_shuffle_epi8(all, missing);
}

AVX2 static size_t pack_avx2(const u16 *restrict words, const u8 *restrict missing, size_t n, u8 *restrict out) {
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
#endif

/* How many bytes of `out` the missing bits take. `out` has 7 bits for each number and 8 bytes besides. */
EXPORT int64_t kv_pack(const u8 *words, size_t words_bytes, const u8 *missing, size_t missing_bytes, u8 *restrict out,
                       size_t out_bytes) {
    size_t n = missing_bytes;
    if (!is_section(n) || words_bytes != 2 * n || out_bytes != n / 8 * 7 + 8)
        return KV_MISFIT;
#ifdef KV_X86
    if (has_avx2())
        return (int64_t)pack_avx2((const u16 *)words, missing, n, out);
#endif
    return (int64_t)pack((const u16 *)words, missing, n, out);
}

/* ---- and back ---- */

/* Where the missing bits of the next HALF_SCALED numbers begin: in `packed`, or in `room`, with zeros behind its end, where
 * reading them could lead beyond. */
INLINE const u8 *bits_at(const Restoring *all, u8 *restrict room) {
    size_t at = all->bits / 8, left = at < all->packed_bytes ? all->packed_bytes - at : 0;
    if (left >= HALF_SCALED)
        return all->packed + at;
    memset(room, 0, HALF_SCALED);
    if (left)
        memcpy(room, all->packed + at, left);
    return room;
}

/* Sets the codes of 64 numbers that are long, twice as large where there are signs below them. Returns whether there are escaped
 * ones among them. */
INLINE int take_long_codes(Restoring *all, uint64_t longs, unsigned sign_bits, u8 *restrict codes) {
    int has_escaped = 0;
    for (; longs; longs &= longs - 1, all->longs++) {
        u8 *own = codes + __builtin_ctzll(longs), code = all->longs < all->long_count ? all->long_codes[all->longs] : 0;
        *own = (u8)(code << sign_bits | (*own & sign_bits));
        has_escaped |= code == ESCAPED_CODE;
    }
    return has_escaped;
}

/* Sets those of 64 numbers that are stored as they are. */
INLINE void place(Stored *stored, uint64_t marked, u16 *restrict words) {
    for (; marked; marked &= marked - 1, stored->used++)
        if (stored->used < stored->count)
            words[__builtin_ctzll(marked)] = stored->words[stored->used];
}

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

#ifdef KV_X86
/* Both halves of a register hold the same table, of which a byte with its highest bit set is given a zero. */
AVX2 static inline __m256i by_table(__m128i table, __m256i index) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), index);
}

/* Of 32 numbers. */
AVX2 static inline __m256i four_bits32(const u8 *plane, size_t at, size_t half) {
    __m256i both = _mm256_loadu_si256((const __m256i_u *)(plane + (at < half ? at : at - half)));
    return _mm256_and_si256(at < half ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
}

AVX2 static inline uint32_t equal_of(u8 value, __m256i bytes) {
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8((char)value)));
}

/* From tables instead of floating point: what a number misses is 7 less than the place of its leading one, and
 * two to that power moves the leading one to its place. */
AVX2 static void restore_avx2(Restoring *all) {
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
            __m256i own = four_bits32(all->codes, at + i, half);
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
                nibbles = four_bits32(all->nibbles, at + i, half);
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

VBMI static inline __m512i four_bits64(const u8 *plane, size_t at, size_t half) {
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
            __m512i codes = four_bits64(all->codes, i, half), nibbles = eight;
            if (all->parts > 1)
                nibbles = four_bits64(all->nibbles, i, half);
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

/* Whether an encoder chooses such steps. */
static int are_steps(const u8 *exponents, size_t n) {
    u8 are = 1;
    for (size_t i = 0; i < n; i++)
        are &= (exponents[i] >= LEAST_EXPONENT) & (exponents[i] <= MOST_EXPONENT);
    return are;
}

static void restore(Restoring *all) {
#ifdef KV_X86
    if (has_avx2()) {
        (has_vbmi() ? restore_vbmi : restore_avx2)(all);
        return;
    }
#endif
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
