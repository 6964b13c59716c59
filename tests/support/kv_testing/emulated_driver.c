/* Calls the kernels for another process, which emulates this one's processor: requests come in on standard input, answers
 * go out on standard output. emulated.py has the other side. KV_COPIES: the library is kv-cuda's, else it is kv-codecs'. */
#include "c_library.h"

#include <stdio.h>
#include <stdlib.h>

#define IN const u8 *, size_t
#define OUT u8 *restrict, size_t
#define INTEGERS int64_t *restrict, size_t
#ifdef KV_COPIES
int64_t kv_quantise(const int64_t *, size_t, IN, OUT, OUT);
int64_t kv_dequantise(const int64_t *, size_t, IN, OUT, OUT);
int64_t kv_copy_blocks(int64_t, IN, IN, u8 *, size_t, u8 *, size_t);
int64_t kv_submit(IN, IN, IN, IN, u8 *, size_t, u8 *, size_t, IN, IN, const int64_t *, size_t);
#else
int64_t kv_split(int64_t, IN, OUT, OUT);
int64_t kv_join(int64_t, IN, IN, OUT);
int64_t kv_cut(int64_t, IN, OUT, OUT, OUT, OUT, OUT, OUT, INTEGERS);
int64_t kv_restore(int64_t, IN, IN, IN, IN, IN, IN, IN, IN, OUT, INTEGERS);
int64_t kv_pack(IN, IN, OUT);
int64_t kv_select(int64_t, IN, IN, OUT);
int64_t kv_histogram(IN, INTEGERS);
int64_t kv_encode_rows(const int64_t *, size_t, IN, IN, IN, IN, IN, IN, OUT, OUT);
int64_t kv_project(const int64_t *, size_t, IN, IN, IN, IN, IN, IN, OUT, OUT);
int64_t kv_decode(const int64_t *, size_t, IN, IN, IN, IN, IN, IN, IN, IN, IN, IN, IN, OUT, OUT);
#endif

enum { MOST_ARRAYS = 14 };

typedef struct {
    char name[16];
    int64_t number;
    uint64_t arrays;
} Request;

static u8 *at[MOST_ARRAYS];
static uint64_t size[MOST_ARRAYS];

#define A(i) at[i], size[i]
#define IS(kernel) (strcmp(name, kernel) == 0)

static int64_t call(const char *name, int64_t number) {
#ifdef KV_COPIES
    if (IS("quantise")) return kv_quantise((int64_t *)at[0], size[0], A(1), A(2), A(3));
    if (IS("dequantise")) return kv_dequantise((int64_t *)at[0], size[0], A(1), A(2), A(3));
    if (IS("copy_blocks")) return kv_copy_blocks(number, A(0), A(1), A(2), A(3));
    if (IS("submit"))
        return kv_submit(A(0), A(1), A(2), A(3), A(4), A(5), A(6), A(7), (int64_t *)at[8], size[8]);
#else
    if (IS("split")) return kv_split(number, A(0), A(1), A(2));
    if (IS("join")) return kv_join(number, A(0), A(1), A(2));
    if (IS("cut")) return kv_cut(number, A(0), A(1), A(2), A(3), A(4), A(5), A(6), (int64_t *)at[7], size[7]);
    if (IS("restore"))
        return kv_restore(number, A(0), A(1), A(2), A(3), A(4), A(5), A(6), A(7), A(8), (int64_t *)at[9], size[9]);
    if (IS("pack")) return kv_pack(A(0), A(1), A(2));
    if (IS("select")) return kv_select(number, A(0), A(1), A(2));
    if (IS("histogram")) return kv_histogram(A(0), (int64_t *)at[1], size[1]);
    if (IS("encode_rows"))
        return kv_encode_rows((int64_t *)at[0], size[0], A(1), A(2), A(3), A(4), A(5), A(6), A(7), A(8));
    if (IS("project"))
        return kv_project((int64_t *)at[0], size[0], A(1), A(2), A(3), A(4), A(5), A(6), A(7), A(8));
    if (IS("decode"))
        return kv_decode((int64_t *)at[0], size[0], A(1), A(2), A(3), A(4), A(5), A(6), A(7), A(8), A(9), A(10), A(11), A(12),
                         A(13));
#endif
    exit(3);
}

static void read_all(void *to, size_t bytes) {
    if (bytes && fread(to, bytes, 1, stdin) != 1)
        exit(2);
}

int main(void) {
    Request request;
    while (fread(&request, sizeof request, 1, stdin) == 1 && request.arrays <= MOST_ARRAYS) {
        for (uint64_t i = 0; i < request.arrays; i++) {
            read_all(&size[i], sizeof size[i]);
            at[i] = malloc(size[i] + 1);
            read_all(at[i], size[i]);
        }
        int64_t answer = call(request.name, request.number);
        fwrite(&answer, sizeof answer, 1, stdout);
        for (uint64_t i = 0; i < request.arrays; i++) {
            fwrite(at[i], 1, size[i], stdout);
            free(at[i]);
        }
        fflush(stdout);
    }
    return 0;
}
