/* Plans of transfers, for kv_cuda's copy/table.py and copy/gpu.py: from a request's block table to runs of slots, and from
 * these to a device's lists of tokens. The rules of library.c for buffers apply here.
 */
#include "c_library.h"

#define KV_OTHER (-2) /* to be looked at more closely: a block that does not exist, or one that is written twice */

typedef struct {
    int64_t chunk, first_token, first_slot, tokens;
} Copy;

/* The copies of tokens `first` to `last` of a prompt, as few as there can be, behind the `made` that are there.
 * chunk: the number of the first one in `starts`, which receives where the copies of each begin.
 * written: a bit for each block that has been written, of the move before too; empty: blocks are read. Returns how many
 * copies there are now. */
EXPORT int64_t kv_split_move(int64_t first, int64_t last, int64_t chunk_tokens, int64_t block_tokens, int64_t blocks,
                             int64_t chunk, int64_t made, const u8 *table, size_t table_bytes, u8 *written,
                             size_t written_bytes, u8 *copies, size_t copies_bytes, u8 *starts, size_t starts_bytes) {
    size_t entries = table_bytes / sizeof(int32_t);
    if (first < 0 || last < first || last > INT32_MAX || chunk_tokens < 1 || block_tokens < 1 || blocks < 0 ||
        blocks > INT32_MAX || chunk_tokens > INT32_MAX || chunk_tokens % block_tokens || chunk < 0 || made < 0 ||
        (uint64_t)(last + block_tokens - 1) / block_tokens > entries ||
        (written_bytes && written_bytes < (size_t)(blocks + 7) / 8))
        return KV_MISFIT;
    for (int64_t token = first; token < last; chunk++) {
        int64_t end = (token / chunk_tokens + 1) * chunk_tokens, next = -1;
        end = end < last ? end : last;
        if ((size_t)chunk >= starts_bytes / sizeof made)
            return KV_MISFIT;
        memcpy(starts + chunk * sizeof made, &made, sizeof made);
        Copy run = {chunk, 0, 0, 0};
        while (token < end) {
            int64_t in_block = token % block_tokens, tokens = block_tokens - in_block, slot;
            int32_t block;
            memcpy(&block, table + token / block_tokens * sizeof block, sizeof block);
            if (block < 0 || block >= blocks)
                return KV_OTHER;
            if (written_bytes) {
                u8 bit = (u8)(1 << block % 8);
                if (written[block / 8] & bit)
                    return KV_OTHER;
                written[block / 8] |= bit;
            }
            tokens = tokens < end - token ? tokens : end - token;
            slot = block * block_tokens + in_block;
            if (slot != next) {
                if ((size_t)made >= copies_bytes / sizeof run)
                    return KV_MISFIT;
                made++;
                run.first_token = token % chunk_tokens;
                run.first_slot = slot;
                run.tokens = 0;
            }
            run.tokens += tokens;
            memcpy(copies + (made - 1) * sizeof run, &run, sizeof run);
            token += tokens;
            next = slot + tokens;
        }
    }
    return made;
}

/* Each token's slot, and the place of its row: its chunk's of `places`, and `row_bytes` a token of the chunk. Returns how
 * many tokens there are. */
EXPORT int64_t kv_list_tokens(int64_t row_bytes, const u8 *copies, size_t copies_bytes, const u8 *places,
                              size_t places_bytes, u8 *slots, size_t slots_bytes, u8 *rows, size_t rows_bytes) {
    size_t listed = 0, room = (slots_bytes < rows_bytes ? slots_bytes : rows_bytes) / sizeof(int64_t);
    for (size_t at = 0; at + sizeof(Copy) <= copies_bytes; at += sizeof(Copy)) {
        Copy run;
        int64_t row;
        memcpy(&run, copies + at, sizeof run);
        if (run.chunk < 0 || (size_t)run.chunk >= places_bytes / sizeof row || run.tokens < 0 ||
            (size_t)run.tokens > room - listed)
            return KV_MISFIT;
        memcpy(&row, places + run.chunk * sizeof row, sizeof row);
        row = (int64_t)((uint64_t)row + (uint64_t)run.first_token * (uint64_t)row_bytes);
        for (int64_t token = 0; token < run.tokens; token++, listed++) {
            int64_t slot = (int64_t)((uint64_t)run.first_slot + (uint64_t)token);
            memcpy(slots + listed * sizeof slot, &slot, sizeof slot);
            memcpy(rows + listed * sizeof row, &row, sizeof row);
            row = (int64_t)((uint64_t)row + (uint64_t)row_bytes);
        }
    }
    return (int64_t)listed;
}
