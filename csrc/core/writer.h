/* SPDX-License-Identifier: Apache-2.0 */
/* writer.h: present? hint, reserve, write, publish, index, keep the newest, write
 * behind. */
#ifndef CKV_WRITER_H
#define CKV_WRITER_H

#include "entry.h"

/* Stores one block; `flags` are those of ckv_put(). */
enum ckv_status ckv_writer_put(struct ckv_volume *volume,
    const struct ckv_identity *identity, const struct ckv_item *item,
    uint32_t flags) CKV_MUST_CHECK;

#endif /* CKV_WRITER_H */
