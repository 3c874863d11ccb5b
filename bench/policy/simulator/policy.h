/* SPDX-License-Identifier: Apache-2.0 */
/* policy.h: replays a stream of requests through a model of one eviction policy.
 *
 * A stream is a list of requests, a request a chain of blocks, a block a number below
 * `universe`.  A request hits its longest stored leading part; what misses is offered to
 * the policy.  A stream of single gets has requests of one block.  Blocks are equal in
 * size; time is the order of the stream.
 *
 *   replay   for each request:  holds? holds? ... -> hits of the leading part
 *                               hit(each of them), put(each of the rest)
 *
 *   P1  A policy holds at most `capacity` blocks.
 *   P2  Models are exact where an engine would use tags or sketches, unless said.
 *   P3  No policy looks ahead, except minimum.c, which is the bound.
 *   P4  The same stream and options give the same result: no clock, no random seed but
 *       the ones in the options.
 */
#ifndef BENCH_POLICY_H
#define BENCH_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#define NONE        UINT32_MAX
#define WHOLE_CHAIN UINT32_MAX /* as arm.known: what leads to a known block */

struct stream {
    uint64_t block_count;
    uint64_t request_count;
    const uint32_t *blocks;
    const uint64_t *ends;   /* of each request, exclusive; NULL: one block each */
    const uint8_t *stripes; /* of each block, for placement by key; NULL: by a hash */
    uint32_t universe;
};

enum kind {
    KIND_LRU,
    KIND_CLOCK,     /* counter_max 0 is FIFO */
    KIND_FLUSH,     /* a stripe is emptied when it is full */
    KIND_RETENTION, /* a lap cleaned chunk by chunk, `chunks` of them */
    KIND_DUEL,      /* second touch, or a choice among arms */
    KIND_SIEVE,
    KIND_S3FIFO,
    KIND_WTINYLFU,
    KIND_ARC,
    KIND_GITTINS,
    KIND_MINIMUM,
    KIND_COUNT
};

enum placement { PLACE_LEAST_ADVANCED, PLACE_BY_KEY };
enum order { ORDER_TAIL_FIRST, ORDER_HEAD_FIRST };

enum filter {
    FILTER_NONE,         /* admit everything */
    FILTER_SECOND_TOUCH, /* only what the ghost knows */
    FILTER_FREQUENCY     /* only what the sketch counts at least `threshold` times */
};

#define ARMS_MAX 4

struct arm {
    uint32_t filter;
    uint32_t counter_max;
    double ghost;       /* entries, in capacities */
    uint32_t threshold; /* of FILTER_FREQUENCY */
    uint32_t known;     /* nonzero: what follows so many known blocks is admitted */
    uint32_t heat;      /* at insertion, of what the ghost knows */
    uint32_t pad;
};

struct options {
    uint32_t kind;
    uint32_t capacity; /* blocks */
    uint32_t stripes;
    uint32_t placement;
    uint32_t order;
    uint32_t counter_max;
    uint32_t search_max; /* hot slots passed before heat is ignored; 0: no bound */
    uint32_t chunks;     /* of KIND_RETENTION */
    double lead;         /* laps that a stripe may be ahead before it is left */
    double small;        /* part of KIND_S3FIFO and KIND_WTINYLFU that is probation */
    /* KIND_DUEL */
    uint32_t arm_count;
    uint32_t sample_log2; /* the shadows see one key in 2^this */
    uint32_t salt;
    uint32_t sample_min; /* more keys are seen while a shadow is smaller */
    double
        enter; /* leave an arm when another misses less than 1 - enter times as much */
    double leave;      /* the same on the way back to arm 0 */
    double switch_min; /* misses that arms must differ by */
    double memory; /* accesses that misses are remembered for, in shadow capacities */
    struct arm arms[ARMS_MAX];
    uint32_t forget; /* of 1000 keys, how many a ghost loses at once */
    uint32_t pad;
    /* KIND_GITTINS */
    uint32_t gittins_flags;
    uint32_t aim;    /* leaves passed per put */
    uint32_t ghosts; /* capacities */
    uint32_t piece;  /* blocks offered in one call; 0: all of a request */
};

struct result {
    uint64_t accesses;
    uint64_t hits;
    uint64_t offers; /* puts, of what was not there */
    uint64_t writes;
    uint64_t passed; /* slots that the cursor stepped over */
    uint64_t switches;
    uint64_t warm_up_requests; /* that were replayed before counting began */
    uint64_t walk_max;
    uint64_t stranded; /* accesses to what was held behind a gap of its chain */
};

struct policy {
    bool (*holds)(const struct policy *policy, uint32_t key);
    void (*hit)(struct policy *policy, uint32_t key);
    bool (*put)(struct policy *policy, uint32_t key);
    /* NULL, or whether a key is held or in a ghost. */
    bool (*knows)(const struct policy *policy, uint32_t key);
    /* NULL, or all of a request: returns the hits, adds to offers and writes. */
    uint32_t (*request)(struct policy *policy, const uint32_t *keys, uint32_t count);
    void (*destroy)(struct policy *policy);
    uint32_t known; /* leading blocks of the present request that it knows */
    uint64_t offers;
    uint64_t writes;
    uint64_t passed;
    uint64_t switches;
    uint64_t walk_max;
};

struct policy *lru_create(const struct stream *stream, const struct options *options);
struct policy *clock_create(const struct stream *stream, const struct options *options);
struct policy *flush_create(const struct stream *stream, const struct options *options);
struct policy *retention_create(const struct stream *stream,
    const struct options *options);
struct policy *duel_create(const struct stream *stream, const struct options *options);
struct policy *sieve_create(const struct stream *stream, const struct options *options);
struct policy *s3fifo_create(const struct stream *stream,
    const struct options *options);
struct policy *wtinylfu_create(const struct stream *stream,
    const struct options *options);
struct policy *arc_create(const struct stream *stream, const struct options *options);
struct policy *gittins_create(const struct stream *stream,
    const struct options *options);

/* 0, or -1 for options that make no sense, -2 when memory runs out.  Counting begins
 * with request `from`. */
int policy_replay(const struct stream *stream, const struct options *options,
    uint64_t from, struct result *result);
/* The request after which an LRU of `capacity` blocks has missed `misses` times. */
uint64_t policy_warm_up(const struct stream *stream, uint32_t capacity,
    uint64_t misses);
int minimum_replay(const struct stream *stream, uint32_t capacity, uint64_t from,
    struct result *result);

/* Shared by the models. */
void *zeroed(uint64_t count, uint64_t size); /* never NULL: ends the process without */
uint32_t *nones(uint64_t count);
uint64_t mixed(uint64_t value);

#endif /* BENCH_POLICY_H */
