/* SPDX-License-Identifier: Apache-2.0 */
/* mapped.h: populating the pages of views, and copies out of the mapping. */
#ifndef CKV_MAPPED_H
#define CKV_MAPPED_H

#include "index.h"

/* Makes the pages of an extent present in this process, once per life of the entry, by a
 * call that reports an error where a load would raise SIGBUS.  False: the device does not
 * deliver them.  May give page tables of other windows back.
 * Requires: the entry is pinned, and counted in `window->pins`. */
bool ckv_mapped_populate(struct ckv_volume *volume, const struct ckv_found *found,
    struct ckv_window *window, const void *address);

/* Whether the mappings of this process show the files: no page was replaced by zeros.
 * Once false, false until the volume is closed. */
bool ckv_mapped_intact(const struct ckv_volume *volume);

/* Copies the payload of a pinned block to the targets, which hold it, without a check.
 * False: it is not in memory, or cannot be copied so; targets hold anything. */
bool ckv_mapped_copy(struct ckv_volume *volume, const struct ckv_found *found,
    const struct ckv_read *read);

#endif /* CKV_MAPPED_H */
