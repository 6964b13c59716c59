/* Lists for a device from requests' block tables, for kv_cuda's copy/gpu.py. The rules of library.c for buffers apply
 * here.
 */
#include "c_library.h"

#define KV_OTHER (-2) /* Python has to look: something does not exist, or would be written twice */

typedef struct {
    int64_t chunk_tokens, block_tokens, blocks, pool, pool_bytes, chunk_bytes, aligned;
} Place;

typedef struct {
    int64_t first, last;
} Move;

/* For each move of tokens `first` to `last` of a prompt: the blocks of the chunks that they touch, and then these chunks'
 * addresses.
 *
 * place: a `Place`; `pool` is an address. moves: `Move`s. tables, chunks: of each move in turn, its blocks, int32, from
 * the first of these chunks to the last token, and these chunks' offsets in the pool, int64. written: a bit for each
 * block, set by earlier calls where it has been written; empty: blocks are read. Blocks that hold none of the tokens are
 * passed on as they are. */
EXPORT int64_t kv_list_moves(const u8 *place, size_t place_bytes, const u8 *moves, size_t moves_bytes, const u8 *tables,
                             size_t tables_bytes, const u8 *chunks, size_t chunks_bytes, u8 *written,
                             size_t written_bytes, u8 *listed, size_t listed_bytes) {
    Place p;
    Move m;
    int64_t number;
    int32_t block;
    if (place_bytes != sizeof p || moves_bytes % sizeof m)
        return KV_MISFIT;
    memcpy(&p, place, sizeof p);
    if (p.chunk_tokens < 1 || p.block_tokens < 1 || p.chunk_tokens > INT32_MAX || p.chunk_tokens % p.block_tokens ||
        p.blocks < 0 || p.blocks > INT32_MAX || p.pool_bytes < 0 || p.chunk_bytes < 0 || p.aligned < 1 ||
        (written_bytes && written_bytes < (uint64_t)(p.blocks + 7) / 8))
        return KV_MISFIT;
    for (; moves_bytes; moves += sizeof m, moves_bytes -= sizeof m) {
        memcpy(&m, moves, sizeof m);
        if (m.first < 0 || m.last <= m.first || m.last > INT32_MAX)
            return KV_MISFIT;
        size_t first_chunk = m.first / p.chunk_tokens, count = (m.last - 1) / p.chunk_tokens + 1 - first_chunk;
        size_t begin = first_chunk * (p.chunk_tokens / p.block_tokens);
        size_t unused = m.first / p.block_tokens - begin, blocks = (m.last - 1) / p.block_tokens + 1 - begin;
        if (blocks > tables_bytes / sizeof block || count > chunks_bytes / sizeof number ||
            blocks + count > listed_bytes / sizeof number)
            return KV_MISFIT;
        for (size_t at = 0; at < blocks; at++, tables += sizeof block, listed += sizeof number) {
            memcpy(&block, tables, sizeof block);
            if (at >= unused && (block < 0 || block >= p.blocks))
                return KV_OTHER;
            if (at >= unused && written_bytes) {
                u8 bit = (u8)(1 << block % 8);
                if (written[block / 8] & bit)
                    return KV_OTHER;
                written[block / 8] |= bit;
            }
            number = block;
            memcpy(listed, &number, sizeof number);
        }
        for (size_t at = 0; at < count; at++, chunks += sizeof number, listed += sizeof number) {
            memcpy(&number, chunks, sizeof number);
            if (number < 0 || number > p.pool_bytes - p.chunk_bytes || number % p.aligned)
                return KV_OTHER;
            number = (int64_t)((uint64_t)p.pool + (uint64_t)number);
            memcpy(listed, &number, sizeof number);
        }
        tables_bytes -= blocks * sizeof block;
        chunks_bytes -= count * sizeof number;
        listed_bytes -= (blocks + count) * sizeof number;
    }
    return 0;
}
