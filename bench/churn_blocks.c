/* SPDX-License-Identifier: Apache-2.0 */
/* churn_blocks.c: the payloads of spec v1, fast enough to be made between two calls.
 *
 * A payload is the stream xorshift64* of its index.  One step needs the result of the
 * one before, so the stream is cut into LANES parts of equal length which advance
 * together; a step is linear over GF(2), so the state at the start of a part is a
 * matrix times the state at the start of the part before.
 *
 *   B1  `matrix` holds 64 columns: column b is what the single bit b becomes.
 *   B2  `words` is a multiple of LANES.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 8, BITS = 64 };

static uint64_t
step(uint64_t state)
{
    state ^= state >> 12;
    state ^= state << 25;
    return state ^ (state >> 27);
}

static uint64_t
apply(const uint64_t *matrix, uint64_t state)
{
    uint64_t result = 0;
    for (int bit = 0; bit < BITS; bit++) {
        result ^= matrix[bit] & (0 - (state >> bit & 1));
    }
    return result;
}

/* matrix := `count` steps; count > 0.  By squaring. */
void
churn_jump(uint64_t count, uint64_t *matrix)
{
    uint64_t power[BITS];
    for (int bit = 0; bit < BITS; bit++) {
        power[bit] = step((uint64_t)1 << bit);
        matrix[bit] = (uint64_t)1 << bit;
    }
    for (; count != 0; count >>= 1) {
        uint64_t next[BITS];
        if ((count & 1) != 0) {
            for (int bit = 0; bit < BITS; bit++) {
                next[bit] = apply(power, matrix[bit]);
            }
            memcpy(matrix, next, sizeof(next));
        }
        for (int bit = 0; bit < BITS; bit++) {
            next[bit] = apply(power, power[bit]);
        }
        memcpy(power, next, sizeof(next));
    }
}

/* The payload of `seed`; `matrix` jumps over words / LANES steps. */
void
churn_fill(uint64_t seed, const uint64_t *matrix, uint64_t *output, size_t words)
{
    const size_t steps = words / LANES;
    uint64_t states[LANES];
    states[0] = seed;
    for (int lane = 1; lane < LANES; lane++) {
        states[lane] = apply(matrix, states[lane - 1]);
    }
    for (size_t i = 0; i < steps; i++) {
        for (size_t lane = 0; lane < LANES; lane++) {
            states[lane] = step(states[lane]);
            output[lane * steps + i] = states[lane] * 0x2545F4914F6CD1DB;
        }
    }
}
