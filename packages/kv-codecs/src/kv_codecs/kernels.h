/* What the sources of this library share. */
#ifndef KV_KERNELS_H
#define KV_KERNELS_H

#include "c_library.h"

#define KV_VERSION 12 /* of these functions' arguments: kernels.py asks for its own */
#define KV_DAMAGED (-2) /* a payload that cannot be */
#define KV_FULL (-3)    /* there is more than fits */

enum { BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3 }; /* types of numbers */

/* What a function in intrinsics is compiled for, and whether this processor has it. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(KV_PORTABLE)
#define KV_X86
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
/* AVX-512's byte instructions compress and expand 64 bytes by a mask: a loop over those that are marked would mispredict its
 * end for every 64. */
#define VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,gfni,bmi2,popcnt")))
#ifdef KV_NO_AVX512 /* a test compiles as if no processor had it */
#define HAS_AVX512(part) 0
#else
#define HAS_AVX512(part) __builtin_cpu_supports("avx512" part)
#endif

static inline int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}

static inline int has_vnni(void) { return HAS_AVX512("vnni") && HAS_AVX512("bw") && HAS_AVX512("vl"); }

static inline int has_vbmi(void) {
    return HAS_AVX512("vbmi") && HAS_AVX512("vbmi2") && HAS_AVX512("bw") && HAS_AVX512("dq") && HAS_AVX512("vl") &&
           __builtin_cpu_supports("gfni");
}
#endif

#endif
