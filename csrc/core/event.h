/* SPDX-License-Identifier: Apache-2.0 */
/* event.h: a ring of events in the shared region, written and read without a lock. */
#ifndef CKV_EVENT_H
#define CKV_EVENT_H

#include "volume.h"

/* An event has its place when it is claimed and is seen when it is filled in. */
struct ckv_event_claim {
    struct ckv_shared_event *slot; /* NULL: dropped */
    uint64_t number;
};
struct ckv_event_claim ckv_event_claim(struct ckv_volume *volume);
void ckv_event_fill(struct ckv_event_claim claim, enum ckv_event_kind kind,
    const uint8_t namespace_tag[16], const uint8_t key[32], bool digested);
/* Both at once. */
void ckv_event_record(struct ckv_volume *volume, enum ckv_event_kind kind,
    const uint8_t namespace_tag[16], const uint8_t key[32], bool digested);

/* As ckv_events() in the public header. */
void ckv_event_read(struct ckv_volume *volume, uint64_t since, struct ckv_event *events,
    size_t capacity, size_t *count, uint64_t *lost, uint64_t *last);

#endif /* CKV_EVENT_H */
