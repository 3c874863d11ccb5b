/* SPDX-License-Identifier: Apache-2.0 */
/* duel.c: admission: second touch, or a choice among arms by shadow rings.
 *
 * An arm is a rule of admission with a maximum of the counter.  Each arm has a shadow: a
 * ring of keys only that sees one key in 2^sample_log2 and has as small a part of the
 * capacity, with a ghost of its own.  The arm whose shadow has missed least of late
 * decides for the real ring.
 *
 *   D1  While a ring is not full it admits everything.
 *   D2  A ghost knows the last `ghost` keys that were refused or evicted; what is
 *       admitted leaves it.
 *   D3  Misses are remembered for `memory` shadow capacities of sampled accesses.
 */
#include <math.h>
#include <stdlib.h>

#include "ring.h"

struct ghost {
    uint64_t *since; /* by key; 0: unknown */
    uint64_t now;
    uint64_t room;
    uint64_t salt;
    uint32_t forget; /* of 1000 */
};

struct sketch { /* conservative counters of 4 bits, halved every `period` additions */
    uint8_t *counters;
    uint32_t mask;
    uint32_t added;
    uint32_t period;
};

struct side { /* a ring with its rule: the real one, or a shadow */
    struct ring ring;
    struct ghost ghost;
    struct sketch sketch;
};

struct duel {
    struct policy base;
    struct side real;
    struct side shadows[ARMS_MAX];
    struct arm arms[ARMS_MAX];
    double missed[ARMS_MAX];
    double decay;
    double enter;
    double leave;
    double switch_min;
    uint32_t arm_count;
    uint32_t arm;
    uint32_t salt;
    uint64_t sample_mask;
};

static bool
ghost_holds(const struct ghost *ghost, uint32_t key)
{
    return ghost->since[key] != 0 && ghost->now - ghost->since[key] < ghost->room &&
           (ghost->forget == 0 ||
               mixed(key + ghost->salt + (ghost->since[key] << 32)) % 1000 >=
                   ghost->forget);
}

static void
ghost_add(struct ghost *ghost, uint32_t key)
{
    ghost->since[key] = ++ghost->now;
}

static uint8_t
sketch_count(const struct sketch *sketch, uint32_t key)
{
    uint8_t least = 255;
    for (uint64_t row = 1; row <= 4; row++) {
        const uint8_t counter =
            sketch->counters[mixed(key + (row << 32)) & sketch->mask];
        least = counter < least ? counter : least;
    }
    return least;
}

static void
sketch_add(struct sketch *sketch, uint32_t key)
{
    if (sketch->counters == NULL) {
        return;
    }
    const uint8_t count = sketch_count(sketch, key);
    for (uint64_t row = 1; row <= 4 && count < 15; row++) {
        uint8_t *counter = &sketch->counters[mixed(key + (row << 32)) & sketch->mask];
        if (*counter == count) {
            (*counter)++;
        }
    }
    if (++sketch->added == sketch->period) {
        for (uint32_t i = 0; i <= sketch->mask; i++) {
            sketch->counters[i] /= 2;
        }
        sketch->added = 0;
    }
}

static void
side_open(struct side *side, const struct stream *stream, const struct options *options,
    uint32_t capacity, uint32_t stripes, double ghost, bool frequency)
{
    ring_open(&side->ring, stream, options, capacity, stripes);
    side->ghost.since = zeroed(stream->universe, sizeof *side->ghost.since);
    side->ghost.room = (uint64_t)(ghost * capacity);
    side->ghost.forget = options->forget;
    side->ghost.salt = (uint64_t)options->salt << 40;
    if (frequency) {
        uint32_t size = 1024;
        while (size < capacity * 8) {
            size *= 2;
        }
        side->sketch.counters = zeroed(size, 1);
        side->sketch.mask = size - 1;
        side->sketch.period = capacity * 10;
    }
}

static void
side_close(struct side *side)
{
    ring_close(&side->ring);
    free(side->ghost.since);
    free(side->sketch.counters);
}

static bool
admits(const struct side *side, const struct arm *arm, uint32_t key, uint32_t known)
{
    if (arm->filter == FILTER_NONE || !ring_full(&side->ring)) {
        return true; /* D1 */
    }
    if (arm->known != 0 && known >= arm->known) {
        return true;
    }
    if (arm->filter == FILTER_FREQUENCY) {
        return sketch_count(&side->sketch, key) >= arm->threshold;
    }
    return ghost_holds(&side->ghost, key);
}

static bool
side_put(struct side *side, const struct arm *arm, uint32_t key, uint32_t known)
{
    side->ghost.room = (uint64_t)(arm->ghost * side->ring.capacity);
    sketch_add(&side->sketch, key);
    if (!admits(side, arm, key, known)) {
        ghost_add(&side->ghost, key);
        return false;
    }
    const bool back = ghost_holds(&side->ghost, key);
    side->ghost.since[key] = 0;
    const uint32_t victim = ring_put(&side->ring, key);
    if (back) {
        side->ring.heats[side->ring.places[key]] = (uint8_t)arm->heat;
    }
    if (victim != NONE) {
        ghost_add(&side->ghost, victim);
    }
    return true;
}

static void
side_hit(struct side *side, const struct arm *arm, uint32_t key)
{
    sketch_add(&side->sketch, key);
    ring_hit(&side->ring, key, arm->counter_max);
}

static void
choose(struct duel *duel)
{
    uint32_t best = 0;
    for (uint32_t a = 1; a < duel->arm_count; a++) {
        if (duel->missed[a] < duel->missed[best]) {
            best = a;
        }
    }
    const double margin = best == 0 ? duel->leave : duel->enter;
    if (best != duel->arm &&
        duel->missed[duel->arm] - duel->missed[best] >= duel->switch_min &&
        duel->missed[best] < duel->missed[duel->arm] * (1.0 - margin)) {
        duel->arm = best;
        duel->base.switches++;
    }
}

static void
observe(struct duel *duel, uint32_t key)
{
    if (duel->arm_count < 2 ||
        (mixed(key + ((uint64_t)duel->salt << 40)) & duel->sample_mask) != 0) {
        return;
    }
    for (uint32_t a = 0; a < duel->arm_count; a++) {
        struct side *shadow = &duel->shadows[a];
        duel->missed[a] *= duel->decay;
        if (ring_holds(&shadow->ring, key)) {
            side_hit(shadow, &duel->arms[a], key);
        } else {
            duel->missed[a] += 1;
            (void)side_put(shadow, &duel->arms[a], key, duel->base.known);
        }
    }
    choose(duel);
}

static bool
duel_holds(const struct policy *policy, uint32_t key)
{
    return ring_holds(&((const struct duel *)policy)->real.ring, key);
}

static bool
duel_knows(const struct policy *policy, uint32_t key)
{
    const struct duel *duel = (const struct duel *)policy;
    return ring_holds(&duel->real.ring, key) || ghost_holds(&duel->real.ghost, key);
}

static void
duel_hit(struct policy *policy, uint32_t key)
{
    struct duel *duel = (struct duel *)policy;
    side_hit(&duel->real, &duel->arms[duel->arm], key);
    observe(duel, key);
}

static bool
duel_put(struct policy *policy, uint32_t key)
{
    struct duel *duel = (struct duel *)policy;
    observe(duel, key);
    if (ghost_holds(&duel->real.ghost, key)) {
        policy->known = WHOLE_CHAIN; /* tail first: its ancestors were used with it */
    }
    const bool stored =
        side_put(&duel->real, &duel->arms[duel->arm], key, policy->known);
    policy->passed = duel->real.ring.passed;
    policy->walk_max = duel->real.ring.walk_max;
    return stored;
}

static void
duel_destroy(struct policy *policy)
{
    struct duel *duel = (struct duel *)policy;
    side_close(&duel->real);
    for (uint32_t a = 0; a < duel->arm_count && duel->arm_count > 1; a++) {
        side_close(&duel->shadows[a]);
    }
    free(duel);
}

struct policy *
duel_create(const struct stream *stream, const struct options *options)
{
    if (options->arm_count == 0 || options->sample_log2 > 16) {
        return NULL;
    }
    struct duel *duel = zeroed(1, sizeof *duel);
    duel->base = (struct policy){
        .holds = duel_holds,
        .hit = duel_hit,
        .put = duel_put,
        .knows = duel_knows,
        .destroy = duel_destroy,
    };
    duel->arm_count = options->arm_count;
    duel->salt = options->salt;
    duel->enter = options->enter;
    duel->leave = options->leave;
    duel->switch_min = options->switch_min;
    uint32_t log2 = options->sample_log2;
    while (log2 > 0 && options->capacity >> log2 < options->sample_min) {
        log2--;
    }
    duel->sample_mask = (UINT64_C(1) << log2) - 1;
    uint32_t small = options->capacity >> log2;
    small = small == 0 ? 1 : small;
    duel->decay = exp(-1.0 / (options->memory > 0 ? options->memory * small : 1.0));
    bool frequency = false;
    for (uint32_t a = 0; a < options->arm_count; a++) {
        duel->arms[a] = options->arms[a];
        frequency = frequency || options->arms[a].filter == FILTER_FREQUENCY;
    }
    side_open(&duel->real, stream, options, options->capacity, options->stripes,
        duel->arms[0].ghost, frequency);
    for (uint32_t a = 0; a < options->arm_count && options->arm_count > 1; a++) {
        side_open(&duel->shadows[a], stream, options, small, 1, duel->arms[a].ghost,
            duel->arms[a].filter == FILTER_FREQUENCY);
    }
    return &duel->base;
}
