/* The products of whole numbers of the codec `kvtc`, with what this processor has for them. Whole numbers' sums have no order,
 * so the results are the same from all.
 *
 * sums[row][t] = Σ matrix[row][i] × numbers[i][t]. Two numbers of 16 bits, or four of 8, are side by side.
 */
#include "products.h"

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

#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#include <immintrin.h>
enum { ROWS = 6 }; /* whose sums are in registers at a time; the last of a block may be computed twice */

/* The first of the next rows. */
INLINE size_t rows_from(size_t row, size_t block) { return row + ROWS <= block ? row : block - ROWS; }

#define AVX2 __attribute__((target("avx2")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

AVX2 static void multiply_avx2(const i16 *matrix, size_t block, const int16_t *numbers, int32_t *restrict sums) {
    for (size_t t = 0; t < TILE; t += 16)
        for (size_t next = 0; next < block; next += ROWS) {
            size_t row = rows_from(next, block);
            __m256i sum[ROWS][2];
            for (int j = 0; j < ROWS; j++)
                sum[j][0] = sum[j][1] = _mm256_setzero_si256();
            const u8 *own_rows = (const u8 *)(matrix + row * block);
            for (size_t i = 0; i < block / 2; i++) {
                const __m256i_u *pairs = (const __m256i_u *)(numbers + 2 * i * TILE + 2 * t);
                __m256i first = _mm256_loadu_si256(pairs), second = _mm256_loadu_si256(pairs + 1);
                for (int j = 0; j < ROWS; j++) {
                    int32_t pair;
                    memcpy(&pair, own_rows + 2 * (size_t)j * block + 4 * i, 4);
                    __m256i own = _mm256_set1_epi32(pair);
                    sum[j][0] = _mm256_add_epi32(sum[j][0], _mm256_madd_epi16(first, own));
                    sum[j][1] = _mm256_add_epi32(sum[j][1], _mm256_madd_epi16(second, own));
                }
            }
            for (int j = 0; j < ROWS; j++)
                for (int k = 0; k < 2; k++)
                    _mm256_storeu_si256((__m256i_u *)(sums + (row + (size_t)j) * TILE + t) + k, sum[j][k]);
        }
}

VNNI static void multiply_vnni(const i16 *matrix, size_t block, const int16_t *numbers, int32_t *restrict sums) {
    for (size_t next = 0; next < block; next += ROWS) {
        size_t row = rows_from(next, block);
        __m512i sum[ROWS][4];
        for (int j = 0; j < ROWS; j++)
            sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = _mm512_setzero_si512();
        const u8 *own_rows = (const u8 *)(matrix + row * block);
        for (size_t i = 0; i < block / 2; i++) {
            __m512i pairs[4];
            for (int k = 0; k < 4; k++)
                pairs[k] = _mm512_loadu_si512((const u8 *)numbers + 4 * i * TILE + 64 * k);
            for (int j = 0; j < ROWS; j++) {
                int32_t pair;
                memcpy(&pair, own_rows + 2 * (size_t)j * block + 4 * i, 4);
                __m512i own = _mm512_set1_epi32(pair);
                for (int k = 0; k < 4; k++)
                    sum[j][k] = _mm512_dpwssd_epi32(sum[j][k], pairs[k], own);
            }
        }
        for (int j = 0; j < ROWS; j++)
            for (int k = 0; k < 4; k++)
                _mm512_storeu_si512(sums + (row + (size_t)j) * TILE + 16 * k, sum[j][k]);
    }
}

/* Of 128 × each row's numbers, as a number that is 128 too large adds that. */
static void excess_of(const i8 *matrix, size_t block, int32_t *excess) {
    memset(excess, 0, sizeof *excess * block);
    for (size_t i = 0; i < (block + 3) / 4; i++)
        for (size_t row = 0; row < block; row++) {
            const i8 *four = matrix + 4 * (i * block + row);
            excess[row] -= 128 * (four[0] + four[1] + four[2] + four[3]);
        }
}

VNNI static void bytes_vnni(const i8 *matrix, size_t block, const u8 *numbers, size_t stride, int32_t *restrict sums) {
    int32_t excess[MOST_CHANNELS];
    excess_of(matrix, block, excess);
    for (size_t next = 0; next < block; next += ROWS) {
        size_t row = rows_from(next, block);
        __m512i sum[ROWS][4];
        for (int j = 0; j < ROWS; j++)
            sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = _mm512_set1_epi32(excess[row + (size_t)j]);
        for (size_t i = 0; i < (block + 3) / 4; i++) {
            __m512i some[4];
            for (int k = 0; k < 4; k++)
                some[k] = _mm512_loadu_si512(numbers + i * stride + 64 * (size_t)k);
            for (int j = 0; j < ROWS; j++) {
                int32_t four;
                memcpy(&four, matrix + 4 * (i * block + row + (size_t)j), 4);
                __m512i own = _mm512_set1_epi32(four);
                for (int k = 0; k < 4; k++)
                    sum[j][k] = _mm512_dpbusd_epi32(sum[j][k], some[k], own);
            }
        }
        for (int j = 0; j < ROWS; j++)
            for (int k = 0; k < 4; k++)
                _mm512_storeu_si512(sums + (row + (size_t)j) * TILE + 16 * k, sum[j][k]);
    }
}

static int has_vnni(void) {
    return HAS_AVX512("vnni") && HAS_AVX512("bw") && HAS_AVX512("vl");
}
#endif

int kv_multiplies_bytes(size_t block) {
#ifdef VNNI
    return block >= ROWS && has_vnni();
#else
    (void)block;
    return 0;
#endif
}

void kv_multiply_bytes(const i8 *matrix, size_t block, const u8 *numbers, size_t stride, int32_t *restrict sums) {
#ifdef VNNI
    bytes_vnni(matrix, block, numbers, stride, sums);
#else
    (void)matrix, (void)block, (void)numbers, (void)stride, (void)sums;
#endif
}

void kv_multiply(const i16 *matrix, size_t block, const int16_t *numbers, int32_t *restrict sums) {
#ifdef VNNI
    if (block >= ROWS && has_vnni()) {
        multiply_vnni(matrix, block, numbers, sums);
        return;
    }
    if (block >= ROWS && __builtin_cpu_supports("avx2")) {
        multiply_avx2(matrix, block, numbers, sums);
        return;
    }
#endif
    multiply_plain(matrix, block, numbers, sums);
}
