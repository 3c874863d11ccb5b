/* SPDX-License-Identifier: Apache-2.0 */
/* ahead.h: who reads in stored order, and reading ahead of it. */
#ifndef CKV_AHEAD_H
#define CKV_AHEAD_H

#include "volume.h"

/* Whether a first read ended lately where an extent of the data area begins.  Notes where
 * this one ends. */
bool ckv_ahead_follows(struct ckv_file *file, uint64_t begin, uint64_t end);

/* Has the I/O threads bring into the page cache what lies from `from` on, in the extent
 * that ends at `end` and behind it, as far as that was not asked for before.
 * Requires: ckv_file_large_faults(). */
void ckv_ahead_post(struct ckv_volume *volume, struct ckv_file *file, uint64_t from,
    uint64_t end);

#endif /* CKV_AHEAD_H */
