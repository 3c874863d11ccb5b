/* SPDX-License-Identifier: Apache-2.0 */
/* event.c: a ring of events in the shared region.
 *
 * What the events are for, and what makes them agree with the table, is in announce.h.
 *
 * Event n belongs into slot n % capacity.  The `number` of a slot is
 *
 *      0              never used
 *      n              holds event n, finished
 *      WRITING | n    somebody is filling in event n
 *
 *      writer                                    reader of event n
 *      n = ++event_head                          number == n ?              R21
 *      number: older finished -> WRITING | n     copy the words             R22
 *      words                          W22        number still n ?
 *      number = n                     W21
 *
 *   D1  A slot changes hands only by CAS from a finished number to WRITING of a larger
 *       one.  So at most one writer fills in a slot, and its numbers only grow.
 *   D2  A writer that meets WRITING, or a number not below its own, drops its event and
 *       counts it in events_dropped.  It never waits: events serve routers, and no put
 *       may be held up by them.
 *   D3  A reader believes words only if `number` was n before and after it copied them.
 *   D4  count + lost == *last - since: each number after `since` is delivered or lost.
 *       From CKV_EVENTS_FROM_NOW on nothing is: *last is the last number drawn.
 *
 *   W21 -> R21  the words of event n are seen by whoever sees the number n.
 *   W22 -> R22  a word of a later event is stored after WRITING; so a reader that saw
 *               such a word sees, behind its fence, that the number has changed (D3).
 *
 * A writer that dies between claim and finish leaves WRITING for the life of the region:
 * that slot drops one event per lap of the ring from then on, each counted as lost.
 * Taking it over was rejected: a writer that was only stopped would go on and scribble
 * over the words of its successor.
 *
 * A race that is harmless.  What happens: a reader finds a slot behind, waits 100 ms, and
 * calls event n lost; then its writer wakes up and finishes it.  Why that is correct: the
 * reader goes on at n + 1 and was told of the gap.  What it costs: one resynchronisation.
 */
#include "event.h"

#include <string.h>

#define WRITING      (UINT64_C(1) << 63)
#define WAIT_MAX_NS  UINT64_C(100000000) /* of one call of ckv_event_read() */
#define WAIT_STEP_NS UINT64_C(500000)

enum { SPINS = 200 }; /* a writer that runs finishes within a few dozen stores */

enum { DIGESTED = 1 << 8 }; /* beside the kind, in word 0 */

enum { GAP = 0 }; /* the kind of an event that is delivered to nobody */

enum outcome { DELIVERED, BEHIND, GONE };

static struct ckv_shared_event *
slot_of(const struct ckv_volume *volume, uint64_t number)
{
    return &volume->region.events[number % volume->region.layout.event_capacity];
}

/* The slot of the next event, claimed; NULL: dropped. */
static struct ckv_shared_event *
claim(struct ckv_volume *volume, uint64_t *drawn)
{
    const uint64_t number =
        ckv_add_ordered_u64(&volume->region.header->event_head, 1) + 1;
    struct ckv_shared_event *slot = slot_of(volume, number);
    *drawn = number;
    CKV_POINT("event.numbered");

    uint64_t seen = ckv_load_relaxed_u64(&slot->number);
    do {
        if ((seen & WRITING) != 0 || seen >= number) { /* D2 */
            ckv_bump(volume, CKV_COUNTER_events_dropped, 1);
            return NULL;
        }
    } while (!ckv_cas_ordered_u64(&slot->number, &seen, WRITING | number)); /* D1 */
    CKV_POINT("event.claimed");
    return slot;
}

void
ckv_event_record(struct ckv_volume *volume, enum ckv_event_kind kind,
    const uint8_t namespace_tag[16], const uint8_t key[32], bool digested)
{
    uint64_t number;
    struct ckv_shared_event *slot = claim(volume, &number);
    uint64_t words[7] = {(uint64_t)kind | (digested ? DIGESTED : 0u)};
    memcpy(&words[1], namespace_tag, 16);
    memcpy(&words[3], key, 32);
    if (slot == NULL) {
        return;
    }
    for (size_t i = 0; i < CKV_ARRAY_LENGTH(words); i++) {
        ckv_store_release_u64(&slot->words[i], words[i]); /* W22 -> R22 */
    }
    CKV_POINT("event.filled");
    ckv_store_release_u64(&slot->number, number); /* W21 -> R21 */
    CKV_POINT("event.told");
}

void
ckv_event_record_gap(struct ckv_volume *volume)
{
    static const uint8_t nothing[32];
    ckv_event_record(volume, (enum ckv_event_kind)GAP, nothing, nothing, false);
}

/* Copies event `number` if its slot holds it. */
static enum outcome
copy(struct ckv_volume *volume, uint64_t number, struct ckv_event *event)
{
    struct ckv_shared_event *slot = slot_of(volume, number);
    const uint64_t seen = ckv_load_acquire_u64(&slot->number); /* R21 */
    if (seen != number) {
        return (seen & ~WRITING) > number ? GONE : BEHIND;
    }
    uint64_t words[7];
    for (size_t i = 0; i < CKV_ARRAY_LENGTH(words); i++) {
        words[i] = ckv_load_relaxed_u64(&slot->words[i]);
    }
    ckv_fence_acquire(); /* R22: the words before the number */
    if (ckv_load_relaxed_u64(&slot->number) != number) { /* D3 */
        return GONE;
    }

    const uint8_t kind = (uint8_t)words[0];
    if (kind < CKV_EVENT_STORED || kind > CKV_EVENT_CLEARED) {
        return GONE; /* a gap, or no event of ours: the region is input */
    }
    *event = (struct ckv_event){.number = number,
        .kind = kind,
        .digested = (words[0] & DIGESTED) != 0};
    memcpy(event->namespace_tag, &words[1], 16);
    memcpy(event->key, &words[3], 32);
    return DELIVERED;
}

/* As copy(), but gives a writer on its way until `*deadline_ns`, which is set by the
 * first wait of the call (0 before). */
static enum outcome
copy_patiently(struct ckv_volume *volume, uint64_t number, struct ckv_event *event,
    uint64_t *deadline_ns)
{
    enum outcome outcome = copy(volume, number, event);
    for (int i = 0; outcome == BEHIND && i < SPINS; i++) {
        ckv_cpu_relax();
        outcome = copy(volume, number, event);
    }
    while (outcome == BEHIND) {
        const uint64_t now_ns = ckv_os.monotonic_ns();
        if (*deadline_ns == 0) {
            *deadline_ns = now_ns + WAIT_MAX_NS;
        } else if (now_ns >= *deadline_ns) {
            return GONE;
        }
        ckv_os.sleep_ns(WAIT_STEP_NS);
        outcome = copy(volume, number, event);
    }
    return outcome;
}

void
ckv_event_read(struct ckv_volume *volume, uint64_t since, struct ckv_event *events,
    size_t capacity, size_t *count, uint64_t *lost, uint64_t *last)
{
    *count = 0;
    *lost = 0;
    *last = since;

    const uint64_t head = ckv_load_ordered_u64(&volume->region.header->event_head);
    uint64_t at = since == CKV_EVENTS_FROM_NOW ? head : since;
    if (at > head) {
        /* Numbers of an earlier life of the region.  What came between is unknown; that
         * there is a gap is said with the smallest number that says it. */
        at = 0;
        *lost = 1;
        *last = 0;
    }
    const uint64_t ring = volume->region.layout.event_capacity;
    if (head - at > ring && capacity != 0) {
        *lost += head - ring - at; /* overwritten before we came */
        at = head - ring;
    }
    uint64_t deadline_ns = 0;
    while (at < head && *count < capacity) {
        at++;
        if (copy_patiently(volume, at, &events[*count], &deadline_ns) == DELIVERED) {
            (*count)++;
        } else {
            (*lost)++;
        }
    }
    *last = at; /* D4 */
}
