/* SPDX-License-Identifier: Apache-2.0 */
#include "ring.h"

#include <stdlib.h>

#define LAP (UINT64_C(1) << 32)

void
ring_open(struct ring *ring, const struct stream *stream, const struct options *options,
    uint32_t capacity, uint32_t stripes)
{
    stripes = stripes == 0 ? 1 : stripes;
    stripes = stripes > capacity ? capacity : stripes;
    *ring = (struct ring){
        .keys = nones(capacity),
        .heats = zeroed(capacity, 1),
        .places = nones(stream->universe),
        .stripes = zeroed(stripes, sizeof *ring->stripes),
        .stripe_of = stream->stripes,
        .stripe_count = stripes,
        .capacity = capacity,
        .search_max = options->search_max == 0 ? UINT32_MAX : options->search_max,
        .lead = (uint64_t)(options->lead * (double)LAP),
        .by_key = options->placement == PLACE_BY_KEY,
    };
    uint32_t first = 0;
    for (uint32_t s = 0; s < stripes; s++) {
        const uint32_t slots = capacity / stripes + (s < capacity % stripes);
        ring->stripes[s] = (struct ring_stripe){.first = first, .slots = slots};
        first += slots;
    }
}

void
ring_close(struct ring *ring)
{
    free(ring->keys);
    free(ring->heats);
    free(ring->places);
    free(ring->stripes);
}

static struct ring_stripe *
choose(struct ring *ring, uint32_t key)
{
    if (ring->stripe_count == 1) {
        return ring->stripes;
    }
    if (ring->by_key) {
        const uint64_t hash = ring->stripe_of ? ring->stripe_of[key] : mixed(key);
        return &ring->stripes[hash % ring->stripe_count];
    }
    uint64_t least = UINT64_MAX;
    uint32_t best = 0;
    for (uint32_t s = 0; s < ring->stripe_count; s++) {
        const uint64_t time = ring->stripes[s].time;
        const uint64_t lead = s == ring->last ? ring->lead : 0;
        const uint64_t rank = time > lead ? time - lead : 0;
        if (rank < least) {
            least = rank;
            best = s;
        }
    }
    ring->last = best;
    return &ring->stripes[best];
}

uint32_t
ring_put(struct ring *ring, uint32_t key)
{
    struct ring_stripe *stripe = choose(ring, key);
    uint32_t at = stripe->cursor;
    uint32_t walked = 0;
    for (;; walked++) {
        const uint32_t slot = stripe->first + at;
        if (ring->keys[slot] == NONE || ring->heats[slot] == 0) {
            break;
        }
        if (walked > ring->search_max) {
            at = stripe->cursor; /* R2 */
            walked = 0;
            break;
        }
        ring->heats[slot]--;
        at = at + 1 == stripe->slots ? 0 : at + 1;
    }
    ring->passed += walked;
    ring->walk_max = walked > ring->walk_max ? walked : ring->walk_max;
    stripe->time += (walked + 1) * LAP / stripe->slots;
    const uint32_t slot = stripe->first + at;
    stripe->cursor = at + 1 == stripe->slots ? 0 : at + 1;
    const uint32_t victim = ring->keys[slot];
    if (victim == NONE) {
        ring->used++;
    } else {
        ring->places[victim] = NONE;
    }
    ring->keys[slot] = key;
    ring->heats[slot] = 0;
    ring->places[key] = slot;
    return victim;
}
