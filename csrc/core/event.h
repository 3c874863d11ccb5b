/* SPDX-License-Identifier: Apache-2.0 */
/* event.h: a ring of events in the shared region, written and read without a lock. */
#ifndef CKV_EVENT_H
#define CKV_EVENT_H

#include "volume.h"

void ckv_event_record(struct ckv_volume *volume, enum ckv_event_kind kind,
    const uint8_t namespace_tag[16], const uint8_t key[32], bool digested);

/* Records that others may have missed something: every reader counts it as lost. */
void ckv_event_record_gap(struct ckv_volume *volume);

/* As ckv_events() in the public header, each event as it was recorded. */
void ckv_event_read(struct ckv_volume *volume, uint64_t since, struct ckv_event *events,
    size_t capacity, size_t *count, uint64_t *lost, uint64_t *last);

#endif /* CKV_EVENT_H */
