/* Whole blocks of an engine's cache on a CPU, copied into chunks and back, for kv_cuda's copy/cpu.py: what it does there
 * with torch's strided copies, without a call for each block. The rules of library.c for buffers apply here.
 *
 * A chunk has [tokens][heads][dims] of each layer, one after the other. In a block either axis may be cut in tiles, and
 * tokens may lie closer together than dims: then a matrix is transposed, in squares of a cache line each way.
 *
 * Copies to the engine that are larger than the caches write around them: an ordinary store first reads the line that it
 * overwrites. Chunks are gathered from places too far apart to gain by it.
 */
#include "c_library.h"

#ifdef __SSE2__
#include <emmintrin.h>
#define STREAM(out, words) _mm_stream_si128((__m128i *)(out), (__m128i)(words))
#define STREAMS_END() _mm_sfence()
#else
#define STREAM(out, words) memcpy(out, &(words), 16)
#define STREAMS_END() (void)0
#endif

typedef uint16_t v16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint32_t v32 __attribute__((vector_size(16), aligned(1), may_alias));

/* Of one part, counted in words: how many, and how far apart in the engine's memory. In a chunk layers are `chunk_layer`
 * apart, and all else lies side by side. */
typedef struct {
    size_t word, offset, layers, layer, chunk_layer, block, tiles, tile, tokens, token, heads, head, dim_tiles, dim_tile,
        dims, dim;
} Part;

enum { RUN_NUMBERS = 3, LARGEST = 1 << 30, LINE = 64, LINES_AHEAD = 3 /* of columns that are prefetched */ };

enum { TO_CHUNK, TO_ENGINE, TO_ENGINE_STREAMED /* around the caches */ };

/* A matrix of words: `tokens` rows of `dims` in a chunk, `row` apart; in the engine's memory at `token` and `dim`. */
typedef struct {
    size_t tokens, dims, row, token, dim;
} Matrix;

INLINE void stream(u8 *out, const u8 *in, size_t bytes) {
    size_t before = -(uintptr_t)out % LINE, at = before;
    if (bytes < before + LINE) {
        memcpy(out, in, bytes);
        return;
    }
    memcpy(out, in, before);
    for (; at + LINE <= bytes; at += LINE)
        for (size_t i = 0; i < LINE; i += sizeof(v16)) {
            v16 words = *(const v16 *)(in + at + i);
            STREAM(out + at + i, words);
        }
    memcpy(out + at, in + at, bytes - at);
}

INLINE void move(u8 *engine, u8 *chunk, size_t bytes, int way) {
    if (way == TO_CHUNK)
        memcpy(chunk, engine, bytes);
    else if (way == TO_ENGINE)
        memcpy(engine, chunk, bytes);
    else
        stream(engine, chunk, bytes);
}

INLINE void move_word(u8 *engine, u8 *chunk, size_t word, int way) {
    int plain = way == TO_CHUNK ? TO_CHUNK : TO_ENGINE; /* a word fills no line */
    switch (word) { /* a known size is no call */
    case 1: move(engine, chunk, 1, plain); break;
    case 2: move(engine, chunk, 2, plain); break;
    case 4: move(engine, chunk, 4, plain); break;
    default: move(engine, chunk, 8, plain);
    }
}

INLINE void move_words(const Matrix *m, u8 *engine, u8 *chunk, size_t word, int way) {
    for (size_t token = 0; token < m->tokens; token++)
        for (size_t dim = 0; dim < m->dims; dim++)
            move_word(engine + (token * m->token + dim * m->dim) * word, chunk + (token * m->row + dim) * word, word,
                      way);
}

#if defined(__clang__) || __GNUC__ >= 12
#define HAS_SQUARES 1
/* A square of 16 bytes each way, transposed by perfect shuffles: after log2(rows) of them rows are columns. */
INLINE void square16(const u8 *in, size_t in_row, u8 *out, size_t out_row, int is_streamed) {
    v16 a[8], b[8];
    for (int i = 0; i < 8; i++)
        a[i] = *(const v16 *)(in + i * in_row);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        memcpy(a, b, sizeof a);
    }
    for (int i = 0; i < 8; i++)
        if (is_streamed)
            STREAM(out + i * out_row, a[i]);
        else
            *(v16 *)(out + i * out_row) = a[i];
}

INLINE void square32(const u8 *in, size_t in_row, u8 *out, size_t out_row, int is_streamed) {
    v32 a[4], b[4];
    for (int i = 0; i < 4; i++)
        a[i] = *(const v32 *)(in + i * in_row);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 2; i++) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + 2], 0, 4, 1, 5);
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 2], 2, 6, 3, 7);
        }
        memcpy(a, b, sizeof a);
    }
    for (int i = 0; i < 4; i++)
        if (is_streamed)
            STREAM(out + i * out_row, a[i]);
        else
            *(v32 *)(out + i * out_row) = a[i];
}

/* Have the processor fetch what the squares from row `r` and column `c` on will read, a line of each of `line` columns:
 * they are too far apart for it to see a pattern. Beyond the last column the next rows begin. */
INLINE void prefetch(const u8 *in, size_t in_row, size_t rows, size_t columns, size_t r, size_t c, size_t line,
                     size_t word) {
    if (c >= columns) {
        c -= columns;
        r += line;
    }
    for (size_t end = c + line; r < rows && c < columns && c < end; c++)
        __builtin_prefetch(in + c * in_row + r * word);
}
#endif

/* Tokens are neighbours in the engine's memory, dims in the chunk. Squares are in the order that fills the lines which
 * are written: one that is streamed before it is full is written more than once. */
INLINE void transpose(const Matrix *m, u8 *engine, u8 *chunk, size_t word, int way) {
    size_t tokens = 0, dims = 0;
#ifdef HAS_SQUARES
    size_t side = 16 / word, line = LINE / word, chunk_row = m->row * word, engine_row = m->dim * word;
    if (word == 2 || word == 4) {
        tokens = m->tokens / side * side;
        dims = m->dims / side * side;
    }
    int to_chunk = way == TO_CHUNK;
    const u8 *in = to_chunk ? engine : chunk;
    u8 *out = to_chunk ? chunk : engine;
    size_t in_row = to_chunk ? engine_row : chunk_row, out_row = to_chunk ? chunk_row : engine_row;
    size_t rows = to_chunk ? tokens : dims, columns = to_chunk ? dims : tokens;
    int is_streamed = way == TO_ENGINE_STREAMED && ((uintptr_t)out | out_row) % 16 == 0;
    for (size_t r0 = 0; r0 < rows; r0 += line)
        for (size_t c0 = 0; c0 < columns; c0 += line) {
            if (word == 4) /* squares of smaller words take longer than their lines */
                prefetch(in, in_row, rows, columns, r0, c0 + LINES_AHEAD * line, line, word);
            for (size_t r = r0; r < rows && r < r0 + line; r += side)
                for (size_t c = c0; c < columns && c < c0 + line; c += side) {
                    const u8 *from = in + c * in_row + r * word;
                    u8 *to = out + r * out_row + c * word;
                    if (word == 2)
                        square16(from, in_row, to, out_row, is_streamed);
                    else
                        square32(from, in_row, to, out_row, is_streamed);
                }
        }
#endif
    Matrix right = *m, below = *m; /* what is left of a whole number of squares */
    right.dims = m->dims - dims;
    right.tokens = tokens;
    move_words(&right, engine + dims * m->dim * word, chunk + dims * word, word, way);
    below.tokens = m->tokens - tokens;
    move_words(&below, engine + tokens * word, chunk + tokens * m->row * word, word, way);
}

/* Two tokens of each dim are neighbours in the engine's memory, of all dims one run. */
INLINE void interleave(const Matrix *m, u8 *engine, u8 *chunk, int way) {
    u16 *both = (u16 *)engine, *first = (u16 *)chunk, *second = first + m->row;
    if (way != TO_CHUNK)
        for (size_t dim = 0; dim < m->dims; dim++) {
            both[2 * dim] = first[dim];
            both[2 * dim + 1] = second[dim];
        }
    else
        for (size_t dim = 0; dim < m->dims; dim++) {
            first[dim] = both[2 * dim];
            second[dim] = both[2 * dim + 1];
        }
}

INLINE void copy_matrix(const Matrix *m, u8 *engine, u8 *chunk, size_t word, int way) {
    if (m->dim == 1 && m->token == m->dims && m->row == m->dims)
        move(engine, chunk, m->tokens * m->dims * word, way);
    else if (m->dim == 1)
        for (size_t token = 0; token < m->tokens; token++)
            move(engine + token * m->token * word, chunk + token * m->row * word, m->dims * word, way);
    else if (m->token == 1 && m->tokens == 2 && m->dim == 2 && word == 2)
        interleave(m, engine, chunk, way);
    else if (m->token == 1)
        transpose(m, engine, chunk, word, way);
    else
        move_words(m, engine, chunk, word, way);
}

INLINE void copy_block(const Part *p, u8 *engine, u8 *chunk, size_t word, int way) {
    size_t head_words = p->dim_tiles * p->dims, row = p->heads * head_words;
    Matrix m = {p->tokens, p->dims, row, p->token, p->dim};
    size_t heads = p->heads;
    if (p->dim == 1 && p->dim_tiles == 1 && p->head == p->dims) { /* a token's heads are one run */
        m.dims = row;
        heads = 1;
    } else if (p->dim == 1 && row > p->dims)
        m.tokens = 1; /* all heads of a token, then the next: that is how a chunk's bytes lie */
    for (size_t tile = 0; tile < p->tiles; tile++)
        for (size_t token = 0; token < p->tokens; token += m.tokens)
            for (size_t head = 0; head < heads; head++)
                for (size_t dims = 0; dims < p->dim_tiles; dims++)
                    copy_matrix(
                        &m, engine + (tile * p->tile + token * p->token + head * p->head + dims * p->dim_tile) * word,
                        chunk + ((tile * p->tokens + token) * row + head * head_words + dims * p->dims) * word, word,
                        way);
}

INLINE void copy_block_one_way(const Part *p, u8 *engine, u8 *chunk, size_t word, int64_t way) {
    switch (way) { /* each a known one, too */
    case TO_CHUNK: copy_block(p, engine, chunk, word, TO_CHUNK); break;
    case TO_ENGINE: copy_block(p, engine, chunk, word, TO_ENGINE); break;
    default: copy_block(p, engine, chunk, word, TO_ENGINE_STREAMED);
    }
}

/* The places of `count` things that are `distance` apart reach `*beyond` further; 0: further than can be counted. */
INLINE int reaches(size_t count, size_t distance, size_t *beyond) {
    size_t more;
    return !__builtin_mul_overflow(count - 1, distance, &more) && !__builtin_add_overflow(*beyond, more, beyond);
}

static int is_part(const Part *p) {
    size_t counts[] = {p->word, p->layers, p->tiles, p->tokens, p->heads, p->dim_tiles, p->dims}, words = 1;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i] < 1 || counts[i] > LARGEST || __builtin_mul_overflow(words, counts[i], &words) || words > LARGEST)
            return 0;
    return p->word == 1 || p->word == 2 || p->word == 4 || p->word == 8;
}

/* way: TO_CHUNK, TO_ENGINE or TO_ENGINE_STREAMED. shape: a `Part`. runs: of adjacent blocks, for each the word of the pool
 * where its first token in the first layer is, the first block, and how many there are. */
EXPORT VERSIONS int64_t kv_copy_blocks(int64_t way, const u8 *shape, size_t shape_bytes, const u8 *runs,
                                       size_t runs_bytes, u8 *engine, size_t engine_bytes, u8 *pool, size_t pool_bytes) {
    Part p;
    size_t run[RUN_NUMBERS], count = runs_bytes / sizeof run, in_block = 0;
    if (shape_bytes != sizeof p || runs_bytes % sizeof run || way < TO_CHUNK || way > TO_ENGINE_STREAMED)
        return KV_MISFIT;
    memcpy(&p, shape, sizeof p);
    if (!is_part(&p) || !reaches(p.tiles, p.tile, &in_block) || !reaches(p.tokens, p.token, &in_block) ||
        !reaches(p.heads, p.head, &in_block) || !reaches(p.dim_tiles, p.dim_tile, &in_block) ||
        !reaches(p.dims, p.dim, &in_block))
        return KV_MISFIT;
    size_t block_words = p.tiles * p.tokens * p.heads * p.dim_tiles * p.dims;
    for (size_t i = 0; i < count; i++) { /* before the first byte is moved */
        memcpy(run, runs + i * sizeof run, sizeof run);
        size_t theirs = in_block, ours = run[0], last;
        if (run[2] < 1 || __builtin_add_overflow(run[1], run[2], &last) || !reaches(last, p.block, &theirs) ||
            __builtin_add_overflow(theirs, p.offset, &theirs) || !reaches(p.layers, p.layer, &theirs) ||
            theirs >= engine_bytes / p.word || __builtin_mul_overflow(run[2], block_words, &last) ||
            __builtin_add_overflow(ours, last - 1, &ours) || !reaches(p.layers, p.chunk_layer, &ours) ||
            ours >= pool_bytes / p.word)
            return KV_MISFIT;
    }
    for (size_t i = 0; i < count; i++) {
        memcpy(run, runs + i * sizeof run, sizeof run);
        for (size_t layer = 0; layer < p.layers; layer++)
            for (size_t block = 0; block < run[2]; block++) {
                u8 *theirs = engine + (p.offset + layer * p.layer + (run[1] + block) * p.block) * p.word;
                u8 *ours = pool + (run[0] + layer * p.chunk_layer + block * block_words) * p.word;
                switch (p.word) { /* a known one each */
                case 1: copy_block_one_way(&p, theirs, ours, 1, way); break;
                case 2: copy_block_one_way(&p, theirs, ours, 2, way); break;
                case 4: copy_block_one_way(&p, theirs, ours, 4, way); break;
                default: copy_block_one_way(&p, theirs, ours, 8, way);
                }
            }
    }
    if (way == TO_ENGINE_STREAMED)
        STREAMS_END(); /* before any other thread reads */
    return 0;
}
