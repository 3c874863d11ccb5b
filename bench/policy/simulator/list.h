/* SPDX-License-Identifier: Apache-2.0 */
/* list.h: doubly linked lists of keys; a key is in at most one list of a set. */
#ifndef BENCH_POLICY_LIST_H
#define BENCH_POLICY_LIST_H

#include <stdlib.h>

#include "policy.h"

struct links {
    uint32_t *next; /* towards the tail */
    uint32_t *previous;
    uint8_t *list; /* which list, 0: none */
};

struct list {
    uint32_t head; /* the newest */
    uint32_t tail;
    uint32_t count;
};

#define LIST_EMPTY ((struct list){.head = NONE, .tail = NONE})

static inline struct links
links_open(uint32_t universe)
{
    return (struct links){
        .next = nones(universe),
        .previous = nones(universe),
        .list = zeroed(universe, 1),
    };
}

static inline void
links_close(struct links *links)
{
    free(links->next);
    free(links->previous);
    free(links->list);
}

static inline void
list_push(struct links *links, struct list *list, uint8_t name, uint32_t key)
{
    links->list[key] = name;
    links->next[key] = list->head;
    links->previous[key] = NONE;
    if (list->head != NONE) {
        links->previous[list->head] = key;
    } else {
        list->tail = key;
    }
    list->head = key;
    list->count++;
}

static inline void
list_take(struct links *links, struct list *list, uint32_t key)
{
    const uint32_t next = links->next[key];
    const uint32_t previous = links->previous[key];
    if (previous != NONE) {
        links->next[previous] = next;
    } else {
        list->head = next;
    }
    if (next != NONE) {
        links->previous[next] = previous;
    } else {
        list->tail = previous;
    }
    links->list[key] = 0;
    list->count--;
}

#endif /* BENCH_POLICY_LIST_H */
