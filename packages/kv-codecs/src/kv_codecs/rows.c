/* Rows of whole numbers into the codes of asymmetric numeral systems and back. rows_vbmi.c does it faster, where it can.
 *
 * A payload may be anything: what it says leads no access beyond a buffer, and what cannot be is KV_DAMAGED. Codes are
 * this program's own: only their arrays' sizes, and what leads elsewhere, are checked.
 */
#include "rows.h"

enum { MOST_TOKENS = 1 << 17, MOST_ROWS_OF_A_BLOCK = 256, MEAN_UNIT = 1 << 12 };

int kv_are_codes(Codes *codes, size_t low_bits_bytes, size_t shares_bytes, size_t starts_bytes, size_t symbols_bytes) {
    codes->count = low_bits_bytes;
    if (!low_bits_bytes || low_bits_bytes >= ALL_ZERO || shares_bytes != SYMBOLS * low_bits_bytes ||
        starts_bytes != shares_bytes || symbols_bytes != SHARES * low_bits_bytes)
        return 0;
    for (size_t i = 0; i < low_bits_bytes; i++)
        if (codes->low_bits[i] > MOST_LOW_BITS)
            return 0;
    for (size_t i = 0; i < symbols_bytes; i++)
        if (codes->symbols[i] >= SYMBOLS)
            return 0;
    for (size_t i = 0; i < low_bits_bytes; i++) { /* symbols that are not escaped are next to each other */
        const u8 *own = codes->shares + i * SYMBOLS;
        int runs = 0;
        for (int symbol = 0; symbol < ESCAPED; symbol++)
            runs += own[symbol] && !(symbol && own[symbol - 1]);
        if (runs != 1)
            return 0;
    }
    return 1;
}

/* Which lanes of a vector have a number: so many components, of so many tokens. */
INLINE uint64_t active_lanes(size_t components, size_t tokens) {
    if (components >= TOGETHER && tokens >= VECTOR / TOGETHER)
        return UINT64_MAX;
    uint64_t of_token = components < TOGETHER ? (1u << components) - 1 : 15, lanes = 0;
    for (size_t t = 0; t < VECTOR / TOGETHER && t < tokens; t++)
        lanes |= of_token << TOGETHER * t;
    return lanes;
}

INLINE unsigned largest_of(const u8 *symbols) {
    u8 largest = 0;
    for (size_t lane = 0; lane < VECTOR; lane++)
        largest = symbols[lane] > largest ? symbols[lane] : largest;
    return largest;
}

/* ---- decoding ---- */

/* As kv_decode_eights has them. */
INLINE void make_slots(const Code *code, uint32_t *restrict slots) {
    for (uint32_t low = 0; low < SHARES; low++) {
        uint32_t symbol = code->symbols[low];
        slots[low] = symbol | ((low - code->starts[symbol]) & 255) << 8 | (uint32_t)code->shares[symbol] << 16;
    }
}

/* The symbols of a vector's lanes, of which each may read a byte. 0: there is none. */
INLINE int decode_symbols(Decoder *decoder, uint16_t *restrict states, const uint32_t *restrict slots, uint64_t active,
                          u8 *restrict symbols) {
    const u8 *restrict at = decoder->at;
    if (active == UINT64_MAX && decoder->end - at >= VECTOR + 8 && kv_has_eights()) {
        at = kv_decode_eights(states, slots, at, symbols);
    } else if (active == UINT64_MAX && decoder->end - at >= VECTOR) {
        for (int i = 0; i < VECTOR; i++) { /* without branches, as none of them could be predicted */
            uint32_t state = states[i], slot = slots[state & 255];
            state = (slot >> 16) * (state >> 8) + (slot >> 8 & 255);
            uint32_t reads = (state - LEAST_STATE) >> 31;
            states[i] = (uint16_t)(state << 8 * reads | (*at & (0 - reads)));
            at += reads;
            symbols[lane_of(i)] = (u8)slot;
        }
    } else {
        for (int i = 0; i < VECTOR; i++) {
            symbols[lane_of(i)] = ZERO_SYMBOL;
            if (!(active >> lane_of(i) & 1))
                continue;
            uint32_t state = states[i], slot = slots[state & 255];
            state = (slot >> 16) * (state >> 8) + (slot >> 8 & 255);
            if (state < LEAST_STATE) {
                if (at == decoder->end)
                    return 0;
                state = state << 8 | *at++;
            }
            states[i] = (uint16_t)state;
            symbols[lane_of(i)] = (u8)slot;
        }
    }
    decoder->at = at;
    return 1;
}

/* Adds the lower bits of each number. */
INLINE void add_low_bits(const u8 *planes, unsigned low_bits, int32_t *restrict numbers) {
    for (unsigned bit = 0; bit < low_bits; bit++) {
        uint64_t plane;
        memcpy(&plane, planes + LOW_BYTES * bit, LOW_BYTES);
        for (int lane = 0; lane < VECTOR; lane++)
            numbers[lane] += (int32_t)(plane >> lane & 1) << bit;
    }
}

/* One vector. place: of its first byte. NULL: damaged. */
INLINE Far *decode_vector(Decoder *decoder, const Code *code, const uint32_t *slots, uint64_t active, uint32_t place,
                          u8 *restrict bytes, Far *restrict far) {
    u8 symbols[VECTOR];
    const u8 *planes = decoder->at;
    if ((size_t)(decoder->end - planes) < LOW_BYTES * code->low_bits)
        return NULL;
    decoder->at += LOW_BYTES * code->low_bits;
    if (!decode_symbols(decoder, decoder->states[decoder->vector % SETS], slots, active, symbols))
        return NULL;
    decoder->vector++;
    int is_escaped = largest_of(symbols) == ESCAPED;
    u8 *restrict own = bytes + place;
    if (!code->low_bits && !is_escaped) {
        for (size_t lane = 0; lane < VECTOR; lane++)
            own[lane] = (u8)(symbols[lane] + FAR_OFFSET - ZERO_SYMBOL);
        return far;
    }
    int32_t numbers[VECTOR];
    for (int lane = 0; lane < VECTOR; lane++)
        numbers[lane] = (int32_t)((uint32_t)(symbols[lane] - ZERO_SYMBOL) << code->low_bits);
    add_low_bits(planes, code->low_bits, numbers);
    if (!is_escaped && code->low_bits <= BYTE_LOW_BITS) {
        for (size_t lane = 0; lane < VECTOR; lane++)
            own[lane] = (u8)(numbers[lane] + FAR_OFFSET);
        return far;
    }
    for (uint32_t lane = 0; lane < VECTOR; lane++) {
        if (symbols[lane] == ESCAPED) {
            if (decoder->end - decoder->at < 2)
                return NULL;
            int16_t stored;
            memcpy(&stored, decoder->at, 2);
            decoder->at += 2;
            numbers[lane] = stored;
        }
        int is_far = numbers[lane] < -FAR_OFFSET || numbers[lane] >= FAR_OFFSET;
        own[lane] = (u8)(is_far ? FAR_OFFSET : numbers[lane] + FAR_OFFSET);
        if (is_far && active >> lane & 1)
            *far++ = (Far){place + lane, 0, numbers[lane]};
    }
    return far;
}

VERSIONS static Far *decode_some(Decoder *decoder, const Layout *layout, size_t components, const Code *code, size_t from,
                                 uint32_t place, u8 *restrict bytes, Far *restrict far) {
    uint32_t slots[SHARES];
    if (from < layout->vectors)
        make_slots(code, slots);
    for (size_t vector = from; far && vector < layout->vectors; vector++, place += VECTOR) {
        uint64_t active = active_lanes(components, layout->tokens - vector * (VECTOR / TOGETHER));
        far = decode_vector(decoder, code, slots, active, place, bytes, far);
    }
    return far;
}

Far *kv_decode_block(Decoder *decoder, const Layout *layout, const Codes *codes, const u8 *unit_codes, size_t place,
                     u8 *restrict bytes, Far *far) {
    int is_whole = layout->tokens % VECTOR == 0 && kv_has_vectors();
    for (size_t four = 0; far && four < layout->fours; four++) {
        size_t number = unit_codes[four / layout->unit_fours], first = place + four * layout->vectors * VECTOR;
        size_t components = layout->channels - TOGETHER * four, done = 0;
        if (number == ALL_ZERO) {
            memset(bytes + first, FAR_OFFSET, layout->vectors * VECTOR);
            decoder->vector += layout->vectors;
            continue;
        }
        if (number >= codes->count)
            return NULL;
        Code code = code_of(codes, number);
        if (is_whole && components >= TOGETHER)
            done = kv_decode_vectors(decoder, &code, layout->vectors, first, bytes, &far);
        far = decode_some(decoder, layout, components, &code, done, (uint32_t)(first + done * VECTOR), bytes, far);
    }
    return far;
}

int kv_ends_well(const Decoder *decoder) {
    int is_well = decoder->at == decoder->end;
    for (int set = 0; set < SETS; set++)
        for (int i = 0; i < VECTOR; i++)
            is_well &= decoder->states[set][i] == LEAST_STATE;
    return is_well;
}

/* ---- encoding: the last number first ---- */

/* 0: there is no room. */
INLINE int put_byte(Encoder *encoder, unsigned byte) {
    if (encoder->at == encoder->end)
        return 0;
    *encoder->at++ = (u8)byte;
    return 1;
}

/* Of each symbol its share, and what a product with it is worth a division: ⌈2^32 ÷ share⌉, exact for states of 16 bits. first,
 * last: of those that are not escaped. */
typedef struct {
    uint64_t inverses[SYMBOLS];
    uint32_t shares[SYMBOLS], starts[SYMBOLS];
    int first, last;
} Dividing;

static void make_dividing(const Code *code, Dividing *restrict dividing) {
    dividing->first = dividing->last = -1;
    for (int symbol = 0; symbol < SYMBOLS; symbol++) {
        uint32_t share = code->shares[symbol] ? code->shares[symbol] : 1;
        dividing->inverses[symbol] = (((uint64_t)1 << 32) + share - 1) / share;
        dividing->shares[symbol] = share;
        dividing->starts[symbol] = code->starts[symbol];
        if (!code->shares[symbol] || symbol == ESCAPED)
            continue;
        dividing->first = dividing->first < 0 ? symbol : dividing->first;
        dividing->last = symbol;
    }
}

/* The codes of a vector's lanes, the last one first. 0: there is no room. */
INLINE int encode_symbols(Encoder *encoder, uint16_t *restrict states, const Code *code, const Dividing *restrict dividing,
                          uint64_t active, const u8 *restrict symbols) {
    u8 *restrict at = encoder->at;
    int has_room = encoder->end - at >= VECTOR + 8;
    if (active == UINT64_MAX && has_room && kv_has_eights()) {
        encoder->at = kv_encode_eights(states, code, symbols, at);
        return 1;
    }
    for (int i = VECTOR; i--;) {
        int lane = lane_of(i);
        if (!(active >> lane & 1))
            continue;
        uint32_t share = dividing->shares[symbols[lane]];
        uint32_t state = states[i], writes = (((share << 8) - 1) - state) >> 31; /* without a branch */
        if (!has_room && writes && at == encoder->end)
            return 0;
        if (has_room || writes)
            *at = (u8)state;
        at += writes;
        state >>= 8 * writes;
        uint32_t whole = (uint32_t)(state * dividing->inverses[symbols[lane]] >> 32);
        states[i] = (uint16_t)(state + whole * (SHARES - share) + dividing->starts[symbols[lane]]);
    }
    encoder->at = at;
    return 1;
}

/* One vector. 0: there is no room. */
VERSIONS static int encode_vector(Encoder *encoder, uint16_t *restrict states, const Code *code, const Dividing *dividing,
                                  uint64_t active, const int16_t *restrict numbers) {
    u8 symbols[VECTOR];
    uint64_t planes[MOST_LOW_BITS] = {0}, escaped = 0;
    const unsigned low_bits = code->low_bits;
    const int16_t first = (int16_t)(dividing->first - ZERO_SYMBOL), last = (int16_t)(dividing->last - ZERO_SYMBOL);
    int16_t own[VECTOR]; /* not in `symbols` at once: loops over two widths are not vectorised */
    for (size_t lane = 0; lane < VECTOR; lane++) {
        int16_t high = (int16_t)(numbers[lane] >> low_bits);
        own[lane] = (int16_t)((high < first) | (high > last) ? ESCAPED - ZERO_SYMBOL : high);
    }
    for (size_t lane = 0; lane < VECTOR; lane++)
        symbols[lane] = (u8)(own[lane] + ZERO_SYMBOL);
    if (largest_of(symbols) == ESCAPED)
        for (int lane = 0; lane < VECTOR; lane++)
            escaped |= (uint64_t)(symbols[lane] == ESCAPED) << lane;
    for (uint64_t left = escaped & active; left;) {
        int lane = VECTOR - 1 - __builtin_clzll(left);
        left &= ~((uint64_t)1 << lane);
        if (!put_byte(encoder, (unsigned)numbers[lane] >> 8) || !put_byte(encoder, (unsigned)numbers[lane]))
            return 0;
    }
    if (!encode_symbols(encoder, states, code, dividing, active, symbols))
        return 0;
    if (kv_has_eights())
        kv_take_low_bits(numbers, low_bits, planes);
    else
        for (unsigned bit = 0; bit < low_bits; bit++)
            for (int lane = 0; lane < VECTOR; lane++)
                planes[bit] |= (uint64_t)(numbers[lane] >> bit & 1) << lane;
    for (unsigned byte = LOW_BYTES * low_bits; byte--;)
        if (!put_byte(encoder, (unsigned)((planes[byte / LOW_BYTES] & active & ~escaped) >> 8 * (byte % LOW_BYTES))))
            return 0;
    return 1;
}

/* The numbers of up to four rows, a token's side by side. Returns the sum of their distances from 0. */
VERSIONS static uint64_t take_rows(const Layout *layout, const i16 *rows, size_t components, int16_t *restrict numbers) {
    uint64_t sum = 0;
    memset(numbers, 0, 2 * VECTOR * layout->vectors);
    for (size_t i = 0; i < components && i < TOGETHER; i++)
        for (size_t t = 0; t < layout->tokens; t++) {
            int16_t number = rows[i * layout->tokens + t];
            numbers[TOGETHER * t + i] = number;
            sum += (uint32_t)(number < 0 ? -number : number);
        }
    return sum;
}

/* The first code that is for numbers of this mean distance from 0. limits: of each code. */
INLINE size_t chosen_code(uint64_t sum, size_t count, const u8 *limits, size_t codes) {
    int64_t mean = (int64_t)((sum * MEAN_UNIT + count - 1) / count), limit;
    size_t first = 0, end = codes - 1; /* the last one is for all */
    while (first < end) {
        size_t middle = (first + end) / 2;
        memcpy(&limit, limits + 8 * middle, 8);
        if (mean <= limit)
            end = middle;
        else
            first = middle + 1;
    }
    return first;
}

/* A unit of a block. rows: the block's. 0: there is no room. */
static int encode_unit(Encoder *encoder, const Layout *layout, const i16 *rows, size_t unit, size_t vector,
                       const Codes *codes, const u8 *limits, int16_t *restrict numbers, u8 *restrict chosen) {
    size_t first = unit * layout->unit_fours, end = first + layout->unit_fours, count = 0;
    end = end < layout->fours ? end : layout->fours;
    uint64_t sum = 0;
    int is_whole = layout->tokens % VECTOR == 0 && kv_has_vectors();
    for (size_t four = first; four < end; four++) {
        size_t components = layout->channels - TOGETHER * four;
        const i16 *from = rows + TOGETHER * four * layout->tokens;
        int16_t *to = numbers + (four - first) * layout->vectors * VECTOR;
        sum += is_whole && components >= TOGETHER ? kv_take_vectors(from, layout->tokens, to)
                                                  : take_rows(layout, from, components, to);
        count += (components < TOGETHER ? components : TOGETHER) * layout->tokens;
    }
    *chosen = ALL_ZERO;
    if (!sum)
        return 1;
    size_t number = chosen_code(sum, count, limits, codes->count);
    *chosen = (u8)number;
    Code code = code_of(codes, number);
    Dividing dividing;
    int has_dividing = 0;
    for (size_t four = end; four-- > first;) {
        size_t components = layout->channels - TOGETHER * four;
        const int16_t *own = numbers + (four - first) * layout->vectors * VECTOR;
        size_t left = layout->vectors;
        while (left) {
            if (is_whole && components >= TOGETHER && left % SETS == 0)
                left -= kv_encode_vectors(encoder, &code, left, own + left * VECTOR);
            if (!left--)
                break;
            if (!has_dividing)
                make_dividing(&code, &dividing);
            has_dividing = 1;
            uint64_t active = active_lanes(components, layout->tokens - left * (VECTOR / TOGETHER));
            uint16_t *states = encoder->states[(vector + (four - first) * layout->vectors + left) % SETS];
            if (!encode_vector(encoder, states, &code, &dividing, active, own + left * VECTOR))
                return 0;
        }
    }
    return 1;
}

static void reverse(u8 *bytes, size_t n) {
    size_t i = 0;
    for (; 2 * i + 16 <= n; i += 8) {
        uint64_t first, last;
        memcpy(&first, bytes + i, 8);
        memcpy(&last, bytes + n - i - 8, 8);
        first = __builtin_bswap64(first);
        last = __builtin_bswap64(last);
        memcpy(bytes + i, &last, 8);
        memcpy(bytes + n - i - 8, &first, 8);
    }
    for (; 2 * i + 1 < n; i++) {
        u8 byte = bytes[i];
        bytes[i] = bytes[n - 1 - i];
        bytes[n - 1 - i] = byte;
    }
}

/* How many bytes of `out` the rows take, or KV_FULL. shape: tokens, and rows of a block. rows: [rows, tokens], int16. limits: of
 * each code, int64. scratch: 2 bytes for each number of a unit, to whole vectors. */
EXPORT int64_t kv_encode_rows(const int64_t *shape, size_t shape_bytes, const u8 *rows, size_t rows_bytes,
                              const u8 *low_bits, size_t low_bits_bytes, const u8 *shares, size_t shares_bytes,
                              const u8 *starts, size_t starts_bytes, const u8 *symbols, size_t symbols_bytes,
                              const u8 *limits, size_t limits_bytes, u8 *restrict scratch, size_t scratch_bytes,
                              u8 *restrict out, size_t out_bytes) {
    Codes codes = {low_bits, shares, starts, symbols, 0};
    if (shape_bytes != 16 || shape[0] < 1 || shape[0] > MOST_TOKENS || shape[1] < 1 || shape[1] > MOST_ROWS_OF_A_BLOCK ||
        !kv_are_codes(&codes, low_bits_bytes, shares_bytes, starts_bytes, symbols_bytes) ||
        limits_bytes != 8 * codes.count || (uintptr_t)scratch % 2)
        return KV_MISFIT;
    Layout layout = layout_of((size_t)shape[1], (size_t)shape[0]);
    size_t of_block = layout.channels * layout.tokens, blocks = rows_bytes / 2 / of_block;
    if (rows_bytes != 2 * of_block * blocks || !blocks || scratch_bytes != 2 * VECTOR * layout.vectors * layout.unit_fours)
        return KV_MISFIT;
    size_t units = blocks * layout.units, stream = units + STATES_BYTES;
    if (out_bytes < stream)
        return KV_FULL;
    Encoder encoder = {.at = out + stream, .end = out + out_bytes};
    for (int set = 0; set < SETS; set++)
        for (int i = 0; i < VECTOR; i++)
            encoder.states[set][i] = LEAST_STATE;
    for (size_t unit = units; unit--;) {
        size_t block = unit / layout.units, own = unit % layout.units;
        size_t vector = (block * layout.fours + own * layout.unit_fours) * layout.vectors;
        const u8 *first = rows + 2 * (block * layout.channels + own * layout.unit_fours * TOGETHER) * layout.tokens;
        size_t next_bytes = 2 * layout.unit_fours * TOGETHER * layout.tokens, left = (size_t)(first - rows);
        for (size_t byte = 0; byte < next_bytes && byte < left; byte += 64)
            __builtin_prefetch(first - 1 - byte); /* of the unit before, which is the next one */
        if (!encode_unit(&encoder, &layout, (const i16 *)rows + block * of_block, own, vector, &codes, limits,
                         (int16_t *)scratch, out + unit))
            return KV_FULL;
    }
    memcpy(out + units, encoder.states, STATES_BYTES);
    reverse(out + stream, (size_t)(encoder.at - out) - stream);
    return encoder.at - out;
}
