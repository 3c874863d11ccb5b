/* SPDX-License-Identifier: Apache-2.0 */
/* retention.c: two rings without memory of use, in stripes by key.
 *
 * Flush: a full stripe is emptied.  Retention: the previous lap stays readable until the
 * chunk that holds it is cleaned, one chunk before the writer needs it.
 */
#include <stdlib.h>

#include "policy.h"

struct lap { /* a stripe */
    uint32_t *keys;
    uint32_t written;  /* slots of this lap */
    uint32_t frontier; /* slots cleaned in this lap */
};

struct retention {
    struct policy base;
    uint32_t *places; /* by key: its slot of its stripe, or NONE */
    struct lap *laps;
    const uint8_t *stripe_of;
    uint32_t stripes;
    uint32_t slots;
    uint32_t chunk;
};

static struct lap *
lap_of(struct retention *retention, uint32_t key)
{
    const uint64_t hash =
        retention->stripe_of != NULL ? retention->stripe_of[key] : mixed(key);
    return &retention->laps[hash % retention->stripes];
}

static bool
retention_holds(const struct policy *policy, uint32_t key)
{
    return ((const struct retention *)policy)->places[key] != NONE;
}

static void
retention_hit(struct policy *policy, uint32_t key)
{
    (void)policy;
    (void)key;
}

static void
clean(struct retention *retention, struct lap *lap, uint32_t from, uint32_t to)
{
    for (uint32_t slot = from; slot < to; slot++) {
        if (lap->keys[slot] != NONE) {
            retention->places[lap->keys[slot]] = NONE;
            lap->keys[slot] = NONE;
        }
    }
}

static void
clean_chunk(struct retention *retention, struct lap *lap)
{
    uint32_t end = lap->frontier + retention->chunk;
    end = end > retention->slots ? retention->slots : end;
    clean(retention, lap, lap->frontier, end);
    lap->frontier = end;
}

static void
place(struct retention *retention, struct lap *lap, uint32_t key)
{
    lap->keys[lap->written] = key;
    retention->places[key] = lap->written++;
}

static bool
retention_put(struct policy *policy, uint32_t key)
{
    struct retention *retention = (struct retention *)policy;
    struct lap *lap = lap_of(retention, key);
    if (lap->written == retention->slots) {
        lap->written = 0;
        lap->frontier = 0;
    }
    if (lap->written == lap->frontier) {
        clean_chunk(retention, lap);
    }
    place(retention, lap, key);
    if (lap->frontier < retention->slots &&
        lap->frontier - lap->written < retention->chunk / 2 + 1) {
        clean_chunk(retention, lap);
    }
    return true;
}

static bool
flush_put(struct policy *policy, uint32_t key)
{
    struct retention *retention = (struct retention *)policy;
    struct lap *lap = lap_of(retention, key);
    if (lap->written == retention->slots) {
        clean(retention, lap, 0, retention->slots);
        lap->written = 0;
    }
    place(retention, lap, key);
    return true;
}

static void
retention_destroy(struct policy *policy)
{
    struct retention *retention = (struct retention *)policy;
    for (uint32_t s = 0; s < retention->stripes; s++) {
        free(retention->laps[s].keys);
    }
    free(retention->laps);
    free(retention->places);
    free(retention);
}

struct policy *
retention_create(const struct stream *stream, const struct options *options)
{
    if (options->capacity < options->stripes) {
        return NULL; /* stripes without a slot */
    }
    struct retention *retention = zeroed(1, sizeof *retention);
    retention->base = (struct policy){
        .holds = retention_holds,
        .hit = retention_hit,
        .put = retention_put,
        .destroy = retention_destroy,
    };
    const uint32_t chunks = options->chunks == 0 ? 1 : options->chunks;
    retention->stripes = options->stripes == 0 ? 1 : options->stripes;
    retention->slots = options->capacity / retention->stripes;
    retention->chunk = (retention->slots + chunks - 1) / chunks;
    retention->stripe_of = stream->stripes;
    retention->places = nones(stream->universe);
    retention->laps = zeroed(retention->stripes, sizeof *retention->laps);
    for (uint32_t s = 0; s < retention->stripes; s++) {
        retention->laps[s].keys = nones(retention->slots);
    }
    return &retention->base;
}

struct policy *
flush_create(const struct stream *stream, const struct options *options)
{
    struct policy *policy = retention_create(stream, options);
    if (policy != NULL) {
        policy->put = flush_put;
    }
    return policy;
}
