/* SPDX-License-Identifier: Apache-2.0 */
/* region.h: create, attach and drop the shared region of a set.
 *
 * The region file is never sparse: its blocks are written at creation, so that no store
 * into the mapping can fail for want of space.  It is created at its final name under the
 * open lock and is believed only when `ready` is set and its nonce is the one in the
 * headers of the volume files.
 */
#ifndef CKV_REGION_H
#define CKV_REGION_H

#include "volume.h"

/* Where the region of this set lies: "<member 0>-shm", or in `directory` (may be NULL or
 * empty) a name made of the set id.  malloc'd. */
enum ckv_status ckv_region_path(const struct ckv_volume *volume, const char *directory,
    char **path, struct ckv_error *error) CKV_MUST_CHECK;

/* Throws an old file away, creates a new one with all its blocks, and gives private
 * memory full of zeros with the header filled in (nonce, layout; ready stays 0).  Owner,
 * group and mode are those of `like`, as far as that opens it to nobody who may not use
 * what has them.  Requires: the open lock; nobody alive. */
enum ckv_status ckv_region_create(struct ckv_volume *volume, const char *path,
    const struct stat *like, struct ckv_error *error) CKV_MUST_CHECK;

/* Writes what that memory holds into the file and maps the file in its place, at the same
 * address.  Done by ckv_rebuild() at its end; nothing for a private region.  After an
 * error the region is unmapped. */
enum ckv_status ckv_region_publish(struct ckv_volume *volume,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Private memory without a file, for a process that reads alone. */
enum ckv_status ckv_region_create_private(struct ckv_volume *volume,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Maps the region that live peers use.  CKV_E_FORMAT in words when it is missing, not
 * ready or has another nonce than the volume files; CKV_E_UNSAFE_PATH when it belongs to
 * somebody whom `options` do not trust. */
enum ckv_status ckv_region_attach(struct ckv_volume *volume,
    const struct ckv_options *options, const char *path, uint64_t nonce,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Memory that is dropped while dirty pages of it could not be written would lose pins and
 * states, so region and tables stay resident as far as RLIMIT_MEMLOCK lets them.  Walks
 * all of it: done beside the work, by the maintenance thread.  Until then a peer that
 * lives, or the one that wrote the region a moment ago, keeps it. */
void ckv_region_keep_resident(struct ckv_volume *volume);

/* Declares the rebuilt region usable. */
void ckv_region_set_ready(struct ckv_volume *volume);

void ckv_region_unmap(struct ckv_volume *volume);

/* Index of the namespace with this tag, registering it when `add`; -1 when there is none
 * or no room.  Adding requires the open lock. */
int ckv_region_namespace(struct ckv_volume *volume, const uint8_t tag[16], bool add);

#endif /* CKV_REGION_H */
