/* SPDX-License-Identifier: Apache-2.0 */
/* chain.h: storing consecutive blocks of one prefix under eviction="prefix".
 *
 * Which blocks of a call are worth storing is decided before the first is written: from
 * the head of the chain on, up to the first that is refused, since what follows it
 * would never be found.  They are written tail first, and each is linked as soon as its
 * predecessor is stored, so that it is no leaf while the rest makes room for itself.
 *
 *   access   Whatever a call stores or refuses counts as one access to each block of it,
 *            at its distance from the end of the call and at a depth that continues
 *            that of `parent`.
 *   orphans  Where `parent` is not there any more, but was refused or evicted not long
 *            ago, everything is refused; a parent that nobody knows begins a new chain.
 */
#ifndef CKV_CHAIN_H
#define CKV_CHAIN_H

#include "policy.h"
#include "prefix.h"

struct ckv_chain_item {
    struct ckv_identity identity;
    bool valid; /* the key makes an identity */
    struct ckv_offer offer;
};

struct ckv_chain {
    struct ckv_chain_item *items; /* head first */
    size_t count;
    struct ckv_found parent;
    bool has_parent; /* stored, and pinned until ckv_chain_finish() */
    struct ckv_found next;
    bool has_next; /* the block after the one that comes now is stored */
};

/* Decides; fills in the offers.  `parent` may be NULL. */
void ckv_chain_begin(struct ckv_volume *volume, struct ckv_chain *chain,
    const struct ckv_identity *parent);

/* After the put of item `index`, whatever became of it: from the last to the first. */
void ckv_chain_stored(struct ckv_volume *volume, struct ckv_chain *chain, size_t index);

/* Links the first block to the parent, and lets that go. */
void ckv_chain_finish(struct ckv_volume *volume, struct ckv_chain *chain);

#endif /* CKV_CHAIN_H */
