/* The codec `kvtc`: rows of whole numbers into prefix codes and back, as docs/formats/kvtc.md has it. row_codes.py makes the
 * codes, numpy_rows.py says what each function computes.
 *
 * A payload may be anything: what it says leads no access beyond a buffer, and what cannot be is KV_DAMAGED. Codes are
 * this program's own: only their arrays' sizes are checked.
 */
#include "rows.h"

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

/* The byte of up to `together` symbols, the first one least significant; ESCAPED_BYTE where one of them is not below the base. */
INLINE u8 byte_of(const uint16_t *symbols, size_t n, unsigned base, unsigned together) {
    unsigned byte = 0, most = 0;
    for (unsigned j = together; j--;) {
        unsigned symbol = j < n ? symbols[j] : 0;
        byte = byte * base + symbol;
        most = most < symbol ? symbol : most;
    }
    return (u8)(most < base ? byte : ESCAPED_BYTE);
}

INLINE void pack_some(const uint16_t *restrict symbols, size_t n, unsigned base, unsigned together, u8 *restrict bytes) {
    size_t whole = n / together;
    for (size_t i = 0; i < whole; i++)
        bytes[i] = byte_of(symbols + i * together, together, base, together);
    if (n % together)
        bytes[whole] = byte_of(symbols + whole * together, n % together, base, together);
}

/* Whether there is such a kind. */
VERSIONS static int to_bytes(const uint16_t *restrict symbols, size_t n, unsigned base, unsigned together,
                             u8 *restrict bytes) {
    if (base == 255 && together == 1)
        pack_some(symbols, n, 255, 1, bytes);
    else if (base == 15 && together == 2)
        pack_some(symbols, n, 15, 2, bytes);
    else if (base == 5 && together == 3)
        pack_some(symbols, n, 5, 3, bytes);
    else if (base == 3 && together == 5)
        pack_some(symbols, n, 3, 5, bytes);
    else
        return 0;
    return 1;
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

/* Writes the codes of a lane's bytes, at most LONGEST bits each, and up to 8 bytes beyond them. first: the number of the first
 * byte. escaped: room for as many numbers as there are bytes; set to the end of those written. Returns the lane's size in bytes. */
VERSIONS static size_t write_codes(const u8 *restrict bytes, uint32_t first, uint32_t n, const CodeTable *table,
                                 uint32_t **escaped, u8 *restrict out) {
    BitWriter writer = {0, 0, *escaped, out};
    uint32_t i = 0;
    if (table->is_split)
        i = kv_write_split(&writer, bytes, first, n, table);
    for (; n - i >= 4; i += 4) {
        for (uint32_t j = 0; j < 4; j++)
            write_code(&writer, table->coded[bytes[i + j]], first + i + j);
        flush_bytes(&writer);
    }
    for (; i < n; i++)
        write_code(&writer, table->coded[bytes[i]], first + i);
    memcpy(writer.out, &writer.bits, 8);
    *escaped = writer.escaped;
    return (size_t)(writer.out - out) + (writer.bit_count + 7) / 8;
}

/* How many bytes of `out` the rows take, or KV_FULL. rows: [rows, tokens], int16. scratch: 8 bytes for each number of a group. */
EXPORT int64_t kv_encode_rows(int64_t tokens, const u8 *rows, size_t rows_bytes, const u8 *kinds, size_t kinds_bytes,
                              const u8 *costs, size_t costs_bytes, const u8 *coded, size_t coded_bytes,
                              u8 *restrict scratch, size_t scratch_bytes, u8 *restrict out, size_t out_bytes) {
    size_t group = group_of(tokens, rows_bytes), codes = kinds_bytes / 3, at = 0;
    if (!group || !codes || codes >= ALL_ZERO || kinds_bytes % 3 || costs_bytes != codes * COSTED * 4 ||
        coded_bytes != codes * 256 * 4 || scratch_bytes != 8 * group || (uintptr_t)scratch % 4)
        return KV_MISFIT;
    uint32_t *first_escaped = (uint32_t *)scratch;
    uint16_t *symbols = (uint16_t *)(first_escaped + group);
    u8 *bytes = (u8 *)(symbols + group);
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
        if (!together || !to_bytes(symbols, n, base, together, bytes))
            return KV_MISFIT;
        size_t count = (n + together - 1) / together, of_lane = (count + LANES - 1) / LANES;
        uint32_t *escaped = first_escaped;
        CodeTable table;
        kv_make_table(&table, (const u32 *)coded + 256 * code);
        for (size_t lane = 0, first = 0; lane < LANES; lane++) {
            size_t some = count - first < of_lane ? count - first : of_lane;
            if (out_bytes - at < some * LONGEST / 8 + 16)
                return KV_FULL;
            size_t used = write_codes(bytes + first, (uint32_t)first, (uint32_t)some, &table, &escaped, out + at);
            put16(head + 2 + 2 * lane, used);
            at += used;
            first += some;
        }
        put32(head + 2 + 2 * LANES, (size_t)(escaped - first_escaped));
        for (const uint32_t *one = first_escaped; one < escaped; one++) {
            size_t number = *one * (size_t)together;
            if (out_bytes - at < 2 * together)
                return KV_FULL;
            for (unsigned i = 0; i < together; i++, at += 2)
                put16(out + at, number + i < n ? symbols[number + i] : 0);
        }
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
    u8 *out, *out_end;
} Lane;

/* Four to eight bytes of a lane, of which all bits are there, as four accesses find one or two each: 48 bits at most, and 57
 * can be had. There is room for eight. */
INLINE void next_of(Lane *lane, const u32 *restrict pairs) {
    uint64_t bits;
    uint32_t sum = 0;
    memcpy(&bits, lane->from + lane->bit / 8, 8);
    bits >>= lane->bit % 8;
    for (int j = 0; j < 4; j++) {
        uint32_t found = pairs[bits & ((1 << LONGEST) - 1)];
        uint16_t both = (uint16_t)(found >> 16);
        memcpy(lane->out + (sum >> 8 & 255), &both, 2);
        bits >>= found & 63; /* how many bits is in the lower byte, as a shift takes it; then how many bytes */
        sum += found;
    }
    lane->bit += sum & 255;
    lane->out += sum >> 8 & 255;
}

/* How often `next_of` can be called for a lane without a look at where it is. end: of what can be read. */
INLINE size_t rounds_of(const Lane *lane, const u8 *end) {
    size_t readable = (size_t)(end - lane->from) - lane->bit / 8, room = (size_t)(lane->out_end - lane->out) / 8;
    size_t rounds = readable < 8 ? 0 : (readable - 8) / (4 * LONGEST / 8) + 1;
    return rounds < room ? rounds : room;
}

/* The group's bytes, from its lanes. left: bytes from the first lane's first on. How many of them the lanes take, or
 * KV_DAMAGED. */
VERSIONS static int64_t get_codes(const u8 *head, const u8 *streams, size_t left, const uint16_t *restrict lookup,
                                  const u32 *restrict pairs, u8 *restrict packed, size_t count) {
    size_t of_lane = (count + LANES - 1) / LANES, at = 0, rounds;
    const u8 *end = streams + left;
    Lane lanes[LANES];
    for (size_t lane = 0; lane < LANES; lane++) {
        size_t first = lane * of_lane < count ? lane * of_lane : count;
        size_t last = first + of_lane < count ? first + of_lane : count;
        lanes[lane] = (Lane){streams + at, 0, get16(head + 2 + 2 * lane), packed + first, packed + last};
        if (left - at < lanes[lane].bytes)
            return KV_DAMAGED;
        at += lanes[lane].bytes;
    }
    /* All lanes side by side, as far as none can run beyond the payload or its room whatever it reads; then again from where
     * they are. */
    do {
        rounds = SIZE_MAX;
        for (int lane = 0; lane < LANES; lane++) {
            size_t own = rounds_of(&lanes[lane], end);
            rounds = own < rounds ? own : rounds;
        }
        for (size_t round = 0; round < rounds; round++)
#pragma GCC unroll 1
            for (int lane = 0; lane < LANES; lane++)
                next_of(&lanes[lane], pairs);
    } while (rounds);
    for (int lane = 0; lane < LANES; lane++) {
        Lane *own = &lanes[lane];
        while (rounds_of(own, end))
            next_of(own, pairs);
        own->bit = lane_rest(own->from, (size_t)(end - own->from), own->bit, lookup, own->out,
                             (size_t)(own->out_end - own->out));
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
                              size_t kinds_bytes, const u8 *lookup, size_t lookup_bytes, const u8 *pairs,
                              size_t pairs_bytes, const u8 *unpacking, size_t unpacking_bytes, u8 *restrict scratch, size_t scratch_bytes, u8 *restrict rows,
                              size_t rows_bytes) {
    size_t group = group_of(tokens, rows_bytes), codes = kinds_bytes / 3, at = 0;
    if (!group || kinds_bytes % 3 || lookup_bytes != codes * (2 << LONGEST) || pairs_bytes != 2 * lookup_bytes ||
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
                                 (const u32 *)pairs + (code << LONGEST), scratch, count);
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
