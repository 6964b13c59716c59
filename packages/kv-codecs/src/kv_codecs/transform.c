/* The codec `kvtc`: keys and values into whole steps of their components, as docs/formats/kvtc.md has it; transform_back.c has the
 * way back. numpy_transform.py says what each function computes.
 *
 * Floating point is used for single numbers only, one rounded operation after the other, and products with matrices are
 * of whole numbers, which have no order: so the results are the same on every processor. 64 tokens are worked on at a
 * time, [channels][64], for them to stay in the cache and for the loops to be vectorised over tokens.
 */
#include "transform.h"

int kv_is_shape(const Shape *shape, size_t shape_bytes, Sizes *sizes) {
    if (shape_bytes != sizeof *shape || shape->dtype < BFLOAT16 || shape->dtype > FLOAT32 || shape->layers < 1 ||
        shape->layers > 1024 || shape->tokens < 1 || shape->tokens > 1 << 17 || shape->heads < 1 ||
        shape->heads > 1024 || shape->head_dim < 2 || shape->head_dim > 1024 || shape->head_dim % 2 ||
        shape->block < 2 || shape->block > MOST_CHANNELS || shape->block % 2 ||
        shape->heads * shape->head_dim % shape->block || shape->exact < 0 || shape->exact > shape->tokens ||
        shape->tables < 1 || shape->tables > 1024)
        return 0;
    sizes->channels = (size_t)(shape->heads * shape->head_dim);
    sizes->blocks = KEYS_AND_VALUES * (size_t)shape->layers * (sizes->channels / (size_t)shape->block);
    sizes->tokens = (size_t)shape->tokens;
    sizes->item = shape->dtype == FLOAT32 ? 4 : 2;
    return 1;
}

int kv_fits(const Shape *shape, const Sizes *sizes, size_t words_bytes, size_t turns_bytes, const u8 *tables,
            size_t tables_bytes, size_t means_bytes) {
    size_t rows = KEYS_AND_VALUES * (size_t)shape->layers * sizes->channels;
    if (words_bytes != rows * sizes->tokens * sizes->item || means_bytes != 4 * rows ||
        tables_bytes != 4 * (size_t)shape->layers ||
        turns_bytes != 4 * (size_t)(shape->tables * shape->head_dim) * turns_stride(sizes))
        return 0;
    for (int64_t layer = 0; layer < shape->layers; layer++)
        if (((const int32_t *)tables)[layer] < 0 || ((const int32_t *)tables)[layer] >= shape->tables)
            return 0;
    return 1;
}

/* ---- [tokens][channels] to [channels][TILE], and back ---- */

typedef uint16_t Eight __attribute__((vector_size(16)));
#if defined(__clang__)
#define ZIPPED(one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define ZIPPED(one, other, ...) __builtin_shuffle(one, other, (Eight){__VA_ARGS__})
#endif

/* 8 × 8 words, of which each row begins so many words behind the one before. */
INLINE void turn_eight(const u16 *from, size_t stride, u16 *to, size_t to_stride) {
    Eight rows[8], zipped[8];
    for (int i = 0; i < 8; i++)
        memcpy(&rows[i], from + (size_t)i * stride, 16);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) {
            zipped[2 * i] = ZIPPED(rows[i], rows[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            zipped[2 * i + 1] = ZIPPED(rows[i], rows[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        for (int i = 0; i < 8; i++)
            rows[i] = zipped[i];
    }
    for (int i = 0; i < 8; i++)
        memcpy(to + (size_t)i * to_stride, &rows[i], 16);
}

VERSIONS void kv_transpose16(const u16 *from, size_t from_stride, size_t rows, size_t columns, u16 *restrict to,
                             size_t to_stride) {
    size_t whole_rows = rows & ~(size_t)7, whole_columns = columns & ~(size_t)7;
    for (size_t row = 0; row < whole_rows; row += 8)
        for (size_t column = 0; column < whole_columns; column += 8)
            turn_eight(from + row * from_stride + column, from_stride, to + column * to_stride + row, to_stride);
    for (size_t row = 0; row < rows; row++)
        for (size_t column = row < whole_rows ? whole_columns : 0; column < columns; column++)
            to[column * to_stride + row] = from[row * from_stride + column];
}

/* ---- words and floats ---- */

INLINE float wide_half(uint32_t half) {
    /* 2**112 brings the exponent to float32's; infinities and what is no number keep theirs. */
    uint32_t sign = (half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t finite = bits_of_float(float_of(rest << 13) * 5.192296858534828e33f);
    return float_of(sign | (rest >= 0x7c00 ? 0x7f800000 | rest << 13 : finite));
}

/* One channel's numbers of a tile. */
INLINE void wide_row(int64_t dtype, const u8 *words, float *restrict numbers) {
    if (dtype == BFLOAT16)
        for (int t = 0; t < TILE; t++)
            numbers[t] = float_of((uint32_t)((const u16 *)words)[t] << 16);
    else if (dtype == FLOAT16)
        for (int t = 0; t < TILE; t++)
            numbers[t] = wide_half(((const u16 *)words)[t]);
    else
        memcpy(numbers, words, 4 * TILE);
}

/* A tile of a plane, in steps from its means. words: of the first token. moved: room for as many. tokens: how many are
 * there. verbatim: how many of the first are stored as they are, and have no steps. */
INLINE void to_steps(const Shape *shape, const Sizes *sizes, const u8 *words, size_t tokens, size_t verbatim,
                     const f32 *cosines, size_t stride, const f32 *means, const f32 *steps, u8 *restrict moved,
                     f32 *restrict numbers) {
    size_t n = sizes->channels, half = (size_t)shape->head_dim / 2;
    if (tokens < TILE)
        memset(moved, 0, TILE * n * sizes->item);
    if (shape->dtype == FLOAT32)
        transpose32((const u32 *)words, n, tokens, n, (u32 *)moved, TILE);
    else
        kv_transpose16((const u16 *)words, n, tokens, n, (u16 *)moved, TILE);
    for (size_t low = 0; low < n; low += low % half == half - 1 ? half + 1 : 1) {
        float both[2][TILE];
        for (size_t i = 0; i < 2; i++)
            wide_row(shape->dtype, moved + (low + i * half) * TILE * sizes->item, both[i]);
        if (cosines)
            turn(cosines + low % half * stride, half * stride, -1.0f, both[0], both[1]);
        for (size_t i = 0; i < 2; i++) {
            size_t channel = low + i * half;
            float mean = means[channel], step = steps[channel / (size_t)shape->block];
            f32 *restrict row = numbers + channel * TILE;
            for (size_t t = 0; t < TILE; t++)
                row[t] = (both[i][t] - mean) * step;
            if (verbatim || tokens < TILE) {
                memset(row, 0, 4 * verbatim);
                memset(row + tokens, 0, 4 * (TILE - tokens));
            }
        }
    }
}

/* The farthest number of a block, in steps; what is no number is farther than all. */
INLINE float farthest(const f32 *restrict numbers, size_t count) {
    uint32_t most = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_of_float(numbers[i]) & 0x7fffffff; /* in the order of the numbers */
        most = bits > most ? bits : most;
    }
    return most > 0x7f800000 ? float_of(0x7f800000) : float_of(most);
}

/* To whole numbers, the even one of two that are as near. [block][TILE] to [block / 2][TILE][2] */
INLINE void to_pairs(const f32 *restrict numbers, size_t block, float unit, int16_t *restrict pairs) {
    const float even = 12582912.0f; /* 1.5 × 2**23, whose last bit is one */
    for (size_t i = 0; i < block; i += 2)
        for (int t = 0; t < TILE; t++) {
            pairs[i * TILE + 2 * (size_t)t] = (int16_t)((numbers[i * TILE + (size_t)t] * unit + even) - even);
            pairs[i * TILE + 2 * (size_t)t + 1] = (int16_t)((numbers[(i + 1) * TILE + (size_t)t] * unit + even) - even);
        }
}

/* ---- products ---- */

VERSIONS static void multiply_plain(const i16 *matrix, size_t block, const int16_t *numbers, int32_t *restrict sums) {
    for (size_t row = 0; row < block; row++) {
        uint32_t sum[TILE] = {0}; /* as its overflow is defined */
        for (size_t i = 0; i < block; i += 2) {
            int32_t one = matrix[row * block + i], other = matrix[row * block + i + 1];
            const int16_t *restrict pairs = numbers + i * TILE;
            for (int t = 0; t < TILE; t++)
                sum[t] += (uint32_t)(one * pairs[2 * t]) + (uint32_t)(other * pairs[2 * t + 1]);
        }
        memcpy(sums + row * TILE, sum, sizeof sum);
    }
}

#ifdef KV_X86
AVX2 static void multiply_avx2(const i16 *matrix, size_t block, const int16_t *numbers, int32_t *restrict sums) {
    for (size_t t = 0; t < TILE; t += 16)
        for (size_t next = 0; next < block; next += SUM_ROWS) {
            size_t row = sum_rows_from(next, block);
            __m256i sum[SUM_ROWS][2];
            for (int j = 0; j < SUM_ROWS; j++)
                sum[j][0] = sum[j][1] = _mm256_setzero_si256();
            const u8 *own_rows = (const u8 *)(matrix + row * block);
            for (size_t i = 0; i < block / 2; i++) {
                const __m256i_u *pairs = (const __m256i_u *)(numbers + 2 * i * TILE + 2 * t);
                __m256i first = _mm256_loadu_si256(pairs), second = _mm256_loadu_si256(pairs + 1);
                for (int j = 0; j < SUM_ROWS; j++) {
                    int32_t pair;
                    memcpy(&pair, own_rows + 2 * (size_t)j * block + 4 * i, 4);
                    __m256i own = _mm256_set1_epi32(pair);
                    sum[j][0] = _mm256_add_epi32(sum[j][0], _mm256_madd_epi16(first, own));
                    sum[j][1] = _mm256_add_epi32(sum[j][1], _mm256_madd_epi16(second, own));
                }
            }
            for (int j = 0; j < SUM_ROWS; j++)
                for (int k = 0; k < 2; k++)
                    _mm256_storeu_si256((__m256i_u *)(sums + (row + (size_t)j) * TILE + t) + k, sum[j][k]);
        }
}

VNNI static void multiply_vnni(const i16 *matrix, size_t block, const int16_t *numbers, int32_t *restrict sums) {
    for (size_t next = 0; next < block; next += SUM_ROWS) {
        size_t row = sum_rows_from(next, block);
        __m512i sum[SUM_ROWS][4];
        for (int j = 0; j < SUM_ROWS; j++)
            sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = _mm512_setzero_si512();
        const u8 *own_rows = (const u8 *)(matrix + row * block);
        for (size_t i = 0; i < block / 2; i++) {
            __m512i pairs[4];
            for (int k = 0; k < 4; k++)
                pairs[k] = _mm512_loadu_si512((const u8 *)numbers + 4 * i * TILE + 64 * k);
            for (int j = 0; j < SUM_ROWS; j++) {
                int32_t pair;
                memcpy(&pair, own_rows + 2 * (size_t)j * block + 4 * i, 4);
                __m512i own = _mm512_set1_epi32(pair);
                for (int k = 0; k < 4; k++)
                    sum[j][k] = _mm512_dpwssd_epi32(sum[j][k], pairs[k], own);
            }
        }
        for (int j = 0; j < SUM_ROWS; j++)
            for (int k = 0; k < 4; k++)
                _mm512_storeu_si512(sums + (row + (size_t)j) * TILE + 16 * k, sum[j][k]);
    }
}
#endif

void kv_multiply(const i16 *matrix, size_t block, const int16_t *numbers, int32_t *restrict sums) {
#ifdef KV_X86
    if (block >= SUM_ROWS && has_vnni()) {
        multiply_vnni(matrix, block, numbers, sums);
        return;
    }
    if (block >= SUM_ROWS && has_avx2()) {
        multiply_avx2(matrix, block, numbers, sums);
        return;
    }
#endif
    multiply_plain(matrix, block, numbers, sums);
}

/* ---- whole tiles of bfloat16, with AVX-512 ---- */

#ifdef KV_X86
/* 8 × 8 words, four times side by side. */
VNNI static inline void turn_eights(__m512i rows[8]) {
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

VNNI static inline void transpose_lines(const u16 *from, size_t from_stride, size_t rows, size_t columns, u16 *restrict to,
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

/* A line's channels of each token of a tile, [LINE][TILE]. By way of a copy: the tokens of a plane may lie so that 32 of them
 * have few places in the first cache. */
VNNI static inline void turned_lines(const u16 *words, size_t n, u16 *restrict turned) {
    ALIGNED uint16_t lines[TILE * LINE];
    for (size_t t = 0; t < TILE; t++)
        _mm512_store_si512(lines + t * LINE, _mm512_loadu_si512(words + t * n));
    transpose_lines(lines, LINE, TILE, LINE, turned, TILE);
}

VNNI static inline __m512 wide(const uint16_t *words) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)words)), 16));
}

/* words: the tile's, of the plane's first channel. numbers: [channels][TILE], in steps from their means. farthest: of each block. */
VNNI static void tile_to_steps(const Part *part, const u16 *words, const f32 *means, const f32 *steps, f32 *restrict numbers,
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

/* The product with a matrix, in whole steps: each row `stride` behind the one before. 0: one of them is beyond LARGEST_STEPS. */
VNNI static int tile_to_rows(const i16 *matrix, size_t block, const int16_t *pairs, int bits,
                           i16 *restrict rows, size_t stride, const Ahead *ahead) {
    const __m128i shift = _mm_cvtsi32_si128(MATRIX_BITS + bits);
    const __m512i half = _mm512_set1_epi32(1 << (MATRIX_BITS + bits - 1)), least = _mm512_set1_epi32(LARGEST_STEPS);
    const __m512i low_words = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                               22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i most = _mm512_setzero_si512(); /* of the steps + LARGEST_STEPS, where less than 0 is more than all */
    for (size_t next = 0; next < block; next += STEP_ROWS) {
        size_t row = next + STEP_ROWS <= block ? next : block - STEP_ROWS;
        read_ahead(ahead, next / STEP_ROWS, (block + STEP_ROWS - 1) / STEP_ROWS);
        __m512i sum[STEP_ROWS][REGISTERS];
        for (int j = 0; j < STEP_ROWS; j++)
            for (int k = 0; k < REGISTERS; k++)
                sum[j][k] = half;
        const u8 *own_rows = (const u8 *)(matrix + row * block);
        for (size_t i = 0; i < block / 2; i++) {
            __m512i some[REGISTERS];
            for (int k = 0; k < REGISTERS; k++)
                some[k] = _mm512_loadu_si512((const u8 *)pairs + 4 * i * TILE + 64 * k);
            for (int j = 0; j < STEP_ROWS; j++) {
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
        for (int j = 0; j < STEP_ROWS; j++) {
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

/* What `tile_to_steps` does at a time, so that it stays in the cache: a block, if it has whole heads, else a whole plane. */
INLINE Part part_of(const Shape *shape, const Sizes *sizes, const f32 *cosines, size_t stride) {
    size_t head = (size_t)shape->head_dim, block = (size_t)shape->block;
    return (Part){sizes->channels, head / 2, block, 0, block % head ? sizes->channels : block, cosines, stride};
}

/* 0: a number is too far from its mean. words: of the tile's first token. means, steps: of the plane. forward: of the part's first
 * block. rows: of its first row's first of these tokens. */
INLINE int project_part(const Part *part, const u16 *words, const f32 *means, const f32 *steps, const i16 *forward,
                        i16 *rows, size_t row_stride, size_t blocks, f32 *numbers, int16_t *pairs,
                        const Ahead *ahead) {
    const Ahead nothing = {0};
    f32 far[MOST_BLOCKS];
    tile_to_steps(part, words, means, steps, numbers, far);
    for (size_t at = 0; at < blocks; at++) {
        size_t block = part->block;
        Unit own = unit_of(far[at]);
        if (!own.unit)
            return 0;
        to_pairs(numbers + at * block * TILE, block, own.unit, pairs);
        if (!tile_to_rows(forward + at * block * block, block, pairs, own.bits, rows + at * block * row_stride, row_stride,
                             at + 1 < blocks ? &nothing : ahead))
            return 0;
    }
    return 1;
}
#endif

/* ---- all of it ---- */

/* 0; or 1: a number is too far from its mean. words: [planes][tokens][channels]. turns: cosines and sines, [tables][2]
 * [head_dim / 2][tokens, to a whole tile]. steps: reciprocals of their widths, [blocks]. forward: [blocks][block][block], int16. rows:
 * [blocks][block][tokens], int16. scratch: 8 bytes for each channel and 64 tokens. */
EXPORT VERSIONS int64_t kv_project(const int64_t *described, size_t shape_bytes, const u8 *words, size_t words_bytes,
                                   const u8 *turns, size_t turns_bytes, const u8 *tables, size_t tables_bytes,
                                   const u8 *means, size_t means_bytes, const u8 *steps, size_t steps_bytes,
                                   const u8 *forward, size_t forward_bytes, u8 *restrict rows, size_t rows_bytes, u8 *restrict scratch, size_t scratch_bytes) {
    const Shape *shape = (const Shape *)described;
    Sizes sizes;
    if (!kv_is_shape(shape, shape_bytes, &sizes) ||
        !kv_fits(shape, &sizes, words_bytes, turns_bytes, tables, tables_bytes, means_bytes) ||
        rows_bytes != 2 * (words_bytes / sizes.item) || scratch_bytes != 8 * TILE * sizes.channels)
        return KV_MISFIT;
    size_t block = (size_t)shape->block, n = sizes.channels, exact = (size_t)shape->exact;
    if (steps_bytes != 4 * sizes.blocks || forward_bytes != 2 * sizes.blocks * block * block)
        return KV_MISFIT;
    size_t stride = turns_stride(&sizes);
    f32 *numbers = (f32 *)scratch;
    ALIGNED int16_t pairs[MOST_CHANNELS * TILE];
    ALIGNED int32_t sums[MOST_CHANNELS * TILE];
    for (size_t plane = 0; plane < KEYS_AND_VALUES * (size_t)shape->layers; plane++) {
        for (size_t first = 0; first < sizes.tokens; first += TILE) {
            size_t tokens = sizes.tokens - first < TILE ? sizes.tokens - first : TILE;
            size_t verbatim = exact > first ? (exact - first < tokens ? exact - first : tokens) : 0;
            const f32 *cosines = cosines_of(shape, &sizes, turns, tables, plane, first);
#ifdef KV_X86
            if (tokens == TILE && !verbatim && has_tiles(shape, &sizes)) {
                Part part = part_of(shape, &sizes, cosines, stride);
                for (; part.first < n; part.first += part.channels) {
                    size_t which = (plane * n + part.first) / block, some = part.channels / block;
                    /* The next part of this tile, or the next tile, if there is any. */
                    const u8 *next = words + 2 * ((plane * sizes.tokens + first) * n + part.first + part.channels);
                    next += part.first + part.channels < n ? 0 : 2 * (TILE - 1) * n;
                    size_t left = (size_t)(words + words_bytes - next) / (2 * n);
                    Ahead ahead = {next, 2 * n, next < words + words_bytes ? (left < TILE ? left : TILE) : 0, 2 * part.channels};
                    if (!project_part(&part, (const u16 *)words + (plane * sizes.tokens + first) * n, (const f32 *)means + plane * n,
                                      (const f32 *)steps + plane * (n / block), (const i16 *)forward + which * block * block,
                                      (i16 *)rows + which * block * sizes.tokens + first, sizes.tokens, some, numbers, pairs,
                                      &ahead))
                        return 1;
                }
                continue;
            }
#endif
            to_steps(shape, &sizes, words + (plane * sizes.tokens + first) * n * sizes.item, tokens, verbatim, cosines, stride,
                     (const f32 *)means + plane * n, (const f32 *)steps + plane * (n / block), scratch + 4 * TILE * n,
                     numbers);
            for (size_t at = 0; at < n / block; at++) {
                size_t which = plane * (n / block) + at;
                f32 *some = numbers + at * block * TILE;
                Unit own = unit_of(farthest(some, block * TILE));
                if (!own.unit)
                    return 1;
                to_pairs(some, block, own.unit, pairs);
                kv_multiply((const i16 *)forward + which * block * block, block, pairs, sums);
                int shift = MATRIX_BITS + own.bits, beyond = 0;
                for (size_t i = 0; i < block; i++) {
                    i16 *restrict row = (i16 *)rows + (which * block + i) * sizes.tokens + first;
                    for (size_t t = 0; t < tokens; t++) {
                        int32_t whole = (int32_t)((uint32_t)sums[i * TILE + t] + (1u << (shift - 1))) >> shift;
                        beyond |= whole > LARGEST_STEPS || whole < -LARGEST_STEPS;
                        row[t] = (int16_t)whole;
                    }
                }
                if (beyond)
                    return 1;
            }
        }
    }
    return 0;
}
