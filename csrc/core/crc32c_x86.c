/* SPDX-License-Identifier: Apache-2.0 */
/* crc32c_x86.c: the kernels for x86-64.
 *
 *   sse42       The CRC32 instruction takes eight bytes per cycle but answers after
 *               three.  Long pieces are cut into three lanes whose registers advance
 *               together; a lane's register is then moved over the next lane's bytes
 *               by a table.  Best for records, where nothing has to be set up.
 *
 *   pclmul      Folding: 16 message bytes, as a polynomial of degree 127, times x^n may
 *               be added to the message n bits further on in their stead.  Three
 *               registers of 16 bytes move on by 48 bytes at a time.  Alone this is no
 *               faster than sse42, but the two use different execution units: long
 *               pieces are cut into a folded part and three lanes, which advance in one
 *               loop.  Folding 64 bytes beside 72 would suit one multiplication per
 *               cycle, 32 bytes one in two cycles; both kinds of processor exist, and
 *               48 is near enough.
 *
 *   vpclmul512  Folding with registers of 64 bytes.  It reads faster than memory
 *               delivers, so that lanes beside it would gain nothing.
 *
 * Invariants (crc32c.c has the algebra and C1 to C3):
 *
 *   X1  A function with a target attribute is called only after detect() has found
 *       those instructions and, for 512-bit registers, that the system saves them.
 *
 *   X2  A carry-less product of reflected operands is reflected, and one bit low: the
 *       product of a and b reads as a * b * x.
 *
 *   X3  A 32-bit constant in the low half of a 64-bit operand reads as itself * x^32.
 *       So to move by n bits, the low half of a register (its 64 bits come before the
 *       high half) is multiplied by x^(n + 64 - 33), and the high half by x^(n - 33).
 *
 * `crc` is the raw register (complemented) everywhere below the update_ functions.
 */
#include "crc32c.h"

#if defined(__x86_64__)

#include <assert.h>
#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

#define TARGET_SSE42   __attribute__((target("sse4.2")))
#define TARGET_PCLMUL  __attribute__((target("sse4.2,pclmul")))
#define TARGET_VPCLMUL __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))

enum {
    LONG_LANES_BYTES = 3 * CKV_CRC32C_LONG_LANE_BYTES,
    SHORT_LANES_BYTES = 3 * CKV_CRC32C_SHORT_LANE_BYTES,
    /* A step of the mixed loop takes 24 bytes of each lane and folds 48. */
    MIXED_STEPS = CKV_CRC32C_LONG_LANE_BYTES / 24,
    MIXED_FOLDED_BYTES = MIXED_STEPS * 48,
    MIXED_BYTES = MIXED_FOLDED_BYTES + LONG_LANES_BYTES,
    /* Measured: below these lengths the serial loop of sse42 is faster. */
    PCLMUL_FROM_BYTES = 192,
    VPCLMUL512_FROM_BYTES = 128,
};

static_assert(CKV_CRC32C_LONG_LANE_BYTES % 24 == 0,
    "the mixed loop ends with its lanes");

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

/* The registers of three lanes; only the first may begin with a value. */
struct lanes {
    uint64_t first;
    uint64_t second;
    uint64_t third;
};

/* Eight bytes of each lane; `bytes` is a place in the first of them. */
static inline TARGET_SSE42 void
lanes_advance(struct lanes *lanes, const uint8_t *bytes, size_t lane_bytes)
{
    lanes->first = _mm_crc32_u64(lanes->first, load_64(bytes));
    lanes->second = _mm_crc32_u64(lanes->second, load_64(bytes + lane_bytes));
    lanes->third = _mm_crc32_u64(lanes->third, load_64(bytes + 2 * lane_bytes));
}

static inline uint32_t
lanes_join(const struct lanes *lanes, const uint32_t lane[4][256])
{
    const uint32_t crc =
        ckv_crc32c_shift(lane, (uint32_t)lanes->first) ^ (uint32_t)lanes->second;
    return ckv_crc32c_shift(lane, crc) ^ (uint32_t)lanes->third;
}

static inline TARGET_SSE42 uint32_t
advance_lanes(uint32_t crc, const uint8_t *bytes, size_t lane_bytes,
    const uint32_t lane[4][256])
{
    struct lanes lanes = {.first = crc};
    for (size_t i = 0; i < lane_bytes; i += 8) {
        lanes_advance(&lanes, bytes + i, lane_bytes);
    }
    return lanes_join(&lanes, lane);
}

static inline TARGET_SSE42 uint32_t
advance_sse42(uint32_t crc, const uint8_t *bytes, size_t length)
{
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
    return advance_serial(crc, bytes, length);
}

static TARGET_SSE42 uint32_t
update_sse42(uint32_t crc, const void *data, size_t length)
{
    return ~advance_sse42(~crc, data, length);
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

/* The register after the message that `sum` stands for. */
static inline TARGET_PCLMUL uint32_t
reduce_128(__m128i sum)
{
    const uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(sum));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(sum, 1));
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
    return advance_serial(reduce_128(sum), bytes, length);
}

/* Three registers that stand for the message up to some point. */
struct folds {
    __m128i a;
    __m128i b;
    __m128i c;
};

static inline TARGET_PCLMUL struct folds
folds_begin(uint32_t crc, const uint8_t *bytes)
{
    /* The register counts as part of the first four message bytes. */
    return (struct folds){
        .a = _mm_xor_si128(load_128(bytes), _mm_cvtsi32_si128((int)crc)),
        .b = load_128(bytes + 16),
        .c = load_128(bytes + 32),
    };
}

static inline TARGET_PCLMUL void
folds_advance(struct folds *folds, const uint8_t *bytes)
{
    const __m128i by_48 = _mm_set_epi64x(FOLD_48_HIGH, FOLD_48_LOW);
    folds->a = fold_128(folds->a, by_48, load_128(bytes));
    folds->b = fold_128(folds->b, by_48, load_128(bytes + 16));
    folds->c = fold_128(folds->c, by_48, load_128(bytes + 32));
}

static inline TARGET_PCLMUL __m128i
folds_join(const struct folds *folds)
{
    const __m128i by_32 = _mm_set_epi64x(FOLD_32_HIGH, FOLD_32_LOW);
    const __m128i by_16 = _mm_set_epi64x(FOLD_16_HIGH, FOLD_16_LOW);
    return fold_128(folds->a, by_32, fold_128(folds->b, by_16, folds->c));
}

/* Requires: length >= 48. */
static inline TARGET_PCLMUL uint32_t
advance_folded(uint32_t crc, const uint8_t *bytes, size_t length)
{
    struct folds folds = folds_begin(crc, bytes);
    bytes += 48;
    length -= 48;
    for (; length >= 48; length -= 48) {
        folds_advance(&folds, bytes);
        bytes += 48;
    }
    return finish_128(folds_join(&folds), bytes, length);
}

/* Exactly MIXED_BYTES: first the folded part, then three lanes. */
static inline TARGET_PCLMUL uint32_t
advance_mixed(uint32_t crc, const uint8_t *bytes)
{
    const uint8_t *lane = bytes + MIXED_FOLDED_BYTES;
    struct lanes lanes = {.first = 0};
    struct folds folds = folds_begin(crc, bytes);
    for (size_t step = 0;;) {
        lanes_advance(&lanes, lane, CKV_CRC32C_LONG_LANE_BYTES);
        lanes_advance(&lanes, lane + 8, CKV_CRC32C_LONG_LANE_BYTES);
        lanes_advance(&lanes, lane + 16, CKV_CRC32C_LONG_LANE_BYTES);
        lane += 24;
        bytes += 48;
        if (++step == MIXED_STEPS) { /* folds_begin() was the first */
            break;
        }
        folds_advance(&folds, bytes);
    }
    /* The folded part comes before the first lane, as if that had begun with it. */
    const uint32_t folded = reduce_128(folds_join(&folds));
    lanes.first ^= ckv_crc32c_shift(ckv_crc32c_long_lane, folded);
    return lanes_join(&lanes, ckv_crc32c_long_lane);
}

static TARGET_PCLMUL uint32_t
update_pclmul(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    crc = ~crc;
    for (; length >= MIXED_BYTES; length -= MIXED_BYTES) {
        crc = advance_mixed(crc, bytes);
        bytes += MIXED_BYTES;
    }
    if (length < PCLMUL_FROM_BYTES || length >= SHORT_LANES_BYTES) {
        return ~advance_sse42(crc, bytes, length);
    }
    return ~advance_folded(crc, bytes, length);
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
    const __m512i factors = _mm512_set_epi64(0, 0, FOLD_16_HIGH, FOLD_16_LOW,
        FOLD_32_HIGH, FOLD_32_LOW, FOLD_48_HIGH, FOLD_48_LOW);
    const __m512i low = _mm512_clmulepi64_epi128(sum, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(sum, factors, 0x11);
    const __m512i moved = _mm512_xor_si512(low, high); /* its last quarter is 0 */
    const __m128i front = _mm_xor_si128(_mm512_castsi512_si128(moved),
        _mm512_extracti32x4_epi32(moved, 1));
    const __m128i back = _mm_xor_si128(_mm512_extracti32x4_epi32(moved, 2),
        _mm512_extracti32x4_epi32(sum, 3));
    return _mm_xor_si128(front, back);
}

/* Four registers over all multiples of 256 bytes.  Requires: length >= 256. */
static inline TARGET_VPCLMUL __m512i
fold_blocks_512(__m512i start, const uint8_t *bytes, size_t length)
{
    const __m512i by_256 = repeat_128(FOLD_256_HIGH, FOLD_256_LOW);
    const __m512i by_128 = repeat_128(FOLD_128_HIGH, FOLD_128_LOW);
    const __m512i by_64 = repeat_128(FOLD_64_HIGH, FOLD_64_LOW);
    __m512i a = _mm512_xor_si512(load_512(bytes), start);
    __m512i b = load_512(bytes + 64);
    __m512i c = load_512(bytes + 128);
    __m512i d = load_512(bytes + 192);
    for (length -= 256; length >= 256; length -= 256) {
        bytes += 256;
        a = fold_512(a, by_256, load_512(bytes));
        b = fold_512(b, by_256, load_512(bytes + 64));
        c = fold_512(c, by_256, load_512(bytes + 128));
        d = fold_512(d, by_256, load_512(bytes + 192));
    }
    c = fold_512(a, by_128, c);
    d = fold_512(b, by_128, d);
    return fold_512(c, by_64, d);
}

static TARGET_VPCLMUL uint32_t
update_vpclmul512(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    crc = ~crc;
    if (length < 64) {
        return ~advance_serial(crc, bytes, length);
    }
    const __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc));
    __m512i sum;
    if (length >= 256) {
        sum = fold_blocks_512(start, bytes, length);
        bytes += length & ~(size_t)255;
        length &= 255;
    } else {
        sum = _mm512_xor_si512(load_512(bytes), start);
        bytes += 64;
        length -= 64;
    }
    const __m512i by_64 = repeat_128(FOLD_64_HIGH, FOLD_64_LOW);
    for (; length >= 64; length -= 64) {
        sum = fold_512(sum, by_64, load_512(bytes));
        bytes += 64;
    }
    return ~finish_128(join_quarters(sum), bytes, length);
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
    .large_from_bytes = PCLMUL_FROM_BYTES,
};

static const struct ckv_crc32c_choice vpclmul512_choice = {
    .name = "vpclmul512",
    .small_update = update_sse42,
    .large_update = update_vpclmul512,
    .large_from_bytes = VPCLMUL512_FROM_BYTES,
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
