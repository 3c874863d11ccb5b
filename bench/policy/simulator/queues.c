/* SPDX-License-Identifier: Apache-2.0 */
/* queues.c: SIEVE, S3-FIFO, W-TinyLFU and ARC, to compare with.
 *
 * They overwrite anywhere, which a ring in place does not: bounds of what is published,
 * not candidates.  The ghosts and the sketch are those of the papers; S3-FIFO's ghost
 * holds as many keys as its main queue.
 */
#include <math.h>

#include "list.h"

enum { ABSENT, MAIN, SMALL, PROTECTED, GHOST_ONE, GHOST_TWO };

struct queues {
    struct policy base;
    struct links links;
    struct list main;
    struct list small;
    struct list protected;
    struct list ghost_one;
    struct list ghost_two;
    uint8_t *counts;
    uint64_t *ghost_since;
    uint64_t ghost_now;
    uint32_t hand;
    uint32_t capacity;
    uint32_t small_max;
    uint32_t protected_max;
    double target; /* of ARC */
    uint8_t *sketch;
    uint32_t sketch_mask;
    uint32_t added;
};

static bool
queues_holds(const struct policy *policy, uint32_t key)
{
    const uint8_t list = ((const struct queues *)policy)->links.list[key];
    return list == MAIN || list == SMALL || list == PROTECTED;
}

static void
queues_destroy(struct policy *policy)
{
    struct queues *queues = (struct queues *)policy;
    links_close(&queues->links);
    free(queues->counts);
    free(queues->ghost_since);
    free(queues->sketch);
    free(queues);
}

static struct queues *
queues_open(const struct stream *stream, const struct options *options)
{
    struct queues *queues = zeroed(1, sizeof *queues);
    queues->base = (struct policy){
        .holds = queues_holds,
        .destroy = queues_destroy,
    };
    queues->links = links_open(stream->universe);
    queues->counts = zeroed(stream->universe, 1);
    queues->ghost_since = zeroed(stream->universe, sizeof *queues->ghost_since);
    queues->main = queues->small = queues->protected = LIST_EMPTY;
    queues->ghost_one = queues->ghost_two = LIST_EMPTY;
    queues->hand = NONE;
    queues->capacity = options->capacity;
    queues->small_max = (uint32_t)(options->small * options->capacity);
    queues->small_max = queues->small_max == 0 ? 1 : queues->small_max;
    return queues;
}

static uint32_t
pop(struct queues *queues, struct list *list)
{
    const uint32_t key = list->tail;
    list_take(&queues->links, list, key);
    return key;
}

/* ---- SIEVE ------------------------------------------------------------------------ */

static void
mark_hit(struct policy *policy, uint32_t key)
{
    ((struct queues *)policy)->counts[key] = 1;
}

static bool
sieve_put(struct policy *policy, uint32_t key)
{
    struct queues *queues = (struct queues *)policy;
    if (queues->main.count == queues->capacity) {
        uint32_t hand = queues->hand == NONE ? queues->main.tail : queues->hand;
        while (queues->counts[hand] != 0) {
            queues->counts[hand] = 0;
            hand = queues->links.previous[hand];
            hand = hand == NONE ? queues->main.tail : hand;
        }
        queues->hand = queues->links.previous[hand];
        list_take(&queues->links, &queues->main, hand);
    }
    queues->counts[key] = 0;
    list_push(&queues->links, &queues->main, MAIN, key);
    return true;
}

struct policy *
sieve_create(const struct stream *stream, const struct options *options)
{
    struct queues *queues = queues_open(stream, options);
    queues->base.hit = mark_hit;
    queues->base.put = sieve_put;
    return &queues->base;
}

/* ---- S3-FIFO ---------------------------------------------------------------------- */

static void
count_hit(struct policy *policy, uint32_t key)
{
    uint8_t *count = &((struct queues *)policy)->counts[key];
    if (*count < 3) {
        (*count)++;
    }
}

static void
evict_main(struct queues *queues)
{
    for (;;) {
        const uint32_t key = pop(queues, &queues->main);
        if (queues->counts[key] == 0) {
            return;
        }
        queues->counts[key]--;
        list_push(&queues->links, &queues->main, MAIN, key);
    }
}

static void
evict_small(struct queues *queues)
{
    while (queues->small.count > 0) {
        const uint32_t key = pop(queues, &queues->small);
        if (queues->counts[key] == 0) {
            queues->ghost_since[key] = ++queues->ghost_now;
            return;
        }
        queues->counts[key] = 0;
        list_push(&queues->links, &queues->main, MAIN, key);
        if (queues->main.count > queues->capacity - queues->small_max) {
            evict_main(queues);
            return;
        }
    }
}

static bool
s3fifo_put(struct policy *policy, uint32_t key)
{
    struct queues *queues = (struct queues *)policy;
    while (queues->main.count + queues->small.count >= queues->capacity) {
        if (queues->small.count >= queues->small_max || queues->main.count == 0) {
            evict_small(queues);
        } else {
            evict_main(queues);
        }
    }
    const uint64_t since = queues->ghost_since[key];
    queues->counts[key] = 0;
    queues->ghost_since[key] = 0;
    if (since != 0 &&
        queues->ghost_now - since < queues->capacity - queues->small_max) {
        list_push(&queues->links, &queues->main, MAIN, key);
    } else {
        list_push(&queues->links, &queues->small, SMALL, key);
    }
    return true;
}

struct policy *
s3fifo_create(const struct stream *stream, const struct options *options)
{
    struct queues *queues = queues_open(stream, options);
    queues->base.hit = count_hit;
    queues->base.put = s3fifo_put;
    return &queues->base;
}

/* ---- W-TinyLFU -------------------------------------------------------------------- */

static uint8_t
estimate(const struct queues *queues, uint32_t key)
{
    uint8_t least = 255;
    for (uint64_t row = 1; row <= 4; row++) {
        const uint8_t counter =
            queues->sketch[mixed(key + (row << 32)) & queues->sketch_mask];
        least = counter < least ? counter : least;
    }
    return least;
}

static void
record(struct queues *queues, uint32_t key)
{
    for (uint64_t row = 1; row <= 4; row++) {
        uint8_t *counter =
            &queues->sketch[mixed(key + (row << 32)) & queues->sketch_mask];
        if (*counter < 15) {
            (*counter)++;
        }
    }
    if (++queues->added == 10 * queues->capacity) {
        for (uint32_t i = 0; i <= queues->sketch_mask; i++) {
            queues->sketch[i] /= 2;
        }
        queues->added = 0;
    }
}

static void
wtinylfu_hit(struct policy *policy, uint32_t key)
{
    struct queues *queues = (struct queues *)policy;
    record(queues, key);
    if (queues->links.list[key] == SMALL) {
        list_take(&queues->links, &queues->small, key);
        list_push(&queues->links, &queues->small, SMALL, key);
        return;
    }
    struct list *list =
        queues->links.list[key] == MAIN ? &queues->main : &queues->protected;
    list_take(&queues->links, list, key);
    list_push(&queues->links, &queues->protected, PROTECTED, key);
    if (queues->protected.count > queues->protected_max) {
        const uint32_t demoted = pop(queues, &queues->protected);
        list_push(&queues->links, &queues->main, MAIN, demoted);
    }
}

static bool
wtinylfu_put(struct policy *policy, uint32_t key)
{
    struct queues *queues = (struct queues *)policy;
    record(queues, key);
    list_push(&queues->links, &queues->small, SMALL, key);
    if (queues->small.count <= queues->small_max) {
        return true;
    }
    const uint32_t candidate = pop(queues, &queues->small);
    const uint32_t room = queues->capacity - queues->small_max;
    if (queues->main.count + queues->protected.count < room) {
        list_push(&queues->links, &queues->main, MAIN, candidate);
        return true;
    }
    struct list *list = queues->main.count > 0 ? &queues->main : &queues->protected;
    if (list->count > 0 && estimate(queues, candidate) > estimate(queues, list->tail)) {
        (void)pop(queues, list);
        list_push(&queues->links, &queues->main, MAIN, candidate);
    }
    return true;
}

struct policy *
wtinylfu_create(const struct stream *stream, const struct options *options)
{
    struct queues *queues = queues_open(stream, options);
    uint32_t size = 1024;
    while (size < 8 * options->capacity) {
        size *= 2;
    }
    queues->sketch = zeroed(size, 1);
    queues->sketch_mask = size - 1;
    queues->protected_max = (queues->capacity - queues->small_max) / 5 * 4;
    queues->base.hit = wtinylfu_hit;
    queues->base.put = wtinylfu_put;
    return &queues->base;
}

/* ---- ARC -------------------------------------------------------------------------- */

static void
arc_hit(struct policy *policy, uint32_t key)
{
    struct queues *queues = (struct queues *)policy;
    struct list *list =
        queues->links.list[key] == SMALL ? &queues->small : &queues->main;
    list_take(&queues->links, list, key);
    list_push(&queues->links, &queues->main, MAIN, key);
}

static void
arc_replace(struct queues *queues, bool in_ghost_two)
{
    const bool from_small =
        queues->small.count > 0 &&
        (queues->small.count > queues->target ||
            (in_ghost_two && queues->small.count >= queues->target) ||
            queues->main.count == 0);
    if (from_small) {
        const uint32_t key = pop(queues, &queues->small);
        list_push(&queues->links, &queues->ghost_one, GHOST_ONE, key);
    } else {
        const uint32_t key = pop(queues, &queues->main);
        list_push(&queues->links, &queues->ghost_two, GHOST_TWO, key);
    }
}

static void
arc_recall(struct queues *queues, uint32_t key, bool two)
{
    struct list *from = two ? &queues->ghost_two : &queues->ghost_one;
    struct list *other = two ? &queues->ghost_one : &queues->ghost_two;
    const double ratio = (double)other->count / from->count;
    const double step = ratio > 1 ? ratio : 1;
    queues->target += two ? -step : step;
    queues->target = fmax(0, fmin(queues->target, queues->capacity));
    arc_replace(queues, two);
    list_take(&queues->links, from, key);
    list_push(&queues->links, &queues->main, MAIN, key);
}

static bool
arc_put(struct policy *policy, uint32_t key)
{
    struct queues *queues = (struct queues *)policy;
    const uint32_t c = queues->capacity;
    if (queues->links.list[key] != ABSENT) {
        arc_recall(queues, key, queues->links.list[key] == GHOST_TWO);
        return true;
    }
    const uint32_t first = queues->small.count + queues->ghost_one.count;
    const uint32_t total = first + queues->main.count + queues->ghost_two.count;
    if (first == c) {
        if (queues->small.count < c) {
            (void)pop(queues, &queues->ghost_one);
            arc_replace(queues, false);
        } else {
            (void)pop(queues, &queues->small);
        }
    } else if (total >= c) {
        if (total == 2 * c) {
            (void)pop(queues, &queues->ghost_two);
        }
        arc_replace(queues, false);
    }
    list_push(&queues->links, &queues->small, SMALL, key);
    return true;
}

struct policy *
arc_create(const struct stream *stream, const struct options *options)
{
    struct queues *queues = queues_open(stream, options);
    queues->base.hit = arc_hit;
    queues->base.put = arc_put;
    return &queues->base;
}
