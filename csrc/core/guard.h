/* SPDX-License-Identifier: Apache-2.0 */
/* guard.h: a chained SIGBUS handler over our own mappings.
 *
 * A page that the device can no longer deliver (media error, truncation) raises SIGBUS at
 * the load.  The handler, installed at the first open and chained to the one before it,
 * acts only on addresses registered here: it notes that and maps a zero page there.
 * Table, head and region are always registered; data windows with sigbus_guard.
 * Async-signal safe: reads a fixed array of ranges published with release stores.
 */
#ifndef CKV_GUARD_H
#define CKV_GUARD_H

#include "atomics.h"
#include "base.h"

/* Keeps SIGXFSZ from ending the process, where nobody else does.  Registers the fork
 * handlers.  They run in the reverse order of registration and take
 * the lock of the table, which is the innermost: call it before others register
 * theirs. */
enum ckv_status ckv_guard_prepare(struct ckv_error *error) CKV_MUST_CHECK;

/* `note` grows by one for each page replaced in the range. */
enum ckv_status ckv_guard_add(const void *address, uint64_t length,
    ckv_atomic_u64 *note, struct ckv_error *error) CKV_MUST_CHECK;
void ckv_guard_remove(const void *address);

/* Whether a SIGBUS of this thread comes to the handler: the thread does not block it, and
 * nobody has taken the handler's place or put another above it.  Two system calls. */
bool ckv_guard_ready(void);

/* Copies between mappings of files, or memory; -EFAULT, with any part copied, when a page
 * of either cannot be delivered.  The page stays as it is for others: unlike a load in a
 * guarded range this replaces nothing.  -ENOSYS where the system cannot do it.  Requires:
 * the thread found ckv_guard_ready(), in this call of the engine. */
int ckv_guard_copy(void *target, const void *source, size_t length);

#endif /* CKV_GUARD_H */
