/* What the sources of this library share. */
#ifndef KV_KERNELS_H
#define KV_KERNELS_H

#include "c_library.h"

#define KV_VERSION 11 /* of these functions' arguments: compiled_kernels.py asks for its own */
#define KV_DAMAGED (-2) /* a payload that cannot be */
#define KV_FULL (-3)    /* there is more than fits */

/* Whether this processor has a part of AVX-512; a test compiles as if none had. */
#ifdef KV_NO_AVX512
#define HAS_AVX512(part) 0
#else
#define HAS_AVX512(part) __builtin_cpu_supports("avx512" part)
#endif

#endif
