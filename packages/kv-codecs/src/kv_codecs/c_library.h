/* What our libraries in C share; kv_core/c_library.py loads them. The packages with one have a link to this file. */
#ifndef KV_C_LIBRARY_H
#define KV_C_LIBRARY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "for little-endian machines"
#endif

#define KV_MISFIT (-1) /* sizes do not fit each other */

#ifndef KV_SOURCE /* a checksum of this file, by which tests find a library that was compiled from another */
#define KV_SOURCE 0
#endif

#define EXPORT __attribute__((visibility("default")))
/* Several versions, of which one is chosen when the library is loaded. Sanitizers start too late for that choice. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(KV_ONE_VERSION)
#define VERSIONS __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define VERSIONS
#endif
#define INLINE static inline __attribute__((always_inline)) /* so that each version has its own */

/* A mask of the first bits, or of all 64. */
INLINE uint64_t first_of(size_t count) { return count < 64 ? ((uint64_t)1 << count) - 1 : UINT64_MAX; }

typedef uint8_t u8;
typedef uint16_t u16 __attribute__((aligned(1), may_alias)); /* at any address, of any buffer */
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef float f32 __attribute__((aligned(1), may_alias));
typedef int8_t i8;
typedef int16_t i16 __attribute__((aligned(1), may_alias));

#endif
