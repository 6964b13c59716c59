/* The version of this library, and the rules of its functions.
 *
 * Every buffer comes with its size in bytes, and no access is made before the sizes have been compared. What a buffer
 * holds is data: no value in it leads an access beyond a buffer. A function answers KV_MISFIT where sizes do not fit
 * each other, and what it has written then means nothing; else 0, or what its comment says. Buffers need not be aligned.
 * None may overlap one that is written. Nothing is allocated or kept, so any thread may call any function at any time.
 */
#include "c_library.h"

#define KV_VERSION 4 /* of these functions' arguments: kernels.py asks for its own */

EXPORT int64_t kv_version(void) { return KV_VERSION; }
EXPORT int64_t kv_source(void) { return KV_SOURCE; }
