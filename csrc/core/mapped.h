/* SPDX-License-Identifier: Apache-2.0 */
/* mapped.h: populating the pages of views, and copies out of the mapping. */
#ifndef CKV_MAPPED_H
#define CKV_MAPPED_H

#include "index.h"

/* Makes the pages of an extent present in this process by a call that reports an error
 * where a load would raise SIGBUS: at the first time in the life of the entry, and when
 * so much has been read since that they may have been thrown out of memory (X4).  False:
 * the device does not deliver them.  May give page tables of other windows back.
 * Requires: the entry is pinned, and counted in `window->pins`. */
bool ckv_mapped_populate(struct ckv_volume *volume, const struct ckv_found *found,
    struct ckv_window *window, const void *address);

/* Whether the mappings of this process show the files: no page was replaced by zeros.
 * Once false, false until the volume is closed. */
bool ckv_mapped_intact(const struct ckv_volume *volume);

/* Brings a pinned block into the page cache, by requests of a huge page.  False: not to
 * be loaded from the mapping. */
bool ckv_mapped_fill(struct ckv_volume *volume, const struct ckv_found *found);

/* Copies the payload of a pinned block to the targets, which hold it; *crc, if wanted,
 * becomes the checksum of what came there.  `resident`: somebody has just looked, and it
 * lies in memory as a whole.  False: it does not, or cannot be copied so; targets hold
 * anything. */
bool ckv_mapped_copy(struct ckv_volume *volume, const struct ckv_found *found,
    const struct ckv_read *read, bool resident, uint32_t *crc);

/* Whether payload and header of a pinned block, loaded through the mapping, agree with
 * its record.  False also when they cannot be loaded: a read call decides. */
bool ckv_mapped_sound(struct ckv_volume *volume, const struct ckv_found *found,
    void *scratch, size_t scratch_bytes);

#endif /* CKV_MAPPED_H */
