/* SPDX-License-Identifier: Apache-2.0 */
#include "chain.h"

#include "pin.h"

/* The life of each block after this access, tail first as they are written.  0 for those
 * that are stored already. */
static void
see_blocks(struct ckv_volume *volume, struct ckv_chain *chain, uint32_t depth)
{
    for (size_t i = chain->count; i-- > 0;) {
        struct ckv_chain_item *item = &chain->items[i];
        const uint32_t from_end =
            (uint32_t)ckv_min_u64(chain->count - 1 - i, UINT32_MAX - 1);
        const uint32_t at = depth + (uint32_t)ckv_min_u64(i, UINT16_MAX);
        struct ckv_found found;
        item->offer = (struct ckv_offer){.verdict = CKV_OFFER_ADMITTED};
        if (!item->valid) {
            continue;
        }
        if (ckv_index_find(volume, &item->identity, &found)) {
            ckv_prefix_hit(volume, &found, at, from_end);
        } else {
            item->offer.life = ckv_density_miss(&volume->region.density,
                item->identity.hash, at, from_end);
        }
    }
}

/* Whether the chain goes on from a block that was refused or evicted. */
static bool
is_orphan(struct ckv_volume *volume, const struct ckv_chain *chain,
    const struct ckv_identity *parent)
{
    return parent != NULL && !chain->has_parent &&
           ckv_density_recall(&volume->region.density, parent->hash) != 0;
}

void
ckv_chain_begin(struct ckv_volume *volume, struct ckv_chain *chain,
    const struct ckv_identity *parent)
{
    const struct ckv_density *density = &volume->region.density;
    uint32_t depth = 0;
    chain->has_parent = parent != NULL &&
                        ckv_index_find(volume, parent, &chain->parent) &&
                        ckv_pin(volume, chain->parent.entry, chain->parent.state);
    if (chain->has_parent) {
        depth = 1 + ckv_density_depth(ckv_load_relaxed_u64(&volume->region
                            .lives[chain->parent.entry]));
    }
    const bool orphan = is_orphan(volume, chain, parent);
    see_blocks(volume, chain, depth);
    if (!ckv_policy_full(volume, 0)) {
        return;
    }
    uint32_t refused = 0;
    for (size_t i = 0; i < chain->count; i++) {
        struct ckv_offer *offer = &chain->items[i].offer;
        if (offer->life != 0 &&
            (orphan || refused > 0 || !ckv_density_admits(density, offer->life))) {
            offer->verdict = CKV_OFFER_REFUSED;
            refused++;
        }
    }
    if (refused > 0) {
        ckv_density_refused(density, refused);
    }
}

void
ckv_chain_stored(struct ckv_volume *volume, struct ckv_chain *chain, size_t index)
{
    struct ckv_found found;
    const struct ckv_chain_item *item = &chain->items[index];
    const bool present = item->valid && ckv_index_find(volume, &item->identity, &found);
    if (present && chain->has_next) {
        ckv_prefix_link(volume, &found, &chain->next);
    }
    if (present) {
        chain->next = found;
    }
    chain->has_next = present;
}

void
ckv_chain_finish(struct ckv_volume *volume, struct ckv_chain *chain)
{
    if (!chain->has_parent) {
        return;
    }
    if (chain->has_next) {
        ckv_prefix_link(volume, &chain->parent, &chain->next);
    }
    ckv_unpin(volume, chain->parent.entry);
    chain->has_parent = false;
}
