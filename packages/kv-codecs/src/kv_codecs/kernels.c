/* The passes over numbers of the codec `floats`, and what it shares with `progressive` (progressive.c), as
 * numpy_kernels.py has them: that file says what each computes, this one only computes it faster, and a test holds both
 * to the same bytes.
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

enum { MOST_SYMBOLS = 1 << 17 }; /* that are counted together */
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

/* ---- numbers with a mark, and counts ---- */

#ifdef KV_X86
/* Of the next 64 marks, or of as many as are left, those that are this one. */
VBMI static inline __mmask64 marked(u8 mark, const u8 *marks, size_t left) {
    __mmask64 here = first_of(left);
    return _mm512_mask_cmpeq_epi8_mask(here, _mm512_maskz_loadu_epi8(here, marks), _mm512_set1_epi8((char)mark));
}

VBMI static int64_t select_vbmi(u8 mark, const u16 *words, const u8 *marks, size_t n, u16 *restrict selected, size_t room) {
    size_t done = 0;
    for (size_t at = 0; at < n; at += 64) {
        __mmask64 all = first_of(n - at), here = marked(mark, marks + at, n - at);
        if (room - done < (size_t)__builtin_popcountll(here))
            return KV_MISFIT;
        for (int k = 0; k < 2; k++, here >>= 32, all >>= 32) {
            __mmask32 own = (__mmask32)here;
            if (!own)
                continue;
            __m512i word = _mm512_maskz_loadu_epi16((__mmask32)all, words + at + 32 * k);
            size_t found = (size_t)__builtin_popcount(own);
            _mm512_mask_storeu_epi16(selected + done, (__mmask32)first_of(found), _mm512_maskz_compress_epi16(own, word));
            done += found;
        }
    }
    return done == room ? 0 : KV_MISFIT;
}
#endif

/* Copies the words of this mark; there is room for exactly as many as there are. */
EXPORT int64_t kv_select(int64_t mark, const u8 *words, size_t words_bytes, const u8 *marks, size_t marks_bytes,
                         u8 *restrict selected, size_t selected_bytes) {
    const u16 *from = (const u16 *)words;
    u16 *to = (u16 *)selected;
    size_t room = selected_bytes / 2, done = 0;
    if (words_bytes != 2 * marks_bytes || selected_bytes % 2)
        return KV_MISFIT;
#ifdef KV_X86
    if (has_vbmi())
        return select_vbmi((u8)mark, from, marks, marks_bytes, to, room);
#endif
    const u8 *end = marks + marks_bytes;
    for (const u8 *at = marks; at < end && (at = memchr(at, (int)mark, (size_t)(end - at))); at++, done++) {
        if (done == room)
            return KV_MISFIT;
        to[done] = from[at - marks];
    }
    return done == room ? 0 : KV_MISFIT;
}

/* How often each byte occurs: 256 counts. */
EXPORT int64_t kv_histogram(const u8 *symbols, size_t symbols_bytes, int64_t *restrict counts, size_t counts_bytes) {
    /* Four tables, as the same symbol often follows itself and would wait for its own count. */
    uint32_t tables[4][256] = {{0}};
    if (counts_bytes != 256 * sizeof *counts || symbols_bytes > MOST_SYMBOLS)
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
