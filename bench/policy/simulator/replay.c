/* SPDX-License-Identifier: Apache-2.0 */
/* replay.c: the loop over the requests of a stream; see policy.h. */
#include "policy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *
zeroed(uint64_t count, uint64_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (memory == NULL) {
        (void)fprintf(stderr, "policy replay: out of memory\n");
        abort();
    }
    return memory;
}

uint32_t *
nones(uint64_t count)
{
    uint32_t *memory = zeroed(count, sizeof *memory);
    memset(memory, 0xff, count * sizeof *memory);
    return memory;
}

uint64_t
mixed(uint64_t value)
{
    value ^= value >> 33;
    value *= UINT64_C(0xff51afd7ed558ccd);
    value ^= value >> 33;
    value *= UINT64_C(0xc4ceb9fe1a85ec53);
    return value ^ value >> 33;
}

typedef struct policy *creator(const struct stream *, const struct options *);

static creator *const creators[KIND_COUNT] = {
    [KIND_LRU] = lru_create,
    [KIND_CLOCK] = clock_create,
    [KIND_FLUSH] = flush_create,
    [KIND_RETENTION] = retention_create,
    [KIND_DUEL] = duel_create,
    [KIND_SIEVE] = sieve_create,
    [KIND_S3FIFO] = s3fifo_create,
    [KIND_WTINYLFU] = wtinylfu_create,
    [KIND_ARC] = arc_create,
    [KIND_GITTINS] = gittins_create,
};

static void
offer(struct policy *policy, uint32_t key)
{
    if (policy->holds(policy, key)) {
        return; /* behind a gap in its chain: a put of what is there does nothing */
    }
    policy->offers++;
    if (policy->put(policy, key)) {
        policy->writes++;
    }
}

static uint32_t
plain_request(struct policy *policy, const uint32_t *keys, uint32_t count, bool forward)
{
    uint32_t hits = 0;
    while (hits < count && policy->holds(policy, keys[hits])) {
        hits++;
    }
    policy->known = hits;
    while (policy->knows != NULL && policy->known < count &&
           policy->knows(policy, keys[policy->known])) {
        policy->known++;
    }
    if (forward) {
        for (uint32_t i = 0; i < hits; i++) {
            policy->hit(policy, keys[i]);
        }
        for (uint32_t i = hits; i < count; i++) {
            offer(policy, keys[i]);
        }
        return hits;
    }
    for (uint32_t i = hits; i-- > 0;) {
        policy->hit(policy, keys[i]);
    }
    for (uint32_t i = count; i-- > hits;) {
        offer(policy, keys[i]);
    }
    return hits;
}

static uint32_t
step(struct policy *policy, const uint32_t *keys, uint32_t count, bool forward)
{
    return policy->request != NULL ? policy->request(policy, keys, count)
                                   : plain_request(policy, keys, count, forward);
}

static uint32_t
held_of(const struct policy *policy, const uint32_t *keys, uint32_t count)
{
    uint32_t held = 0;
    for (uint32_t i = 0; i < count; i++) {
        held += policy->holds(policy, keys[i]);
    }
    return held;
}

static uint64_t
begin_of(const struct stream *stream, uint64_t request)
{
    if (stream->ends == NULL) {
        return request;
    }
    return request == 0 ? 0 : stream->ends[request - 1];
}

int
policy_replay(const struct stream *stream, const struct options *options, uint64_t from,
    struct result *result)
{
    if (options->capacity == 0 || options->kind >= KIND_COUNT ||
        options->arm_count > ARMS_MAX || options->stripes > 256 ||
        from > stream->request_count) {
        return -1;
    }
    *result = (struct result){.warm_up_requests = from};
    if (options->kind == KIND_MINIMUM) {
        return minimum_replay(stream, options->capacity, from, result);
    }
    struct policy *policy = creators[options->kind](stream, options);
    if (policy == NULL) {
        return -1;
    }
    const bool forward = options->order == ORDER_HEAD_FIRST;
    struct policy before = *policy;
    for (uint64_t r = 0; r < stream->request_count; r++) {
        const uint64_t begin = begin_of(stream, r);
        const uint32_t count = (uint32_t)(begin_of(stream, r + 1) - begin);
        if (r == from) {
            before = *policy;
        }
        const uint32_t held = held_of(policy, stream->blocks + begin, count);
        const uint32_t hits = step(policy, stream->blocks + begin, count, forward);
        if (r >= from) {
            result->accesses += count;
            result->hits += hits;
            result->stranded += held - hits;
        }
    }
    result->offers = policy->offers - before.offers;
    result->writes = policy->writes - before.writes;
    result->passed = policy->passed - before.passed;
    result->switches = policy->switches;
    result->walk_max = policy->walk_max;
    policy->destroy(policy);
    return 0;
}

uint64_t
policy_warm_up(const struct stream *stream, uint32_t capacity, uint64_t misses)
{
    const struct options options = {.kind = KIND_LRU, .capacity = capacity};
    struct policy *policy = lru_create(stream, &options);
    uint64_t request = 0;
    while (request < stream->request_count && policy->offers < misses) {
        const uint64_t begin = begin_of(stream, request);
        const uint32_t count = (uint32_t)(begin_of(stream, request + 1) - begin);
        (void)step(policy, stream->blocks + begin, count, true);
        request++;
    }
    policy->destroy(policy);
    return request;
}
