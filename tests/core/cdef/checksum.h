/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of crc32c.h and sha256.h, as far as the tests need them. */

struct ckv_crc32c_kernel_info {
    const char *name;
    uint32_t (*update)(uint32_t crc, const void *data, size_t length);
};

uint32_t ckv_crc32c(uint32_t crc, const void *data, size_t length);
uint32_t ckv_crc32c_combine(uint32_t crc1, uint32_t crc2, uint64_t length2);
const char *ckv_crc32c_kernel(void);
size_t ckv_crc32c_kernels(struct ckv_crc32c_kernel_info *out, size_t max);

struct ckv_sha256_state {
    uint32_t words[8];
    uint64_t length_bytes;
    uint8_t pending[64];
};

struct ckv_sha256_kernel_info {
    const char *name;
    void (*compress)(uint32_t *words, const uint8_t *blocks, size_t block_count);
};

void ckv_sha256(const void *data, size_t length, uint8_t *digest);
void ckv_sha256_init(struct ckv_sha256_state *state);
void ckv_sha256_update(struct ckv_sha256_state *state, const void *data, size_t length);
void ckv_sha256_final(struct ckv_sha256_state *state, uint8_t *digest);
size_t ckv_sha256_kernels(struct ckv_sha256_kernel_info *out, size_t max);
