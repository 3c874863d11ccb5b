/* SPDX-License-Identifier: Apache-2.0 */
/* writer.h: present? hint, reserve, write, publish, index, keep the newest, write
 * behind. */
#ifndef CKV_WRITER_H
#define CKV_WRITER_H

#include "entry.h"
#include "policy.h"

/* Stores one block; `flags` are those of ckv_put(); *offer begins as zeros, or as what
 * ckv_chain_begin() made of it.  *deadline_ns begins as 0 and is
 * shared by all blocks of a call, so that together they wait no longer than one. */
enum ckv_status ckv_writer_put(struct ckv_volume *volume,
    const struct ckv_identity *identity, const struct ckv_item *item, uint32_t flags,
    struct ckv_offer *offer, uint64_t *deadline_ns) CKV_MUST_CHECK;

#endif /* CKV_WRITER_H */
