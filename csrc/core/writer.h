/* SPDX-License-Identifier: Apache-2.0 */
/* writer.h: present? hint, reserve, write, publish, index, keep the newest, write behind. */
#ifndef CKV_WRITER_H
#define CKV_WRITER_H

#include "entry.h"

/* `parent_entry` is UINT32_MAX for none; *entry (may be NULL) is where the block lies. */
enum ckv_status ckv_writer_put(struct ckv_volume *volume, const struct ckv_identity *identity,
    const struct ckv_item *item, uint32_t flags, uint32_t parent_entry,
    uint32_t *entry) CKV_MUST_CHECK;

#endif /* CKV_WRITER_H */
