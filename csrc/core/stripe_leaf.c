/* SPDX-License-Identifier: Apache-2.0 */
/* stripe_leaf.c: the cursor of eviction="prefix".
 *
 * Goes from leaf to leaf along the bitmap of prefix.h.  A run may hold leaves, dead
 * entries, free space, and blocks all of whose successors lie in it as well, before them:
 * chains are stored tail first.  It is worth what its best block is worth.
 *
 *   G1  A search scores at most 64 runs and looks at no more than 2 048 granules and
 *       entries; then the lowest run that it saw is taken.  With none the stripe has no
 *       room, and the put tries another.
 *   G2  It goes round no further than once, and the next search goes on where it ended,
 *       also when the run that it takes lies before that: what was passed once has its
 *       turn only when all others had theirs.
 */
#include "entry.h"
#include "prefix.h"
#include "stripe_parts.h"

enum { PASSED_MAX = 64, LOOKED_MAX = 2048, INSIDE_MAX = 64 };

struct run {
    uint32_t first_page;
    uint32_t first_end; /* of its first entry or of free space before one */
    uint32_t taken;
    bool costs; /* a block that is of use to somebody */
    int32_t score;
};

struct walk {
    struct ckv_volume *volume;
    const struct ckv_bounds *bounds;
    struct ckv_search *search;
    uint32_t looked;
    uint32_t parents[INSIDE_MAX]; /* of the entries of the run being tried */
    uint32_t parent_count;
};

/* Whether all successors of an entry lie in the run. */
static bool
is_leaf_of_run(const struct walk *walk, uint32_t entry)
{
    uint32_t left = ckv_prefix_successors(walk->volume, entry);
    for (uint32_t i = 0; left > 0 && i < walk->parent_count; i++) {
        left -= walk->parents[i] == entry;
    }
    return left == 0;
}

/* Whether chains let the cursor take an entry of the run; raises its score. */
static bool
join(struct walk *walk, struct run *run, uint32_t entry)
{
    struct ckv_volume *volume = walk->volume;
    const struct ckv_region *region = &volume->region;
    const uint64_t state = ckv_load_ordered_u64(&region->states[entry]);
    const uint8_t owner = ckv_load_relaxed_u8(&region->owners[entry]);
    if (ckv_state_kind(state) == CKV_STATE_LIVE &&
        !ckv_entry_cleared(volume, owner, ckv_state_sequence(state))) {
        if (!is_leaf_of_run(walk, entry)) {
            return false;
        }
        const int32_t score = ckv_density_score(&region->density,
            ckv_load_relaxed_u64(&region->lives[entry]));
        run->score = score > run->score ? score : run->score;
        run->costs = true;
        if (walk->parent_count < INSIDE_MAX) {
            walk->parents[walk->parent_count++] = ckv_prefix_parent(volume, entry);
        }
    }
    return ckv_stripe_takeable(volume, entry, true);
}

/* Tries the run that begins at `start`, where an entry or free space does.  Otherwise
 * *next is where to go on. */
static bool
try_run(struct walk *walk, uint32_t start, struct run *run, uint32_t *next)
{
    const struct ckv_bounds *bounds = walk->bounds;
    const uint32_t end = start + walk->search->pages;
    *run = (struct run){.first_page = start,
        .first_end = end,
        .score = -CKV_DENSITY_SCORE_MAX};
    walk->parent_count = 0;
    for (uint32_t at = start; at < end;) {
        const uint32_t entry = ckv_stripe_next(walk->volume, bounds->file, at, end);
        struct ckv_gap place;
        if (entry == UINT32_MAX) {
            return true;
        }
        walk->looked++;
        if (!ckv_stripe_placed(walk->volume, bounds->file, entry, at, end, &place)) {
            walk->looked = LOOKED_MAX; /* changed under our lock: hostile memory */
            return false;
        }
        const uint32_t place_end = place.first_page + place.pages;
        if (!join(walk, run, entry)) {
            ckv_stripe_note_gap(walk->search, at, place.first_page);
            *next = place_end;
            return false;
        }
        run->taken++;
        run->first_end = run->taken == 1 ? place_end : run->first_end;
        at = place_end;
    }
    return true;
}

/* Where the next run may begin, at or behind `at`: a leaf, or the begin of a chunk or of
 * the stripe, which may be free.  UINT32_MAX when the search is over. */
static uint32_t
next_start(struct walk *walk, uint32_t at, uint32_t *walked)
{
    const struct ckv_bounds *bounds = walk->bounds;
    while (*walked <= bounds->end - bounds->begin && walk->looked < LOOKED_MAX) {
        if (at >= bounds->end) {
            at = bounds->begin;
        }
        const uint32_t border = ckv_stripe_border(bounds, at);
        const uint32_t leaf = ckv_prefix_next_leaf(walk->volume, bounds->file, at,
            border, &walk->looked, LOOKED_MAX);
        if (leaf < border && walk->search->pages <= border - leaf) {
            *walked += leaf - at;
            return leaf;
        }
        *walked += border - at;
        at = border < bounds->end ? border : bounds->begin;
        if (walk->search->pages <= ckv_stripe_border(bounds, at) - at) {
            return at;
        }
    }
    return UINT32_MAX;
}

static bool
take(struct walk *walk, const struct run *run, uint32_t passed, uint32_t resume)
{
    walk->search->resume = resume;
    walk->search->run_start = run->first_page;
    walk->search->position = run->first_page + walk->search->pages;
    walk->search->taken = run->taken;
    if (run->costs) {
        ckv_density_took(&walk->volume->region.density, passed);
    }
    return true;
}

bool
ckv_stripe_find_leaves(struct ckv_volume *volume, const struct ckv_bounds *bounds,
    struct ckv_search *search)
{
    struct walk walk = {.volume = volume, .bounds = bounds, .search = search};
    const int32_t threshold = ckv_density_threshold(&volume->region.density);
    struct run best = {.score = INT32_MAX};
    uint32_t passed = 0;
    uint32_t walked = 0;
    uint32_t at = search->run_start;
    uint32_t next = at;
    if (search->pages > ckv_stripe_border(bounds, at) - at) {
        at = next_start(&walk, at, &walked);
    }
    while (at != UINT32_MAX) {
        struct run run;
        next = at;
        const bool fits = try_run(&walk, at, &run, &next);
        if (fits) {
            next = run.first_end;
        }
        if (fits && (run.taken > 0 || !search->need_entry)) {
            if (run.score <= threshold) {
                return take(&walk, &run, passed, at + search->pages);
            }
            best = run.score < best.score ? run : best;
            if (++passed == PASSED_MAX) {
                break;
            }
        }
        walked += next - at;
        at = next_start(&walk, next, &walked);
    }
    /* The runs that were tried overlap: the last may have ended inside the best. */
    const uint32_t best_end = best.first_page + search->pages;
    const bool inside = next > best.first_page && next < best_end;
    return best.score != INT32_MAX &&
           take(&walk, &best, passed, inside ? best_end : next);
}
