/* SPDX-License-Identifier: Apache-2.0 */
/* crc32c_x86.c: the kernels for x86-64.
 *
 *   sse42       The CRC32 instruction takes eight bytes per cycle but answers after
 *               three.  Long pieces are cut into three lanes whose registers advance
 *               together; a lane's register is then moved over the next lane's bytes by a
 *               table.  Best for records, where nothing has to be set up.
 *   pclmul      Folding: 16 message bytes, as a polynomial of degree 127, are congruent
 *               to the same polynomial multiplied by x^n and added n bits further on.
 *               Four registers of 16 bytes move on by 64 bytes at a time.
 *   vpclmul512  The same with registers of 64 bytes.
 *
 * Invariants (crc32c.c has the algebra and C1 to C3):
 *
 *   X1  A function with a target attribute is called only after detect() has found those
 *       instructions, and, for 512-bit registers, that the system saves them.
 *   X2  A carry-less product of reflected operands is reflected, and one bit low: the
 *       product of a and b reads as a * b * x.
 *   X3  A 32-bit constant in the low half of a 64-bit operand reads as itself * x^32.  So
 *       to move by n bits, the low half of a register (its 64 bits come before the high
 *       half) is multiplied by x^(n + 64 - 33), and the high half by x^(n - 33).
 *
 * `crc` is the raw register (complemented) everywhere below the update_ functions.
 */
#include "crc32c.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

#define TARGET_SSE42   __attribute__((target("sse4.2")))
#define TARGET_PCLMUL  __attribute__((target("sse4.2,pclmul")))
#define TARGET_VPCLMUL __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))

/* Constants of X3 for a distance in bytes: low half, high half. */
#define FOLD_16_LOW   0xf20c0dfe
#define FOLD_16_HIGH  0x493c7d27
#define FOLD_32_LOW   0x3da6d0cb
#define FOLD_32_HIGH  0xba4fc28e
#define FOLD_48_LOW   0x1c291d04
#define FOLD_48_HIGH  0xddc0152b
#define FOLD_64_LOW   0x740eef02
#define FOLD_64_HIGH  0x9e4addf8
#define FOLD_128_LOW  0x6992cea2
#define FOLD_128_HIGH 0x0d3b6092
#define FOLD_256_LOW  0xdcb17aa4
#define FOLD_256_HIGH 0xb9e02b86

static inline uint64_t
load_64(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static inline TARGET_SSE42 uint32_t
advance_serial(uint32_t crc, const uint8_t *bytes, size_t length)
{
    uint64_t wide = crc;
    for (; length >= 8; length -= 8) {
        wide = _mm_crc32_u64(wide, load_64(bytes));
        bytes += 8;
    }
    crc = (uint32_t)wide;
    if ((length & 4) != 0) {
        uint32_t word;
        memcpy(&word, bytes, sizeof word);
        crc = _mm_crc32_u32(crc, word);
        bytes += 4;
    }
    if ((length & 2) != 0) {
        uint16_t word;
        memcpy(&word, bytes, sizeof word);
        crc = _mm_crc32_u16(crc, word);
        bytes += 2;
    }
    if ((length & 1) != 0) {
        crc = _mm_crc32_u8(crc, *bytes);
    }
    return crc;
}

static inline TARGET_SSE42 uint32_t
advance_lanes(uint32_t crc, const uint8_t *bytes, size_t lane_bytes,
    const uint32_t lane[4][256])
{
    uint64_t first = crc;
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < lane_bytes; i += 8) {
        first = _mm_crc32_u64(first, load_64(bytes + i));
        second = _mm_crc32_u64(second, load_64(bytes + lane_bytes + i));
        third = _mm_crc32_u64(third, load_64(bytes + 2 * lane_bytes + i));
    }
    crc = ckv_crc32c_shift(lane, (uint32_t)first) ^ (uint32_t)second;
    return ckv_crc32c_shift(lane, crc) ^ (uint32_t)third;
}

static TARGET_SSE42 uint32_t
update_sse42(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    crc = ~crc;
    while (length >= 3 * CKV_CRC32C_LONG_LANE_BYTES) {
        crc = advance_lanes(
            crc, bytes, CKV_CRC32C_LONG_LANE_BYTES, ckv_crc32c_long_lane);
        bytes += 3 * CKV_CRC32C_LONG_LANE_BYTES;
        length -= 3 * CKV_CRC32C_LONG_LANE_BYTES;
    }
    while (length >= 3 * CKV_CRC32C_SHORT_LANE_BYTES) {
        crc = advance_lanes(
            crc, bytes, CKV_CRC32C_SHORT_LANE_BYTES, ckv_crc32c_short_lane);
        bytes += 3 * CKV_CRC32C_SHORT_LANE_BYTES;
        length -= 3 * CKV_CRC32C_SHORT_LANE_BYTES;
    }
    return ~advance_serial(crc, bytes, length);
}

/* Moves `from` on by the distance of `factors` and adds it to `onto`. */
static inline TARGET_PCLMUL __m128i
fold_128(__m128i from, __m128i factors, __m128i onto)
{
    const __m128i low = _mm_clmulepi64_si128(from, factors, 0x00);
    const __m128i high = _mm_clmulepi64_si128(from, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

static inline TARGET_PCLMUL __m128i
load_128(const uint8_t *bytes)
{
    return _mm_loadu_si128((const void *)bytes);
}

/* `sum` stands for everything before `bytes`. */
static inline TARGET_PCLMUL uint32_t
finish_128(__m128i sum, const uint8_t *bytes, size_t length)
{
    const __m128i by_16 = _mm_set_epi64x(FOLD_16_HIGH, FOLD_16_LOW);
    for (; length >= 16; length -= 16) {
        sum = fold_128(sum, by_16, load_128(bytes));
        bytes += 16;
    }
    uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(sum));
    crc = _mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(sum, 1));
    return advance_serial((uint32_t)crc, bytes, length);
}

static TARGET_PCLMUL uint32_t
update_pclmul(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    crc = ~crc;
    if (length < 64) {
        return ~advance_serial(crc, bytes, length);
    }
    const __m128i by_64 = _mm_set_epi64x(FOLD_64_HIGH, FOLD_64_LOW);
    const __m128i by_32 = _mm_set_epi64x(FOLD_32_HIGH, FOLD_32_LOW);
    const __m128i by_16 = _mm_set_epi64x(FOLD_16_HIGH, FOLD_16_LOW);
    /* The register counts as part of the first four message bytes. */
    __m128i a = _mm_xor_si128(load_128(bytes), _mm_cvtsi32_si128((int)crc));
    __m128i b = load_128(bytes + 16);
    __m128i c = load_128(bytes + 32);
    __m128i d = load_128(bytes + 48);
    bytes += 64;
    length -= 64;
    for (; length >= 64; length -= 64) {
        a = fold_128(a, by_64, load_128(bytes));
        b = fold_128(b, by_64, load_128(bytes + 16));
        c = fold_128(c, by_64, load_128(bytes + 32));
        d = fold_128(d, by_64, load_128(bytes + 48));
        bytes += 64;
    }
    c = fold_128(a, by_32, c);
    d = fold_128(b, by_32, d);
    return ~finish_128(fold_128(c, by_16, d), bytes, length);
}

static inline TARGET_VPCLMUL __m512i
fold_512(__m512i from, __m512i factors, __m512i onto)
{
    const __m512i low = _mm512_clmulepi64_epi128(from, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(from, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, onto, 0x96); /* XOR of all three */
}

static inline TARGET_VPCLMUL __m512i
load_512(const uint8_t *bytes)
{
    return _mm512_loadu_si512((const void *)bytes);
}

static inline TARGET_VPCLMUL __m512i
repeat_128(long long high, long long low)
{
    return _mm512_broadcast_i32x4(_mm_set_epi64x(high, low));
}

/* Adds the four quarters of a register up, each moved to where the last one stands. */
static inline TARGET_VPCLMUL __m128i
join_quarters(__m512i sum)
{
    const __m512i factors = _mm512_set_epi64(
        0, 0, FOLD_16_HIGH, FOLD_16_LOW, FOLD_32_HIGH, FOLD_32_LOW, FOLD_48_HIGH, FOLD_48_LOW);
    const __m512i low = _mm512_clmulepi64_epi128(sum, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(sum, factors, 0x11);
    const __m512i moved = _mm512_xor_si512(low, high); /* its last quarter is 0 */
    const __m128i front = _mm_xor_si128(
        _mm512_castsi512_si128(moved), _mm512_extracti32x4_epi32(moved, 1));
    const __m128i back = _mm_xor_si128(
        _mm512_extracti32x4_epi32(moved, 2), _mm512_extracti32x4_epi32(sum, 3));
    return _mm_xor_si128(front, back);
}

static TARGET_VPCLMUL uint32_t
update_vpclmul512(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    if (length < 256) {
        return update_pclmul(crc, data, length);
    }
    crc = ~crc;
    const __m512i by_256 = repeat_128(FOLD_256_HIGH, FOLD_256_LOW);
    const __m512i by_128 = repeat_128(FOLD_128_HIGH, FOLD_128_LOW);
    const __m512i by_64 = repeat_128(FOLD_64_HIGH, FOLD_64_LOW);
    const __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc));
    __m512i a = _mm512_xor_si512(load_512(bytes), start);
    __m512i b = load_512(bytes + 64);
    __m512i c = load_512(bytes + 128);
    __m512i d = load_512(bytes + 192);
    bytes += 256;
    length -= 256;
    for (; length >= 256; length -= 256) {
        a = fold_512(a, by_256, load_512(bytes));
        b = fold_512(b, by_256, load_512(bytes + 64));
        c = fold_512(c, by_256, load_512(bytes + 128));
        d = fold_512(d, by_256, load_512(bytes + 192));
        bytes += 256;
    }
    c = fold_512(a, by_128, c);
    d = fold_512(b, by_128, d);
    d = fold_512(c, by_64, d);
    for (; length >= 64; length -= 64) {
        d = fold_512(d, by_64, load_512(bytes));
        bytes += 64;
    }
    return ~finish_128(join_quarters(d), bytes, length);
}

/* ---- choice ------------------------------------------------------------------- */

struct features {
    bool sse42;
    bool pclmul;
    bool vpclmul512;
};

/* The system saves the mask registers and all 32 512-bit registers (XCR0 bits 1, 2, 5,
 * 6 and 7).  Requires the XGETBV instruction. */
static bool
system_saves_512(void)
{
    uint32_t low;
    uint32_t high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & 0xe6) == 0xe6;
}

static struct features
detect(void)
{
    struct features found = {.sse42 = false};
    unsigned int eax;
    unsigned int ebx;
    unsigned int ecx;
    unsigned int edx;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) {
        return found;
    }
    const bool has_xgetbv = (ecx & 1u << 27) != 0;
    found.sse42 = (ecx & 1u << 20) != 0;
    found.pclmul = found.sse42 && (ecx & 1u << 1) != 0;
    if (!found.pclmul || !has_xgetbv || !system_saves_512() ||
        __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) {
        return found;
    }
    const bool has_avx512f = (ebx & 1u << 16) != 0;
    const bool has_vpclmulqdq = (ecx & 1u << 10) != 0;
    found.vpclmul512 = has_avx512f && has_vpclmulqdq;
    return found;
}

static const struct ckv_crc32c_choice sse42_choice = {
    .name = "sse42",
    .small_update = update_sse42,
    .large_update = update_sse42,
    .large_from_bytes = 0,
};

static const struct ckv_crc32c_choice pclmul_choice = {
    .name = "pclmul",
    .small_update = update_sse42,
    .large_update = update_pclmul,
    .large_from_bytes = 128,
};

static const struct ckv_crc32c_choice vpclmul512_choice = {
    .name = "vpclmul512",
    .small_update = update_sse42,
    .large_update = update_vpclmul512,
    .large_from_bytes = 128,
};

const struct ckv_crc32c_choice *
ckv_crc32c_native_choice(void)
{
    const struct features found = detect();
    if (found.vpclmul512) {
        return &vpclmul512_choice;
    }
    if (found.pclmul) {
        return &pclmul_choice;
    }
    return found.sse42 ? &sse42_choice : NULL;
}

size_t
ckv_crc32c_native_kernels(struct ckv_crc32c_kernel_info *out)
{
    const struct features found = detect();
    size_t count = 0;
    if (found.sse42) {
        out[count++] = (struct ckv_crc32c_kernel_info){"sse42", update_sse42};
    }
    if (found.pclmul) {
        out[count++] = (struct ckv_crc32c_kernel_info){"pclmul", update_pclmul};
    }
    if (found.vpclmul512) {
        out[count++] = (struct ckv_crc32c_kernel_info){"vpclmul512", update_vpclmul512};
    }
    return count;
}

#endif /* __x86_64__ */
