/* A step's copies on a device from requests' block tables, for kv_cuda's copy/gpu.py: they are listed in memory that the
 * device reads, and enqueued. The rules of library.c for buffers apply here, with one exception: `Device` holds addresses
 * of functions, which are called, and handles for them.
 */
#include "c_library.h"

#define KV_OTHER (-2) /* Python has to look: something does not exist, or would be written twice */

typedef struct {
    int64_t chunk_tokens, block_tokens, blocks, pool, pool_bytes, chunk_bytes, aligned;
} Place;

typedef struct {
    int64_t first, last, ends; /* ends: the last move of its request */
} Move;

typedef struct {
    int64_t first, count, step, ends; /* ends: the last planes of a step, behind which there are events */
} Planes;

typedef struct {
    int64_t push, pop, record, wait, copy, launch; /* the driver's functions, by the names of driver.py */
    int64_t context, stream, edge;                 /* edge: an event for what the engine has enqueued so far */
    int64_t kernel, threads, shared, planes, plane_bytes, tile_tokens, pieces, programs; /* of rows.py's kernel */
} Device;

/* The lists of `kv_submit`. */
static int64_t list(const Place *p, const u8 *moves, size_t moves_bytes, const u8 *tables, size_t tables_bytes,
                    const u8 *chunks, size_t chunks_bytes, u8 *written, size_t written_bytes, u8 *listed,
                    size_t listed_bytes) {
    Move m;
    int64_t number;
    int32_t block;
    for (; moves_bytes; moves += sizeof m, moves_bytes -= sizeof m) {
        memcpy(&m, moves, sizeof m);
        if (m.first < 0 || m.last <= m.first || m.last > INT32_MAX)
            return KV_MISFIT;
        size_t first_chunk = m.first / p->chunk_tokens, count = (m.last - 1) / p->chunk_tokens + 1 - first_chunk;
        size_t begin = first_chunk * (p->chunk_tokens / p->block_tokens);
        size_t unused = m.first / p->block_tokens - begin, blocks = (m.last - 1) / p->block_tokens + 1 - begin;
        if (blocks > tables_bytes / sizeof block || count > chunks_bytes / sizeof number ||
            blocks + count > listed_bytes / sizeof number)
            return KV_MISFIT;
        for (size_t at = 0; at < blocks; at++, tables += sizeof block, listed += sizeof number) {
            memcpy(&block, tables, sizeof block);
            if (at >= unused && (block < 0 || block >= p->blocks))
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
            if (number < 0 || number > p->pool_bytes - p->chunk_bytes || number % p->aligned)
                return KV_OTHER;
            number = (int64_t)((uint64_t)p->pool + (uint64_t)number);
            memcpy(listed, &number, sizeof number);
        }
        tables_bytes -= blocks * sizeof block;
        chunks_bytes -= count * sizeof number;
        listed_bytes -= (blocks + count) * sizeof number;
    }
    return 0;
}

typedef int (*OfContext)(uintptr_t);
typedef int (*OfContextPlace)(uintptr_t *);
typedef int (*OfEvent)(uintptr_t event, uintptr_t stream);
typedef int (*OfStream)(uintptr_t stream, uintptr_t event, unsigned flags);
typedef int (*Copy)(uint64_t to, const void *from, size_t bytes, uintptr_t stream);
typedef int (*Launch)(uintptr_t kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                      uintptr_t stream, void **values, void **extra);

/* Launch `move_rows` of rows.py: `values` are its arguments in their order, and behind them the two scratch areas that
 * Triton gives to kernels, of which this one uses none. */
static int launch(const Device *d, uint64_t numbers, const Planes *planes, int32_t tokens, int32_t slots_at,
                  int32_t rows_at, int32_t first, int32_t per_slot, int32_t per_row) {
    uint64_t table = (uint64_t)d->planes, none = 0;
    int64_t base = 0, plane_bytes = d->plane_bytes;
    int32_t first_plane = (int32_t)planes->first, count = (int32_t)planes->count, step = (int32_t)planes->step;
    void *values[] = {&table, &numbers, &numbers, &base, &tokens, &slots_at, &rows_at, &first, &per_slot, &per_row,
                      &first_plane, &count, &step, &plane_bytes, &none, &none};
    int64_t tiles = (tokens + d->tile_tokens - 1) / d->tile_tokens * d->pieces * count;
    unsigned programs = (unsigned)(tiles < d->programs ? tiles : d->programs);
    return ((Launch)d->launch)((uintptr_t)d->kernel, programs ? programs : 1, 1, 1, (unsigned)d->threads, 1, 1,
                               (unsigned)d->shared, (uintptr_t)d->stream, values, NULL);
}

/* What the driver says: 0, or the number of its error. Then what was enqueued before goes on. */
static int64_t enqueue(const Place *p, const Device *d, const u8 *moves, size_t moves_bytes, const u8 *steps,
                       size_t steps_bytes, const u8 *listed, size_t listed_bytes, const int64_t *call,
                       const int64_t *events, size_t count) {
    uint64_t numbers = (uint64_t)call[1];
    Planes planes;
    Move m;
    int status = ((OfEvent)d->record)((uintptr_t)d->edge, (uintptr_t)call[0]);
    if (!status)
        status = ((OfStream)d->wait)((uintptr_t)d->stream, (uintptr_t)d->edge, 0);
    if (!status && numbers != (uintptr_t)listed)
        status = ((Copy)d->copy)(numbers, listed, listed_bytes, (uintptr_t)d->stream);
    for (; !status && steps_bytes; steps += sizeof planes, steps_bytes -= sizeof planes) {
        memcpy(&planes, steps, sizeof planes);
        int64_t at = 0;
        for (size_t move = 0; !status && move < moves_bytes; move += sizeof m) {
            memcpy(&m, moves + move, sizeof m);
            int64_t first_chunk = m.first / p->chunk_tokens, begin = first_chunk * p->chunk_tokens;
            int64_t blocks = (m.last - 1) / p->block_tokens + 1 - begin / p->block_tokens;
            int64_t chunks = (m.last - 1) / p->chunk_tokens + 1 - first_chunk;
            status = launch(d, numbers, &planes, (int32_t)(m.last - m.first), (int32_t)at, (int32_t)(at + blocks),
                            (int32_t)(m.first - begin), (int32_t)p->block_tokens, (int32_t)p->chunk_tokens);
            at += blocks + chunks;
            if (!status && planes.ends && m.ends && count) {
                status = ((OfEvent)d->record)((uintptr_t)*events++, (uintptr_t)d->stream);
                count--;
            }
        }
    }
    return status;
}

/* For each move of tokens `first` to `last` of a prompt: the blocks of the chunks that they touch, and then these chunks'
 * addresses. Then, if there is a device, they are copied: an edge behind what the engine has enqueued, the list's way over
 * the bus, a launch for each move's planes, and for each step an event behind the last of each request.
 *
 * place: a `Place`; `pool` is an address. moves: `Move`s. tables, chunks: of each move in turn, its blocks, int32, from
 * the first of these chunks to the last token, and these chunks' offsets in the pool, int64. written: a bit for each
 * block, set by earlier calls where it has been written; empty: blocks are read. Blocks that hold none of the tokens are
 * passed on as they are. device: a `Device`; empty: they are only listed. steps: `Planes`. call: the engine's
 * stream, the list's address on the device, and the events, one for each step and request.
 * Answers KV_OTHER before anything is enqueued, or the driver's error. */
EXPORT int64_t kv_submit(const u8 *place, size_t place_bytes, const u8 *moves, size_t moves_bytes, const u8 *tables,
                         size_t tables_bytes, const u8 *chunks, size_t chunks_bytes, u8 *written, size_t written_bytes,
                         u8 *listed, size_t listed_bytes, const u8 *device, size_t device_bytes, const u8 *steps,
                         size_t steps_bytes, const int64_t *call, size_t call_bytes) {
    Place p;
    Device d;
    uintptr_t popped;
    if (place_bytes != sizeof p || moves_bytes % sizeof(Move) || (device_bytes && device_bytes != sizeof d) ||
        steps_bytes % sizeof(Planes) || (device_bytes && call_bytes < 2 * sizeof *call))
        return KV_MISFIT;
    memcpy(&p, place, sizeof p);
    if (p.chunk_tokens < 1 || p.block_tokens < 1 || p.chunk_tokens > INT32_MAX || p.chunk_tokens % p.block_tokens ||
        p.blocks < 0 || p.blocks > INT32_MAX || p.pool_bytes < 0 || p.chunk_bytes < 0 || p.aligned < 1 ||
        (written_bytes && written_bytes < (uint64_t)(p.blocks + 7) / 8))
        return KV_MISFIT;
    int64_t answer = list(&p, moves, moves_bytes, tables, tables_bytes, chunks, chunks_bytes, written, written_bytes,
                          listed, listed_bytes);
    if (answer || !device_bytes)
        return answer;
    memcpy(&d, device, sizeof d);
    answer = ((OfContext)d.push)((uintptr_t)d.context);
    if (answer)
        return answer;
    answer = enqueue(&p, &d, moves, moves_bytes, steps, steps_bytes, listed, listed_bytes, call, call + 2,
                     call_bytes / sizeof *call - 2);
    ((OfContextPlace)d.pop)(&popped);
    return answer;
}
