/* SPDX-License-Identifier: Apache-2.0 */
/* churn.c: the churn stream of bench/generators.py, fast; a test holds them together. */
#include <math.h>
#include <stdlib.h>

#include "policy.h"

#define MULTIPLIER       UINT64_C(0x2545F4914F6CD1DB)
#define PERMUTATION_SEED UINT64_C(0x243F6A8885A308D3)
#define SCAN_BASE        (UINT64_C(1) << 40)

int churn_fill(uint32_t universe, uint32_t thread, int scan, uint64_t count,
    uint64_t *indices);

static uint64_t
next(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * MULTIPLIER;
}

static double
uniform(uint64_t *state)
{
    return (double)(next(state) >> 11) * 0x1p-53;
}

static uint32_t *
permutation(uint32_t n)
{
    uint64_t state = PERMUTATION_SEED;
    uint32_t *order = zeroed(n, sizeof *order);
    for (uint32_t i = 0; i < n; i++) {
        order[i] = i;
    }
    for (uint32_t i = n - 1; i > 0; i--) {
        const uint32_t j = (uint32_t)(next(&state) % (i + 1));
        const uint32_t kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
    return order;
}

/* The first `count` key indices that a thread asks for.  0, or -1 for no universe. */
int
churn_fill(uint32_t universe, uint32_t thread, int scan, uint64_t count,
    uint64_t *indices)
{
    if (universe < 3) {
        return -1;
    }
    const double n = universe;
    const double theta = 0.99;
    double zeta = 0;
    for (uint32_t i = 1; i <= universe; i++) {
        zeta += pow(i, -theta);
    }
    const double alpha = 1.0 / (1.0 - theta);
    const double zeta2 = 1.0 + pow(2.0, -theta);
    const double eta = (1.0 - pow(2.0 / n, 1.0 - theta)) / (1.0 - zeta2 / zeta);
    uint32_t *order = permutation(universe);
    uint64_t ranks = 42 + thread;
    uint64_t choices = 1000003 + thread;
    uint64_t scanned = SCAN_BASE + ((uint64_t)thread << 32);
    for (uint64_t i = 0; i < count; i++) {
        if (scan && uniform(&choices) < 0.1) {
            indices[i] = scanned++;
            continue;
        }
        const double u = uniform(&ranks);
        const double z = u * zeta;
        uint32_t rank = 0;
        if (z >= 1.0 + pow(0.5, theta)) {
            const uint64_t far = (uint64_t)(n * pow(eta * u - eta + 1.0, alpha));
            rank = far < universe ? (uint32_t)far : universe - 1;
        } else if (z >= 1.0) {
            rank = 1;
        }
        indices[i] = order[rank];
    }
    free(order);
    return 0;
}
