/* The codec `kvtc`: rows of whole numbers into prefix codes and back, as docs/formats/kvtc.md has it. row_codes.py makes the
 * codes, numpy_rows.py says what each function computes.
 *
 * A payload may be anything: what it says leads no access beyond a buffer, and what cannot be is KV_DAMAGED. Codes are
 * this program's own: only their arrays' sizes are checked.
 */
#include "kernels.h"

enum {
    LANES = 8,              /* streams of a group, which are decoded side by side */
    HEAD = 6 + 2 * LANES,   /* of a group */
    LONGEST = 12,           /* bits of a code */
    ESCAPED_BYTE = 255,
    GROUP = 1 << 14,        /* numbers, where a row has no more than these */
    MOST_TOKENS = 1 << 17,
    COSTED = 76,            /* classes of symbols that cost about the same */
    SINGLE = 32,            /* symbols that are a class each */
    SAMPLED = 16,           /* one of so many decides on the code */
    MOST_TOGETHER = 8,
    PACKING = 1 << 10,      /* ways in which symbols can lie side by side, at the most */
    ALL_ZERO = 255          /* instead of a code */
};

/* Numbers of a group, 0: the arguments do not fit each other. */
static size_t group_of(int64_t tokens, size_t rows_bytes) {
    if (tokens < 1 || tokens > MOST_TOKENS || rows_bytes % (2 * (size_t)tokens))
        return 0;
    size_t together = GROUP / (size_t)tokens;
    return (together ? together : 1) * (size_t)tokens;
}

static void put16(u8 *at, size_t value) {
    at[0] = (u8)value;
    at[1] = (u8)(value >> 8);
}

static void put32(u8 *at, size_t value) {
    put16(at, value);
    put16(at + 2, value >> 16);
}

static size_t get16(const u8 *at) { return (size_t)at[0] | (size_t)at[1] << 8; }
static size_t get32(const u8 *at) { return get16(at) | get16(at + 2) << 16; }

/* 0, -1, 1, -2, … as 0, 1, 2, 3, … */
INLINE uint16_t zigzag(int16_t whole) { return (uint16_t)((uint16_t)((uint16_t)whole << 1) ^ (uint16_t)(whole >> 15)); }
INLINE int16_t straight(uint16_t symbol) { return (int16_t)((symbol >> 1) ^ (uint16_t)(0 - (symbol & 1))); }

INLINE size_t pack_some(const uint16_t *restrict symbols, size_t n, unsigned base, unsigned together,
                        const u8 *restrict packing, u8 *restrict packed) {
    size_t made = 0, at = 0;
    for (; at + together <= n; at += together, made++) {
        unsigned index = 0;
        for (unsigned i = together; i--;)
            index = index * (base + 1) + (symbols[at + i] < base ? symbols[at + i] : base);
        packed[made] = packing[index];
    }
    if (at < n) {
        unsigned index = 0;
        for (unsigned i = together; i--;)
            index = index * (base + 1) + (at + i >= n ? 0 : symbols[at + i] < base ? symbols[at + i] : base);
        packed[made++] = packing[index];
    }
    return made;
}

/* Several symbols to a byte. How many bytes they make; 0: there is no such kind. */
VERSIONS static size_t pack_symbols(const uint16_t *restrict symbols, size_t n, unsigned base, unsigned together,
                                    const u8 *restrict packing, u8 *restrict packed) {
    if (base == 255 && together == 1)
        return pack_some(symbols, n, 255, 1, packing, packed);
    if (base == 15 && together == 2)
        return pack_some(symbols, n, 15, 2, packing, packed);
    if (base == 5 && together == 3)
        return pack_some(symbols, n, 5, 3, packing, packed);
    if (base == 3 && together == 5)
        return pack_some(symbols, n, 3, 5, packing, packed);
    return 0;
}

VERSIONS static uint32_t to_symbols(const i16 *restrict rows, size_t n, uint16_t *restrict symbols) {
    uint16_t any = 0;
    for (size_t i = 0; i < n; i++) {
        symbols[i] = zigzag(rows[i]);
        any |= symbols[i];
    }
    return any;
}

/* A quarter of a power of two, from SINGLE on. */
INLINE unsigned class_of(uint16_t symbol) {
    if (symbol < SINGLE)
        return symbol;
    unsigned power = 31 - (unsigned)__builtin_clz(symbol);
    return SINGLE + 4 * (power - 5) + (symbol >> (power - 2) & 3);
}

/* The code that takes the fewest bits for a sample of the symbols. */
VERSIONS static size_t cheapest(const uint16_t *restrict symbols, size_t n, const uint32_t *restrict costs,
                                size_t codes) {
    uint32_t counts[2][COSTED] = {{0}}; /* as a symbol often follows itself, and would wait for its own count */
    /* Of each sixteen another one, or with some numbers of tokens all samples would be of one token. */
    for (size_t k = 0, i = 0; i < n; k++, i = k * SAMPLED + (k * 5) % SAMPLED)
        counts[k & 1][class_of(symbols[i])]++;
    for (int i = 0; i < COSTED; i++)
        counts[0][i] += counts[1][i];
    size_t best = 0;
    uint64_t least = UINT64_MAX;
    for (size_t code = 0; code < codes; code++) {
        uint64_t cost = 0;
        for (int i = 0; i < COSTED; i++)
            cost += (uint64_t)counts[0][i] * costs[code * COSTED + i];
        if (cost < least) {
            least = cost;
            best = code;
        }
    }
    return best;
}

/* A stream of these bytes' codes, at most LONGEST bits each and 8 bytes besides. How many bytes it takes. */
static size_t put_codes(const u8 *restrict packed, size_t n, const uint32_t *restrict words, u8 *restrict out) {
    uint64_t waiting = 0;
    unsigned filled = 0;
    size_t at = 0, i = 0;
    for (; i + 4 <= n; i += 4) {
        for (int j = 0; j < 4; j++) {
            uint32_t word = words[packed[i + j]];
            waiting |= (uint64_t)(word & 0xffff) << filled;
            filled += word >> 16;
        }
        memcpy(out + at, &waiting, 8);
        at += filled / 8;
        waiting >>= filled & ~7u;
        filled &= 7;
    }
    for (; i < n; i++) {
        uint32_t word = words[packed[i]];
        waiting |= (uint64_t)(word & 0xffff) << filled;
        filled += word >> 16;
    }
    memcpy(out + at, &waiting, 8);
    return at + (filled + 7) / 8;
}

/* How many bytes of `out` the rows take, or KV_FULL. rows: [rows, tokens], int16. scratch: 3 bytes for each number of a
 * group. */
EXPORT int64_t kv_encode_rows(int64_t tokens, const u8 *rows, size_t rows_bytes, const u8 *kinds, size_t kinds_bytes,
                              const u8 *costs, size_t costs_bytes, const u8 *words, size_t words_bytes,
                              const u8 *packing, size_t packing_bytes, u8 *restrict scratch, size_t scratch_bytes, u8 *restrict out, size_t out_bytes) {
    size_t group = group_of(tokens, rows_bytes), codes = kinds_bytes / 3, at = 0;
    if (!group || !codes || codes >= ALL_ZERO || kinds_bytes % 3 || costs_bytes != codes * COSTED * 4 ||
        words_bytes != codes * 256 * 4 || packing_bytes != codes * PACKING || scratch_bytes != 3 * group)
        return KV_MISFIT;
    uint16_t *symbols = (uint16_t *)scratch;
    u8 *packed = scratch + 2 * group;
    for (size_t start = 0; start < rows_bytes / 2; start += group) {
        size_t n = rows_bytes / 2 - start < group ? rows_bytes / 2 - start : group;
        uint32_t any = to_symbols((const i16 *)rows + start, n, symbols);
        if (out_bytes - at < HEAD)
            return KV_FULL;
        u8 *head = out + at;
        memset(head, 0, HEAD);
        head[0] = ALL_ZERO;
        at += HEAD;
        if (!any)
            continue;
        size_t code = cheapest(symbols, n, (const uint32_t *)costs, codes);
        unsigned base = kinds[3 * code], together = kinds[3 * code + 1], low = kinds[3 * code + 2];
        head[0] = (u8)code;
        if (low) {
            size_t low_bytes = (n + 1) / 2;
            if (out_bytes - at < low_bytes)
                return KV_FULL;
            for (size_t i = 0; i < low_bytes; i++)
                out[at + i] = (u8)((symbols[2 * i] & 15) | (2 * i + 1 < n ? (symbols[2 * i + 1] & 15) << 4 : 0));
            at += low_bytes;
            for (size_t i = 0; i < n; i++)
                symbols[i] >>= 4;
        }
        const uint32_t *own = (const uint32_t *)words + 256 * code;
        size_t count = pack_symbols(symbols, n, base, together, packing + PACKING * code, packed);
        if (!count)
            return KV_MISFIT;
        size_t of_lane = (count + LANES - 1) / LANES;
        for (size_t lane = 0, first = 0; lane < LANES; lane++) {
            size_t some = count - first < of_lane ? count - first : of_lane;
            if (out_bytes - at < some * LONGEST / 8 + 16)
                return KV_FULL;
            size_t used = put_codes(packed + first, some, own, out + at);
            put16(head + 2 + 2 * lane, used);
            at += used;
            first += some;
        }
        size_t escapes = 0;
        for (const u8 *one = packed, *end = packed + count; (one = memchr(one, ESCAPED_BYTE, (size_t)(end - one))); one++) {
            size_t number = (size_t)(one - packed) * together;
            if (out_bytes - at < 2 * together)
                return KV_FULL;
            for (unsigned i = 0; i < together; i++, at += 2)
                put16(out + at, number + i < n ? symbols[number + i] : 0);
            escapes++;
        }
        put32(head + 2 + 2 * LANES, escapes);
    }
    return (int64_t)at;
}

/* ---- the way back ---- */

/* Up to 8 bytes from a bit on. Beyond the end there are zeros. */
INLINE uint64_t peek(const u8 *from, size_t bytes, size_t bit) {
    size_t at = bit / 8;
    uint64_t bits = 0;
    if (at < bytes)
        memcpy(&bits, from + at, bytes - at < 8 ? bytes - at : 8);
    return bits >> bit % 8;
}

/* The last `n` bytes of a lane. The bit behind them. */
static size_t lane_rest(const u8 *from, size_t bytes, size_t bit, const uint16_t *restrict lookup, u8 *restrict out,
                        size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint16_t found = lookup[peek(from, bytes, bit) & ((1 << LONGEST) - 1)];
        out[i] = (u8)(found >> 8);
        bit += found & 255;
    }
    return bit;
}

typedef struct {
    const u8 *from;
    size_t bit, bytes;
    u8 *out;
} Lane;

/* Four bytes of a lane, of which all bits are there: four codes are 48 bits at most, and 57 can be had. */
INLINE void four_of(Lane *lane, const uint16_t *restrict lookup, size_t at) {
    uint64_t bits;
    uint32_t four = 0, used = 0;
    memcpy(&bits, lane->from + lane->bit / 8, 8);
    bits >>= lane->bit % 8;
    for (int j = 0; j < 4; j++) {
        uint32_t found = lookup[bits & ((1 << LONGEST) - 1)];
        four |= found >> 8 << 8 * j;
        bits >>= found & 63; /* a code's length is in the lower byte, as a shift takes it */
        used += found;
    }
    memcpy(lane->out + at, &four, 4);
    lane->bit += used & 255;
}

/* The group's bytes, from its lanes. left: bytes from the first lane's first on. How many of them the lanes take, or
 * KV_DAMAGED. */
VERSIONS static int64_t get_codes(const u8 *head, const u8 *streams, size_t left, const uint16_t *restrict lookup,
                                  u8 *restrict packed, size_t count) {
    size_t of_lane = (count + LANES - 1) / LANES, at = 0, i = 0;
    Lane lanes[LANES];
    for (size_t lane = 0; lane < LANES; lane++) {
        lanes[lane] = (Lane){streams + at, 0, get16(head + 2 + 2 * lane), packed + lane * of_lane};
        if (left - at < lanes[lane].bytes)
            return KV_DAMAGED;
        at += lanes[lane].bytes;
    }
    /* All lanes side by side, as far as none can run beyond the payload whatever it reads; then again from where they are. */
    size_t last = count > (LANES - 1) * of_lane ? count - (LANES - 1) * of_lane : 0, together;
    do {
        const u8 *farthest = streams;
        for (int lane = 0; lane < LANES; lane++) {
            const u8 *now = lanes[lane].from + lanes[lane].bit / 8;
            farthest = now > farthest ? now : farthest;
        }
        size_t safe = (size_t)(streams + left - farthest);
        together = safe > 16 ? (safe - 16) * 8 / LONGEST : 0;
        together = (together < last - i ? together : last - i) & ~(size_t)3;
        for (size_t end = i + together; i < end; i += 4)
#pragma GCC unroll 1
            for (int lane = 0; lane < LANES; lane++)
                four_of(&lanes[lane], lookup, i);
    } while (together);
    for (size_t lane = 0; lane < LANES; lane++) {
        size_t first = lane * of_lane, end = first + of_lane < count ? first + of_lane : count;
        Lane *own = &lanes[lane];
        if (first + i < end)
            own->bit = lane_rest(own->from, (size_t)(streams + left - own->from), own->bit, lookup, own->out + i,
                                 end - first - i);
        if ((own->bit + 7) / 8 != own->bytes)
            return KV_DAMAGED;
    }
    return (int64_t)at;
}

/* Numbers of bytes that hold several each. */
INLINE void unpack_some(const u8 *restrict packed, size_t n, const i16 *restrict unpacking, unsigned together,
                        i16 *restrict rows) {
    const size_t copied = together == 2 ? 4 : together == 3 ? 8 : 16; /* bytes; those too many are written over */
    size_t i = 0, at = 0;
    for (; at + MOST_TOGETHER <= n; i++, at += together)
        memcpy(rows + at, unpacking + MOST_TOGETHER * packed[i], copied);
    for (; at < n; i++, at += together)
        for (unsigned j = 0; j < together && at + j < n; j++)
            rows[at + j] = unpacking[MOST_TOGETHER * packed[i] + j];
}

VERSIONS static void unpack_symbols(const u8 *restrict packed, size_t n, const i16 *restrict unpacking,
                                    unsigned together, const u8 *restrict low, i16 *restrict rows) {
    if (together == 1 && low) {
        for (size_t i = 0; i < n; i++)
            rows[i] = straight((uint16_t)(packed[i] << 4 | (low[i / 2] >> 4 * (i & 1) & 15)));
    } else if (together == 1) {
        for (size_t i = 0; i < n; i++)
            rows[i] = straight(packed[i]);
    } else if (together == 2) {
        unpack_some(packed, n, unpacking, 2, rows);
    } else if (together == 3) {
        unpack_some(packed, n, unpacking, 3, rows);
    } else {
        unpack_some(packed, n, unpacking, 5, rows);
    }
}

/* 0, or KV_DAMAGED. rows: [rows, tokens], int16. scratch: a byte for each number of a group. */
EXPORT int64_t kv_decode_rows(int64_t tokens, const u8 *payload, size_t payload_bytes, const u8 *kinds,
                              size_t kinds_bytes, const u8 *lookup, size_t lookup_bytes, const u8 *unpacking,
                              size_t unpacking_bytes, u8 *restrict scratch, size_t scratch_bytes, u8 *restrict rows,
                              size_t rows_bytes) {
    size_t group = group_of(tokens, rows_bytes), codes = kinds_bytes / 3, at = 0;
    if (!group || kinds_bytes % 3 || lookup_bytes != codes * (2 << LONGEST) ||
        unpacking_bytes != 2 * codes * 256 * MOST_TOGETHER || scratch_bytes != group)
        return KV_MISFIT;
    for (size_t start = 0; start < rows_bytes / 2; start += group) {
        size_t n = rows_bytes / 2 - start < group ? rows_bytes / 2 - start : group;
        i16 *out = (i16 *)rows + start;
        if (payload_bytes - at < HEAD)
            return KV_DAMAGED;
        const u8 *head = payload + at, *low = 0;
        at += HEAD;
        if (head[0] == ALL_ZERO) {
            memset(out, 0, 2 * n);
            continue;
        }
        size_t code = head[0], escapes = get32(head + 2 + 2 * LANES);
        if (code >= codes)
            return KV_DAMAGED;
        unsigned together = kinds[3 * code + 1];
        if (!together || together > MOST_TOGETHER)
            return KV_MISFIT;
        if (kinds[3 * code + 2]) {
            if (payload_bytes - at < (n + 1) / 2)
                return KV_DAMAGED;
            low = payload + at;
            at += (n + 1) / 2;
        }
        size_t count = (n + together - 1) / together;
        int64_t used = get_codes(head, payload + at, payload_bytes - at, (const uint16_t *)lookup + (code << LONGEST),
                                 scratch, count);
        if (used < 0)
            return KV_DAMAGED;
        at += (size_t)used;
        unpack_symbols(scratch, n, (const i16 *)unpacking + code * 256 * MOST_TOGETHER, together, low, out);
        if (escapes > count || (payload_bytes - at) / (2 * together) < escapes)
            return KV_DAMAGED;
        const u8 *one = scratch, *end = scratch + count;
        for (; one < end && (one = memchr(one, ESCAPED_BYTE, (size_t)(end - one))); one++, escapes--) {
            if (!escapes)
                return KV_DAMAGED;
            size_t number = (size_t)(one - scratch) * together;
            for (unsigned i = 0; i < together; i++, at += 2) {
                size_t symbol = get16(payload + at), place = number + i;
                if (place < n)
                    out[place] = straight((uint16_t)(low ? symbol << 4 | (low[place / 2] >> 4 * (place & 1) & 15) : symbol));
            }
        }
        if (escapes)
            return KV_DAMAGED;
    }
    return at == payload_bytes ? 0 : KV_DAMAGED;
}
