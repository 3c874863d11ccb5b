/* SPDX-License-Identifier: Apache-2.0 */
/* announce.h: what is said about blocks, so that who folds the events has what is there.
 *
 * An event is late by nature: between a change and its event anybody may be stopped or
 * killed, and others may change the block meanwhile.  So the ring says of which block
 * something changed, and whoever reads it says what is.
 *
 *   A1  After each change of what a lookup of a key answers, whoever made it records an
 *       event of that key.  The number of the event is drawn after the change.
 *   A2  Of the events of a key in one answer the last one says what is true: it is looked
 *       up after all of them were finished.  Those before it say what was recorded.
 *   A3  A clear takes effect, and then is recorded.  A sequence that was drawn in between
 *       may be that of a block that was announced before the clear; then it is done
 *       again, and in the end a gap is recorded.
 *   A4  A thread is counted in `announcing` of its slot from before its change until its
 *       event is recorded.  Who sweeps a slot that counts any records a gap: the dead may
 *       have changed something and not said it.
 *   A5  A change of which the key is not known, and one of many keys (a path that fails
 *       or is recovered), is announced by a gap.
 *
 * Hence: take any key, and the last change of it.  Its event was read after that change
 * (A1), and so was the last one of its key in the same answer, which is therefore right
 * (A2), or the reader was told that events are lost, after the change (A4, A5, and D2, D4
 * of event.c); then it begins anew with what is there.  No order of events is needed for
 * that, so nothing has to be corrected afterwards, and nobody waits.
 *
 * A sequence in each event, by which a reader drops what is older than the block it has
 * seen, was rejected: a removal whose event is lost would then make later ones count as
 * old, and it says nothing of those who die.  So was a second look by the one who records
 * an event: it may be stopped or killed before that look.
 *
 * A race that is harmless.  What happens: a block is announced, goes and is stored again,
 * and the reader is told "stored" twice.  Why that is correct: it is there.  What it
 * costs: nothing.
 */
#ifndef CKV_ANNOUNCE_H
#define CKV_ANNOUNCE_H

#include "index.h"

/* Around a change and its event (A4). */
void ckv_announce_begin(struct ckv_volume *volume);
void ckv_announce_end(struct ckv_volume *volume);

/* A block was stored, or is gone. */
void ckv_announce(struct ckv_volume *volume, const struct ckv_identity *identity,
    bool stored);

/* As ckv_events() in the public header. */
void ckv_announce_read(struct ckv_volume *volume, uint64_t since,
    struct ckv_event *events, size_t capacity, size_t *delivered, uint64_t *lost,
    uint64_t *last);

#endif /* CKV_ANNOUNCE_H */
