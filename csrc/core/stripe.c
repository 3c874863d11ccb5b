/* SPDX-License-Identifier: Apache-2.0 */
#include "stripe.h"

#include <errno.h>

#include "entry.h"
#include "prefix.h"
#include "slot.h"
#include "stripe_parts.h"

#define CHUNK_PAGES ((uint32_t)(CKV_CHUNK_BYTES / CKV_PAGE_BYTES))

enum {
    SEARCH_BEYOND_MAX = 256,  /* entries looked at and not taken (T5) */
    SEARCH_FORCED_MAX = 1024, /* the same once heat is ignored */
    ENTRY_HAND_STEPS = 4096,
    LEAF_STRIPES_MAX = 4, /* asked for a run of leaves before chains are ignored */
    STRIKES_MAX = 256     /* records struck after the lock is released */
};

#define LOCK_WAIT_NS   UINT64_C(1000000000)
#define LOCK_SLICE_NS  UINT64_C(5000000)
#define LAP            (UINT64_C(1) << 32) /* of virtual time */
#define LAG_MAX        (LAP / 16)
#define LAG_BYTES      (UINT64_C(64) << 20)
#define NO_RUN_PENALTY (LAP / 64)

/* ---- page map (T2) -------------------------------------------------------------- */

static ckv_atomic_u32 *
map_word(struct ckv_volume *volume, const struct ckv_file *file, uint32_t page)
{
    const uint64_t granule =
        (uint64_t)page * CKV_PAGE_BYTES / file->geometry.granule_bytes;
    return &volume->region.page_map[file->first_granule + granule];
}

/* The place of an entry if it may be believed: inside the file. */
static bool
place_of(struct ckv_volume *volume, const struct ckv_file *file, uint32_t entry,
    struct ckv_gap *place)
{
    if (entry - file->first_entry >= file->geometry.entry_count) {
        return false;
    }
    place->first_page = ckv_load_relaxed_u32(&volume->region.places[entry].first_page);
    place->pages = ckv_load_relaxed_u32(&volume->region.places[entry].pages);
    return ckv_geometry_extent_valid(&file->geometry, place->first_page, place->pages);
}

bool
ckv_stripe_placed(struct ckv_volume *volume, const struct ckv_file *file,
    uint32_t entry, uint32_t from, uint32_t to, struct ckv_gap *place)
{
    return place_of(volume, file, entry, place) && place->first_page >= from &&
           place->first_page < to;
}

uint32_t
ckv_stripe_next(struct ckv_volume *volume, const struct ckv_file *file, uint32_t from,
    uint32_t to)
{
    const uint32_t granule_pages = file->geometry.granule_bytes / CKV_PAGE_BYTES;
    for (uint32_t base = from - from % granule_pages; base < to;
        base += granule_pages) {
        uint32_t word = ckv_load_acquire_u32(map_word(volume, file, base)); /* R6 */
        uint32_t best = UINT32_MAX;
        uint32_t best_page = to;
        for (uint32_t steps = 0; word != 0 && steps < granule_pages; steps++) {
            struct ckv_gap place;
            const uint32_t entry = word - 1;
            if (!place_of(volume, file, entry, &place) ||
                place.first_page - base >= granule_pages) {
                break; /* the entry does not agree */
            }
            if (place.first_page >= from && place.first_page < best_page) {
                best = entry;
                best_page = place.first_page;
            }
            word = ckv_load_acquire_u32(&volume->region.links[entry]); /* R6 */
        }
        if (best != UINT32_MAX) {
            return best;
        }
    }
    return UINT32_MAX;
}

void
ckv_stripe_link(struct ckv_volume *volume, uint32_t entry)
{
    const struct ckv_file *file = ckv_volume_file_of(volume, entry);
    CKV_CHECK(file != NULL);
    const uint32_t page =
        ckv_load_relaxed_u32(&volume->region.places[entry].first_page);
    if (!ckv_geometry_extent_valid(&file->geometry, page, 1)) {
        return; /* changed since it was set: hostile memory */
    }
    ckv_atomic_u32 *head = map_word(volume, file, page);
    ckv_store_relaxed_u32(&volume->region.links[entry], ckv_load_relaxed_u32(head));
    CKV_POINT("stripe.link");
    ckv_store_release_u32(head, entry + 1); /* W6 */
}

/* Takes an entry out of the chain of its granule, if it is in it. */
static void
unlink_entry(struct ckv_volume *volume, const struct ckv_file *file, uint32_t entry)
{
    struct ckv_gap place;
    if (!place_of(volume, file, entry, &place)) {
        return;
    }
    const uint32_t granule_pages = file->geometry.granule_bytes / CKV_PAGE_BYTES;
    ckv_atomic_u32 *word = map_word(volume, file, place.first_page);
    for (uint32_t steps = 0; steps < granule_pages; steps++) {
        const uint32_t value = ckv_load_relaxed_u32(word);
        if (value == entry + 1) {
            CKV_POINT("stripe.unlink");
            ckv_store_release_u32(word,
                ckv_load_relaxed_u32(&volume->region.links[entry])); /* W6 */
            return;
        }
        if (value == 0 || value - 1 - file->first_entry >= file->geometry.entry_count) {
            return;
        }
        word = &volume->region.links[value - 1];
    }
}

/* ---- lock (T3) ------------------------------------------------------------------ */

static bool
try_lock(struct ckv_volume *volume, struct ckv_stripe *stripe)
{
    uint64_t expected = 0;
    return ckv_load_relaxed_u64(&stripe->lock) == 0 &&
           ckv_cas_ordered_u64(&stripe->lock, &expected, volume->owner_word);
}

/* Takes the lock over from an owner that is proven dead. */
static bool
succeed(struct ckv_volume *volume, struct ckv_stripe *stripe)
{
    uint64_t word = ckv_load_acquire_u64(&stripe->lock);
    if (word == 0 || word == volume->owner_word ||
        ckv_slot_alive(volume, ckv_owner_slot(word), (uint32_t)(word >> 32))) {
        return false;
    }
    CKV_POINT("stripe.succeed");
    if (!ckv_cas_ordered_u64(&stripe->lock, &word, volume->owner_word)) {
        return false;
    }
    ckv_store_relaxed_u32(&stripe->hole_count, 0);
    ckv_bump(volume, CKV_COUNTER_lock_successions, 1);
    return true;
}

/* False when the word is not ours: the region was truncated or written to by others, and
 * what was done under the lock proves nothing. */
static bool
unlock(struct ckv_volume *volume, struct ckv_stripe *stripe)
{
    uint64_t expected = volume->owner_word;
    CKV_POINT("stripe.unlock");
    return ckv_cas_ordered_u64(&stripe->lock, &expected, 0); /* W3 */
}

bool
ckv_stripe_lock(struct ckv_volume *volume, uint32_t stripe_index, uint64_t timeout_ns)
{
    struct ckv_stripe *stripe = &volume->region.stripes[stripe_index];
    for (int spins = 0; spins < 1000; spins++) {
        if (try_lock(volume, stripe)) {
            return true;
        }
        ckv_cpu_relax();
    }
    ckv_bump(volume, CKV_COUNTER_lock_waits, 1);
    const uint64_t deadline = ckv_os.monotonic_ns() + timeout_ns;
    for (uint64_t slice = 20000;; slice = ckv_min_u64(slice * 2, LOCK_SLICE_NS)) {
        if (try_lock(volume, stripe) || succeed(volume, stripe)) {
            return true;
        }
        if (ckv_os.monotonic_ns() >= deadline) {
            return false;
        }
        ckv_os.sleep_ns(slice);
    }
}

void
ckv_stripe_unlock(struct ckv_volume *volume, uint32_t stripe_index)
{
    (void)unlock(volume, &volume->region.stripes[stripe_index]); /* looking only */
}

/* ---- search (T5) ---------------------------------------------------------------- */

uint32_t
ckv_stripe_border(const struct ckv_bounds *bounds, uint32_t page)
{
    const uint32_t chunk_end = page - page % CHUNK_PAGES + CHUNK_PAGES;
    return chunk_end < bounds->end ? chunk_end : bounds->end;
}

bool
ckv_stripe_takeable(struct ckv_volume *volume, uint32_t entry, bool ignore_heat)
{
    const uint64_t state = ckv_load_ordered_u64(&volume->region.states[entry]);
    uint64_t mask = ckv_load_ordered_u64(&volume->region.masks[entry]);
    switch (ckv_state_kind(state)) {
    case CKV_STATE_FREE:
        return true;
    case CKV_STATE_RESERVED:
    case CKV_STATE_DYING: {
        const uint32_t slot = ckv_state_slot(state);
        if (ckv_slot_alive(volume, slot, ckv_state_incarnation(state))) {
            return false;
        }
        (void)ckv_slot_sweep(volume, slot);
        return ckv_state_kind(ckv_load_ordered_u64(&volume->region.states[entry])) ==
                   CKV_STATE_DEAD &&
               ckv_load_ordered_u64(&volume->region.masks[entry]) == 0;
    }
    case CKV_STATE_DEAD:
        break;
    case CKV_STATE_LIVE: {
        const uint8_t owner = ckv_load_relaxed_u8(&volume->region.owners[entry]);
        ckv_atomic_u8 *heat = &volume->region.heats[entry];
        const uint8_t passes = ckv_load_relaxed_u8(heat);
        if (ignore_heat ||
            ckv_entry_cleared(volume, owner, ckv_state_sequence(state))) {
            break;
        }
        if (ckv_prefix_on(volume)) { /* heat counts hits there */
            if (ckv_prefix_successors(volume, entry) > 0) {
                return false;
            }
        } else if (passes > 0) {
            ckv_store_relaxed_u8(heat, passes > 2 ? 1 : (uint8_t)(passes - 1));
            return false;
        }
        break;
    }
    default:
        return false; /* not a state that we write: leave its pages alone */
    }
    if (mask != 0) {
        mask = ckv_slot_sweep_dead(volume, mask);
    }
    return mask == 0;
}

void
ckv_stripe_note_gap(struct ckv_search *search, uint32_t first_page, uint32_t end_page)
{
    if (first_page < end_page && search->gap_count < CKV_GAPS_MAX) {
        search->gaps[search->gap_count++] =
            (struct ckv_gap){.first_page = first_page, .pages = end_page - first_page};
    }
}

/* Gives the present run up and goes on at `page`. */
static void
restart_run(struct ckv_search *search, uint32_t page)
{
    search->beyond += search->taken;
    search->taken = 0;
    search->run_start = page;
    search->position = page;
}

/* Moves a run that would cross a border to the next place where it does not.  False after
 * a whole lap. */
static bool
cross_border(const struct ckv_bounds *bounds, struct ckv_search *search)
{
    for (;;) {
        const uint32_t border = ckv_stripe_border(bounds, search->run_start);
        if (search->pages <= border - search->run_start) {
            return true;
        }
        restart_run(search, border);
        if (border == bounds->end) {
            restart_run(search, bounds->begin);
            if (++search->wraps >= 2) {
                return false;
            }
        }
    }
}

/* From search->run_start on; true when [run_start, + pages) may be taken. */
static bool
find_run(struct ckv_volume *volume, const struct ckv_bounds *bounds,
    struct ckv_search *search)
{
    const uint32_t limit = search->ignore_heat ? SEARCH_FORCED_MAX : SEARCH_BEYOND_MAX;
    while (search->beyond <= limit) {
        if (!cross_border(bounds, search)) {
            return false;
        }
        const uint32_t run_end = search->run_start + search->pages;
        const uint32_t entry =
            ckv_stripe_next(volume, bounds->file, search->position, run_end);
        if (entry == UINT32_MAX) {
            return true;
        }
        struct ckv_gap place;
        if (!ckv_stripe_placed(volume, bounds->file, entry, search->position, run_end,
                &place)) {
            return false; /* changed under our lock: hostile memory */
        }
        const uint32_t place_end = place.first_page + place.pages;
        if (ckv_stripe_takeable(volume, entry, search->ignore_heat)) {
            search->taken++;
            search->position = place_end;
        } else {
            ckv_stripe_note_gap(search, search->position, place.first_page);
            search->beyond++;
            restart_run(search, place_end);
            if (place_end >= bounds->end) {
                search->wraps++;
                restart_run(search, bounds->begin);
            }
        }
    }
    return false;
}

/* ---- taking a run --------------------------------------------------------------- */

struct victims {
    uint32_t reuse; /* DYING entry whose number the new one takes, or UINT32_MAX */
    uint32_t strikes[STRIKES_MAX + 1]; /* one more for `reuse` when it is not needed */
    uint32_t strike_count;
};

/* Pages that dead entries hold; an entry whose number is given out holds none. */
static void
add_doomed(struct ckv_volume *volume, const struct ckv_file *file, uint32_t entry,
    bool more)
{
    const uint64_t pages = ckv_load_relaxed_u32(&volume->region.places[entry].pages);
    ckv_add_relaxed_u64(&volume->region.paths[ckv_volume_file_index(volume, file)]
                            .doomed_pages,
        more ? pages : -pages);
}

/* Turns one entry of the run into our property (DYING, mask 0).  False when a pin turned
 * up after the kill: the entry is gone for lookups, its pages stay (E3). */
static bool
kill_victim(struct ckv_volume *volume, uint32_t entry)
{
    const uint64_t dying =
        ckv_state_owned(CKV_STATE_DYING, volume->slot, volume->incarnation);
    for (;;) {
        uint64_t state = ckv_load_ordered_u64(&volume->region.states[entry]);
        switch (ckv_state_kind(state)) {
        case CKV_STATE_LIVE:
            if (!ckv_entry_condemn(volume, entry, state, CKV_KILL_EVICT)) {
                continue;
            }
            break;
        case CKV_STATE_FREE:
        case CKV_STATE_DEAD:
            if (!ckv_cas_ordered_u64(&volume->region.states[entry], &state, dying)) {
                continue;
            }
            if (state == CKV_STATE_FREE) { /* linked still: its last owner died */
                add_doomed(volume, ckv_volume_file_of(volume, entry), entry, true);
            }
            break;
        case CKV_STATE_RESERVED:
        case CKV_STATE_DYING:
        default:
            /* Removed just now by another process, or by another thread of this one,
             * whose word is the same as ours: it is being struck. */
            return false;
        }
        break;
    }
    if (ckv_load_ordered_u64(&volume->region.masks[entry]) == 0) {
        return true;
    }
    ckv_entry_bury(volume, entry);
    return false;
}

/* Our DYING entry becomes FREE: struck now, or by the caller after unlocking. */
static void
release_victim(struct ckv_volume *volume, const struct ckv_bounds *bounds,
    struct victims *victims, uint32_t entry)
{
    unlink_entry(volume, bounds->file, entry);
    add_doomed(volume, bounds->file, entry, false);
    if (victims->reuse == UINT32_MAX) {
        victims->reuse = entry;
        return;
    }
    if (victims->strike_count < STRIKES_MAX) {
        victims->strikes[victims->strike_count++] = entry;
        return;
    }
    ckv_entry_strike(volume, bounds->file, entry);
    ckv_store_ordered_u64(&volume->region.states[entry], CKV_STATE_FREE);
}

/* What was killed in [first, end) for a run that had to be given up becomes DEAD. */
static void
bury_run(struct ckv_volume *volume, const struct ckv_bounds *bounds, uint32_t first,
    uint32_t end)
{
    for (uint32_t at = first; at < end;) {
        const uint32_t entry = ckv_stripe_next(volume, bounds->file, at, end);
        struct ckv_gap place;
        if (entry == UINT32_MAX ||
            !ckv_stripe_placed(volume, bounds->file, entry, at, end, &place)) {
            return;
        }
        ckv_entry_bury(volume, entry);
        at = place.first_page + place.pages;
    }
}

/* Kills everything in [first, end) and takes it out of the page map.  On a late pin, or
 * where somebody else was quicker, returns false and leaves what it killed DEAD. */
static bool
clear_run(struct ckv_volume *volume, const struct ckv_bounds *bounds, uint32_t first,
    uint32_t end, struct victims *victims)
{
    for (uint32_t at = first; at < end;) {
        const uint32_t entry = ckv_stripe_next(volume, bounds->file, at, end);
        struct ckv_gap place;
        if (entry == UINT32_MAX ||
            !ckv_stripe_placed(volume, bounds->file, entry, at, end, &place)) {
            break;
        }
        if (!kill_victim(volume, entry)) {
            bury_run(volume, bounds, first, place.first_page);
            return false;
        }
        at = place.first_page + place.pages;
    }
    CKV_POINT("put.evicted");
    for (uint32_t at = first; at < end;) {
        const uint32_t entry = ckv_stripe_next(volume, bounds->file, at, end);
        struct ckv_gap place;
        if (entry == UINT32_MAX ||
            !ckv_stripe_placed(volume, bounds->file, entry, at, end, &place)) {
            break;
        }
        release_victim(volume, bounds, victims, entry);
        at = place.first_page + place.pages;
    }
    return true;
}

/* A free number of the stripe, ours as DYING; UINT32_MAX when the hand finds none. */
static uint32_t
free_entry(struct ckv_volume *volume, const struct ckv_bounds *bounds)
{
    const uint64_t dying =
        ckv_state_owned(CKV_STATE_DYING, volume->slot, volume->incarnation);
    uint32_t hand = ckv_load_relaxed_u32(&bounds->stripe->entry_hand);
    const uint32_t steps =
        bounds->entry_count < ENTRY_HAND_STEPS ? bounds->entry_count : ENTRY_HAND_STEPS;
    for (uint32_t i = 0; i < steps; i++) {
        hand = hand + 1 < bounds->entry_count ? hand + 1 : 0;
        const uint32_t entry = bounds->first_entry + hand;
        uint64_t state = ckv_load_ordered_u64(&volume->region.states[entry]);
        const bool usable =
            state == CKV_STATE_FREE ||
            (state == CKV_STATE_DEAD &&
                ckv_load_ordered_u64(&volume->region.masks[entry]) == 0);
        if (usable &&
            ckv_cas_ordered_u64(&volume->region.states[entry], &state, dying)) {
            ckv_store_relaxed_u32(&bounds->stripe->entry_hand, hand);
            unlink_entry(volume, bounds->file, entry);
            if (state == CKV_STATE_DEAD) {
                add_doomed(volume, bounds->file, entry, false);
            }
            return entry;
        }
    }
    ckv_store_relaxed_u32(&bounds->stripe->entry_hand, hand);
    return UINT32_MAX;
}

/* Turns our DYING number into the RESERVED entry of [first_page, + pages). */
static void
occupy(struct ckv_volume *volume, const struct ckv_bounds *bounds, uint32_t entry,
    struct ckv_extent *extent)
{
    struct ckv_region *region = &volume->region;
    ckv_store_relaxed_u32(&region->places[entry].first_page, extent->first_page);
    ckv_store_relaxed_u32(&region->places[entry].pages, extent->pages);
    ckv_store_relaxed_u8(&region->heats[entry], 0);
    ckv_store_relaxed_u32(&region->marks[entry], 0);
    if (ckv_prefix_on(volume)) {
        ckv_prefix_begin(volume, entry);
    }
    CKV_POINT("put.occupy");
    ckv_store_ordered_u64(&region->states[entry],
        ckv_state_owned(CKV_STATE_RESERVED, volume->slot, volume->incarnation));
    ckv_stripe_link(volume, entry);
    extent->entry = entry;
    extent->file = bounds->file;
    CKV_POINT("put.reserved");
}

/* ---- holes (T6) ----------------------------------------------------------------- */

static uint32_t
distance(const struct ckv_bounds *bounds, uint32_t from, uint32_t to)
{
    return to >= from ? to - from : to + (bounds->end - bounds->begin) - from;
}

static uint32_t
hole_count(const struct ckv_stripe *stripe)
{
    const uint32_t count = ckv_load_relaxed_u32(&stripe->hole_count);
    return count < CKV_HOLES_MAX ? count : CKV_HOLES_MAX;
}

static void
drop_hole(struct ckv_stripe *stripe, uint32_t index)
{
    if (hole_count(stripe) == 0) {
        return;
    }
    const uint32_t last = hole_count(stripe) - 1;
    stripe->holes[index] = stripe->holes[last];
    ckv_store_relaxed_u32(&stripe->hole_count, last);
}

static bool
overlap(uint32_t first, uint32_t pages, uint32_t other, uint32_t other_pages)
{
    return first < other + other_pages && other < first + pages;
}

/* Holes never overlap: what one of them gave away would be inside the other. */
static void
add_hole(struct ckv_stripe *stripe, const struct ckv_gap *gap)
{
    for (uint32_t i = 0; i < hole_count(stripe);) {
        if (overlap(gap->first_page, gap->pages, stripe->holes[i].first_page,
                stripe->holes[i].pages)) {
            drop_hole(stripe, i); /* what was seen last counts */
        } else {
            i++;
        }
    }
    const uint32_t count = hole_count(stripe);
    uint32_t at = count;
    if (count == CKV_HOLES_MAX) { /* the smallest gives way */
        at = 0;
        for (uint32_t i = 1; i < count; i++) {
            at = stripe->holes[i].pages < stripe->holes[at].pages ? i : at;
        }
        if (stripe->holes[at].pages >= gap->pages) {
            return;
        }
    }
    stripe->holes[at] =
        (struct ckv_hole){.first_page = gap->first_page, .pages = gap->pages};
    if (at == count) {
        ckv_store_relaxed_u32(&stripe->hole_count, count + 1);
    }
}

/* The smallest hole that fits, or UINT32_MAX.  Forgets those the cursor left too far. */
static uint32_t
choose_hole(const struct ckv_bounds *bounds, uint32_t pages)
{
    struct ckv_stripe *stripe = bounds->stripe;
    const uint32_t cursor = ckv_load_relaxed_u32(&stripe->cursor_page);
    uint32_t best = UINT32_MAX;
    for (uint32_t i = 0; i < hole_count(stripe);) {
        const struct ckv_hole *hole = &stripe->holes[i];
        const bool sane = hole->first_page >= bounds->begin &&
                          hole->first_page < bounds->end &&
                          hole->pages <= bounds->end - hole->first_page;
        if (!sane || distance(bounds, hole->first_page, cursor) >
                         (bounds->end - bounds->begin) / 4) {
            drop_hole(stripe, i);
            continue;
        }
        if (hole->pages >= pages &&
            (best == UINT32_MAX || hole->pages < stripe->holes[best].pages)) {
            best = i;
        }
        i++;
    }
    return best;
}

static bool
fill_hole(struct ckv_volume *volume, const struct ckv_bounds *bounds,
    struct ckv_extent *extent)
{
    struct ckv_stripe *stripe = bounds->stripe;
    const uint32_t index = choose_hole(bounds, extent->pages);
    if (index == UINT32_MAX) {
        return false;
    }
    struct ckv_hole *hole = &stripe->holes[index];
    const uint32_t first = hole->first_page;
    if (!ckv_geometry_extent_valid(&bounds->file->geometry, first, extent->pages) ||
        ckv_stripe_next(volume, bounds->file, first, first + extent->pages) !=
            UINT32_MAX) {
        drop_hole(stripe, index);
        return false;
    }
    const uint32_t entry = free_entry(volume, bounds);
    if (entry == UINT32_MAX) {
        return false;
    }
    hole->first_page += extent->pages;
    hole->pages -= extent->pages;
    if (hole->pages == 0) {
        drop_hole(stripe, index);
    }
    extent->first_page = first;
    extent->hole = true;
    occupy(volume, bounds, entry, extent);
    ckv_bump(volume, CKV_COUNTER_holes_filled, 1);
    return true;
}

/* ---- cursor --------------------------------------------------------------------- */

/* The cursor, pulled into the stripe if the shared word is nonsense. */
static uint32_t
cursor_of(const struct ckv_bounds *bounds)
{
    const uint32_t cursor = ckv_load_relaxed_u32(&bounds->stripe->cursor_page);
    return cursor >= bounds->begin && cursor < bounds->end ? cursor : bounds->begin;
}

/* Moves the cursor behind the run; holes that it passed are gone, gaps left behind are
 * holes.  The search may have gone round more than once: the run then covers places where
 * it saw gaps before, and perhaps where the cursor was. */
static void
move_cursor(const struct ckv_bounds *bounds, const struct ckv_search *search)
{
    struct ckv_stripe *stripe = bounds->stripe;
    const uint32_t stripe_pages = bounds->end - bounds->begin;
    const uint32_t from = cursor_of(bounds);
    const uint32_t end = search->run_start + search->pages;
    const uint32_t to = end == bounds->end ? bounds->begin : end;
    uint32_t moved = distance(bounds, from, to);
    if (moved < search->pages) {
        moved = stripe_pages; /* the old cursor lies inside the run */
    }
    for (uint32_t i = 0; i < hole_count(stripe);) {
        const struct ckv_hole *hole = &stripe->holes[i];
        if (distance(bounds, from, hole->first_page) < moved ||
            overlap(hole->first_page, hole->pages, search->run_start, search->pages)) {
            drop_hole(stripe, i);
        } else {
            i++;
        }
    }
    for (uint32_t i = 0; i < search->gap_count; i++) {
        const struct ckv_gap *gap = &search->gaps[i];
        if (distance(bounds, gap->first_page + gap->pages, search->run_start) < moved &&
            !overlap(gap->first_page, gap->pages, search->run_start, search->pages)) {
            add_hole(stripe, gap);
        }
    }
    if (from + (uint64_t)moved >= bounds->end) {
        ckv_add_relaxed_u64(&stripe->laps, 1);
    }
    ckv_store_relaxed_u32(&stripe->cursor_page, to);
    const uint64_t advance = ((uint64_t)moved << 32) / stripe_pages;
    ckv_add_relaxed_u64(&stripe->virtual_time, advance);
}

/* Out of entries: where the next takeable live entry starts, so that the run begins
 * there and gives a number. */
static bool
seek_victim(struct ckv_volume *volume, const struct ckv_bounds *bounds,
    struct ckv_search *search)
{
    uint32_t at = search->run_start;
    for (uint32_t looked = 0; looked < SEARCH_FORCED_MAX;) {
        const uint32_t entry = ckv_stripe_next(volume, bounds->file, at, bounds->end);
        struct ckv_gap place;
        if (entry == UINT32_MAX) {
            if (at == bounds->begin) {
                return false; /* there is none */
            }
            at = bounds->begin; /* as often as it takes: each lap costs all a heat */
            continue;
        }
        if (!ckv_stripe_placed(volume, bounds->file, entry, at, bounds->end, &place)) {
            return false; /* changed under our lock: hostile memory */
        }
        if (ckv_stripe_takeable(volume, entry, looked > SEARCH_BEYOND_MAX)) {
            search->run_start = place.first_page;
            search->position = place.first_page;
            search->taken = 0;
            return true;
        }
        looked++;
        at = place.first_page + place.pages;
    }
    return false;
}

static void
count_exhaustion(struct ckv_volume *volume)
{
    struct ckv_region_header *header = volume->region.header;
    ckv_bump(volume, CKV_COUNTER_entries_exhausted, 1);
    if (ckv_load_relaxed_u32(&header->exhaustion_seen) == 0 &&
        ckv_exchange_ordered_u32(&header->exhaustion_seen, 1) == 0) {
        ckv_log(CKV_LOG_WARNING, "the table has no free entry although there is room: "
                                 "blocks are smaller than "
                                 "the volume was laid out for; create it with a "
                                 "smaller expected_object_size");
    }
}

static bool
search_again(struct ckv_volume *volume, const struct ckv_bounds *bounds,
    struct ckv_search *search, uint32_t start, bool force)
{
    const bool leaves = ckv_prefix_on(volume);
    if (leaves && !force) {
        *search = (struct ckv_search){.pages = search->pages,
            .run_start = start,
            .need_entry = search->need_entry};
        return ckv_stripe_find_leaves(volume, bounds, search);
    }
    for (int pass = leaves; pass < 2; pass++) {
        *search = (struct ckv_search){.pages = search->pages,
            .run_start = start,
            .position = start,
            .ignore_heat = pass == 1};
        if (find_run(volume, bounds, search)) {
            return true;
        }
    }
    return false;
}

/* Requires: the stripe lock.  False: no run. */
static bool
take_run(struct ckv_volume *volume, const struct ckv_bounds *bounds,
    struct ckv_extent *extent, struct victims *victims, bool force)
{
    struct ckv_search search = {.pages = extent->pages};
    uint32_t start = cursor_of(bounds);
    for (int attempt = 0; attempt < 8; attempt++) {
        if (!search_again(volume, bounds, &search, start, force)) {
            return false;
        }
        uint32_t entry = UINT32_MAX;
        if (search.taken == 0) {
            entry = free_entry(volume, bounds);
            if (entry == UINT32_MAX) {
                count_exhaustion(volume);
                if (ckv_prefix_on(volume) && !force) {
                    search.need_entry = true;
                    continue;
                }
                if (!seek_victim(volume, bounds, &search)) {
                    return false;
                }
                start = search.run_start;
                continue;
            }
        }
        const uint32_t end = search.run_start + extent->pages;
        if (!clear_run(volume, bounds, search.run_start, end, victims)) {
            if (entry != UINT32_MAX) {
                ckv_store_ordered_u64(&volume->region.states[entry], CKV_STATE_FREE);
            }
            continue;
        }
        if (entry == UINT32_MAX) {
            entry = victims->reuse;
        } else if (victims->reuse != UINT32_MAX) {
            victims->strikes[victims->strike_count++] = victims->reuse;
        }
        if (entry == UINT32_MAX) {
            return false; /* taken by others while we looked: nothing was overwritten */
        }
        extent->first_page = search.run_start;
        extent->hole = false;
        occupy(volume, bounds, entry, extent);
        move_cursor(bounds, &search);
        CKV_POINT("put.cursor");
        return true;
    }
    return false;
}

/* ---- choosing a stripe (T4) ----------------------------------------------------- */

static struct ckv_bounds
bounds_of(struct ckv_volume *volume, struct ckv_file *file, uint32_t local_stripe)
{
    const uint32_t pages = ckv_geometry_stripe_pages(&file->geometry);
    return (struct ckv_bounds){
        .file = file,
        .stripe = &volume->region.stripes[file->first_stripe + local_stripe],
        .begin = local_stripe * pages,
        .end = (local_stripe + 1) * pages,
        .first_entry = file->first_entry + local_stripe * file->geometry.stripe_entries,
        .entry_count = file->geometry.stripe_entries,
    };
}

struct choice {
    struct ckv_file *file;
    uint32_t local_stripe;
    uint64_t latest; /* the most advanced virtual time of all */
    bool any_usable;
};

/* A stripe is left only when it is this far ahead, so that blocks stored one after the
 * other lie one after the other and can be read ahead. */
static uint64_t
stay_ahead(const struct ckv_file *file)
{
    const uint64_t bytes = UINT64_C(16) << 20;
    return ckv_min_u64(LAP / 64, bytes * LAP / file->geometry.stripe_bytes);
}

/* The least advanced stripe whose lock looks free, other than `refused`. */
static struct choice
choose(struct ckv_volume *volume, uint64_t payload_pages, uint32_t refused)
{
    struct choice choice = {0};
    const uint32_t last = ckv_load_relaxed_u32(&volume->last_stripe);
    uint64_t least = UINT64_MAX;
    for (uint32_t f = 0; f < volume->file_count; f++) {
        struct ckv_file *file = &volume->files[f];
        if (!ckv_volume_file_usable(volume, file) ||
            payload_pages * CKV_PAGE_BYTES >
                ckv_geometry_payload_max(&file->geometry)) {
            continue;
        }
        for (uint32_t s = 0; s < file->geometry.stripe_count; s++) {
            const struct ckv_stripe *stripe =
                &volume->region.stripes[file->first_stripe + s];
            const uint64_t time = ckv_load_relaxed_u64(&stripe->virtual_time);
            choice.latest = ckv_max_u64(choice.latest, time);
            if (file->first_stripe + s == refused) {
                continue;
            }
            choice.any_usable = true;
            const uint64_t lead = file->first_stripe + s == last ? stay_ahead(file) : 0;
            const uint64_t rank = time > lead ? time - lead : 0;
            if ((choice.file == NULL || rank < least) &&
                ckv_load_relaxed_u64(&stripe->lock) == 0) {
                least = rank;
                choice.file = file;
                choice.local_stripe = s;
            }
        }
    }
    return choice;
}

/* A lag counts for at most LAG_MAX; in small stripes for LAG_BYTES, where single puts
 * make lags that are no sign of trouble: to forgive those would give the smaller paths
 * of a set more than their part. */
static uint64_t
lag_max(const struct ckv_file *file)
{
    const uint64_t lag =
        ckv_min_u64(LAP, LAG_BYTES * LAP / file->geometry.stripe_bytes);
    return ckv_max_u64(LAG_MAX, lag);
}

/* Requires: the lock. */
static void
catch_up(struct ckv_stripe *stripe, const struct choice *choice)
{
    const uint64_t time = ckv_load_relaxed_u64(&stripe->virtual_time);
    const uint64_t lag = lag_max(choice->file);
    if (choice->latest > lag && time < choice->latest - lag) {
        ckv_store_relaxed_u64(&stripe->virtual_time, choice->latest - lag);
    }
}

/* All stripes look locked: one of their owners may be dead. */
static void
succeed_any(struct ckv_volume *volume)
{
    for (uint32_t s = 0; s < volume->region.layout.stripe_count; s++) {
        struct ckv_stripe *stripe = &volume->region.stripes[s];
        if (succeed(volume, stripe)) {
            (void)unlock(volume, stripe); /* not ours: then nothing was done under it */
        }
    }
}

/* Before a byte of their pages is overwritten, so that a process that dies while it
 * writes leaves no sealed record over them. */
static void
strike_victims(struct ckv_volume *volume, struct ckv_file *file,
    const struct victims *victims)
{
    if (victims->reuse !=
        UINT32_MAX) { /* RESERVED by us now, or in `strikes` as well */
        ckv_entry_strike(volume, file, victims->reuse);
    }
    for (uint32_t i = 0; i < victims->strike_count; i++) {
        const uint32_t entry = victims->strikes[i];
        CKV_POINT("put.strike");
        ckv_entry_strike(volume, file, entry);
        ckv_store_ordered_u64(&volume->region.states[entry], CKV_STATE_FREE);
    }
}

static bool
take_from(struct ckv_volume *volume, const struct choice *choice,
    struct ckv_extent *extent, bool force)
{
    const struct ckv_bounds bounds =
        bounds_of(volume, choice->file, choice->local_stripe);
    struct victims victims = {.reuse = UINT32_MAX};
    CKV_POINT("put.locked");
    catch_up(bounds.stripe, choice);
    const bool filled = fill_hole(volume, &bounds, extent);
    const bool taken = filled || take_run(volume, &bounds, extent, &victims, force);
    if (taken && !filled && force && ckv_prefix_on(volume)) {
        ckv_bump(volume, CKV_COUNTER_chains_ignored, 1);
    }
    if (!taken) {
        ckv_add_relaxed_u64(&bounds.stripe->virtual_time, NO_RUN_PENALTY);
    }
    const bool ours = unlock(volume, bounds.stripe);
    if (!ours || ckv_load_ordered_u64(&volume->region.lost_pages) != 0) {
        ckv_volume_fail_path(volume, choice->file, "using the shared region", EIO);
        return false; /* nothing was struck, nothing is overwritten */
    }
    strike_victims(volume, choice->file, &victims);
    return taken;
}

enum ckv_status
ckv_stripe_reserve(struct ckv_volume *volume, uint32_t pages, uint64_t *deadline_ns,
    struct ckv_extent *extent)
{
    *extent = (struct ckv_extent){.entry = UINT32_MAX, .pages = pages};
    uint32_t refused = UINT32_MAX;
    /* Stripes that may yet refuse for want of leaves; then chains are ignored. */
    uint32_t leaf_tries = ckv_prefix_on(volume) ? LEAF_STRIPES_MAX : 0;
    bool waited = false;
    uint64_t slice = 20000;
    for (uint32_t rounds = 0;;) {
        const struct choice choice = choose(volume, pages, refused);
        if (!choice.any_usable && leaf_tries > 0 && refused != UINT32_MAX) {
            leaf_tries = 0; /* one path with one stripe is left */
            refused = UINT32_MAX;
            continue;
        }
        if (!choice.any_usable) {
            return refused == UINT32_MAX ? CKV_FAILED_PATH : CKV_NO_RUN;
        }
        if (choice.file != NULL) {
            const uint32_t index = choice.file->first_stripe + choice.local_stripe;
            if (!try_lock(volume, &volume->region.stripes[index])) {
                continue; /* somebody was quicker; look again */
            }
            if (take_from(volume, &choice, extent, leaf_tries == 0)) {
                ckv_store_relaxed_u32(&volume->last_stripe, index);
                return CKV_OK;
            }
            if (leaf_tries > 0) {
                leaf_tries =
                    volume->region.layout.stripe_count > 1 ? leaf_tries - 1 : 0;
                refused = leaf_tries > 0 ? index : UINT32_MAX;
                continue;
            }
            if (refused != UINT32_MAX) {
                return CKV_NO_RUN;
            }
            refused = index;
            continue;
        }
        if (rounds++ < 200) {
            ckv_cpu_relax();
            continue;
        }
        const uint64_t now = ckv_os.monotonic_ns();
        if (!waited) {
            ckv_bump(volume, CKV_COUNTER_lock_waits, 1);
            waited = true;
        }
        if (*deadline_ns == 0) {
            *deadline_ns = now + LOCK_WAIT_NS;
        }
        if (now >= *deadline_ns) {
            return CKV_BUSY;
        }
        succeed_any(volume);
        ckv_os.sleep_ns(slice);
        slice = ckv_min_u64(slice * 2, LOCK_SLICE_NS);
    }
}
