/* The codes of the codec `kvtc`: rows of whole numbers into the codes of asymmetric numeral systems and back, as
 * docs/formats/kvtc.md has it. row_codes.py makes the codes, numpy_rows.py says what is computed. */
#ifndef KV_ROWS_H
#define KV_ROWS_H

#include "kernels.h"

enum {
    SETS = 4,          /* of lanes, which take turns */
    VECTOR = 64,       /* lanes of a set, and numbers that they decode side by side */
    TOGETHER = 4,      /* rows of which a vector has numbers */
    STATES_BYTES = 2 * SETS * VECTOR,
    LOW_BYTES = VECTOR / 8, /* one bit of each number of a vector */
    MOST_LOW_BITS = 11,
    BYTE_LOW_BITS = 3,      /* with no more of them, all numbers that are not escaped are bytes */
    SYMBOLS = 32,
    ESCAPED = SYMBOLS - 1,  /* the symbol of a number that is stored as it is */
    ZERO_SYMBOL = 16,       /* the symbol of 0 */
    SHARES = 256,
    LEAST_STATE = 256,
    ALL_ZERO = 255,         /* instead of a code */
    FAR_OFFSET = 128,       /* numbers are decoded to bytes that are as much larger */
    /* The most that a vector takes. */
    VECTOR_BYTES = MOST_LOW_BITS * LOW_BYTES + VECTOR + 2 * VECTOR
};

/* Arrays as `RowCodes` has them. */
typedef struct {
    const u8 *low_bits, *shares, *starts, *symbols;
    size_t count;
} Codes;

/* One of them. */
typedef struct {
    unsigned low_bits;
    const u8 *shares, *starts, *symbols;
} Code;

INLINE Code code_of(const Codes *codes, size_t number) {
    return (Code){codes->low_bits[number], codes->shares + number * SYMBOLS, codes->starts + number * SYMBOLS,
                  codes->symbols + number * SHARES};
}

/* Whether these arrays are of as many codes, which it counts, and lead nowhere else. */
int kv_are_codes(Codes *codes, size_t low_bits_bytes, size_t shares_bytes, size_t starts_bytes, size_t symbols_bytes);

/* How a block's numbers are divided. */
typedef struct {
    size_t channels, tokens;
    size_t fours, vectors;    /* how often four rows are coded together, and the vectors of these */
    size_t unit_fours, units; /* how many fours share a code, and how many codes there are */
} Layout;

/* channels, tokens: at least 1. */
INLINE Layout layout_of(size_t channels, size_t tokens) {
    size_t fours = (channels + TOGETHER - 1) / TOGETHER, vectors = (tokens + VECTOR / TOGETHER - 1) / (VECTOR / TOGETHER);
    size_t unit_fours = tokens < 256 ? 256 / tokens : 1;
    return (Layout){channels, tokens, fours, vectors, unit_fours, (fours + unit_fours - 1) / unit_fours};
}

/* Bytes of a block's decoded numbers: [fours][vectors][VECTOR]. */
INLINE size_t decoded_bytes(const Layout *layout) { return layout->fours * layout->vectors * VECTOR; }

/* The lane that reads i-th. */
INLINE int lane_of(int i) { return i < VECTOR / 2 ? 2 * i : 2 * i - VECTOR + 1; }

/* A number that a byte does not hold, and the place of its byte. next: for the caller. */
typedef struct {
    uint32_t place, next;
    int32_t number;
} Far;

typedef struct {
    uint16_t states[SETS][VECTOR]; /* in the order in which lanes read */
    const u8 *at, *end;            /* what is left of the stream */
    size_t vector;                 /* the number of the next one, which decides on its set */
} Decoder;

/* Reads the states. */
INLINE void begin_decoding(Decoder *decoder, const u8 *states, const u8 *end) {
    memcpy(decoder->states, states, STATES_BYTES);
    decoder->at = states + STATES_BYTES;
    decoder->end = end;
    decoder->vector = 0;
}

/* Decodes a block to bytes, of which each is its number + FAR_OFFSET, or that of 0 if there is no such byte. unit_codes: of the
 * block. place: of the first one. far: where the other numbers go, of which there may be all. Returns the end of those, or NULL:
 * damaged. */
Far *kv_decode_block(Decoder *decoder, const Layout *layout, const Codes *codes, const u8 *unit_codes, size_t place,
                     u8 *restrict bytes, Far *far);
/* Whether all of the stream was read, and every lane is in the state that encoding began with. */
int kv_ends_well(const Decoder *decoder);

#endif
