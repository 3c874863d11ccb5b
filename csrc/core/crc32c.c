/* SPDX-License-Identifier: Apache-2.0 */
/* crc32c.c: the portable kernel, the tables, combination, and the choice of a kernel.
 *
 * A message is a polynomial over GF(2), its first bit the highest power of x.  The
 * register holds the remainder modulo
 *
 *     P = x^32 + x^28 + x^27 + x^26 + x^25 + x^23 + x^22 + x^20 + x^19 + x^18 + x^14
 *       + x^13 + x^11 + x^10 + x^9 + x^8 + x^6 + 1
 *
 * bit-reflected: bit i is the coefficient of x^(31-i).  It is complemented on the way
 * in and on the way out.  Appending n zero bits multiplies it by x^n; nearly every
 * constant of this module is therefore "x^n mod P, reflected", and is written down as
 * such.
 *
 * Invariants, cited by number wherever they are relied on:
 *
 *   C1  All tables and choices are constants.  Nothing is computed at start, so that
 *       there is nothing whose completion a second thread would have to wait for.
 *
 *   C2  Every kernel gives the same result for the same arguments, at any length and
 *       alignment.  A process may change kernels between two pieces of a message.
 *
 *   C3  x has order 2^31 - 1 modulo P, hence x^(2^31) == x.
 *
 * Tables are linear in their index, so each is given by its eight entries at powers of
 * two, and the preprocessor adds the other 248.  Building them at run time was rejected
 * for C1, and two thousand numbers in the source because nobody could check them.
 *
 * Fusing the checksum with a copy was rejected: the copy leaves the bytes in cache,
 * where a wide kernel reads them faster than the copy wrote them.
 */
#include "crc32c.h"

#include <assert.h>
#include <stdatomic.h>

#if defined(__x86_64__) ||                                                             \
    (defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
#define CKV_CRC32C_HAS_NATIVE 1
#else
#define CKV_CRC32C_HAS_NATIVE 0
#endif

/* All XOR sums of the basis, in the order of the index whose bits select from it. */
#define SPAN2(v, a)              (v), ((v) ^ (a))
#define SPAN4(v, a, b)           SPAN2(v, a), SPAN2((v) ^ (b), a)
#define SPAN8(v, a, b, c)        SPAN4(v, a, b), SPAN4((v) ^ (c), a, b)
#define SPAN16(v, a, b, c, d)    SPAN8(v, a, b, c), SPAN8((v) ^ (d), a, b, c)
#define SPAN32(v, a, b, c, d, e) SPAN16(v, a, b, c, d), SPAN16((v) ^ (e), a, b, c, d)
#define SPAN64(v, a, b, c, d, e, f)                                                    \
    SPAN32(v, a, b, c, d, e), SPAN32((v) ^ (f), a, b, c, d, e)
#define SPAN128(v, a, b, c, d, e, f, g)                                                \
    SPAN64(v, a, b, c, d, e, f), SPAN64((v) ^ (g), a, b, c, d, e, f)
#define SPAN256(a, b, c, d, e, f, g, h)                                                \
    SPAN128(0u, a, b, c, d, e, f, g), SPAN128(h, a, b, c, d, e, f, g)

/* [k][b]: byte b followed by k zero bytes.  The bases are x^(39+8k) to x^(32+8k). */
static const uint32_t slices[8][256] = {
    {SPAN256(0xf26b8303u, 0xe13b70f7u, 0xc79a971fu, 0x8ad958cfu, 0x105ec76fu,
        0x20bd8edeu, 0x417b1dbcu, 0x82f63b78u)},
    {SPAN256(0x13a29877u, 0x274530eeu, 0x4e8a61dcu, 0x9d14c3b8u, 0x3fc5f181u,
        0x7f8be302u, 0xff17c604u, 0xfbc3faf9u)},
    {SPAN256(0xa541927eu, 0x4f6f520du, 0x9edea41au, 0x38513ec5u, 0x70a27d8au,
        0xe144fb14u, 0xc76580d9u, 0x8b277743u)},
    {SPAN256(0xdd45aab8u, 0xbf672381u, 0x7b2231f3u, 0xf64463e6u, 0xe964b13du,
        0xd725148bu, 0xaba65fe7u, 0x52a0c93fu)},
    {SPAN256(0x38116facu, 0x7022df58u, 0xe045beb0u, 0xc5670b91u, 0x8f2261d3u,
        0x1ba8b557u, 0x37516aaeu, 0x6ea2d55cu)},
    {SPAN256(0xef306b19u, 0xdb8ca0c3u, 0xb2f53777u, 0x6006181fu, 0xc00c303eu,
        0x85f4168du, 0x0e045bebu, 0x1c08b7d6u)},
    {SPAN256(0x68032cc8u, 0xd0065990u, 0xa5e0c5d1u, 0x4e2dfd53u, 0x9c5bfaa6u,
        0x3d5b83bdu, 0x7ab7077au, 0xf56e0ef4u)},
    {SPAN256(0x493c7d27u, 0x9278fa4eu, 0x211d826du, 0x423b04dau, 0x847609b4u,
        0x0d006599u, 0x1a00cb32u, 0x34019664u)},
};

/* The bases are x^(8n+31-8k) to x^(8n+24-8k), where n is the lane length. */
const uint32_t ckv_crc32c_long_lane[4][256] = {
    {SPAN256(0x397d84a1u, 0x72fb0942u, 0xe5f61284u, 0xce0053f9u, 0x99ecd103u,
        0x3635d4f7u, 0x6c6ba9eeu, 0xd8d753dcu)},
    {SPAN256(0xb442d149u, 0x6d69d463u, 0xdad3a8c6u, 0xb04b277du, 0x657a380bu,
        0xcaf47016u, 0x900496ddu, 0x25e55b4bu)},
    {SPAN256(0x4bcab696u, 0x97956d2cu, 0x2ac6aca9u, 0x558d5952u, 0xab1ab2a4u,
        0x53d913b9u, 0xa7b22772u, 0x4a883815u)},
    {SPAN256(0x9510702au, 0x2fcc96a5u, 0x5f992d4au, 0xbf325a94u, 0x7b88c3d9u,
        0xf71187b2u, 0xebcf7995u, 0xd27285dbu)},
};

const uint32_t ckv_crc32c_short_lane[4][256] = {
    {SPAN256(0x6992cea2u, 0xd3259d44u, 0xa3a74c79u, 0x42a2ee03u, 0x8545dc06u,
        0x0f67cefdu, 0x1ecf9dfau, 0x3d9f3bf4u)},
    {SPAN256(0x7b3e77e8u, 0xf67cefd0u, 0xe915a951u, 0xd7c72453u, 0xaa623e57u,
        0x51280a5fu, 0xa25014beu, 0x414c5f8du)},
    {SPAN256(0x8298bf1au, 0x00dd08c5u, 0x01ba118au, 0x03742314u, 0x06e84628u,
        0x0dd08c50u, 0x1ba118a0u, 0x37423140u)},
    {SPAN256(0x6e846280u, 0xdd08c500u, 0xbffdfcf1u, 0x7a178f13u, 0xf42f1e26u,
        0xedb24abdu, 0xde88e38bu, 0xb8fdb1e7u)},
};

static_assert(CKV_CRC32C_LONG_LANE_BYTES == 1344 && CKV_CRC32C_SHORT_LANE_BYTES == 128,
    "the lane tables were computed for these lengths");

/* Compilers turn this into one load where that is right, and it needs no alignment. */
static inline uint32_t
load_le32(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
           (uint32_t)bytes[3] << 24;
}

/* Slicing by eight: eight independent lookups for eight bytes. */
static uint32_t
update_portable(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    crc = ~crc;
    while (length >= 8) {
        const uint32_t low = crc ^ load_le32(bytes);
        const uint32_t high = load_le32(bytes + 4);
        crc = slices[7][low & 0xff] ^ slices[6][(low >> 8) & 0xff] ^
              slices[5][(low >> 16) & 0xff] ^ slices[4][low >> 24] ^
              slices[3][high & 0xff] ^ slices[2][(high >> 8) & 0xff] ^
              slices[1][(high >> 16) & 0xff] ^ slices[0][high >> 24];
        bytes += 8;
        length -= 8;
    }
    while (length > 0) {
        crc = (crc >> 8) ^ slices[0][(crc ^ *bytes) & 0xff];
        bytes++;
        length--;
    }
    return ~crc;
}

static const struct ckv_crc32c_choice portable_choice = {
    .name = "portable",
    .small_update = update_portable,
    .large_update = update_portable,
    .large_from_bytes = 0,
};

/* NULL until the first call.  Threads that meet here at the same time all store the
 * same address, and what lies there is constant (C1): no store is published through
 * this pointer, so that relaxed order is enough and costs a plain load. */
static _Atomic(const struct ckv_crc32c_choice *) current_choice;

static const struct ckv_crc32c_choice *
choose(void)
{
    const struct ckv_crc32c_choice *choice = NULL;
#if CKV_CRC32C_HAS_NATIVE
    choice = ckv_crc32c_native_choice();
#endif
    if (choice == NULL) {
        choice = &portable_choice;
    }
    atomic_store_explicit(&current_choice, choice, memory_order_relaxed);
    return choice;
}

static inline const struct ckv_crc32c_choice *
get_choice(void)
{
    const struct ckv_crc32c_choice *choice =
        atomic_load_explicit(&current_choice, memory_order_relaxed);
    return choice != NULL ? choice : choose();
}

uint32_t
ckv_crc32c(uint32_t crc, const void *data, size_t length)
{
    const struct ckv_crc32c_choice *choice = get_choice();
    if (length < choice->large_from_bytes) {
        return choice->small_update(crc, data, length);
    }
    return choice->large_update(crc, data, length);
}

/* The product of two reflected polynomials modulo P. */
static uint32_t
multiply(uint32_t left, uint32_t right)
{
    uint32_t product = 0;
    while (left != 0) {
        product ^= (left & 0x80000000u) != 0 ? right : 0;
        left <<= 1;
        right = (right >> 1) ^ ((right & 1) != 0 ? 0x82f63b78u : 0);
    }
    return product;
}

uint32_t
ckv_crc32c_combine(uint32_t crc1, uint32_t crc2, uint64_t length2)
{
    /* x^(2^k); then it starts again (C3). */
    static const uint32_t squares[31] = {
        0x40000000u,
        0x20000000u,
        0x08000000u,
        0x00800000u,
        0x00008000u,
        0x82f63b78u,
        0x6ea2d55cu,
        0x18b8ea18u,
        0x510ac59au,
        0xb82be955u,
        0xb8fdb1e7u,
        0x88e56f72u,
        0x74c360a4u,
        0xe4172b16u,
        0x0d65762au,
        0x35d73a62u,
        0x28461564u,
        0xbf455269u,
        0xe2ea32dcu,
        0xfe7740e6u,
        0xf946610bu,
        0x3c204f8fu,
        0x538586e3u,
        0x59726915u,
        0x734d5309u,
        0xbc1ac763u,
        0x7d0722ccu,
        0xd289cabeu,
        0xe94ca9bcu,
        0x05b74f3fu,
        0xa51e1f42u,
    };
    /* A byte is x^8, which is 2^3.  The complements of the two registers cancel. */
    size_t square_index = 3;
    while (length2 != 0) {
        if ((length2 & 1) != 0) {
            crc1 = multiply(squares[square_index], crc1);
        }
        square_index = square_index == 30 ? 0 : square_index + 1;
        length2 >>= 1;
    }
    return crc1 ^ crc2;
}

const char *
ckv_crc32c_kernel(void)
{
    return get_choice()->name;
}

size_t
ckv_crc32c_kernels(struct ckv_crc32c_kernel_info *out, size_t max)
{
    struct ckv_crc32c_kernel_info all[CKV_CRC32C_KERNELS_MAX] = {
        {.name = portable_choice.name, .update = update_portable},
    };
    size_t count = 1;
#if CKV_CRC32C_HAS_NATIVE
    count += ckv_crc32c_native_kernels(all + 1);
#endif
    for (size_t i = 0; i < count && i < max; i++) {
        out[i] = all[i];
    }
    return count;
}
