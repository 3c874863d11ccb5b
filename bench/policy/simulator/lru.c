/* SPDX-License-Identifier: Apache-2.0 */
/* lru.c: exact LRU in one list, or one list per stripe by key. */
#include "list.h"

struct lru {
    struct policy base;
    struct links links;
    struct list *lists;
    const uint8_t *stripe_of;
    uint32_t stripes;
    uint32_t slots; /* of a stripe */
};

static struct list *
list_of(struct lru *lru, uint32_t key)
{
    if (lru->stripes == 1) {
        return lru->lists;
    }
    const uint64_t hash = lru->stripe_of != NULL ? lru->stripe_of[key] : mixed(key);
    return &lru->lists[hash % lru->stripes];
}

static bool
lru_holds(const struct policy *policy, uint32_t key)
{
    return ((const struct lru *)policy)->links.list[key] != 0;
}

static void
lru_hit(struct policy *policy, uint32_t key)
{
    struct lru *lru = (struct lru *)policy;
    struct list *list = list_of(lru, key);
    list_take(&lru->links, list, key);
    list_push(&lru->links, list, 1, key);
}

static bool
lru_put(struct policy *policy, uint32_t key)
{
    struct lru *lru = (struct lru *)policy;
    struct list *list = list_of(lru, key);
    if (list->count == lru->slots) {
        list_take(&lru->links, list, list->tail);
    }
    list_push(&lru->links, list, 1, key);
    return true;
}

static void
lru_destroy(struct policy *policy)
{
    struct lru *lru = (struct lru *)policy;
    links_close(&lru->links);
    free(lru->lists);
    free(lru);
}

struct policy *
lru_create(const struct stream *stream, const struct options *options)
{
    const bool by_key = options->placement == PLACE_BY_KEY && options->stripes > 1;
    if (by_key && options->capacity < options->stripes) {
        return NULL; /* stripes without a slot */
    }
    struct lru *lru = zeroed(1, sizeof *lru);
    lru->base = (struct policy){
        .holds = lru_holds,
        .hit = lru_hit,
        .put = lru_put,
        .destroy = lru_destroy,
    };
    lru->stripes = by_key ? options->stripes : 1;
    lru->slots = options->capacity / lru->stripes;
    lru->stripe_of = stream->stripes;
    lru->links = links_open(stream->universe);
    lru->lists = zeroed(lru->stripes, sizeof *lru->lists);
    for (uint32_t s = 0; s < lru->stripes; s++) {
        lru->lists[s] = LIST_EMPTY;
    }
    return &lru->base;
}
