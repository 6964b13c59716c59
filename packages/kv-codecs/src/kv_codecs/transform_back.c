/* The codec `kvtc`: a payload's codes into whole steps of components, and these into keys and values. rows.c has the codes,
 * transform.c the way there and what both do about floating point. numpy_transform.py says what is computed.
 */
#include "transform.h"

/* ---- from floats to words ---- */

/* Rounded to the nearest, the even one of two; no farther than the largest. */
INLINE uint16_t narrow_half(float number) {
    uint32_t bits = bits_of_float(number), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    uint32_t normal = (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13;
    uint32_t small = bits_of_float(float_of(rest) + 0.5f) - 0x3f000000; /* units of 2**-24, as 2**-24 is 0.5's last bit */
    uint32_t half = rest < (113u << 23) ? small : normal;
    half = rest > 0x7f800000 ? 0x7e00 : half > 0x7bff || rest >= 0x47800000 ? 0x7bff : half;
    return (uint16_t)(sign | half);
}

INLINE uint16_t narrow_bfloat(float number) {
    uint32_t bits = bits_of_float(number);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE void narrow_row(int64_t dtype, const float *restrict numbers, u8 *restrict words) {
    if (dtype == BFLOAT16)
        for (int t = 0; t < TILE; t++)
            ((u16 *)words)[t] = narrow_bfloat(numbers[t]);
    else if (dtype == FLOAT16)
        for (int t = 0; t < TILE; t++)
            ((u16 *)words)[t] = narrow_half(numbers[t]);
    else
        memcpy(words, numbers, 4 * TILE);
}

/* ---- with AVX-512 ---- */

#ifdef KV_X86
/* Of 128 × each row's numbers, as a number that is 128 too large adds that. */
static void excess_of(const i8 *matrix, size_t block, int32_t *excess) {
    memset(excess, 0, sizeof *excess * block);
    for (size_t i = 0; i < (block + 3) / 4; i++)
        for (size_t row = 0; row < block; row++) {
            const i8 *four = matrix + 4 * (i * block + row);
            excess[row] -= 128 * (four[0] + four[1] + four[2] + four[3]);
        }
}

/* As kv_multiply of bytes, twice as fast. matrix: [block / 4, rounded up][block][4], with zeros beyond the block; numbers: [block / 4,
 * rounded up] times TILE times four, `stride` bytes apart, each of them 128 too large. */
VNNI static void bytes_vnni(const i8 *matrix, size_t block, const u8 *numbers, size_t stride, int32_t *restrict sums) {
    int32_t excess[MOST_CHANNELS];
    excess_of(matrix, block, excess);
    for (size_t next = 0; next < block; next += SUM_ROWS) {
        size_t row = sum_rows_from(next, block);
        __m512i sum[SUM_ROWS][4];
        for (int j = 0; j < SUM_ROWS; j++)
            sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = _mm512_set1_epi32(excess[row + (size_t)j]);
        for (size_t i = 0; i < (block + 3) / 4; i++) {
            __m512i some[4];
            for (int k = 0; k < 4; k++)
                some[k] = _mm512_loadu_si512(numbers + i * stride + 64 * (size_t)k);
            for (int j = 0; j < SUM_ROWS; j++) {
                int32_t four;
                memcpy(&four, matrix + 4 * (i * block + row + (size_t)j), 4);
                __m512i own = _mm512_set1_epi32(four);
                for (int k = 0; k < 4; k++)
                    sum[j][k] = _mm512_dpbusd_epi32(sum[j][k], some[k], own);
            }
        }
        for (int j = 0; j < SUM_ROWS; j++)
            for (int k = 0; k < 4; k++)
                _mm512_storeu_si512(sums + (row + (size_t)j) * TILE + 16 * k, sum[j][k]);
    }
}

/* The upper words of 32 numbers, rounded to the even one of two. */
VNNI static inline __m512i narrow(__m512 first, __m512 second) {
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

VNNI static inline size_t channel_of(size_t first, size_t half, int i) {
    return first + (size_t)(i / 2) * half + (size_t)(i % 2) * LANES;
}

/* What a group's tokens are computed from: its part of the matrix, and of each channel what its sums begin with, as each step is
 * FAR_OFFSET too large. */
typedef struct {
    __m512i matrix[MOST_CHANNELS / 4][GROUP_REGISTERS], start[GROUP_REGISTERS];
} Group;

VNNI static void take_group(Group *group, const i8 *matrix, size_t block, size_t first, size_t half) {
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
VNNI static inline void tokens_of_group(const Part *part, const Group *group, const u8 *bytes, size_t stride, size_t first,
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

/* Tokens of a block, of whole heads, from its decoded steps. vectors: of four rows. matrix: as for bytes_vnni. far_tiles: of each
 * tile, NO_FAR if all of its steps are bytes; else it is left alone. turns: of each token the cosines of all frequencies, then the sines;
 * NULL: they are not turned. words: of the plane's first token and the block's first channel. ahead: what is read next. */
VNNI static void block_to_words(const Part *part, const u8 *bytes, size_t vectors, const i8 *matrix, const f32 *scales, const f32 *means,
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
#endif

/* ---- from steps to words ---- */

/* A chunk's blocks, a part at a time: a block if it has whole heads, else a whole plane, as what is turned together is in it. */
typedef struct {
    Layout layout;
    size_t channels, blocks, bytes; /* of a part; bytes: of its decoded steps */
    size_t tiles;
    int is_fast; /* whether block_to_words does it */
} Parts;

static Parts parts_of(const Shape *shape, const Sizes *sizes) {
    size_t block = (size_t)shape->block, head = (size_t)shape->head_dim;
    Parts parts = {.layout = layout_of(block, sizes->tokens), .tiles = (sizes->tokens + TILE - 1) / TILE};
    parts.channels = block % head ? sizes->channels : block;
    parts.blocks = parts.channels / block;
    parts.bytes = parts.blocks * decoded_bytes(&parts.layout);
#ifdef KV_X86
    parts.is_fast = block % head == 0 && has_tiles(shape, sizes);
#endif
    return parts;
}

/* What a part needs while it is decoded. Its Python counterpart is Transform.scratch_bytes. */
typedef struct {
    u8 *bytes;           /* the steps, and room for what a whole tile reads beyond the last ones */
    f32 *turns;          /* as block_to_words takes them, of every table */
    int32_t *sums;
    u8 *moved;
    uint32_t *far_tiles; /* of each tile the last number in `far`; NO_FAR: there is none */
    Far *far;
} Scratch;

static size_t scratch_of(const Shape *shape, const Parts *parts, u8 *memory, Scratch *scratch) {
    size_t padded = VECTOR / TOGETHER * parts->layout.vectors, at = 0;
    scratch->bytes = memory;
    at += parts->bytes + TOGETHER * TILE;
    scratch->turns = (f32 *)(memory + at);
    at += 4 * (size_t)(shape->tables * shape->head_dim) * padded;
    scratch->sums = (int32_t *)(memory + at);
    at += 4 * TILE * parts->channels;
    scratch->moved = memory + at;
    at += 4 * TILE * parts->channels;
    scratch->far_tiles = (uint32_t *)(memory + at);
    at += 4 * parts->tiles;
    scratch->far = (Far *)(memory + at);
    return at + sizeof(Far) * parts->bytes;
}

/* Of each table and token the cosines of all frequencies, then the sines. */
VERSIONS static void turn_tables(const Shape *shape, const Sizes *sizes, const u8 *turns, size_t padded, f32 *restrict to) {
    size_t head = (size_t)shape->head_dim;
    for (size_t table = 0; table < (size_t)shape->tables; table++)
        transpose32((const u32 *)turns + table * head * turns_stride(sizes), turns_stride(sizes), head, padded,
                    (u32 *)to + table * head * padded, head);
}

/* Links the numbers of each tile. */
static void link_far(const Parts *parts, Scratch *scratch, const Far *end) {
    size_t stride = VECTOR * parts->layout.vectors;
    for (size_t tile = 0; tile < parts->tiles; tile++)
        scratch->far_tiles[tile] = NO_FAR;
    for (Far *far = scratch->far; far < end; far++) {
        uint32_t *tile = scratch->far_tiles + far->place % stride / (TOGETHER * TILE);
        far->next = *tile;
        *tile = (uint32_t)(far - scratch->far);
    }
}

/* A block's steps of a tile, two of 16 bits side by side. place: of the block's first byte. first: the tile's first token. */
INLINE void to_pairs_of(const Scratch *scratch, size_t place, size_t stride, size_t block, size_t first, size_t tokens,
                        int16_t *restrict pairs) {
    for (size_t i = 0; i < block; i += 2) {
        const u8 *own = scratch->bytes + place + i / TOGETHER * stride + TOGETHER * first + i % TOGETHER;
        for (size_t t = 0; t < tokens; t++) {
            pairs[i * TILE + 2 * t] = (int16_t)(own[TOGETHER * t] - FAR_OFFSET);
            pairs[i * TILE + 2 * t + 1] = (int16_t)(own[TOGETHER * t + 1] - FAR_OFFSET);
        }
    }
    for (uint32_t next = scratch->far_tiles[first / TILE]; next != NO_FAR; next = scratch->far[next].next) {
        const Far *far = scratch->far + next;
        if (far->place < place || far->place - place >= (block + TOGETHER - 1) / TOGETHER * stride)
            continue;
        size_t within = (far->place - place) % stride, t = within / TOGETHER - first;
        size_t i = TOGETHER * ((far->place - place) / stride) + within % TOGETHER;
        pairs[i / 2 * 2 * TILE + 2 * t + i % 2] = (int16_t)far->number;
    }
}

/* A tile of a part from the sums of its channels. words: of the first token and channel. */
INLINE void from_sums(const Shape *shape, const Sizes *sizes, size_t channels, const int32_t *restrict sums, const f32 *scales,
                      const f32 *means, const f32 *cosines, u8 *restrict moved, u8 *words, size_t tokens) {
    size_t n = sizes->channels, half = (size_t)shape->head_dim / 2, stride = turns_stride(sizes);
    for (size_t low = 0; low < channels; low += low % half == half - 1 ? half + 1 : 1) {
        float both[2][TILE];
        for (size_t i = 0; i < 2; i++) {
            size_t channel = low + i * half;
            float scale = scales[channel], mean = means[channel];
            for (size_t t = 0; t < TILE; t++)
                both[i][t] = (float)sums[channel * TILE + t] * scale + mean;
        }
        if (cosines)
            turn(cosines + low % half * stride, half * stride, 1.0f, both[0], both[1]);
        for (size_t i = 0; i < 2; i++)
            narrow_row(shape->dtype, both[i], moved + (low + i * half) * TILE * sizes->item);
    }
    if (shape->dtype == FLOAT32)
        transpose32((const u32 *)moved, TILE, channels, tokens, (u32 *)words, n);
    else
        kv_transpose16((const u16 *)moved, TILE, channels, tokens, (u16 *)words, n);
}

/* The tiles of a part of a plane that block_to_words leaves alone, or all of them. words: of the plane's first token and the
 * part's first channel; and so on. backward, matrix: of the part's first block. */
INLINE void tiles_to_words(const Shape *shape, const Sizes *sizes, const Parts *parts, const Scratch *scratch,
                           const i16 *backward, const i8 *matrix, const f32 *scales, const f32 *means, const f32 *cosines,
                           u8 *words) {
    ALIGNED int16_t pairs[MOST_CHANNELS * TILE] = {0}; /* as those beyond a tile's tokens are read too */
    size_t block = (size_t)shape->block, stride = VECTOR * parts->layout.vectors, of_block = decoded_bytes(&parts->layout);
    (void)matrix; /* not every processor multiplies bytes */
    for (size_t tile = 0; tile < parts->tiles; tile++) {
        size_t first = tile * TILE, tokens = sizes->tokens - first < TILE ? sizes->tokens - first : TILE;
        int are_bytes = scratch->far_tiles[tile] == NO_FAR;
        if (parts->is_fast && are_bytes)
            continue;
        for (size_t at = 0; at < parts->blocks; at++) {
            int32_t *sums = scratch->sums + at * block * TILE;
#ifdef KV_X86
            if (are_bytes && block >= SUM_ROWS && has_vnni()) {
                bytes_vnni(matrix + at * block * TOGETHER * parts->layout.fours, block,
                           scratch->bytes + at * of_block + TOGETHER * first, stride, sums);
                continue;
            }
#endif
            to_pairs_of(scratch, at * of_block, stride, block, first, tokens, pairs);
            kv_multiply(backward + at * block * block, block, pairs, sums);
        }
        from_sums(shape, sizes, parts->channels, scratch->sums, scales, means, cosines ? cosines + first : NULL, scratch->moved,
                  words + first * sizes->channels * sizes->item, tokens);
    }
}

/* 0, or KV_DAMAGED. payload: behind the tokens that are stored unencoded. words, turns, tables, means: as for `kv_project`. scales: of each channel of each block, [blocks][block].
 * backward: [blocks][block][block], int16; matrix: the same as bytes, [blocks][block / 4, rounded up][block][4]. low_bits and so on:
 * as `RowCodes` has them. memory: as `scratch_of` divides it. */
EXPORT VERSIONS int64_t kv_decode(const int64_t *described, size_t shape_bytes, const u8 *payload, size_t payload_bytes,
                                  const u8 *turns, size_t turns_bytes, const u8 *tables, size_t tables_bytes,
                                  const u8 *means, size_t means_bytes, const u8 *scales, size_t scales_bytes,
                                  const u8 *backward, size_t backward_bytes, const u8 *matrix, size_t matrix_bytes,
                                  const u8 *low_bits, size_t low_bits_bytes, const u8 *shares, size_t shares_bytes,
                                  const u8 *starts, size_t starts_bytes, const u8 *symbols, size_t symbols_bytes,
                                  u8 *restrict words, size_t words_bytes, u8 *restrict memory, size_t memory_bytes) {
    const Shape *shape = (const Shape *)described;
    Sizes sizes;
    Codes codes = {low_bits, shares, starts, symbols, 0};
    if (!kv_is_shape(shape, shape_bytes, &sizes) ||
        !kv_fits(shape, &sizes, words_bytes, turns_bytes, tables, tables_bytes, means_bytes) || scales_bytes != means_bytes ||
        !kv_are_codes(&codes, low_bits_bytes, shares_bytes, starts_bytes, symbols_bytes))
        return KV_MISFIT;
    Parts parts = parts_of(shape, &sizes);
    Scratch scratch;
    size_t block = (size_t)shape->block, n = sizes.channels, padded = VECTOR / TOGETHER * parts.layout.vectors;
    size_t units = sizes.blocks * parts.layout.units, of_block = block * TOGETHER * parts.layout.fours;
    if (backward_bytes != 2 * sizes.blocks * block * block || matrix_bytes != sizes.blocks * of_block ||
        scratch_of(shape, &parts, memory, &scratch) != memory_bytes || parts.bytes > UINT32_MAX ||
        (uintptr_t)memory % 4)
        return KV_MISFIT;
    if (payload_bytes < units + STATES_BYTES)
        return KV_DAMAGED;
    if (parts.is_fast)
        turn_tables(shape, &sizes, turns, padded, scratch.turns);
    memset(scratch.bytes + parts.bytes, 0, TOGETHER * TILE);
    Decoder decoder;
    begin_decoding(&decoder, payload + units, payload + payload_bytes);
    for (size_t first = 0; first < sizes.blocks * block; first += parts.channels) { /* the part's first channel of all planes' */
        size_t which = first / block, plane = first / n;
        Far *far = scratch.far;
        for (size_t at = 0; far && at < parts.blocks; at++)
            far = kv_decode_block(&decoder, &parts.layout, &codes, payload + (which + at) * parts.layout.units,
                                  at * decoded_bytes(&parts.layout), scratch.bytes, far);
        if (!far)
            return KV_DAMAGED;
        link_far(&parts, &scratch, far);
        const f32 *own_scales = (const f32 *)scales + first, *own_means = (const f32 *)means + first;
        const i8 *own_matrix = (const i8 *)matrix + which * of_block;
        u8 *own_words = words + (plane * sizes.tokens * n + first % n) * sizes.item;
#ifdef KV_X86
        if (parts.is_fast) {
            Part part = {n, (size_t)shape->head_dim / 2, block, 0, block, NULL, 0};
            const f32 *own_turns = NULL;
            Ahead next_matrix = {(const u8 *)own_matrix + of_block, 64, which + 1 < sizes.blocks ? of_block / 64 : 0, 64};
            if (plane < (size_t)shape->layers)
                own_turns = scratch.turns + (size_t)((const int32_t *)tables)[plane] * (size_t)shape->head_dim * padded;
            block_to_words(&part, scratch.bytes, parts.layout.vectors, own_matrix, own_scales, own_means, own_turns,
                           scratch.far_tiles, (u16 *)own_words, sizes.tokens, &next_matrix);
        }
#endif
        if (!parts.is_fast || far > scratch.far)
            tiles_to_words(shape, &sizes, &parts, &scratch, (const i16 *)backward + which * block * block, own_matrix,
                           own_scales, own_means, cosines_of(shape, &sizes, turns, tables, plane, 0), own_words);
    }
    return kv_ends_well(&decoder) ? 0 : KV_DAMAGED;
}
