/* SPDX-License-Identifier: Apache-2.0 */
/* entry.h: the life of an entry (states in format.h), and its record.
 *
 *   E1  LIVE -> DYING by CAS is the commit point of every eviction, removal, overwrite
 *       and failed check, and is final.
 *   E2  The record of a DYING entry is struck by its owner before it becomes DEAD, so
 *       that a late strike can never hit a later record of the same number.
 *   E3  The pages of an entry are reused only after its mask was 0 in a state that is not
 *       LIVE, looked at by the holder of the stripe lock.
 *   E4  The index leads to an entry before its record is written, and until it is
 *       struck.  So who stores or removes a key meets every record of it, whoever died
 *       over it: blocks are killed, and records of puts that did not come to an end, or
 *       of blocks that others have condemned and not struck yet, are waited for
 *       (ckv_index_settle): when it has returned, none of them comes back.
 */
#ifndef CKV_ENTRY_H
#define CKV_ENTRY_H

#include "index.h"

enum ckv_kill_reason {
    CKV_KILL_EVICT,   /* by a cursor: counted as eviction, event removed */
    CKV_KILL_CROWD,   /* for want of a place in the index: the same */
    CKV_KILL_REMOVE,  /* counted as removed, event removed */
    CKV_KILL_REPLACE, /* counted as removed, no event: the newer version was announced */
    CKV_KILL_CORRUPT, /* counted as corrupt, event removed */
    CKV_KILL_CLEAR    /* below the clear sequence: neither counted nor announced */
};

/* Totals of a namespace.  Adding returns the epoch it was added in; taking off does
 * nothing and returns false when that epoch is over. */
uint64_t ckv_total_add(ckv_atomic_u64 *total, uint64_t amount);
bool ckv_total_take(ckv_atomic_u64 *total, uint64_t amount, uint64_t epoch);
/* Begins a new epoch at zero; returns the value of the old one. */
uint64_t ckv_total_reset(ckv_atomic_u64 *total);

/* Reads a record; true when `state` (a LIVE word) held before and after, i.e. the copy is
 * consistent and belongs to that sequence. */
bool ckv_entry_read(struct ckv_volume *volume, uint32_t entry, uint64_t state,
    struct ckv_record *record);

/* Whether an entry of this namespace and sequence was cleared. */
bool ckv_entry_cleared(struct ckv_volume *volume, uint8_t namespace_index,
    uint64_t sequence);

/* LIVE -> DYING -> (strike) -> DEAD.  False when the state was no longer `live_state`. */
bool ckv_entry_kill(struct ckv_volume *volume, uint32_t entry, uint64_t live_state,
    enum ckv_kill_reason reason);

/* The first half only: LIVE -> DYING(owner), counters, event.  The caller strikes and
 * moves the state on. */
bool ckv_entry_condemn(struct ckv_volume *volume, uint32_t entry, uint64_t live_state,
    enum ckv_kill_reason reason);
/* Strikes the record of an entry that is ours, and takes it out of the index (E4).  One
 * that cannot be struck would come back after a restart, whatever sync() says: it fails
 * the path, and recovery strikes it. */
void ckv_entry_strike(struct ckv_volume *volume, struct ckv_file *file, uint32_t entry);
/* The second half: strike, DYING -> DEAD. */
void ckv_entry_bury(struct ckv_volume *volume, uint32_t entry);

/* RESERVED -> LIVE: takes a sequence, enters it into the index (E4), writes the sealed
 * record, changes the state, counts it in its namespace; from then on it is found.
 * CKV_NO_RUN: the index has no place for it, CKV_IO_FAILED: no record can be written;
 * then the entry is still RESERVED.  `record` has everything but sequence and seal. */
enum ckv_status ckv_entry_publish(struct ckv_volume *volume,
    const struct ckv_identity *identity, uint32_t entry,
    struct ckv_record *record) CKV_MUST_CHECK;

/* RESERVED -> DEAD: an aborted put.  The cursor frees it. */
void ckv_entry_abort(struct ckv_volume *volume, uint32_t entry);

/* The mark that says "checked in this life of the region" (5: low bits of the
 * sequence). */
bool ckv_entry_verified(struct ckv_volume *volume, uint32_t entry, uint64_t sequence);
void ckv_entry_set_verified(struct ckv_volume *volume, uint32_t entry,
    uint64_t sequence);

/* One more pass of the cursor, up to `limit` (2). */
void ckv_entry_heat(struct ckv_volume *volume, uint32_t entry, uint8_t amount);

#endif /* CKV_ENTRY_H */
