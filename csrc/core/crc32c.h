/* SPDX-License-Identifier: Apache-2.0 */
/* crc32c.h: CRC-32C (Castagnoli), several kernels behind one function.
 *
 * ckv_crc32c() itself is public and declared in cyclone_kv.h.  All functions here may
 * be called from any thread, allocate nothing and cannot fail.
 *
 * The convention is that of zlib's crc32(): 0 begins, and the result of one piece is
 * passed on to the next, so that
 *
 *     crc(a || b) == ckv_crc32c(crc(a), b)
 *                 == ckv_crc32c_combine(crc(a), crc(b), length of b)
 *
 * `data` may be NULL when the length is 0, and needs no alignment.
 */
#ifndef CKV_CRC32C_H
#define CKV_CRC32C_H

#include <stddef.h>
#include <stdint.h>

#include "cyclone_kv.h"

enum { CKV_CRC32C_KERNELS_MAX = 4 }; /* enough for every kernel of one architecture */

struct ckv_crc32c_kernel_info {
    const char *name; /* constant */
    uint32_t (*update)(uint32_t crc, const void *data, size_t length);
};

/* The checksum of two pieces laid end to end, from those of the pieces. */
uint32_t ckv_crc32c_combine(uint32_t crc1, uint32_t crc2, uint64_t length2);

/* The kernel that ckv_crc32c() uses for long pieces; a constant string. */
const char *ckv_crc32c_kernel(void);

/* Lists the kernels that this processor can run, the portable one first.  Fills at most
 * `max` of them in and returns how many there are; `out` may be NULL when max is 0. */
size_t ckv_crc32c_kernels(struct ckv_crc32c_kernel_info *out, size_t max);

/* ---- between crc32c.c and the file of the architecture ------------------------- */

/* What ckv_crc32c() calls.  Objects of this type are constants. */
struct ckv_crc32c_choice {
    const char *name;
    uint32_t (*small_update)(uint32_t crc, const void *data, size_t length);
    uint32_t (*large_update)(uint32_t crc, const void *data, size_t length);
    size_t large_from_bytes; /* measured: from here on large_update is the faster */
};

/* Kernels that need instructions this processor has, slowest first; never more than
 * CKV_CRC32C_KERNELS_MAX - 1. */
size_t ckv_crc32c_native_kernels(struct ckv_crc32c_kernel_info *out);

/* NULL when the portable kernel is all there is. */
const struct ckv_crc32c_choice *ckv_crc32c_native_choice(void);

/* Lane lengths of the three-way kernels.  Three long lanes and 64 bytes make a page. */
enum { CKV_CRC32C_LONG_LANE_BYTES = 1344, CKV_CRC32C_SHORT_LANE_BYTES = 128 };

/* [k][b]: what byte k of a register becomes, when it is b, once a lane of zeros has
 * passed. */
extern const uint32_t ckv_crc32c_long_lane[4][256];
extern const uint32_t ckv_crc32c_short_lane[4][256];

/* The raw register `crc` after a lane of zeros, by one of the two tables. */
static inline uint32_t
ckv_crc32c_shift(const uint32_t lane[4][256], uint32_t crc)
{
    return lane[0][crc & 0xff] ^ lane[1][(crc >> 8) & 0xff] ^
           lane[2][(crc >> 16) & 0xff] ^ lane[3][crc >> 24];
}

#endif /* CKV_CRC32C_H */
