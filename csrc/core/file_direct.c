/* SPDX-License-Identifier: Apache-2.0 */
/* file_direct.c: the description of a volume file whose reads go around the page cache.
 *
 *   L1  `direct_fd` goes from 0 to fd + 1 or to NONE, and from fd + 1 to RETIRED + fd;
 *       the descriptor stays open until the file is closed, so that a read that has it
 *       never meets another file.
 */
#include "file_parts.h"

#include <errno.h>
#include <fcntl.h>

#define NONE    UINT64_MAX
#define RETIRED (UINT64_C(1) << 32) /* + fd + 1 */

int
ckv_file_direct(struct ckv_file *file)
{
    uint64_t seen = ckv_load_acquire_u64(&file->direct_fd);
    if (seen == 0) {
        /* In memory there is nothing to go around, and of what lies below an overlay or
         * behind a server the kernel does not know what is cached. */
        const enum ckv_file_system_kind kind = file->file_system.kind;
        const bool sensible =
            ckv_os_direct_flag != 0 && (kind == CKV_FS_LOCAL || kind == CKV_FS_UNKNOWN);
        const int fd =
            sensible ? ckv_file_reopen(file, O_RDONLY | ckv_os_direct_flag) : -ENOSYS;
        const uint64_t found = fd < 0 ? NONE : (uint64_t)fd + 1;
        if (ckv_cas_ordered_u64(&file->direct_fd, &seen, found)) {
            seen = found;
        } else if (fd >= 0) {
            (void)ckv_os.close_file(fd); /* another thread was first */
        }
    }
    return seen < RETIRED ? (int)seen - 1 : -1;
}

void
ckv_file_no_direct(struct ckv_file *file)
{
    uint64_t seen = ckv_load_acquire_u64(&file->direct_fd);
    if (seen != 0 && seen < RETIRED) {
        /* Who loses to another that retires it has nothing left to do. */
        (void)ckv_cas_ordered_u64(&file->direct_fd, &seen, RETIRED + seen);
    }
}

void
ckv_file_close_direct(struct ckv_file *file)
{
    const uint64_t seen = ckv_load_acquire_u64(&file->direct_fd);
    if (seen != 0 && seen != NONE) {
        (void)ckv_os.close_file((int)(seen % RETIRED) - 1); /* nothing to lose */
    }
    ckv_store_relaxed_u64(&file->direct_fd, 0);
}
