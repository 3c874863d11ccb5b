/* SPDX-License-Identifier: Apache-2.0 */
/* sha256.h: SHA-256 (FIPS 180-4), for keys that are not 32 bytes long already.
 *
 * All functions may be called from any thread, allocate nothing and cannot fail.
 * Digests name blocks; nothing here is hardened against side channels.
 */
#ifndef CKV_SHA256_H
#define CKV_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { CKV_SHA256_BYTES = 32, CKV_SHA256_BLOCK_BYTES = 64, CKV_SHA256_KERNELS_MAX = 2 };

/* A digest in the making.  May be copied to hash several endings of one beginning. */
struct ckv_sha256_state {
    uint32_t words[8];
    uint64_t length_bytes; /* so far; its low six bits say how much is pending */
    uint8_t pending[CKV_SHA256_BLOCK_BYTES];
};

/* `data` may be NULL when the length is 0. */
void ckv_sha256(const void *data, size_t length, uint8_t digest[CKV_SHA256_BYTES]);

void ckv_sha256_init(struct ckv_sha256_state *state);
void ckv_sha256_update(struct ckv_sha256_state *state, const void *data, size_t length);
/* Ends the state; only ckv_sha256_init() may follow. */
void ckv_sha256_final(struct ckv_sha256_state *state, uint8_t digest[CKV_SHA256_BYTES]);

struct ckv_sha256_kernel_info {
    const char *name; /* constant */
    /* Runs whole blocks through the eight words. */
    void (*compress)(uint32_t words[8], const uint8_t *blocks, size_t block_count);
};

/* Lists the kernels that this processor can run, the portable one first and the one in
 * use last.  Fills at most `max` of them in and returns how many there are; `out` may
 * be NULL when max is 0. */
size_t ckv_sha256_kernels(struct ckv_sha256_kernel_info *out, size_t max);

#endif /* CKV_SHA256_H */
