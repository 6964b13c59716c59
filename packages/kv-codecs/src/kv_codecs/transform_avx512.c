/* The passes over numbers of transform.c with AVX-512, for whole tiles of bfloat16: the same results, in two thirds of the time
 * that a compiler's loops take. Sums become steps where they are, in registers, and what is read next is fetched while a
 * product is computed. */
#include "transform.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

enum {
    LINE = 32,  /* words of a line of the cache, and channels that are transposed at a time */
    LANES = 16, /* numbers of a register */
    REGISTERS = TILE / LANES,
    ROWS = 5    /* whose sums are in registers at a time, beside constants; the last of a block may be computed twice */
};

int kv_has_tiles(size_t head_dim, size_t block, size_t n) {
    return head_dim % (2 * LINE) == 0 && block >= ROWS && block % 4 == 0 &&
           (block % head_dim == 0 || n / block <= MOST_BLOCKS) && HAS_AVX512("vnni") &&
           HAS_AVX512("bw") && HAS_AVX512("vl");
}

/* 8 × 8 words, four times side by side. */
AVX512 static inline void turn_eights(__m512i rows[8]) {
    __m512i zipped[8];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) {
            zipped[2 * i] = _mm512_unpacklo_epi16(rows[i], rows[i + 4]);
            zipped[2 * i + 1] = _mm512_unpackhi_epi16(rows[i], rows[i + 4]);
        }
        for (int i = 0; i < 8; i++)
            rows[i] = zipped[i];
    }
}

AVX512 static inline void transpose_lines(const u16 *from, size_t from_stride, size_t rows, size_t columns, u16 *restrict to,
                                          size_t to_stride) {
    for (size_t row = 0; row < rows; row += 32)
        for (size_t column = 0; column < columns; column += 8) {
            __m512i own[8];
            for (size_t i = 0; i < 8; i++) {
                const u16 *at = from + (row + i) * from_stride + column;
                own[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i_u *)at));
                own[i] = _mm512_inserti32x4(own[i], _mm_loadu_si128((const __m128i_u *)(at + 8 * from_stride)), 1);
                own[i] = _mm512_inserti32x4(own[i], _mm_loadu_si128((const __m128i_u *)(at + 16 * from_stride)), 2);
                own[i] = _mm512_inserti32x4(own[i], _mm_loadu_si128((const __m128i_u *)(at + 24 * from_stride)), 3);
            }
            turn_eights(own);
            for (size_t i = 0; i < 8; i++)
                _mm512_storeu_si512(to + (column + i) * to_stride + row, own[i]);
        }
}

AVX512 void kv_transpose_lines(const u16 *from, size_t from_stride, size_t rows, size_t columns, u16 *restrict to,
                               size_t to_stride) {
    transpose_lines(from, from_stride, rows, columns, to, to_stride);
}

/* ---- the way there ---- */

/* A line's channels of each token of a tile, [LINE][TILE]. By way of a copy: the tokens of a plane may lie so that 32 of them
 * have few places in the first cache. */
AVX512 static inline void turned_lines(const u16 *words, size_t n, u16 *restrict turned) {
    ALIGNED uint16_t lines[TILE * LINE];
    for (size_t t = 0; t < TILE; t++)
        _mm512_store_si512(lines + t * LINE, _mm512_loadu_si512(words + t * n));
    transpose_lines(lines, LINE, TILE, LINE, turned, TILE);
}

AVX512 static inline __m512 wide(const uint16_t *words) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)words)), 16));
}

AVX512 void kv_tile_to_steps(const Part *part, const u16 *words, const f32 *means, const f32 *steps, f32 *restrict numbers,
                             f32 *restrict farthest) {
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    size_t half = part->half;
    memset(farthest, 0, sizeof *farthest * (part->channels / part->block));
    for (size_t low = 0; low < part->channels; low += low % (2 * half) == half - LINE ? half + LINE : LINE) {
        ALIGNED uint16_t turned[2][LINE * TILE];
        __m512i far[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}; /* numbers without signs have the order of their bits */
        for (size_t i = 0; i < 2; i++)
            turned_lines(words + part->first + low + i * half, part->n, turned[i]);
        for (size_t j = 0; j < LINE; j++) {
            size_t channel = low + j, other = channel + half;
            const f32 *cos = part->cosines ? part->cosines + channel % (2 * half) * part->stride : NULL;
            const __m512 mean = _mm512_set1_ps(means[part->first + channel]);
            const __m512 other_mean = _mm512_set1_ps(means[part->first + other]);
            const __m512 step = _mm512_set1_ps(steps[(part->first + channel) / part->block]);
            const __m512 other_step = _mm512_set1_ps(steps[(part->first + other) / part->block]);
            for (size_t t = 0; t < TILE; t += LANES) {
                __m512 x = wide(turned[0] + j * TILE + t), y = wide(turned[1] + j * TILE + t);
                if (cos) { /* back to position 0 */
                    __m512 c = _mm512_loadu_ps(cos + t), s = _mm512_loadu_ps(cos + half * part->stride + t);
                    __m512 back = _mm512_add_ps(_mm512_mul_ps(x, c), _mm512_mul_ps(y, s));
                    y = _mm512_sub_ps(_mm512_mul_ps(y, c), _mm512_mul_ps(x, s));
                    x = back;
                }
                x = _mm512_mul_ps(_mm512_sub_ps(x, mean), step);
                y = _mm512_mul_ps(_mm512_sub_ps(y, other_mean), other_step);
                _mm512_storeu_ps(numbers + channel * TILE + t, x);
                _mm512_storeu_ps(numbers + other * TILE + t, y);
                far[0] = _mm512_max_epu32(far[0], _mm512_and_si512(_mm512_castps_si512(x), no_sign));
                far[1] = _mm512_max_epu32(far[1], _mm512_and_si512(_mm512_castps_si512(y), no_sign));
            }
            for (size_t i = 0; i < 2; i++)
                if (j == LINE - 1 || (channel + i * half + 1) % part->block == 0) {
                    f32 *own = farthest + (channel + i * half) / part->block;
                    uint32_t most = _mm512_reduce_max_epu32(far[i]), before = bits_of_float(*own);
                    *own = float_of(most > before ? most : before);
                    far[i] = _mm512_setzero_si512();
                }
        }
    }
}

AVX512 void kv_tile_to_pairs(const f32 *restrict numbers, size_t block, float unit, int16_t *restrict pairs) {
    /* Added to 1.5 x 2**23, whose last bit is one, a number is rounded, and is the sum's lowest bits. */
    const __m512 even = _mm512_set1_ps(12582912.0f), units = _mm512_set1_ps(unit);
    for (size_t i = 0; i < block; i += 2)
        for (size_t t = 0; t < TILE; t += LANES) {
            __m512 one = _mm512_mul_ps(_mm512_loadu_ps(numbers + i * TILE + t), units);
            __m512 other = _mm512_mul_ps(_mm512_loadu_ps(numbers + (i + 1) * TILE + t), units);
            __m512i low = _mm512_castps_si512(_mm512_add_ps(one, even));
            __m512i high = _mm512_slli_epi32(_mm512_castps_si512(_mm512_add_ps(other, even)), 16);
            _mm512_storeu_si512(pairs + i * TILE + 2 * t, _mm512_mask_mov_epi16(low, 0xaaaaaaaa, high));
        }
}

AVX512 int kv_tile_to_rows(const i16 *matrix, size_t block, const int16_t *pairs, int bits,
                           i16 *restrict rows, size_t stride, const Ahead *ahead) {
    const __m128i shift = _mm_cvtsi32_si128(MATRIX_BITS + bits);
    const __m512i half = _mm512_set1_epi32(1 << (MATRIX_BITS + bits - 1)), least = _mm512_set1_epi32(LARGEST_STEPS);
    const __m512i low_words = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                               22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i most = _mm512_setzero_si512(); /* of the steps + LARGEST_STEPS, where less than 0 is more than all */
    for (size_t next = 0; next < block; next += ROWS) {
        size_t row = next + ROWS <= block ? next : block - ROWS;
        read_ahead(ahead, next / ROWS, (block + ROWS - 1) / ROWS);
        __m512i sum[ROWS][REGISTERS];
        for (int j = 0; j < ROWS; j++)
            for (int k = 0; k < REGISTERS; k++)
                sum[j][k] = half;
        const u8 *own_rows = (const u8 *)(matrix + row * block);
        for (size_t i = 0; i < block / 2; i++) {
            __m512i some[REGISTERS];
            for (int k = 0; k < REGISTERS; k++)
                some[k] = _mm512_loadu_si512((const u8 *)pairs + 4 * i * TILE + 64 * k);
            for (int j = 0; j < ROWS; j++) {
                int32_t pair;
                memcpy(&pair, own_rows + 2 * (size_t)j * block + 4 * i, 4);
                __m512i own = _mm512_set1_epi32(pair);
                for (int k = 0; k < REGISTERS; k++) {
                    sum[j][k] = _mm512_dpwssd_epi32(sum[j][k], some[k], own);
                    __asm__("" : "+v"(sum[j][k])); /* or gcc copies each sum to another register in each round */
                }
            }
        }
#pragma GCC unroll 5 /* or the compiler keeps all sums in memory */
        for (int j = 0; j < ROWS; j++) {
            i16 *to = rows + (row + (size_t)j) * stride;
            for (int k = 0; k < REGISTERS; k += 2) {
                __m512i one = _mm512_sra_epi32(sum[j][k], shift), other = _mm512_sra_epi32(sum[j][k + 1], shift);
                most = _mm512_max_epu32(most, _mm512_add_epi32(one, least));
                most = _mm512_max_epu32(most, _mm512_add_epi32(other, least));
                _mm512_storeu_si512(to + LANES * k, _mm512_permutex2var_epi16(one, low_words, other));
            }
        }
    }
    return _mm512_reduce_max_epu32(most) <= 2 * LARGEST_STEPS;
}

/* ---- the way back ---- */

/* The upper words of 32 numbers, rounded to the even one of two. */
AVX512 static inline __m512i narrow(__m512 first, __m512 second) {
    const __m512i upper_words = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                                 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m512i one = _mm512_set1_epi32(1), below_half = _mm512_set1_epi32(0x7fff);
    __m512i x = _mm512_castps_si512(first), y = _mm512_castps_si512(second);
    x = _mm512_add_epi32(_mm512_add_epi32(x, below_half), _mm512_and_si512(_mm512_srli_epi32(x, 16), one));
    y = _mm512_add_epi32(_mm512_add_epi32(y, below_half), _mm512_and_si512(_mm512_srli_epi32(y, 16), one));
    return _mm512_permutex2var_epi16(x, upper_words, y);
}

/* A group of channels, which are turned together: two lines of the cache, half a head apart, of each token. */
enum { GROUP = 2 * LINE, GROUP_REGISTERS = GROUP / LANES, TOKENS = 4 /* whose sums are in registers at a time */ };

AVX512 static inline size_t channel_of(size_t first, size_t half, int i) {
    return first + (size_t)(i / 2) * half + (size_t)(i % 2) * LANES;
}

/* What a group's tokens are computed from: its part of the matrix, and of each channel what its sums begin with, as each step is
 * FAR_OFFSET too large. */
typedef struct {
    __m512i matrix[MOST_CHANNELS / 4][GROUP_REGISTERS], start[GROUP_REGISTERS];
} Group;

AVX512 static void take_group(Group *group, const i8 *matrix, size_t block, size_t first, size_t half) {
    const __m512i too_large = _mm512_set1_epi8((char)FAR_OFFSET);
    for (int i = 0; i < GROUP_REGISTERS; i++) {
        __m512i excess = _mm512_setzero_si512();
        for (size_t four = 0; four < block / 4; four++) {
            group->matrix[four][i] = _mm512_loadu_si512(matrix + 4 * (four * block + channel_of(first, half, i)));
            excess = _mm512_dpbusd_epi32(excess, too_large, group->matrix[four][i]);
        }
        group->start[i] = _mm512_sub_epi32(_mm512_setzero_si512(), excess);
    }
}

/* Some tokens of a group. bytes: of the first token. turns: of the first token and the group's first frequency. words: of the first
 * token and the block's first channel. tokens: how many there are. */
AVX512 static inline void tokens_of_group(const Part *part, const Group *group, const u8 *bytes, size_t stride, size_t first,
                                          const f32 *scales, const f32 *means, const f32 *turns, u16 *words, size_t tokens) {
    __m512i sums[TOKENS][GROUP_REGISTERS];
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < GROUP_REGISTERS; i++)
            sums[t][i] = group->start[i];
    for (size_t four = 0; four < part->block / 4; four++) {
        const u8 *own = bytes + four * stride;
        __m512i matrix[GROUP_REGISTERS];
        for (int i = 0; i < GROUP_REGISTERS; i++)
            matrix[i] = group->matrix[four][i];
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; t++) {
            int32_t steps;
            memcpy(&steps, own + 4 * t, 4);
            __m512i all = _mm512_set1_epi32(steps);
            for (int i = 0; i < GROUP_REGISTERS; i++) {
                sums[t][i] = _mm512_dpbusd_epi32(sums[t][i], all, matrix[i]);
                __asm__("" : "+v"(sums[t][i])); /* or gcc copies each sum to another register in each round */
            }
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; t++) {
        __m512 numbers[GROUP_REGISTERS];
        for (int i = 0; i < GROUP_REGISTERS; i++) {
            size_t channel = channel_of(first, part->half, i);
            numbers[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[t][i]), _mm512_loadu_ps(scales + channel));
            numbers[i] = _mm512_add_ps(numbers[i], _mm512_loadu_ps(means + channel));
        }
        if (turns) {
            const f32 *cos = turns + (size_t)t * 2 * part->half, *sin = cos + part->half;
            for (int i = 0; i < 2; i++) {
                __m512 c = _mm512_loadu_ps(cos + i * LANES), s = _mm512_loadu_ps(sin + i * LANES), x = numbers[i], y = numbers[i + 2];
                numbers[i] = _mm512_sub_ps(_mm512_mul_ps(x, c), _mm512_mul_ps(y, s));
                numbers[i + 2] = _mm512_add_ps(_mm512_mul_ps(y, c), _mm512_mul_ps(x, s));
            }
        }
        if ((size_t)t < tokens) {
            u16 *to = words + (size_t)t * part->n + first;
            _mm512_storeu_si512(to, narrow(numbers[0], numbers[1]));
            _mm512_storeu_si512(to + part->half, narrow(numbers[2], numbers[3]));
        }
    }
}

AVX512 void kv_block_to_words(const Part *part, const u8 *bytes, size_t vectors, const i8 *matrix, const f32 *scales, const f32 *means,
                              const f32 *turns, const uint32_t *far_tiles, u16 *words, size_t tokens, const Ahead *ahead) {
    size_t half = part->half, done = 0, steps = part->block / GROUP * ((tokens + TOKENS - 1) / TOKENS);
    for (size_t first = 0; first < part->block; first += first % (2 * half) == half - LINE ? half + LINE : LINE) {
        Group group;
        take_group(&group, matrix, part->block, first, half);
        for (size_t token = 0; token < tokens; token += TOKENS) {
            read_ahead(ahead, done++, steps);
            if (far_tiles[token / TILE] != NO_FAR)
                continue;
            tokens_of_group(part, &group, bytes + 4 * token, VECTOR * vectors, first, scales, means,
                            turns ? turns + token * 2 * half + first % (2 * half) : NULL, words + token * part->n, tokens - token);
        }
    }
}

#else /* no such processor */
int kv_has_tiles(size_t head_dim, size_t block, size_t n) { return (void)head_dim, (void)block, (void)n, 0; }
void kv_tile_to_steps(const Part *part, const u16 *words, const f32 *means, const f32 *steps, f32 *restrict numbers,
                      f32 *restrict farthest) {
    (void)part, (void)words, (void)means, (void)steps, (void)numbers, (void)farthest;
}
void kv_tile_to_pairs(const f32 *restrict numbers, size_t block, float unit, int16_t *restrict pairs) {
    (void)numbers, (void)block, (void)unit, (void)pairs;
}
int kv_tile_to_rows(const i16 *matrix, size_t block, const int16_t *pairs, int bits, i16 *restrict rows, size_t stride,
                    const Ahead *ahead) {
    return (void)matrix, (void)block, (void)pairs, (void)bits, (void)rows, (void)stride, (void)ahead, 0;
}
void kv_block_to_words(const Part *part, const u8 *bytes, size_t vectors, const i8 *matrix, const f32 *scales, const f32 *means,
                       const f32 *turns, const uint32_t *far_tiles, u16 *words, size_t tokens, const Ahead *ahead) {
    (void)part, (void)bytes, (void)vectors, (void)matrix, (void)scales, (void)means, (void)turns, (void)far_tiles, (void)words;
    (void)tokens, (void)ahead;
}
#endif
