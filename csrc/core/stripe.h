/* SPDX-License-Identifier: Apache-2.0 */
/* stripe.h: find pages for a put: a clock in place.
 *
 * Each stripe is a ring of pages with a cursor.  The pages ahead of it hold the oldest
 * entries.  At the cursor an entry that is pinned or being written is stepped over; one
 * with heat loses one and is stepped over; the first run of cold entries and free pages
 * that is long enough is taken.  Nothing is copied and nothing is evicted before a whole
 * run is known.
 *
 *         cursor                 run found
 *            v                  |<------->|
 *   [newest]|[hot][pinned][cold][cold][free]|[hot] ...
 *
 *   T1  Lock, page map, links, cursor, holes and the transitions to RESERVED and FREE are
 *       touched only by the holder of the stripe lock, some 10 us at a time.
 *   T2  The page map is a word per granule, the entry that starts in it, and a link per
 *       entry to the next one that starts in the same granule: each change is one store.
 *       A word is believed only if the entry's place agrees with it.
 *   T3  The lock word is taken by CAS and freed by CAS from exactly our word.  Only an
 *       owner whose byte lock is free is succeeded; the successor forgets the holes.
 *   T4  virtual_time = laps + position / size.  The least advanced unlocked stripe gets
 *       the put, the last one again until it is 16 MiB or 1/64 lap ahead; a lag counts
 *       for at most 1/16 lap or 64 MiB; a refused search costs 1/64 lap.
 *   T5  A search looks at no more than 256 entries beyond those it would take; past that
 *       heat is ignored.
 *       With eviction="prefix" the cursor goes from leaf to leaf (stripe_leaf.c).
 *   T6  A hole is free space less than a quarter lap behind the cursor; the smallest that
 *       fits is filled first.
 */
#ifndef CKV_STRIPE_H
#define CKV_STRIPE_H

#include "volume.h"

struct ckv_extent {
    uint32_t entry; /* RESERVED for us; its place is set */
    struct ckv_file *file;
    uint32_t first_page;
    uint32_t pages;
    bool hole; /* to be flagged in the record */
};

/* Reserves `pages` for a new entry.  CKV_BUSY, CKV_NO_RUN, CKV_FAILED_PATH otherwise.
 * Waits at most 1 s, takes no more than two stripes.  *deadline_ns is 0, or what an
 * earlier reservation of the same call made of it: all of them together wait that
 * long. */
enum ckv_status ckv_stripe_reserve(struct ckv_volume *volume, uint32_t pages,
    uint64_t *deadline_ns, struct ckv_extent *extent) CKV_MUST_CHECK;

/* For rebuild and repair: links an entry whose place is set into the page map. */
void ckv_stripe_link(struct ckv_volume *volume, uint32_t entry);
/* For rebuild, verify and the cursor: the entry that starts first in the pages [from, to)
 * of a file's data area, or UINT32_MAX.  Exact under the stripe lock. */
uint32_t ckv_stripe_next(struct ckv_volume *volume, const struct ckv_file *file,
    uint32_t from, uint32_t to);

/* The stripe lock, for verify: waits at most `timeout_ns`. */
bool ckv_stripe_lock(struct ckv_volume *volume, uint32_t stripe, uint64_t timeout_ns);
void ckv_stripe_unlock(struct ckv_volume *volume, uint32_t stripe);

#endif /* CKV_STRIPE_H */
