/* SPDX-License-Identifier: Apache-2.0 */
/* slot.h: which processes have the set open, and what the dead ones left.
 *
 * A process owns a slot while it holds byte CKV_SLOT_LOCK_BYTE + slot of every present
 * file.  Each lock belongs to an open file description that only a one-page mapping keeps
 * alive (MADV_DONTFORK; its descriptor is closed at once).  So the lock ends with the
 * process or its exec, is not inherited by fork, survives closing every descriptor, and
 * is right across pid namespaces.  It is never unlocked, only unmapped.
 *
 *   S1  Whoever writes the column of a slot (its bit in every mask, RESERVED and DYING
 *       states that name it, its hints) without being its owner holds the slot's byte
 *       lock, and inside the process the sweep mutex.
 *   S2  A slot with `unswept` set and its byte free belonged to a process that died; its
 *       column is swept before anybody uses the slot.
 *   S3  The incarnation of a slot grows with every owner, so a word that names (slot,
 *       incarnation) never names a later owner.
 */
#ifndef CKV_SLOT_H
#define CKV_SLOT_H

#include "volume.h"

/* Claims a free slot for this process: byte locks, anchors, sweep, new incarnation.
 * Requires: the region is mapped and ready, the open lock is held.  CKV_E_NO_SLOT. */
enum ckv_status ckv_slot_claim(struct ckv_volume *volume,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Leaves in order: nothing of the slot is pinned, reserved or dying any more. */
void ckv_slot_leave(struct ckv_volume *volume);

/* Whether any process holds a slot of the set (asked on the given files, before the
 * region is mapped).  1, 0 or -errno. */
int ckv_slot_any_alive(struct ckv_file *const *files, uint32_t count);

/* Whether the owner named by a lock word or state is alive: it is ours, or its byte is
 * held and its incarnation is current.  Errs on the side of alive. */
bool ckv_slot_alive(struct ckv_volume *volume, uint32_t slot, uint32_t incarnation);

/* Sweeps a dead slot if its byte can be locked without waiting; false: left alone. */
bool ckv_slot_sweep(struct ckv_volume *volume, uint32_t slot);

/* Sweeps every slot of `mask` that is dead; returns the bits that are still to be
 * respected.  Makes one question to the kernel per bit. */
uint64_t ckv_slot_sweep_dead(struct ckv_volume *volume, uint64_t mask);

/* Sweeps every slot whose process died and that nobody has swept since. */
void ckv_slot_sweep_departed(struct ckv_volume *volume);

/* Registers the pthread_atfork handlers and the canary page, once per process.  The
 * handlers keep fork out of the moments when a lock is owned by a descriptor. */
enum ckv_status ckv_slot_prepare_process(struct ckv_volume *volume,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Brackets every use of a description that owns a lock while it has a descriptor. */
void ckv_slot_fork_block(void);
void ckv_slot_fork_unblock(void);

#endif /* CKV_SLOT_H */
