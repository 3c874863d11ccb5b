/* SPDX-License-Identifier: Apache-2.0 */
#include "announce.h"

#include <string.h>

#include "event.h"

/* How far an event looks for a later one of its key.  One that looks no further says what
 * is true, which is never wrong (A2). */
enum { LOOK_AHEAD = 1024 };

/* While a volume is opened or laid out it has no slot yet: who dies then has announced
 * nothing that others could have missed. */
static void
count(struct ckv_volume *volume, uint64_t amount)
{
    if (volume->incarnation != 0) {
        ckv_add_ordered_u64(&volume->region.slots[volume->slot].announcing, amount);
    }
}

void
ckv_announce_begin(struct ckv_volume *volume)
{
    count(volume, 1);
}

void
ckv_announce_end(struct ckv_volume *volume)
{
    count(volume, (uint64_t)-1);
}

void
ckv_announce(struct ckv_volume *volume, const struct ckv_identity *identity,
    bool stored)
{
    ckv_event_record(volume, stored ? CKV_EVENT_STORED : CKV_EVENT_REMOVED,
        identity->namespace_tag, identity->key, identity->digested);
}

/* Whether the block of an event is there now. */
static bool
is_there(struct ckv_volume *volume, const struct ckv_event *event)
{
    struct ckv_identity identity = {.digested = event->digested};
    struct ckv_found found;
    memcpy(identity.namespace_tag, event->namespace_tag, 16);
    memcpy(identity.key, event->key, 32);
    identity.hash =
        ckv_index_hash(volume, identity.namespace_tag, identity.key, identity.digested);
    return ckv_index_find(volume, &identity, &found);
}

/* Whether a later event of the same answer takes the word of `events[0]`. */
static bool
is_followed(const struct ckv_event *events, size_t length)
{
    for (size_t i = 1; i < length && i <= LOOK_AHEAD; i++) {
        const bool same_space =
            memcmp(events[i].namespace_tag, events[0].namespace_tag, 16) == 0;
        if (same_space &&
            (events[i].kind == CKV_EVENT_CLEARED
                    ? events[0].kind == CKV_EVENT_STORED
                    : events[i].digested == events[0].digested &&
                          memcmp(events[i].key, events[0].key, 32) == 0)) {
            return true;
        }
    }
    return false;
}

void
ckv_announce_read(struct ckv_volume *volume, uint64_t since, struct ckv_event *events,
    size_t capacity, size_t *delivered, uint64_t *lost, uint64_t *last)
{
    ckv_event_read(volume, since, events, capacity, delivered, lost, last);
    CKV_POINT("event.judged");
    for (size_t i = 0; i < *delivered; i++) {
        struct ckv_event *event = &events[i];
        if (event->kind == CKV_EVENT_CLEARED) {
            continue;
        }
        const enum ckv_event_kind now =
            is_there(volume, event) ? CKV_EVENT_STORED : CKV_EVENT_REMOVED;
        if (event->kind != now && !is_followed(event, *delivered - i)) {
            event->kind = (uint8_t)now; /* A2 */
        }
    }
}
