/* Chunks of bfloat16 in the format `int8`, and back, as kv_cuda's quantise.py has it with torch's operations: that
 * file defines the computation, this one only makes it faster, and a test compares the bytes of both
 * (docs/formats/quantised.md). The rules of library.c for buffers apply here.
 */
#include "c_library.h"

enum { LEAST_OF_CHANNEL = -40, MOST_OF_CHANNEL = 120 };
enum { LARGEST_MAGNITUDE = 0x7dfe }; /* of a bfloat16: 127 times the largest scale, 2^118 */

/* Sizes in numbers, and where things lie in a plane, in bytes. */
typedef struct {
    size_t planes, tokens, heads, dim, exact, channels, first, last, scales_at, exact_at, exponents_at, plane_bytes;
} Shape;

static int shape_of(const int64_t *sizes, size_t sizes_bytes, size_t words_bytes, size_t chunk_bytes, size_t scratch_bytes,
                    Shape *shape) {
    if (sizes_bytes != 7 * sizeof *sizes)
        return 0;
    for (int i = 0; i < 7; i++)
        if (sizes[i] < (i < 4) || sizes[i] > 1 << 24)
            return 0;
    size_t planes = (size_t)sizes[0], tokens = (size_t)sizes[1], heads = (size_t)sizes[2], dim = (size_t)sizes[3];
    size_t exact = (size_t)sizes[4], first = (size_t)sizes[5], last = (size_t)sizes[6], channels = heads * dim, numbers;
    if (exact >= tokens || first > last || last > tokens || __builtin_mul_overflow(channels, tokens, &numbers) ||
        numbers > SIZE_MAX / 16 / planes)
        return 0;
    size_t exact_at = numbers + 4 * tokens * heads, exponents_at = exact_at + 2 * exact * channels;
    *shape = (Shape){planes, tokens, heads, dim, exact, channels, first, last, numbers, exact_at, exponents_at,
                     exponents_at + (channels + 3) / 4 * 4};
    return words_bytes == 2 * numbers * planes && chunk_bytes == planes * shape->plane_bytes &&
           scratch_bytes == 6 * channels;
}

INLINE float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

INLINE uint32_t magnitudes(const u16 *restrict in, size_t tokens, size_t channels, u16 *restrict peaks) {
    uint16_t most = 0;
    memset(peaks, 0, 2 * channels);
    for (size_t token = 0; token < tokens; token++)
        for (size_t i = 0; i < channels; i++) {
            uint16_t own = in[token * channels + i] & 0x7fff;
            peaks[i] = peaks[i] < own ? own : peaks[i];
        }
    for (size_t i = 0; i < channels; i++)
        most = most < peaks[i] ? peaks[i] : most;
    return most;
}

INLINE int32_t exponent_of(uint16_t peak) {
    int32_t own = (int32_t)(peak >> 7) - 126;
    return own < LEAST_OF_CHANNEL ? LEAST_OF_CHANNEL : own > MOST_OF_CHANNEL ? MOST_OF_CHANNEL : own;
}

/* Of a head: the exponents of its channels, or the largest of them where they differ by one at most. */
INLINE void level(const u16 *peaks, size_t dim, u8 *exponents, f32 *factors) {
    int32_t least = MOST_OF_CHANNEL, most = LEAST_OF_CHANNEL;
    for (size_t i = 0; i < dim; i++) {
        int32_t own = exponent_of(peaks[i]);
        least = own < least ? own : least;
        most = own > most ? own : most;
    }
    for (size_t i = 0; i < dim; i++) {
        int32_t own = most - least <= 1 ? most : exponent_of(peaks[i]);
        exponents[i] = (u8)own;
        factors[i] = float_of((uint32_t)(127 - own) << 23);
    }
}

INLINE float quantise_row(const u16 *restrict in, const f32 *restrict factors, size_t dim, u8 *restrict codes) {
    uint32_t most = 0;
    for (size_t i = 0; i < dim; i++) {
        uint32_t own = bits_of(float_of((uint32_t)in[i] << 16) * factors[i]) & 0x7fffffff;
        most = most < own ? own : most;
    }
    float scale = float_of(most) / 127.0f;
    scale = scale > 0x1p-60f ? scale : 0.0f;
    float factor = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (size_t i = 0; i < dim; i++) /* the sum's last bits are the code, rounded to even */
        codes[i] = (u8)bits_of(float_of((uint32_t)in[i] << 16) * factors[i] * factor + 0x1.8p23f);
    return scale;
}

/* shape: planes, tokens, heads, numbers of a head, first tokens that are stored exactly, and two that are not used.
 * The largest magnitude, as the bits of a bfloat16; where that is above LARGEST_MAGNITUDE the chunk is worthless. */
EXPORT VERSIONS int64_t kv_quantise(const int64_t *sizes, size_t sizes_bytes, const u8 *words, size_t words_bytes,
                                    u8 *restrict chunk, size_t chunk_bytes, u8 *restrict scratch, size_t scratch_bytes) {
    Shape shape;
    if (!shape_of(sizes, sizes_bytes, words_bytes, chunk_bytes, scratch_bytes, &shape))
        return KV_MISFIT;
    f32 *factors = (f32 *)scratch;
    u16 *peaks = (u16 *)(scratch + 4 * shape.channels);
    uint32_t largest = 0;
    for (size_t plane = 0; plane < shape.planes; plane++) {
        const u16 *in = (const u16 *)words + plane * shape.tokens * shape.channels, *coded = in + shape.exact * shape.channels;
        u8 *out = chunk + plane * shape.plane_bytes, *exponents = out + shape.exponents_at;
        f32 *scales = (f32 *)(out + shape.scales_at);
        uint32_t first = magnitudes(in, shape.exact, shape.channels, peaks);
        uint32_t rest = magnitudes(coded, shape.tokens - shape.exact, shape.channels, peaks);
        first = first < rest ? rest : first;
        largest = largest < first ? first : largest;
        if (largest > LARGEST_MAGNITUDE)
            return largest;
        memset(out + shape.plane_bytes - 4, 0, 4);
        for (size_t head = 0; head < shape.heads; head++)
            level(peaks + head * shape.dim, shape.dim, exponents + head * shape.dim, factors + head * shape.dim);
        memset(out, 0, shape.exact * shape.channels);
        memset(out + shape.scales_at, 0, 4 * shape.exact * shape.heads);
        memcpy(out + shape.exact_at, in, 2 * shape.exact * shape.channels);
        for (size_t row = shape.exact * shape.heads; row < shape.tokens * shape.heads; row++)
            scales[row] = quantise_row(in + row * shape.dim, factors + row % shape.heads * shape.dim, shape.dim,
                                       out + row * shape.dim);
    }
    return largest;
}

/* shape: as of kv_quantise, and of the tokens to be written the first and the one after the last. */
EXPORT VERSIONS int64_t kv_dequantise(const int64_t *sizes, size_t sizes_bytes, const u8 *chunk, size_t chunk_bytes,
                                      u8 *restrict words, size_t words_bytes, u8 *restrict scratch,
                                      size_t scratch_bytes) {
    Shape shape;
    if (!shape_of(sizes, sizes_bytes, words_bytes, chunk_bytes, scratch_bytes, &shape))
        return KV_MISFIT;
    f32 *factors = (f32 *)scratch;
    size_t exact = shape.last < shape.exact ? shape.last : shape.exact;
    for (size_t plane = 0; plane < shape.planes; plane++) {
        const u8 *in = chunk + plane * shape.plane_bytes;
        u16 *restrict out = (u16 *)words + plane * shape.tokens * shape.channels;
        for (size_t i = 0; i < shape.channels; i++)
            factors[i] = float_of((uint32_t)((int8_t)in[shape.exponents_at + i] + 127) << 23);
        for (size_t row = shape.first * shape.heads; row < shape.last * shape.heads; row++) {
            float scale = ((const f32 *)(in + shape.scales_at))[row];
            const f32 *restrict own = factors + row % shape.heads * shape.dim;
            for (size_t i = 0; i < shape.dim; i++) {
                uint32_t bits = bits_of((float)(int8_t)in[row * shape.dim + i] * scale * own[i]);
                out[row * shape.dim + i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
            }
        }
        if (shape.first < exact)
            memcpy(out + shape.first * shape.channels, in + shape.exact_at + 2 * shape.first * shape.channels,
                   2 * (exact - shape.first) * shape.channels);
    }
    return 0;
}
