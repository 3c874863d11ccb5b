/* SPDX-License-Identifier: Apache-2.0 */
/* policy.h: what the engine tells the admission policy, and the one thing it asks.
 *
 *   ckv_policy_found    a block was read or touched           reader.c, api.c
 *   ckv_policy_admits   a block that is absent is offered     writer.c
 *   ckv_policy_evicted  a block gave way to another           entry.c
 *
 *   Y1  A block is refused only when the volume is full, which it is once a cursor has
 *       evicted and as long as live blocks take as much room as they did then, less
 *       1/32 of the capacity and two blocks of the size that is offered.  So what was
 *       removed or cleared is filled up again by anything.
 *   Y2  A block of a key that is present is never refused: an overwrite, or a put of
 *       other lengths, must not leave the older bytes in place.
 *   Y3  The policy is that of the process; what is known is shared by all.  A process
 *       that admits always neither looks nor tells, and pays nothing.
 *   Y4  Which of two decisions is taken is never a matter of right or wrong, so nothing
 *       here is ordered (A1 in admission.h).
 *   Y5  Within one chain, what precedes a block that the ghost knows is admitted as well:
 *       it was asked for whenever that block was, and without it the block is lost.  A
 *       ghost forgets some keys early.  The shadow that asks for a second touch admits
 *       the same, or it would show what that rule costs and not what it gives.
 */
#ifndef CKV_POLICY_H
#define CKV_POLICY_H

#include "volume.h"

static inline void
ckv_policy_found(struct ckv_volume *volume, uint64_t hash, enum ckv_access access)
{
    if (volume->admission == CKV_ADMISSION_ADAPTIVE &&
        ckv_admission_samples(&volume->region.admission, hash)) {
        ckv_admission_access(&volume->region.admission, hash, access);
    }
}

enum ckv_verdict {
    CKV_OFFER_OPEN,
    CKV_OFFER_ADMITTED, /* a second touch, by its own key or as part of a chain */
    CKV_OFFER_REFUSED
};

struct ckv_offer { /* of a block to be stored */
    enum ckv_verdict verdict;
    uint64_t life; /* for eviction="prefix", see hit_density.h; 0 for a present block */
};

/* Whether the volume is full for a block of so many pages (Y1). */
bool ckv_policy_full(struct ckv_volume *volume, uint32_t pages);

/* Whether a block of so many pages, whose key is absent, is to be stored. */
bool ckv_policy_admits(struct ckv_volume *volume, uint64_t hash, uint32_t pages,
    struct ckv_offer *offer);

/* A block that was live, not cleared, gave way.  When it lay in the way of a cursor, the
 * volume is full and holds what it holds. */
void ckv_policy_evicted(struct ckv_volume *volume, uint64_t hash, bool by_cursor);

#endif /* CKV_POLICY_H */
