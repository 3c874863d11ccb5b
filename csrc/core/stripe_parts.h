/* SPDX-License-Identifier: Apache-2.0 */
/* stripe_parts.h: what the parts of the search for a run share (stripe.c, stripe_leaf.c).
 */
#ifndef CKV_STRIPE_PARTS_H
#define CKV_STRIPE_PARTS_H

#include "stripe.h"

enum { CKV_GAPS_MAX = 16 };

struct ckv_bounds { /* one stripe, in pages of the data area of its file */
    struct ckv_file *file;
    struct ckv_stripe *stripe;
    uint32_t begin;
    uint32_t end;
    uint32_t first_entry; /* number in the set */
    uint32_t entry_count;
};

struct ckv_gap {
    uint32_t first_page;
    uint32_t pages;
};

struct ckv_search {
    uint32_t pages;     /* wanted */
    uint32_t run_start; /* of the run being tried */
    uint32_t position;  /* up to where it is known to be good */
    uint32_t resume;    /* where the next search begins: not inside the run */
    uint32_t taken;     /* entries inside the run */
    uint32_t beyond;    /* entries looked at that are not inside it */
    uint32_t wraps;     /* times the end of the stripe was passed */
    bool ignore_heat;
    bool need_entry;                   /* the run has to give a number (leaves only) */
    struct ckv_gap gaps[CKV_GAPS_MAX]; /* free space in abandoned runs */
    uint32_t gap_count;
};

/* The place of an entry that the map led to, looked at again: still in [from, to). */
bool ckv_stripe_placed(struct ckv_volume *volume, const struct ckv_file *file,
    uint32_t entry, uint32_t from, uint32_t to, struct ckv_gap *place);

/* Whether the cursor may take an entry now.  May cost the entry one heat. */
bool ckv_stripe_takeable(struct ckv_volume *volume, uint32_t entry, bool ignore_heat);

/* The end of the chunk or stripe that a page lies in. */
uint32_t ckv_stripe_border(const struct ckv_bounds *bounds, uint32_t page);

/* Remembers free space of a run that was given up. */
void ckv_stripe_note_gap(struct ckv_search *search, uint32_t first_page,
    uint32_t end_page);

/* eviction="prefix": from search->run_start on, the first run of leaves whose hit density
 * is below the threshold, or the lowest of those that were looked at. */
bool ckv_stripe_find_leaves(struct ckv_volume *volume, const struct ckv_bounds *bounds,
    struct ckv_search *search);

#endif /* CKV_STRIPE_PARTS_H */
