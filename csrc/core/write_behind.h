/* SPDX-License-Identifier: Apache-2.0 */
/* write_behind.h: starts the write-back of stored blocks on a thread of its own, so
 * that a put does not wait while the kernel queues its pages.  Knows ranges, not
 * blocks. */
#ifndef CKV_WRITE_BEHIND_H
#define CKV_WRITE_BEHIND_H

#include "base.h"

struct ckv_write_behind;

enum ckv_status ckv_write_behind_new(struct ckv_write_behind **behind,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Queues a range of an open file, which must stay open until the free.  Never waits for
 * the device unless the queue is full: then the caller does the work, which slows a
 * writer down to what the device takes. */
void ckv_write_behind_add(struct ckv_write_behind *behind, int fd, uint64_t offset,
    uint64_t length);

/* Works the queue off and ends the thread. */
void ckv_write_behind_free(struct ckv_write_behind **behind);

#endif /* CKV_WRITE_BEHIND_H */
