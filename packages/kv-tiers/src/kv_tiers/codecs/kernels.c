/* The passes over numbers of the codecs `floats` and `progressive`, as numpy_kernels.py has them: that file says what
 * each computes, this one only computes it faster, and a test holds both to the same bytes.
 *
 * Plain loops for the compiler to vectorise, of which x86-64 gets versions for AVX2 and AVX-512. Nothing is
 * allocated, kept or called but the C library's memory functions, so any thread may call any of these at any time.
 *
 * Every buffer comes with its size in bytes, and no access is made before the sizes have been compared. What a buffer
 * holds is data: no value in it leads an access beyond a buffer. A function answers KV_MISFIT where sizes do not fit
 * each other, and what it has written then means nothing; else 0, or what its comment says. Buffers need not be aligned.
 * None may overlap one that is written.
 */
#include "kernels.h"

enum { BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3 };
enum {
    SCALED = 256,          /* numbers that share a step */
    HALF_SCALED = 128,     /* what is worked on at a time, as half a section is a whole number of these */
    SECTION = 1 << 17,     /* the most numbers of a section */
    LEAST_EXPONENT = 8,    /* of a step */
    MOST_EXPONENT = 240,
    ESCAPED = 255,         /* the symbol of a number that is stored as it is */
    ALL_MISSING = 8        /* of a number that is stored as it is, as its bits are in neither of the first parts */
};

EXPORT int64_t kv_version(void) { return KV_VERSION; }
EXPORT int64_t kv_source(void) { return KV_SOURCE; }

/* ---- floats: numbers into a plane that is coded and the rest, and back ---- */

static int64_t numbers_of(int64_t kind, size_t words_bytes, size_t coded_bytes, size_t rest_bytes) {
    size_t item = kind == FLOAT32 ? 4 : 2;
    if (kind < BFLOAT16 || kind > FLOAT32 || words_bytes % item || words_bytes / item != coded_bytes ||
        words_bytes - coded_bytes != rest_bytes)
        return KV_MISFIT;
    return (int64_t)coded_bytes;
}

EXPORT VERSIONS int64_t kv_split(int64_t kind, const u8 *words, size_t words_bytes, u8 *restrict coded,
                                 size_t coded_bytes, u8 *restrict rest, size_t rest_bytes) {
    int64_t n = numbers_of(kind, words_bytes, coded_bytes, rest_bytes);
    if (kind == BFLOAT16) {
        const u16 *in = (const u16 *)words;
        for (int64_t i = 0; i < n; i++) {
            coded[i] = (u8)(in[i] >> 7);
            rest[i] = (u8)((in[i] >> 8 & 0x80) | (in[i] & 0x7f));
        }
    } else if (kind == FLOAT16) {
        const u16 *in = (const u16 *)words;
        for (int64_t i = 0; i < n; i++) {
            coded[i] = (u8)(in[i] >> 8);
            rest[i] = (u8)in[i];
        }
    } else if (n > 0) {
        const u32 *in = (const u32 *)words;
        u16 *low = (u16 *)rest;
        u8 *middle = rest + 2 * n;
        for (int64_t i = 0; i < n; i++) {
            uint32_t turned = in[i] << 1 | in[i] >> 31;
            low[i] = (uint16_t)turned;
            middle[i] = (u8)(turned >> 16);
            coded[i] = (u8)(turned >> 24);
        }
    }
    return n < 0 ? KV_MISFIT : 0;
}

EXPORT VERSIONS int64_t kv_join(int64_t kind, const u8 *coded, size_t coded_bytes, const u8 *rest, size_t rest_bytes,
                                u8 *restrict words, size_t words_bytes) {
    int64_t n = numbers_of(kind, words_bytes, coded_bytes, rest_bytes);
    if (kind == BFLOAT16) {
        u16 *restrict out = (u16 *)words;
        for (int64_t i = 0; i < n; i++)
            out[i] = (uint16_t)((rest[i] & 0x80) << 8 | coded[i] << 7 | (rest[i] & 0x7f));
    } else if (kind == FLOAT16) {
        u16 *restrict out = (u16 *)words;
        for (int64_t i = 0; i < n; i++)
            out[i] = (uint16_t)(coded[i] << 8 | rest[i]);
    } else if (n > 0) {
        u32 *restrict out = (u32 *)words;
        const u16 *low = (const u16 *)rest;
        const u8 *middle = rest + 2 * n;
        for (int64_t i = 0; i < n; i++) {
            uint32_t turned = (uint32_t)coded[i] << 24 | (uint32_t)middle[i] << 16 | low[i];
            out[i] = turned >> 1 | turned << 31;
        }
    }
    return n < 0 ? KV_MISFIT : 0;
}

/* ---- progressive: numbers into symbols, nibbles and missing bits, and back ---- */

static int is_section(size_t numbers) { return numbers % SCALED == 0 && numbers <= SECTION; }

/* How many of half a block's bytes are this one: a byte counts them. */
INLINE uint32_t equal_to(u8 value, const u8 *restrict bytes) {
    uint8_t count = 0;
    for (int i = 0; i < HALF_SCALED; i++)
        count += bytes[i] == value;
    return count;
}

INLINE uint32_t bits_of(const u8 *restrict missing) {
    uint16_t count = 0;
    for (int i = 0; i < HALF_SCALED; i++)
        count += missing[i] & 7;
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

/* counts: how many numbers are escaped, and how many miss all their bits. */
EXPORT VERSIONS int64_t kv_cut(int64_t offset, const u8 *words, size_t words_bytes, u8 *restrict exponents,
                               size_t exponents_bytes, u8 *restrict symbols, size_t symbols_bytes,
                               u8 *restrict nibbles, size_t nibbles_bytes, u8 *restrict missing, size_t missing_bytes,
                               int64_t *restrict counts, size_t counts_bytes) {
    size_t n = symbols_bytes, half = n / 2;
    if (!is_section(n) || words_bytes != 2 * n || exponents_bytes != n / SCALED || nibbles_bytes != half ||
        missing_bytes != n || counts_bytes != 2 * sizeof *counts || offset < 0 || offset > 1 << 16)
        return KV_MISFIT;
    const u16 *in = (const u16 *)words;
    for (size_t block = 0; block < n / SCALED; block++) {
        uint32_t sum = (uint32_t)offset;
        for (int i = 0; i < SCALED; i++)
            sum += in[block * SCALED + i] >> 7 & 0xff;
        sum /= SCALED;
        exponents[block] = (u8)(sum < LEAST_EXPONENT ? LEAST_EXPONENT : sum > MOST_EXPONENT ? MOST_EXPONENT : sum);
    }
    uint32_t escaped = 0, whole = 0;
    for (size_t at = 0; at < half; at += HALF_SCALED) {
        u8 low[HALF_SCALED], high[HALF_SCALED];
        cut(in + at, exponents[at / SCALED], symbols + at, low, missing + at);
        cut(in + half + at, exponents[(half + at) / SCALED], symbols + half + at, high, missing + half + at);
        for (int i = 0; i < HALF_SCALED; i++)
            nibbles[at + i] = (u8)(low[i] | high[i] << 4);
        escaped += equal_to(ESCAPED, symbols + at) + equal_to(ESCAPED, symbols + half + at);
        whole += equal_to(ALL_MISSING, missing + at) + equal_to(ALL_MISSING, missing + half + at);
    }
    counts[0] = escaped;
    counts[1] = whole;
    return 0;
}

INLINE void restore(const u8 *restrict symbols, const u8 *restrict nibbles, uint32_t step, float middle,
                           u16 *restrict words, u8 *restrict missing) {
    for (int i = 0; i < HALF_SCALED; i++) {
        int32_t symbol = symbols[i];
        int32_t steps = symbol >> 1;
        int32_t up = steps >> 4 > 0 ? (steps >> 4) - 1 : 0;
        /* A whole number below 512 and perhaps a half: exact in float32, whose leading one is where ours shall be. */
        float sixteenths = (float)((steps - (up << 4)) << 4 | nibbles[i]) + middle;
        uint32_t bits;
        memcpy(&bits, &sixteenths, sizeof bits);
        int32_t high = (int32_t)(bits >> 16);
        int32_t lacking = ALL_MISSING + 126 - (high >> 7);
        missing[i] = (u8)(lacking < 0 ? 0 : lacking > ALL_MISSING ? ALL_MISSING : lacking);
        words[i] = (uint16_t)(((uint32_t)high + ((uint32_t)up << 7) + ((step - 131) << 7)) | (uint32_t)symbol << 15);
    }
}

/* nibbles: of size 0 where they are not known: each is then taken to be 8. to_middle: half a nibble is added.
 * counts: how many numbers are escaped, how many miss all their bits, and how many bits the others miss together. */
EXPORT VERSIONS int64_t kv_restore(int64_t to_middle, const u8 *symbols, size_t symbols_bytes, const u8 *nibbles,
                                   size_t nibbles_bytes, const u8 *exponents, size_t exponents_bytes,
                                   u8 *restrict words, size_t words_bytes, u8 *restrict missing, size_t missing_bytes,
                                   int64_t *restrict counts, size_t counts_bytes) {
    size_t n = symbols_bytes, half = n / 2;
    if (!is_section(n) || words_bytes != 2 * n || exponents_bytes != n / SCALED ||
        (nibbles_bytes != half && nibbles_bytes != 0) || missing_bytes != n || counts_bytes != 3 * sizeof *counts)
        return KV_MISFIT;
    u16 *out = (u16 *)words;
    float middle = to_middle ? 0.5f : 0.0f;
    uint32_t escaped = 0, whole = 0, bits = 0;
    for (size_t at = 0; at < half; at += HALF_SCALED) {
        u8 low[HALF_SCALED], high[HALF_SCALED];
        if (nibbles_bytes) {
            for (int i = 0; i < HALF_SCALED; i++) {
                low[i] = nibbles[at + i] & 15;
                high[i] = nibbles[at + i] >> 4;
            }
        } else {
            memset(low, 8, sizeof low);
            memset(high, 8, sizeof high);
        }
        restore(symbols + at, low, exponents[at / SCALED], middle, out + at, missing + at);
        restore(symbols + half + at, high, exponents[(half + at) / SCALED], middle, out + half + at,
                missing + half + at);
        escaped += equal_to(ESCAPED, symbols + at) + equal_to(ESCAPED, symbols + half + at);
        whole += equal_to(ALL_MISSING, missing + at) + equal_to(ALL_MISSING, missing + half + at);
        bits += bits_of(missing + at) + bits_of(missing + half + at);
    }
    counts[0] = escaped;
    counts[1] = whole;
    counts[2] = bits;
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

/* The 8 bytes of `packed` from a bit on: 57 bits of them at least, of which eight numbers need 56 at most. */
INLINE uint64_t bits_from(const u8 *packed, size_t packed_bytes, size_t bit) {
    size_t at = bit / 8, left = packed_bytes - at;
    uint64_t bits = 0;
    if (left >= 8)
        memcpy(&bits, packed + at, 8);
    else
        memcpy(&bits, packed + at, left);
    return bits >> bit % 8;
}

static void unpack(const u8 *restrict packed, size_t packed_bytes, const u8 *restrict missing, size_t n,
                   u16 *restrict words) {
    size_t bit = 0;
    for (size_t i = 0; i < n; i += 8) {
        uint64_t next = bits_from(packed, packed_bytes, bit);
        for (int j = 0; j < 8; j++) {
            unsigned bits = missing[i + j] & 7;
            words[i + j] |= (uint16_t)(next & ((1u << bits) - 1));
            next >>= bits;
            bit += bits;
        }
    }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#include <immintrin.h>
/* BMI2 has an instruction for eight numbers at a time: the two functions again, in a quarter of the time. */
#define BMI2 __attribute__((target("avx2,bmi,bmi2,popcnt")))

/* Eight bits of each number, of which the lowest are set: as many as it misses. By table, as shifts by as many bits as
 * each says take 32 bits a number. */
BMI2 static inline void masks_of(const u8 *restrict missing, u8 *restrict masks) {
    const __m256i all = _mm256_setr_epi8(0, 1, 3, 7, 15, 31, 63, 127, 0, 1, 3, 7, 15, 31, 63, 127, /* twice, */
                                         0, 1, 3, 7, 15, 31, 63, 127, 0, 1, 3, 7, 15, 31, 63, 127); /* for each half */
    for (int i = 0; i < SCALED; i += 32) {
        __m256i own = _mm256_loadu_si256((const __m256i_u *)(missing + i));
        own = _mm256_shuffle_epi8(all, _mm256_and_si256(own, _mm256_set1_epi8(7)));
        _mm256_storeu_si256((__m256i_u *)(masks + i), own);
    }
}

BMI2 static size_t pack_bmi2(const u16 *restrict words, const u8 *restrict missing, size_t n, u8 *restrict out) {
    uint64_t waiting = 0;
    unsigned filled = 0;
    size_t at = 0;
    for (size_t start = 0; start < n; start += SCALED) {
        u8 masks[SCALED], low[SCALED];
        masks_of(missing + start, masks);
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

BMI2 static void unpack_bmi2(const u8 *restrict packed, size_t packed_bytes, const u8 *restrict missing, size_t n,
                             u16 *restrict words) {
    size_t bit = 0;
    for (size_t start = 0; start < n; start += SCALED) {
        u8 masks[SCALED], low[SCALED];
        masks_of(missing + start, masks);
        for (int i = 0; i < SCALED; i += 8) {
            uint64_t mask, bytes;
            memcpy(&mask, masks + i, 8);
            bytes = __builtin_ia32_pdep_di(bits_from(packed, packed_bytes, bit), mask);
            memcpy(low + i, &bytes, 8);
            bit += (unsigned)__builtin_popcountll(mask);
        }
        for (int i = 0; i < SCALED; i++)
            words[start + i] |= low[i];
    }
}

/* AVX-512's second byte instructions compress and expand 32 words by a mask: a loop over those that are marked would
 * mispredict its end for every 32. */
#define VBMI2 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,popcnt")))

/* Of the next 32 marks, or of as many as are left, those that are this one. */
VBMI2 static inline __mmask32 marked(u8 mark, const u8 *marks, size_t left) {
    __mmask32 here = left < 32 ? (1u << left) - 1 : ~0u;
    __m256i next = _mm256_maskz_loadu_epi8(here, marks);
    return _mm256_mask_cmpeq_epi8_mask(here, next, _mm256_set1_epi8((char)mark));
}

VBMI2 static int64_t select_vbmi2(u8 mark, const u16 *words, const u8 *marks, size_t n, u16 *restrict out,
                                  size_t room) {
    size_t done = 0;
    for (size_t at = 0; at < n; at += 32) {
        __mmask32 here = marked(mark, marks + at, n - at);
        unsigned found = (unsigned)__builtin_popcount(here);
        if (room - done < found)
            return KV_MISFIT;
        __m512i chosen = _mm512_maskz_compress_epi16(here, _mm512_maskz_loadu_epi16(here, words + at));
        _mm512_mask_storeu_epi16(out + done, found < 32 ? (1u << found) - 1 : ~0u, chosen);
        done += found;
    }
    return done == room ? 0 : KV_MISFIT;
}

VBMI2 static int64_t place_vbmi2(u8 mark, const u16 *values, size_t count, const u8 *marks, size_t n,
                                 u16 *restrict words) {
    size_t done = 0;
    for (size_t at = 0; at < n; at += 32) {
        __mmask32 here = marked(mark, marks + at, n - at);
        unsigned found = (unsigned)__builtin_popcount(here);
        if (count - done < found)
            return KV_MISFIT;
        _mm512_mask_storeu_epi16(words + at, here, _mm512_maskz_expandloadu_epi16(here, values + done));
        done += found;
    }
    return done == count ? 0 : KV_MISFIT;
}

static int has_vbmi2(void) {
    return __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

static int has_bmi2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}
#endif

/* How many bytes of `out` the missing bits take. `out` has 7 bits for
 * each number and 8 bytes besides. */
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

/* Sets the missing bits in the words, in which they are 0. */
EXPORT VERSIONS int64_t kv_unpack(const u8 *packed, size_t packed_bytes, const u8 *missing, size_t missing_bytes,
                                  u8 *restrict words, size_t words_bytes) {
    size_t n = missing_bytes, bits = 0;
    if (!is_section(n) || words_bytes != 2 * n)
        return KV_MISFIT;
    for (size_t i = 0; i < n; i += HALF_SCALED)
        bits += bits_of(missing + i);
    if (packed_bytes != (bits + 7) / 8)
        return KV_MISFIT;
#ifdef BMI2
    if (has_bmi2()) {
        unpack_bmi2(packed, packed_bytes, missing, n, (u16 *)words);
        return 0;
    }
#endif
    unpack(packed, packed_bytes, missing, n, (u16 *)words);
    return 0;
}

/* Copies the words of this mark to `out`, which has room for exactly as many as there are. */
EXPORT int64_t kv_select(int64_t mark, const u8 *words, size_t words_bytes, const u8 *marks, size_t marks_bytes,
                         u8 *restrict out, size_t out_bytes) {
    if (words_bytes != 2 * marks_bytes || out_bytes % 2)
        return KV_MISFIT;
#ifdef VBMI2
    if (has_vbmi2())
        return select_vbmi2((u8)mark, (const u16 *)words, marks, marks_bytes, (u16 *)out, out_bytes / 2);
#endif
    size_t done = 0;
    const u8 *end = marks + marks_bytes;
    for (const u8 *at = marks; at < end && (at = memchr(at, (int)mark, (size_t)(end - at))); at++, done += 2) {
        if (out_bytes - done < 2)
            return KV_MISFIT;
        memcpy(out + done, words + 2 * (at - marks), 2);
    }
    return done == out_bytes ? 0 : KV_MISFIT;
}

/* The reverse: `values` has exactly as many as there are. */
EXPORT int64_t kv_place(int64_t mark, const u8 *values, size_t values_bytes, const u8 *marks, size_t marks_bytes,
                        u8 *restrict words, size_t words_bytes) {
    if (words_bytes != 2 * marks_bytes || values_bytes % 2)
        return KV_MISFIT;
#ifdef VBMI2
    if (has_vbmi2())
        return place_vbmi2((u8)mark, (const u16 *)values, values_bytes / 2, marks, marks_bytes, (u16 *)words);
#endif
    size_t done = 0;
    const u8 *end = marks + marks_bytes;
    for (const u8 *at = marks; at < end && (at = memchr(at, (int)mark, (size_t)(end - at))); at++, done += 2) {
        if (values_bytes - done < 2)
            return KV_MISFIT;
        memcpy(words + 2 * (at - marks), values + done, 2);
    }
    return done == values_bytes ? 0 : KV_MISFIT;
}

/* How often each byte occurs: 256 counts. */
EXPORT int64_t kv_histogram(const u8 *symbols, size_t symbols_bytes, int64_t *restrict counts, size_t counts_bytes) {
    /* Four tables, as the same symbol often follows itself and would wait for its own count. */
    uint32_t tables[4][256] = {{0}};
    if (counts_bytes != 256 * sizeof *counts || symbols_bytes > SECTION)
        return KV_MISFIT;
    size_t i = 0;
    for (; symbols_bytes - i >= 4; i += 4)
        for (int j = 0; j < 4; j++)
            tables[j][symbols[i + j]]++;
    for (; i < symbols_bytes; i++)
        tables[0][symbols[i]]++;
    for (int symbol = 0; symbol < 256; symbol++)
        counts[symbol] = (int64_t)tables[0][symbol] + tables[1][symbol] + tables[2][symbol] + tables[3][symbol];
    return 0;
}
