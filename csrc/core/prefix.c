/* SPDX-License-Identifier: Apache-2.0 */
#include "prefix.h"

#include "pin.h"
#include "stripe.h"

enum {
    GENERATION_SHIFT = 20,
    GENERATION_MASK = 0xfff,
    COUNT_MASK = 0xfffff, /* signed (K1) */
    COUNT_MAX = 0x7ffff,  /* a block with so many successors counts no more of them */
    COUNT_MIN = 0x80000
};

#define LINK_MASK                                                                      \
    (UINT64_C(0xffffffff) << 32 | (uint64_t)GENERATION_MASK << GENERATION_SHIFT)

/* ---- leaves (K4) ----------------------------------------------------------------- */

static ckv_atomic_u64 *
leaf_word(const struct ckv_volume *volume, const struct ckv_file *file, uint32_t page,
    uint64_t *bit)
{
    const uint64_t granule = file->first_granule + (uint64_t)page * CKV_PAGE_BYTES /
                                                       file->geometry.granule_bytes;
    *bit = UINT64_C(1) << granule % 64;
    return &volume->region.leaves[granule / 64];
}

static void
set_leaf(struct ckv_volume *volume, uint32_t entry)
{
    const struct ckv_file *file = ckv_volume_file_of(volume, entry);
    const uint32_t page =
        ckv_load_relaxed_u32(&volume->region.places[entry].first_page);
    uint64_t bit;
    if (file == NULL || !ckv_geometry_extent_valid(&file->geometry, page, 1)) {
        return; /* hostile memory (K5) */
    }
    ckv_atomic_u64 *word = leaf_word(volume, file, page, &bit);
    if ((ckv_load_ordered_u64(word) & bit) == 0) {
        CKV_POINT("prefix.leaf");
        (void)ckv_or_ordered_u64(word, bit);
    }
}

/* An entry that the cursor may take as far as chains go. */
static bool
may_be_leaf(const struct ckv_volume *volume, uint32_t entry)
{
    const uint64_t state = ckv_load_ordered_u64(&volume->region.states[entry]);
    return ckv_state_kind(state) != CKV_STATE_LIVE ||
           ckv_prefix_successors(volume, entry) == 0;
}

/* The first entry from `from` on that starts in the granule and may be a leaf.  *any
 * tells whether one does from the beginning of the granule on. */
static uint32_t
leaf_in_granule(struct ckv_volume *volume, const struct ckv_file *file, uint32_t begin,
    uint32_t from, bool *any)
{
    const uint32_t end = begin + file->geometry.granule_bytes / CKV_PAGE_BYTES;
    uint32_t found = UINT32_MAX;
    *any = false;
    for (uint32_t at = begin; at < end && found == UINT32_MAX;) {
        const uint32_t entry = ckv_stripe_next(volume, file, at, end);
        if (entry == UINT32_MAX) {
            break;
        }
        const uint32_t page =
            ckv_load_relaxed_u32(&volume->region.places[entry].first_page);
        if (page < at || page >= end) {
            break; /* changed under the lock: hostile memory */
        }
        if (may_be_leaf(volume, entry)) {
            *any = true;
            found = page >= from ? page : UINT32_MAX;
        }
        at = page + 1;
    }
    return found;
}

uint32_t
ckv_prefix_next_leaf(struct ckv_volume *volume, const struct ckv_file *file,
    uint32_t from, uint32_t to, uint32_t *looked, uint32_t limit)
{
    const uint32_t granule_pages = file->geometry.granule_bytes / CKV_PAGE_BYTES;
    for (uint32_t begin = from - from % granule_pages; begin < to && *looked < limit;) {
        uint64_t bit;
        ckv_atomic_u64 *word = leaf_word(volume, file, begin, &bit);
        const uint64_t ahead = ckv_load_ordered_u64(word) & ~(bit - 1);
        if ((ahead & bit) == 0) { /* the next one of the word, or the next word */
            const uint32_t skip = ahead != 0 ? (uint32_t)__builtin_ctzll(ahead) -
                                                   (uint32_t)__builtin_ctzll(bit)
                                             : 64 - (uint32_t)__builtin_ctzll(bit);
            begin += skip * granule_pages;
            continue;
        }
        bool any;
        ++*looked;
        uint32_t page = leaf_in_granule(volume, file, begin, from, &any);
        if (!any) {
            (void)ckv_and_ordered_u64(word, ~bit);
            CKV_POINT("prefix.cleared");
            page = leaf_in_granule(volume, file, begin, from, &any);
            if (any) {
                (void)ckv_or_ordered_u64(word, bit);
            }
        }
        if (page < to) {
            return page;
        }
        begin += granule_pages;
    }
    return UINT32_MAX;
}

/* ---- chains (K1, K2) ------------------------------------------------------------- */

static uint64_t
link_to(uint32_t parent, uint64_t parent_sequence)
{
    return ((uint64_t)parent + 1) << 32 | (parent_sequence & GENERATION_MASK)
                                              << GENERATION_SHIFT;
}

uint32_t
ckv_prefix_successors(const struct ckv_volume *volume, uint32_t entry)
{
    const uint32_t count =
        (uint32_t)ckv_load_ordered_u64(&volume->region.chains[entry]) & COUNT_MASK;
    return count <= COUNT_MAX ? count : 0;
}

static uint32_t
parent_in(const struct ckv_volume *volume, uint64_t word)
{
    const uint32_t parent = (uint32_t)(word >> 32);
    return parent != 0 && parent - 1 < volume->region.layout.entry_count ? parent - 1
                                                                         : UINT32_MAX;
}

uint32_t
ckv_prefix_parent(const struct ckv_volume *volume, uint32_t entry)
{
    return parent_in(volume, ckv_load_relaxed_u64(&volume->region.chains[entry]));
}

/* Whether a link leads to a block that is alive. */
static bool
leads_to_live(const struct ckv_volume *volume, uint64_t word)
{
    const uint32_t parent = parent_in(volume, word);
    if (parent == UINT32_MAX) {
        return false;
    }
    const uint64_t state = ckv_load_ordered_u64(&volume->region.states[parent]);
    return ckv_state_kind(state) == CKV_STATE_LIVE &&
           (ckv_state_sequence(state) & GENERATION_MASK) ==
               (word >> GENERATION_SHIFT & GENERATION_MASK);
}

uint32_t
ckv_prefix_live_parent(const struct ckv_volume *volume, uint32_t entry)
{
    const uint64_t word = ckv_load_relaxed_u64(&volume->region.chains[entry]);
    return leads_to_live(volume, word) ? parent_in(volume, word) : UINT32_MAX;
}

void
ckv_prefix_set_successors(struct ckv_volume *volume, uint32_t entry, uint32_t count)
{
    ckv_atomic_u64 *chain = &volume->region.chains[entry];
    uint64_t word = ckv_load_relaxed_u64(chain);
    const uint64_t cut = ckv_min_u64(count, COUNT_MAX);
    while (!ckv_cas_ordered_u64(chain, &word, (word & ~(uint64_t)COUNT_MASK) | cut)) {
    }
    if (count == 0) {
        set_leaf(volume, entry);
    }
}

/* One more or one less than in the word. */
static uint64_t
counted(uint64_t word, uint64_t change)
{
    return (word & ~(uint64_t)COUNT_MASK) | ((word + change) & COUNT_MASK);
}

/* One successor less, perhaps before it was counted.  The block may get another life at
 * this moment, which then has one too few (K1). */
static void
count_down(struct ckv_volume *volume, uint32_t entry)
{
    ckv_atomic_u64 *chain = &volume->region.chains[entry];
    uint64_t word = ckv_load_relaxed_u64(chain);
    do {
        if ((word & COUNT_MASK) == COUNT_MIN) {
            return;
        }
    } while (!ckv_cas_ordered_u64(chain, &word, counted(word, UINT64_MAX)));
    CKV_POINT("prefix.counted");
    if ((word & COUNT_MASK) == 1) {
        set_leaf(volume, entry);
    }
}

/* Takes an entry off the count of its parent, then forgets the parent. */
static void
unlink_chain(struct ckv_volume *volume, uint32_t entry)
{
    ckv_atomic_u64 *chain = &volume->region.chains[entry];
    uint64_t word = ckv_load_relaxed_u64(chain);
    const uint64_t link = word & LINK_MASK;
    if (link == 0) {
        return;
    }
    if (leads_to_live(volume, link)) {
        count_down(volume, parent_in(volume, link));
    }
    CKV_POINT("prefix.unlink");
    while ((word & LINK_MASK) == link &&
           !ckv_cas_ordered_u64(chain, &word, word & COUNT_MASK)) {
    }
}

void
ckv_prefix_begin(struct ckv_volume *volume, uint32_t entry)
{
    unlink_chain(volume, entry); /* what a process that died had not undone */
    ckv_store_ordered_u64(&volume->region.chains[entry], 0);
    ckv_store_relaxed_u64(&volume->region.lives[entry], 0);
    set_leaf(volume, entry);
}

void
ckv_prefix_end(struct ckv_volume *volume, uint32_t entry, uint64_t hash, bool evicted)
{
    if (evicted) {
        ckv_density_remember(&volume->region.density, hash,
            ckv_load_relaxed_u64(&volume->region.lives[entry]));
    }
    CKV_POINT("prefix.end");
    unlink_chain(volume, entry);
    set_leaf(volume, entry); /* dead pages are as good */
}

/* K3: the link of `child` may lead to `parent`. */
static bool
is_below(const struct ckv_volume *volume, uint32_t parent, uint32_t child)
{
    const uint64_t above = ckv_load_relaxed_u64(&volume->region.lives[parent]);
    const uint64_t below = ckv_load_relaxed_u64(&volume->region.lives[child]);
    return ckv_density_depth(below) > ckv_density_depth(above);
}

/* Requires: both are pinned. */
static void
link_pinned(struct ckv_volume *volume, const struct ckv_found *parent,
    const struct ckv_found *child)
{
    ckv_atomic_u64 *chain = &volume->region.chains[child->entry];
    uint64_t word = ckv_load_relaxed_u64(chain);
    const uint64_t link = link_to(parent->entry, parent->record.sequence);
    do {
        if (leads_to_live(volume, word) ||
            !is_below(volume, parent->entry, child->entry)) {
            return;
        }
    } while (!ckv_cas_ordered_u64(chain, &word, link | (word & COUNT_MASK)));
    CKV_POINT("prefix.linked");
    chain = &volume->region.chains[parent->entry];
    word = ckv_load_relaxed_u64(chain);
    while ((word & COUNT_MASK) != COUNT_MAX &&
           !ckv_cas_ordered_u64(chain, &word, counted(word, 1))) {
    }
}

void
ckv_prefix_link(struct ckv_volume *volume, const struct ckv_found *parent,
    const struct ckv_found *child)
{
    const uint64_t word = ckv_load_relaxed_u64(&volume->region.chains[child->entry]);
    if (parent->entry == child->entry || leads_to_live(volume, word) ||
        !ckv_pin(volume, parent->entry, parent->state)) {
        return;
    }
    if (ckv_pin(volume, child->entry, child->state)) {
        link_pinned(volume, parent, child);
        ckv_unpin(volume, child->entry);
    }
    ckv_unpin(volume, parent->entry);
}

/* ---- accesses -------------------------------------------------------------------- */

void
ckv_prefix_hit(struct ckv_volume *volume, const struct ckv_found *found, uint32_t depth,
    uint32_t from_end)
{
    ckv_atomic_u64 *life = &volume->region.lives[found->entry];
    const uint64_t before = ckv_load_relaxed_u64(life);
    ckv_density_hit(&volume->region.density, found->hash, life, from_end);
    if (depth != CKV_PREFIX_UNKNOWN && depth != 0 && ckv_density_depth(before) == 0 &&
        ckv_load_relaxed_u64(&volume->region.chains[found->entry]) == 0) {
        /* Neither parent nor successors (K3). */
        ckv_store_relaxed_u64(life,
            ckv_density_at_depth(ckv_load_relaxed_u64(life), depth));
    }
}

/* A rebuilt entry was read as often as its heat says, and at no time that is known. */
void
ckv_prefix_rebuilt(struct ckv_volume *volume)
{
    const struct ckv_region *region = &volume->region;
    ckv_density_init(&region->density);
    for (uint32_t i = 0; i < region->layout.entry_count; i++) {
        const uint64_t state = ckv_load_relaxed_u64(&region->states[i]);
        if (ckv_state_kind(state) == CKV_STATE_LIVE) {
            ckv_store_relaxed_u64(&region->lives[i],
                ckv_density_resume(&region->density,
                    1u + ckv_load_relaxed_u8(&region->heats[i])));
            set_leaf(volume, i);
        }
    }
}

void
ckv_prefix_learn(struct ckv_volume *volume)
{
    const struct ckv_density *density = &volume->region.density;
    ckv_density_resize(density, ckv_admission_capacity(&volume->region.admission));
    if (ckv_density_due(density)) {
        ckv_density_rebuild(density);
    }
}
