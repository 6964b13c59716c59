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

/* Whether this processor has AVX2. */
int kv_has_eights(void);
/* The symbols of a vector, all of whose lanes have numbers, and where the next byte is. At least VECTOR + 8 bytes can be read.
 * slots: for each lower byte of a state, from bit 0 on the symbol, from bit 8 on how far in its share the byte is, and from bit 16
 * on the share. */
const u8 *kv_decode_eights(uint16_t *restrict states, const uint32_t *restrict slots, const u8 *restrict at,
                           u8 *restrict symbols);
/* The reverse, from the last lane to the first. There is room for VECTOR + 8 bytes. */
u8 *kv_encode_eights(uint16_t *restrict states, const Code *code, const u8 *restrict symbols, u8 *restrict at);

/* The lower bits of a vector's numbers: of each bit, a plane with those of all lanes. */
void kv_take_low_bits(const int16_t *numbers, unsigned low_bits, uint64_t *restrict planes);

/* Whether this processor has AVX-512's instructions for bytes, which decode and encode 64 numbers at once. */
int kv_has_vectors(void);
/* Decodes some of the n vectors, all of whose lanes have numbers, and of which the first is its set's first. first: the place of
 * its first number in `bytes`. Returns how many: a multiple of SETS. */
size_t kv_decode_vectors(Decoder *decoder, const Code *code, size_t n, size_t first, u8 *restrict bytes, Far **far);

typedef struct {
    uint16_t states[SETS][VECTOR]; /* in the order in which lanes read */
    u8 *at, *end;                  /* where the next byte of the stream, the last one first, is written to */
} Encoder;

/* The numbers of four rows of so many tokens, a multiple of VECTOR, a token's side by side. Returns the sum of their distances from
 * 0. */
uint64_t kv_take_vectors(const i16 *rows, size_t tokens, int16_t *restrict numbers);
/* Encodes some of the n vectors before the end of `numbers`, the last one first, under the same conditions. Returns how many. */
size_t kv_encode_vectors(Encoder *encoder, const Code *code, size_t n, const int16_t *numbers);

#endif
