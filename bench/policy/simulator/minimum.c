/* SPDX-License-Identifier: Apache-2.0 */
/* minimum.c: Belady's bound, with bypass: a block that would be used later than all that
 * are held is not stored.
 *
 * Blocks are counted one by one.  A request uses a block only after all that lead to it,
 * so what is held is closed under prefixes, and this is the bound for prefixes as well.
 * A heap of (next use, key), the latest first; entries that a hit outdated are dropped
 * when they come up.
 */
#include <stdlib.h>
#include <string.h>

#include "policy.h"

#define NEVER UINT64_MAX

struct use {
    uint64_t next;
    uint32_t key;
};

struct heap {
    struct use *uses;
    uint64_t count;
    uint64_t room;
};

static void
heap_push(struct heap *heap, struct use use)
{
    if (heap->count == heap->room) {
        heap->room = heap->room ? heap->room * 2 : 1024;
        struct use *uses = zeroed(heap->room, sizeof *uses);
        if (heap->count > 0) {
            memcpy(uses, heap->uses, heap->count * sizeof *uses);
        }
        free(heap->uses);
        heap->uses = uses;
    }
    uint64_t at = heap->count++;
    while (at > 0 && heap->uses[(at - 1) / 2].next < use.next) {
        heap->uses[at] = heap->uses[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap->uses[at] = use;
}

static void
heap_pop(struct heap *heap)
{
    const struct use last = heap->uses[--heap->count];
    uint64_t at = 0;
    for (;;) {
        uint64_t child = at * 2 + 1;
        if (child >= heap->count) {
            break;
        }
        if (child + 1 < heap->count &&
            heap->uses[child + 1].next > heap->uses[child].next) {
            child++;
        }
        if (heap->uses[child].next <= last.next) {
            break;
        }
        heap->uses[at] = heap->uses[child];
        at = child;
    }
    if (heap->count > 0) {
        heap->uses[at] = last;
    }
}

int
minimum_replay(const struct stream *stream, uint32_t capacity, uint64_t from,
    struct result *result)
{
    uint64_t *following = zeroed(stream->block_count, sizeof *following);
    uint64_t *next = zeroed(stream->universe, sizeof *next); /* by key; 0: not held */
    memset(next, 0xff, stream->universe * sizeof *next);
    for (uint64_t i = stream->block_count; i-- > 0;) {
        following[i] = next[stream->blocks[i]];
        next[stream->blocks[i]] = i;
    }
    memset(next, 0, stream->universe * sizeof *next);
    const uint64_t first =
        stream->ends == NULL ? from : (from == 0 ? 0 : stream->ends[from - 1]);
    struct heap heap = {0};
    uint32_t held = 0;
    for (uint64_t i = 0; i < stream->block_count; i++) {
        const uint32_t key = stream->blocks[i];
        const bool counted = i >= first;
        const bool hit = next[key] != 0;
        result->accesses += counted;
        result->hits += counted && hit;
        result->offers += counted && !hit;
        if (hit) {
            held--;
            next[key] = 0;
        }
        if (following[i] == NEVER) {
            continue;
        }
        while (held == capacity && next[heap.uses[0].key] != heap.uses[0].next) {
            heap_pop(&heap);
        }
        if (held == capacity) {
            if (heap.uses[0].next <= following[i]) {
                continue;
            }
            next[heap.uses[0].key] = 0;
            heap_pop(&heap);
            held--;
        }
        result->writes += counted && !hit;
        next[key] = following[i];
        heap_push(&heap, (struct use){.next = following[i], .key = key});
        held++;
    }
    free(following);
    free(next);
    free(heap.uses);
    return 0;
}
