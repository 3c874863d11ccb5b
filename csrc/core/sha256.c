/* SPDX-License-Identifier: Apache-2.0 */
/* sha256.c: SHA-256, portable and with the SHA instructions of x86.
 *
 * A state gathers bytes until a block of 64 is full; whole blocks of the caller's data
 * are taken where they lie.  A kernel is a function that runs blocks through the eight
 * words of the state; padding is done once, above the kernels.
 *
 * Invariants, cited by number wherever they are relied on:
 *
 *   H1  pending[0 .. length_bytes % 64) holds the bytes not yet compressed.
 *   H2  The choice of a kernel is a constant of the machine: threads that make it at
 *       the same time make the same one.
 */
#include "sha256.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>
#endif

static_assert(CKV_SHA256_BLOCK_BYTES == 64, "shifts and masks below assume it");

/* The first 32 fractional bits of the cube roots of the first 64 primes. */
static const uint32_t round_constants[64] = {0x428a2f98u, 0x71374491u, 0xb5c0fbcfu,
    0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u, 0xd807aa98u,
    0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u,
    0xc19bf174u, 0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu,
    0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau, 0x983e5152u, 0xa831c66du, 0xb00327c8u,
    0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u, 0x27b70a85u,
    0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu,
    0x92722c85u, 0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u,
    0xd6990624u, 0xf40e3585u, 0x106aa070u, 0x19a4c116u, 0x1e376c08u, 0x2748774cu,
    0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u, 0x748f82eeu,
    0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u,
    0xc67178f2u};

/* Likewise of the square roots of the first eight. */
static const uint32_t initial_words[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u,
    0xa54ff53au, 0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};

/* ---- portable ----------------------------------------------------------------- */

static inline uint32_t
rotate_right(uint32_t word, unsigned int bits)
{
    return word >> bits | word << (32 - bits);
}

static inline uint32_t
load_be32(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 |
           (uint32_t)bytes[2] << 8 | (uint32_t)bytes[3];
}

static inline void
store_be32(uint8_t *bytes, uint32_t word)
{
    bytes[0] = (uint8_t)(word >> 24);
    bytes[1] = (uint8_t)(word >> 16);
    bytes[2] = (uint8_t)(word >> 8);
    bytes[3] = (uint8_t)word;
}

static void
expand_schedule(uint32_t schedule[64], const uint8_t *block)
{
    for (size_t i = 0; i < 16; i++) {
        schedule[i] = load_be32(block + 4 * i);
    }
    for (size_t i = 16; i < 64; i++) {
        const uint32_t early = schedule[i - 15];
        const uint32_t late = schedule[i - 2];
        schedule[i] = schedule[i - 16] + schedule[i - 7] +
                      (rotate_right(early, 7) ^ rotate_right(early, 18) ^ early >> 3) +
                      (rotate_right(late, 17) ^ rotate_right(late, 19) ^ late >> 10);
    }
}

static void
compress_portable(uint32_t words[8], const uint8_t *blocks, size_t block_count)
{
    for (; block_count > 0; block_count--) {
        uint32_t schedule[64];
        expand_schedule(schedule, blocks);
        uint32_t a = words[0];
        uint32_t b = words[1];
        uint32_t c = words[2];
        uint32_t d = words[3];
        uint32_t e = words[4];
        uint32_t f = words[5];
        uint32_t g = words[6];
        uint32_t h = words[7];
        for (size_t i = 0; i < 64; i++) {
            const uint32_t sum_e =
                rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
            const uint32_t sum_a =
                rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
            const uint32_t chosen = (e & f) ^ (~e & g);
            const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
            const uint32_t step = h + sum_e + chosen + round_constants[i] + schedule[i];
            h = g;
            g = f;
            f = e;
            e = d + step;
            d = c;
            c = b;
            b = a;
            a = step + sum_a + majority;
        }
        const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
        for (size_t i = 0; i < 8; i++) {
            words[i] += sums[i];
        }
        blocks += CKV_SHA256_BLOCK_BYTES;
    }
}

/* ---- x86 ---------------------------------------------------------------------- */

#if defined(__x86_64__)

#define TARGET_SHA __attribute__((target("sha,sse4.1,ssse3")))

/* Two times two rounds. */
static inline TARGET_SHA void
four_rounds(__m128i *abef, __m128i *cdgh, __m128i quad, const uint32_t *constants)
{
    const __m128i sum = _mm_add_epi32(quad, _mm_loadu_si128((const void *)constants));
    *cdgh = _mm_sha256rnds2_epu32(*cdgh, *abef, sum);
    *abef = _mm_sha256rnds2_epu32(*abef, *cdgh, _mm_shuffle_epi32(sum, 0x0e));
}

/* The four words of the schedule after q0 ... q3, the oldest first. */
static inline TARGET_SHA __m128i
next_quad(__m128i q0, __m128i q1, __m128i q2, __m128i q3)
{
    const __m128i sum =
        _mm_add_epi32(_mm_sha256msg1_epu32(q0, q1), _mm_alignr_epi8(q3, q2, 4));
    return _mm_sha256msg2_epu32(sum, q3);
}

static TARGET_SHA void
compress_sha_ni(uint32_t words[8], const uint8_t *blocks, size_t block_count)
{
    const __m128i swap_bytes = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    /* The instructions want the words as (a, b, e, f) and (c, d, g, h), highest first.
     */
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const void *)words), 0xb1);
    const __m128i efgh =
        _mm_shuffle_epi32(_mm_loadu_si128((const void *)(words + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
    for (; block_count > 0; block_count--) {
        const __m128i start_abef = abef;
        const __m128i start_cdgh = cdgh;
        __m128i quads[4];
        for (size_t i = 0; i < 4; i++) {
            quads[i] =
                _mm_shuffle_epi8(_mm_loadu_si128((const void *)(blocks + 16 * i)),
                    swap_bytes);
        }
        for (size_t round = 0; round < 48; round += 16) {
            const uint32_t *constants = round_constants + round;
            four_rounds(&abef, &cdgh, quads[0], constants);
            quads[0] = next_quad(quads[0], quads[1], quads[2], quads[3]);
            four_rounds(&abef, &cdgh, quads[1], constants + 4);
            quads[1] = next_quad(quads[1], quads[2], quads[3], quads[0]);
            four_rounds(&abef, &cdgh, quads[2], constants + 8);
            quads[2] = next_quad(quads[2], quads[3], quads[0], quads[1]);
            four_rounds(&abef, &cdgh, quads[3], constants + 12);
            quads[3] = next_quad(quads[3], quads[0], quads[1], quads[2]);
        }
        for (size_t i = 0; i < 4; i++) {
            four_rounds(&abef, &cdgh, quads[i], round_constants + 48 + 4 * i);
        }
        abef = _mm_add_epi32(abef, start_abef);
        cdgh = _mm_add_epi32(cdgh, start_cdgh);
        blocks += CKV_SHA256_BLOCK_BYTES;
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((void *)words, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((void *)(words + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static bool
has_sha_ni(void)
{
    unsigned int eax;
    unsigned int ebx;
    unsigned int ecx;
    unsigned int edx;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) {
        return false;
    }
    const bool has_ssse3 = (ecx & 1u << 9) != 0;
    const bool has_sse41 = (ecx & 1u << 19) != 0;
    if (!has_ssse3 || !has_sse41 ||
        __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) {
        return false;
    }
    return (ebx & 1u << 29) != 0;
}

#endif /* __x86_64__ */

/* ---- choice ------------------------------------------------------------------- */

size_t
ckv_sha256_kernels(struct ckv_sha256_kernel_info *out, size_t max)
{
    struct ckv_sha256_kernel_info all[CKV_SHA256_KERNELS_MAX] = {
        {.name = "portable", .compress = compress_portable},
    };
    size_t count = 1;
#if defined(__x86_64__)
    if (has_sha_ni()) {
        all[count++] = (struct ckv_sha256_kernel_info){"sha-ni", compress_sha_ni};
    }
#endif
    for (size_t i = 0; i < count && i < max; i++) {
        out[i] = all[i];
    }
    return count;
}

/* NULL until the first use.  Relaxed order is enough: a function is not data that a
 * store could publish, and every thread stores the same one (H2). */
static void (*_Atomic current_compress)(uint32_t[8], const uint8_t *, size_t);

static void
compress(uint32_t words[8], const uint8_t *blocks, size_t block_count)
{
    void (*chosen)(uint32_t[8], const uint8_t *, size_t) =
        atomic_load_explicit(&current_compress, memory_order_relaxed);
    if (chosen == NULL) {
        struct ckv_sha256_kernel_info all[CKV_SHA256_KERNELS_MAX];
        const size_t count = ckv_sha256_kernels(all, CKV_SHA256_KERNELS_MAX);
        chosen = all[count - 1].compress;
        atomic_store_explicit(&current_compress, chosen, memory_order_relaxed);
    }
    chosen(words, blocks, block_count);
}

/* ---- digests ------------------------------------------------------------------ */

void
ckv_sha256_init(struct ckv_sha256_state *state)
{
    *state = (struct ckv_sha256_state){.length_bytes = 0};
    memcpy(state->words, initial_words, sizeof state->words);
}

void
ckv_sha256_update(struct ckv_sha256_state *state, const void *data, size_t length)
{
    if (length == 0) { /* data may be NULL, which memcpy() does not permit */
        return;
    }
    const uint8_t *bytes = data;
    const size_t pending_bytes = (size_t)(state->length_bytes & 63); /* H1 */
    state->length_bytes += length;
    if (pending_bytes != 0) {
        const size_t room_bytes = CKV_SHA256_BLOCK_BYTES - pending_bytes;
        if (length < room_bytes) {
            memcpy(state->pending + pending_bytes, bytes, length);
            return;
        }
        memcpy(state->pending + pending_bytes, bytes, room_bytes);
        compress(state->words, state->pending, 1);
        bytes += room_bytes;
        length -= room_bytes;
    }
    const size_t block_count = length / CKV_SHA256_BLOCK_BYTES;
    if (block_count != 0) {
        compress(state->words, bytes, block_count);
        bytes += block_count * CKV_SHA256_BLOCK_BYTES;
    }
    memcpy(state->pending, bytes, length & 63);
}

void
ckv_sha256_final(struct ckv_sha256_state *state, uint8_t digest[CKV_SHA256_BYTES])
{
    const uint64_t length_bits = state->length_bytes << 3;
    size_t end = (size_t)(state->length_bytes & 63); /* H1 */
    state->pending[end++] = 0x80;
    if (end >
        CKV_SHA256_BLOCK_BYTES - 8) { /* the length goes into a block of its own */
        memset(state->pending + end, 0, CKV_SHA256_BLOCK_BYTES - end);
        compress(state->words, state->pending, 1);
        end = 0;
    }
    memset(state->pending + end, 0, CKV_SHA256_BLOCK_BYTES - 8 - end);
    store_be32(state->pending + 56, (uint32_t)(length_bits >> 32));
    store_be32(state->pending + 60, (uint32_t)length_bits);
    compress(state->words, state->pending, 1);
    for (size_t i = 0; i < 8; i++) {
        store_be32(digest + 4 * i, state->words[i]);
    }
}

void
ckv_sha256(const void *data, size_t length, uint8_t digest[CKV_SHA256_BYTES])
{
    struct ckv_sha256_state state;
    ckv_sha256_init(&state);
    ckv_sha256_update(&state, data, length);
    ckv_sha256_final(&state, digest);
}
