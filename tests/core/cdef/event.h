/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of event.h. */

struct ckv_volume;

void ckv_event_record(struct ckv_volume *volume, enum ckv_event_kind kind,
    const uint8_t *namespace_tag, const uint8_t *key, bool digested);
void ckv_event_read(struct ckv_volume *volume, uint64_t since, struct ckv_event *events,
    size_t capacity, size_t *count, uint64_t *lost, uint64_t *last);
