/* SPDX-License-Identifier: Apache-2.0 */
/* clock.c: FIFO (counter_max 0), CLOCK (1) and GCLOCK: everything is admitted. */
#include "ring.h"

#include <stdlib.h>

struct clock {
    struct policy base;
    struct ring ring;
    uint32_t counter_max;
};

static bool
clock_holds(const struct policy *policy, uint32_t key)
{
    return ring_holds(&((const struct clock *)policy)->ring, key);
}

static void
clock_hit(struct policy *policy, uint32_t key)
{
    struct clock *clock = (struct clock *)policy;
    ring_hit(&clock->ring, key, clock->counter_max);
}

static bool
clock_put(struct policy *policy, uint32_t key)
{
    struct clock *clock = (struct clock *)policy;
    (void)ring_put(&clock->ring, key);
    policy->passed = clock->ring.passed;
    policy->walk_max = clock->ring.walk_max;
    return true;
}

static void
clock_destroy(struct policy *policy)
{
    ring_close(&((struct clock *)policy)->ring);
    free(policy);
}

struct policy *
clock_create(const struct stream *stream, const struct options *options)
{
    struct clock *clock = zeroed(1, sizeof *clock);
    clock->base = (struct policy){
        .holds = clock_holds,
        .hit = clock_hit,
        .put = clock_put,
        .destroy = clock_destroy,
    };
    clock->counter_max = options->counter_max;
    ring_open(&clock->ring, stream, options, options->capacity, options->stripes);
    return &clock->base;
}
