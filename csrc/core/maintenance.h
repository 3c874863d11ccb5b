/* SPDX-License-Identifier: Apache-2.0 */
/* maintenance.h: one thread per read-write volume and process, no Python in it.
 *
 * Once a second: the tick that ages pins, the question for write-back errors of each
 * path, the age of the oldest pin into the slot.  When the last good sync of anybody is
 * older than the interval (jittered): a sync.  Every few minutes: a checkpoint.  Takes
 * no lock of the region, so a stopped process stops nobody's syncs.
 */
#ifndef CKV_MAINTENANCE_H
#define CKV_MAINTENANCE_H

#include "volume.h"

enum ckv_status ckv_maintenance_start(struct ckv_volume *volume,
    struct ckv_error *error) CKV_MUST_CHECK;
void ckv_maintenance_stop(struct ckv_volume *volume);

/* fsync of every usable file; then the sequence that it covers goes into the region and
 * the headers.  An error fails the path.  CKV_OK, CKV_FAILED_PATH. */
enum ckv_status ckv_volume_sync(struct ckv_volume *volume) CKV_MUST_CHECK;

/* Asks the kernel for write-back errors of a file; fails the path on any. */
void ckv_volume_probe(struct ckv_volume *volume, struct ckv_file *file);

#endif /* CKV_MAINTENANCE_H */
