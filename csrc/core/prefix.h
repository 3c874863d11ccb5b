/* SPDX-License-Identifier: Apache-2.0 */
/* prefix.h: eviction="prefix": which blocks belong to chains, and what each is worth.
 *
 * A prefix is a chain of blocks, and a block is of use only while all before it are
 * there.  So the cursor overwrites leaves alone, that is blocks of which no successor is
 * stored, and among those the one whose hit density (hit_density.h) is low.
 *
 *   chains   a word per entry: bits 32..63 1 + entry of the block before it, bits 20..31
 *            low bits of the sequence which that entry had, bits 0..19 number of its own
 *            successors, signed
 *   lives    a word per entry: the life word of hit_density.h
 *   leaves   a bit per granule: an entry that starts in it may be without successors
 *
 *        root <--- block <--- block <--- leaf        number of successors: 1 2 1 0
 *                    ^--------- leaf
 *
 *   K1  A number may be too small, after a death between two steps or when its block
 *       came back under another number: then a block goes before its successors, which
 *       nobody finds any more and whose turn comes.  It is never too large but by what is
 *       undone when an entry gets a new life (ckv_prefix_begin): a link is written before
 *       it is counted, and taken off the count before it is erased.  So a successor that
 *       is killed in between is taken off before it is counted: the number goes below 0
 *       for that moment, which means none.
 *   K2  Who counts a successor holds a pin on both blocks, so that neither number can get
 *       another life meanwhile.
 *   K3  A link leads from a greater depth to a smaller one, and the depth of a block that
 *       has links does not change.  So there are no rings, whatever callers say.
 *   K4  A granule with a leaf has its bit, but for a moment: who lets a number fall to 0,
 *       links an entry or kills one sets it afterwards; who clears it looks once more
 *       afterwards.  What a death in between leaves is found when the entry is touched.
 *   K5  Everything read from the region is bounds-checked at use.  All of it is a hint:
 *       no content makes the cursor take a block that is pinned or being written.
 */
#ifndef CKV_PREFIX_H
#define CKV_PREFIX_H

#include "index.h"

#define CKV_PREFIX_UNKNOWN UINT32_MAX /* distance or depth that is not known */

static inline bool
ckv_prefix_on(const struct ckv_volume *volume)
{
    return volume->eviction == CKV_EVICTION_PREFIX;
}

/* For occupy, under the stripe lock: the entry gets a new life without links.  Its place
 * is set. */
void ckv_prefix_begin(struct ckv_volume *volume, uint32_t entry);

/* After a kill, once: the entry is nobody's successor any more; if it was evicted its
 * life goes to the ghost. */
void ckv_prefix_end(struct ckv_volume *volume, uint32_t entry, uint64_t hash,
    bool evicted);

/* A hit.  `depth` is its place in the request, `from_end` its distance from the end. */
void ckv_prefix_hit(struct ckv_volume *volume, const struct ckv_found *found,
    uint32_t depth, uint32_t from_end);

/* Says that `child` follows `parent` in a chain, if both are there still.  The first
 * parent of a block stays its parent while it lives. */
void ckv_prefix_link(struct ckv_volume *volume, const struct ckv_found *parent,
    const struct ckv_found *child);

/* Number of stored successors. */
uint32_t ckv_prefix_successors(const struct ckv_volume *volume, uint32_t entry);
/* The entry of the block before it as the link has it, or UINT32_MAX. */
uint32_t ckv_prefix_parent(const struct ckv_volume *volume, uint32_t entry);
/* The same, if that block is alive. */
uint32_t ckv_prefix_live_parent(const struct ckv_volume *volume, uint32_t entry);
/* For verify: states the number as counted. */
void ckv_prefix_set_successors(struct ckv_volume *volume, uint32_t entry,
    uint32_t count);

/* The first page in [from, to) of a file's data area where an entry starts that may be a
 * leaf, or UINT32_MAX.  Adds the granules looked at to *looked and gives up beyond
 * `limit`.  Requires: the stripe lock. */
uint32_t ckv_prefix_next_leaf(struct ckv_volume *volume, const struct ckv_file *file,
    uint32_t from, uint32_t to, uint32_t *looked, uint32_t limit);

/* After a rebuild: entries begin with what their heat tells. */
void ckv_prefix_rebuilt(struct ckv_volume *volume);

/* Whoever stores a block renews the scores when it is time to. */
void ckv_prefix_learn(struct ckv_volume *volume);

#endif /* CKV_PREFIX_H */
