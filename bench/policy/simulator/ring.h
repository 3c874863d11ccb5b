/* SPDX-License-Identifier: Apache-2.0 */
/* ring.h: the clock in place, as the engine has it.
 *
 * Each stripe is a ring of slots with a cursor.  A slot with heat at the cursor loses one
 * and is passed; the first cold one is overwritten.
 *
 *   R1  The stripe that has advanced least, in laps, takes the next block; the last one
 *       again until it is `lead` laps ahead.
 *   R2  After search_max hot slots the one where the search began is taken.
 */
#ifndef BENCH_POLICY_RING_H
#define BENCH_POLICY_RING_H

#include "policy.h"

struct ring_stripe {
    uint32_t first; /* slot */
    uint32_t slots;
    uint32_t cursor;
    uint64_t time; /* laps, 32 bits of fraction */
};

struct ring {
    uint32_t *keys;   /* by slot; NONE: free */
    uint8_t *heats;   /* by slot */
    uint32_t *places; /* by key: its slot, or NONE */
    struct ring_stripe *stripes;
    const uint8_t *stripe_of; /* by key, or NULL */
    uint32_t stripe_count;
    uint32_t capacity;
    uint32_t used;
    uint32_t last;
    uint32_t search_max;
    uint64_t lead;
    bool by_key;
    uint64_t passed;
    uint32_t walk_max;
};

void ring_open(struct ring *ring, const struct stream *stream,
    const struct options *options, uint32_t capacity, uint32_t stripes);
void ring_close(struct ring *ring);
/* Returns the key that gave way, or NONE. */
uint32_t ring_put(struct ring *ring, uint32_t key);

static inline bool
ring_holds(const struct ring *ring, uint32_t key)
{
    return ring->places[key] != NONE;
}

static inline bool
ring_full(const struct ring *ring)
{
    return ring->used == ring->capacity;
}

static inline void
ring_hit(struct ring *ring, uint32_t key, uint32_t counter_max)
{
    uint8_t *heat = &ring->heats[ring->places[key]];
    if (*heat < counter_max) {
        (*heat)++;
    }
}

#endif /* BENCH_POLICY_RING_H */
