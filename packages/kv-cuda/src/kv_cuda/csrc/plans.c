/* Lists for a device from a request's block table, for kv_cuda's copy/gpu.py. The rules of library.c for buffers apply
 * here.
 */
#include "c_library.h"

#define KV_OTHER (-2) /* Python has to look: something does not exist, or would be written twice */

typedef struct {
    int64_t first, last, chunk_tokens, block_tokens, blocks, pool, pool_bytes, chunk_bytes, aligned;
} Move;

/* For tokens `first` to `last` of a prompt: the blocks of the chunks that they touch, and then these chunks' addresses.
 *
 * shape: a `Move`; `pool` is an address. table: blocks, int32, from the prompt's first token on. chunks: offsets in the
 * pool, int64, from the chunk of token `first` on. written: a bit for each block, set by earlier calls where it has been
 * written; empty: blocks are read. Blocks that hold none of the tokens are passed on as they are. */
EXPORT int64_t kv_list_move(const u8 *shape, size_t shape_bytes, const u8 *table, size_t table_bytes, const u8 *chunks,
                            size_t chunks_bytes, u8 *written, size_t written_bytes, u8 *listed, size_t listed_bytes) {
    Move m;
    int64_t offset, number;
    int32_t block;
    if (shape_bytes != sizeof m)
        return KV_MISFIT;
    memcpy(&m, shape, sizeof m);
    if (m.first < 0 || m.last <= m.first || m.last > INT32_MAX || m.chunk_tokens < 1 || m.block_tokens < 1 ||
        m.chunk_tokens > INT32_MAX || m.chunk_tokens % m.block_tokens || m.blocks < 0 || m.blocks > INT32_MAX ||
        m.chunk_bytes < 0 || m.aligned < 1 || (written_bytes && written_bytes < (uint64_t)(m.blocks + 7) / 8))
        return KV_MISFIT;
    size_t first_chunk = m.first / m.chunk_tokens, count = (m.last - 1) / m.chunk_tokens + 1 - first_chunk;
    size_t begin = first_chunk * (m.chunk_tokens / m.block_tokens);
    size_t first = m.first / m.block_tokens, end = (m.last - 1) / m.block_tokens + 1;
    if (end > table_bytes / sizeof block || count > chunks_bytes / sizeof offset ||
        end - begin + count > listed_bytes / sizeof number)
        return KV_MISFIT;
    for (size_t at = begin; at < end; at++) {
        memcpy(&block, table + at * sizeof block, sizeof block);
        if (at >= first && (block < 0 || block >= m.blocks))
            return KV_OTHER;
        if (at >= first && written_bytes) {
            u8 bit = (u8)(1 << block % 8);
            if (written[block / 8] & bit)
                return KV_OTHER;
            written[block / 8] |= bit;
        }
        number = block;
        memcpy(listed + (at - begin) * sizeof number, &number, sizeof number);
    }
    for (size_t at = 0; at < count; at++) {
        memcpy(&offset, chunks + at * sizeof offset, sizeof offset);
        if (offset < 0 || offset > m.pool_bytes - m.chunk_bytes || offset % m.aligned)
            return KV_OTHER;
        number = (int64_t)((uint64_t)m.pool + (uint64_t)offset);
        memcpy(listed + (end - begin + at) * sizeof number, &number, sizeof number);
    }
    return 0;
}
