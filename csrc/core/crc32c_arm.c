/* SPDX-License-Identifier: Apache-2.0 */
/* crc32c_arm.c: the kernel for 64-bit ARM (little-endian).
 *
 *   armv8-crc   The CRC32CX instruction takes eight bytes per cycle but answers after
 *               two or three.  Long pieces are cut into three lanes whose registers
 *               advance together; a lane's register is then moved over the next lane's
 *               bytes by a table.  (The same plan as sse42 in crc32c_x86.c.)
 *
 * The instruction is optional in ARMv8.0.  Linux says in the auxiliary vector whether
 * it is there; every 64-bit Apple processor that runs macOS has it; elsewhere the
 * portable kernel stays.  The builtins are used rather than <arm_acle.h>, which older
 * compilers leave empty unless the whole file is compiled for a processor that has
 * them.
 *
 * `crc` is the raw register (complemented) everywhere below update_armv8_crc().
 */
#include "crc32c.h"

#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

#include <stdbool.h>
#include <string.h>

#if defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__clang__)
#define TARGET_CRC     __attribute__((target("crc")))
#define CRC_8(crc, v)  __builtin_arm_crc32cb((crc), (v))
#define CRC_16(crc, v) __builtin_arm_crc32ch((crc), (v))
#define CRC_32(crc, v) __builtin_arm_crc32cw((crc), (v))
#define CRC_64(crc, v) __builtin_arm_crc32cd((crc), (v))
#else
#define TARGET_CRC     __attribute__((target("+crc")))
#define CRC_8(crc, v)  __builtin_aarch64_crc32cb((crc), (v))
#define CRC_16(crc, v) __builtin_aarch64_crc32ch((crc), (v))
#define CRC_32(crc, v) __builtin_aarch64_crc32cw((crc), (v))
#define CRC_64(crc, v) __builtin_aarch64_crc32cx((crc), (v))
#endif

enum {
    LONG_LANES_BYTES = 3 * CKV_CRC32C_LONG_LANE_BYTES,
    SHORT_LANES_BYTES = 3 * CKV_CRC32C_SHORT_LANE_BYTES,
};

static inline uint64_t
load_64(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static inline TARGET_CRC uint32_t
advance_serial(uint32_t crc, const uint8_t *bytes, size_t length)
{
    for (; length >= 8; length -= 8) {
        crc = CRC_64(crc, load_64(bytes));
        bytes += 8;
    }
    if ((length & 4) != 0) {
        uint32_t word;
        memcpy(&word, bytes, sizeof word);
        crc = CRC_32(crc, word);
        bytes += 4;
    }
    if ((length & 2) != 0) {
        uint16_t word;
        memcpy(&word, bytes, sizeof word);
        crc = CRC_16(crc, word);
        bytes += 2;
    }
    if ((length & 1) != 0) {
        crc = CRC_8(crc, *bytes);
    }
    return crc;
}

static inline TARGET_CRC uint32_t
advance_lanes(uint32_t crc, const uint8_t *bytes, size_t lane_bytes,
    const uint32_t lane[4][256])
{
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < lane_bytes; i += 8) {
        crc = CRC_64(crc, load_64(bytes + i));
        second = CRC_64(second, load_64(bytes + lane_bytes + i));
        third = CRC_64(third, load_64(bytes + 2 * lane_bytes + i));
    }
    crc = ckv_crc32c_shift(lane, crc) ^ second;
    return ckv_crc32c_shift(lane, crc) ^ third;
}

static TARGET_CRC uint32_t
update_armv8_crc(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    crc = ~crc;
    for (; length >= LONG_LANES_BYTES; length -= LONG_LANES_BYTES) {
        crc =
            advance_lanes(crc, bytes, CKV_CRC32C_LONG_LANE_BYTES, ckv_crc32c_long_lane);
        bytes += LONG_LANES_BYTES;
    }
    for (; length >= SHORT_LANES_BYTES; length -= SHORT_LANES_BYTES) {
        crc = advance_lanes(crc, bytes, CKV_CRC32C_SHORT_LANE_BYTES,
            ckv_crc32c_short_lane);
        bytes += SHORT_LANES_BYTES;
    }
    return ~advance_serial(crc, bytes, length);
}

static bool
has_crc(void)
{
#if defined(__APPLE__)
    return true;
#elif defined(__linux__)
    const unsigned long hwcap_crc32 = 1ul << 7; /* HWCAP_CRC32 of <asm/hwcap.h> */
    return (getauxval(AT_HWCAP) & hwcap_crc32) != 0;
#else
    return false;
#endif
}

static const struct ckv_crc32c_choice armv8_crc_choice = {
    .name = "armv8-crc",
    .small_update = update_armv8_crc,
    .large_update = update_armv8_crc,
    .large_from_bytes = 0,
};

const struct ckv_crc32c_choice *
ckv_crc32c_native_choice(void)
{
    return has_crc() ? &armv8_crc_choice : NULL;
}

size_t
ckv_crc32c_native_kernels(struct ckv_crc32c_kernel_info *out)
{
    if (!has_crc()) {
        return 0;
    }
    out[0] = (struct ckv_crc32c_kernel_info){
        .name = armv8_crc_choice.name,
        .update = update_armv8_crc,
    };
    return 1;
}

#endif /* __aarch64__ */
