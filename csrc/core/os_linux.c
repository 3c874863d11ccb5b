/* SPDX-License-Identifier: Apache-2.0 */
/* os_linux.c: the table of system calls on Linux. */
#include "os_posix.h"

#ifdef __linux__

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef F_OFD_SETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* since 5.14; older kernels answer -EINVAL */
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* the same */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* since 6.1; older kernels answer -EINVAL */
#endif
#ifndef SYS_cachestat
#define SYS_cachestat 451 /* since 6.5, the same on every architecture */
#endif

#define BTRFS_MAGIC UINT32_C(0x9123683e)

static const struct {
    uint32_t magic;
    enum ckv_file_system_kind kind;
    const char *name;
} file_systems[] = {
    {UINT32_C(0x0000ef53), CKV_FS_LOCAL, "ext4"},
    {UINT32_C(0x58465342), CKV_FS_LOCAL, "xfs"},
    {BTRFS_MAGIC, CKV_FS_LOCAL, "btrfs"},
    {UINT32_C(0xf2f52010), CKV_FS_LOCAL, "f2fs"},
    {UINT32_C(0x3153464a), CKV_FS_LOCAL, "jfs"},
    {UINT32_C(0x52654973), CKV_FS_LOCAL, "reiserfs"},
    {UINT32_C(0x00004d44), CKV_FS_LOCAL, "vfat"},
    {UINT32_C(0x2011bab0), CKV_FS_LOCAL, "exfat"},
    {UINT32_C(0x5346544e), CKV_FS_LOCAL, "ntfs"},
    {UINT32_C(0x7366746e), CKV_FS_LOCAL, "ntfs3"},
    {UINT32_C(0x01021994), CKV_FS_MEMORY, "tmpfs"},
    {UINT32_C(0x858458f6), CKV_FS_MEMORY, "ramfs"},
    {UINT32_C(0x794c7630), CKV_FS_OVERLAY, "overlay"},
    {UINT32_C(0x61756673), CKV_FS_OVERLAY, "aufs"},
    {UINT32_C(0x0000f15f), CKV_FS_OVERLAY, "ecryptfs"},
    {UINT32_C(0x00006969), CKV_FS_NETWORK, "nfs"},
    {UINT32_C(0xff534d42), CKV_FS_NETWORK, "cifs"},
    {UINT32_C(0xfe534d42), CKV_FS_NETWORK, "smb2"},
    {UINT32_C(0x0000517b), CKV_FS_NETWORK, "smb"},
    {UINT32_C(0x01021997), CKV_FS_NETWORK, "9p"},
    {UINT32_C(0x00c36400), CKV_FS_NETWORK, "ceph"},
    {UINT32_C(0x0bd00bd0), CKV_FS_NETWORK, "lustre"},
    {UINT32_C(0x5346414f), CKV_FS_NETWORK, "afs"},
    {UINT32_C(0x6b414653), CKV_FS_NETWORK, "afs"},
    {UINT32_C(0x73757245), CKV_FS_NETWORK, "coda"},
    {UINT32_C(0x01161970), CKV_FS_NETWORK, "gfs2"},
    {UINT32_C(0x7461636f), CKV_FS_NETWORK, "ocfs2"},
    {UINT32_C(0x47504653), CKV_FS_NETWORK, "gpfs"},
    {UINT32_C(0x19830326), CKV_FS_NETWORK, "beegfs"},
    {UINT32_C(0x20030528), CKV_FS_NETWORK, "orangefs"},
    {UINT32_C(0xaad7aaea), CKV_FS_NETWORK, "panfs"},
    {UINT32_C(0x786f4256), CKV_FS_NETWORK, "vboxsf"},
    {UINT32_C(0xbacbacbc), CKV_FS_NETWORK, "vmhgfs"},
    {UINT32_C(0x65735546), CKV_FS_FUSE, "fuse"},
    {UINT32_C(0x2fc12fc1), CKV_FS_COW, "zfs"},
    {UINT32_C(0xca451a4e), CKV_FS_COW, "bcachefs"},
    {UINT32_C(0x00003434), CKV_FS_COW, "nilfs2"},
};

static int
linux_file_system(int fd, struct ckv_file_system *result)
{
    struct statfs info;
    if (fstatfs(fd, &info) < 0) {
        return -errno;
    }
    *result = (struct ckv_file_system){.kind = CKV_FS_UNKNOWN};
    /* Without a limit of its own a tmpfs reports 0 blocks in all. */
    if (info.f_blocks == 0) {
        result->free_bytes = UINT64_MAX;
    } else if (!ckv_mul_u64(info.f_bavail, (uint64_t)info.f_bsize,
                   &result->free_bytes)) {
        result->free_bytes = UINT64_MAX;
    }
    const uint32_t magic = (uint32_t)info.f_type;
    for (size_t i = 0; i < CKV_ARRAY_LENGTH(file_systems); i++) {
        if (file_systems[i].magic == magic) {
            result->kind = file_systems[i].kind;
            (void)snprintf(result->name, sizeof(result->name), "%s",
                file_systems[i].name);
            return 0;
        }
    }
    (void)snprintf(result->name, sizeof(result->name), "0x%08x", (unsigned int)magic);
    return 0;
}

/* btrfs takes the flag on empty files only and keeps quiet otherwise, hence the second
 * look. */
static int
linux_set_no_cow(int fd)
{
    struct statfs info;
    if (fstatfs(fd, &info) < 0) {
        return -errno;
    }
    if ((uint32_t)info.f_type != BTRFS_MAGIC) {
        return 0;
    }
    int flags = 0;
    if (ioctl(fd, FS_IOC_GETFLAGS, &flags) < 0) {
        return -errno;
    }
    if ((flags & FS_NOCOW_FL) != 0) {
        return 0;
    }
    flags |= FS_NOCOW_FL;
    if (ioctl(fd, FS_IOC_SETFLAGS, &flags) < 0 ||
        ioctl(fd, FS_IOC_GETFLAGS, &flags) < 0) {
        return -errno;
    }
    return (flags & FS_NOCOW_FL) != 0 ? 0 : -EOPNOTSUPP;
}

static int
linux_allocate(int fd, uint64_t offset, uint64_t length)
{
    if (fallocate(fd, 0, (off_t)offset, (off_t)length) == 0) {
        return 0;
    }
    /* Sandboxes and some file systems have other words for "cannot". */
    return errno == ENOSYS || errno == EINVAL ? -EOPNOTSUPP : -errno;
}

static int
linux_sync_file(int fd)
{
    return fsync(fd) < 0 ? -errno : 0;
}

/* msync is fsync of the mapped range: also where the mapping itself only reads, since
 * its description writes. */
static int
linux_sync_range(int fd, void *mapped, uint64_t offset, uint64_t length)
{
    (void)fd;
    (void)offset;
    return msync(mapped, (size_t)length, MS_SYNC) < 0 ? -errno : 0;
}

static int
linux_start_write_back(int fd, uint64_t offset, uint64_t length)
{
    const int result =
        sync_file_range(fd, (off_t)offset, (off_t)length, SYNC_FILE_RANGE_WRITE);
    return result < 0 ? -errno : 0;
}

static int
linux_pending_error(int fd, uint64_t offset, uint64_t length)
{
    const int result =
        sync_file_range(fd, (off_t)offset, (off_t)length, SYNC_FILE_RANGE_WAIT_BEFORE);
    return result < 0 ? -errno : 0;
}

static int
linux_advise_file(int fd, uint64_t offset, uint64_t length, enum ckv_advice advice)
{
    int native = POSIX_FADV_NORMAL;
    switch (advice) {
    case CKV_ADVICE_WILL_NEED:
        native = POSIX_FADV_WILLNEED;
        break;
    case CKV_ADVICE_DONT_NEED:
        native = POSIX_FADV_DONTNEED;
        break;
    case CKV_ADVICE_RANDOM:
        native = POSIX_FADV_RANDOM;
        break;
    }
    return -posix_fadvise(fd, (off_t)offset, (off_t)length, native);
}

/* As in <linux/mman.h> of new kernels. */
struct cachestat_range {
    uint64_t offset;
    uint64_t length;
};
struct cachestat_counts {
    uint64_t cached, dirty, written_back, evicted, recently_evicted;
};

static int
linux_cached(int fd, uint64_t offset, uint64_t length, struct ckv_cached *result)
{
    struct cachestat_range range = {.offset = offset, .length = length};
    struct cachestat_counts counts = {0};
    if (syscall(SYS_cachestat, (unsigned int)fd, &range, &counts, 0u) < 0) {
        return -errno;
    }
    *result = (struct ckv_cached){.pages = counts.cached,
        .dirty_pages = counts.dirty + counts.written_back,
        .evicted_pages = counts.evicted,
        .recent_pages = counts.recently_evicted};
    return 0;
}

static int
linux_lock_byte(int fd, uint64_t byte)
{
    return ckv_posix_set_lock(fd, F_OFD_SETLK, F_WRLCK, byte);
}

static int
linux_unlock_byte(int fd, uint64_t byte)
{
    return ckv_posix_set_lock(fd, F_OFD_SETLK, F_UNLCK, byte);
}

static int
linux_byte_held(int fd, uint64_t byte, uint64_t count)
{
    return ckv_posix_lock_held(fd, F_OFD_GETLK, byte, count);
}

static int
linux_populate_read(void *address, size_t length)
{
    return madvise(address, length, MADV_POPULATE_READ) < 0 ? -errno : 0;
}

/* The advice makes the first touch take huge pages; collapsing tells whether it did, and
 * does not care whether the machine hands them out by itself. */
static int
linux_make_huge(void *address, size_t length)
{
    if (madvise(address, length, MADV_HUGEPAGE) < 0) {
        return -errno;
    }
    memset(address, 0, length);
    return madvise(address, length, MADV_COLLAPSE) < 0 ? -errno : 0;
}

/* MADV_RANDOM alone would read page by page.  Kernels before 5.18 do so whatever the
 * first advice says, hence the question for a call that came later (cachestat, 6.5). */
static int
linux_large_faults(void *address, size_t length)
{
    if (syscall(SYS_cachestat, (unsigned int)-1, NULL, NULL, 0u) < 0 &&
        errno != EBADF) {
        return -errno;
    }
    if (madvise(address, length, MADV_HUGEPAGE) < 0) { /* a kernel without huge pages */
        return -errno;
    }
    return madvise(address, length, MADV_RANDOM) < 0 ? -errno : 0;
}

static int
linux_populate_write(void *address, size_t length)
{
    (void)madvise(address, length, MADV_HUGEPAGE); /* refused where there are none */
    return madvise(address, length, MADV_POPULATE_WRITE) < 0 ? -errno : 0;
}

static int
linux_dont_fork(void *address, size_t length)
{
    return madvise(address, length, MADV_DONTFORK) < 0 ? -errno : 0;
}

static int
linux_wipe_on_fork(void *address, size_t length)
{
    return madvise(address, length, MADV_WIPEONFORK) < 0 ? -errno : 0;
}

static int
linux_random_bytes(void *target, size_t length)
{
    unsigned char *next = target;
    while (length > 0) {
        const ssize_t done = getrandom(next, length, 0);
        if (done < 0) {
            if (errno == EINTR) {
                continue;
            }
            return -errno;
        }
        next += done;
        length -= (size_t)done;
    }
    return 0;
}

static const char *
linux_program_name(void)
{
    return program_invocation_short_name;
}

#define CKV_LINUX_TABLE                                                                \
    {                                                                                  \
        .open_file = ckv_posix_open_file,                                              \
        .close_file = ckv_posix_close_file,                                            \
        .stat_file = ckv_posix_stat_file,                                              \
        .stat_path = ckv_posix_stat_path,                                              \
        .lstat_path = ckv_posix_lstat_path,                                            \
        .file_system = linux_file_system,                                              \
        .set_no_cow = linux_set_no_cow,                                                \
        .truncate_file = ckv_posix_truncate_file,                                      \
        .allocate = linux_allocate,                                                    \
        .unlink_path = ckv_posix_unlink_path,                                          \
        .rename_path = ckv_posix_rename_path,                                          \
        .change_mode = ckv_posix_change_mode,                                          \
        .change_owner = ckv_posix_change_owner,                                        \
        .read_at = ckv_posix_read_at,                                                  \
        .write_at = ckv_posix_write_at,                                                \
        .sync_file = linux_sync_file,                                                  \
        .sync_range = linux_sync_range,                                                \
        .start_write_back = linux_start_write_back,                                    \
        .pending_error = linux_pending_error,                                          \
        .advise_file = linux_advise_file,                                              \
        .cached = linux_cached,                                                        \
        .lock_byte = linux_lock_byte,                                                  \
        .unlock_byte = linux_unlock_byte,                                              \
        .byte_held = linux_byte_held,                                                  \
        .map = ckv_posix_map,                                                          \
        .unmap = ckv_posix_unmap,                                                      \
        .populate_read = linux_populate_read,                                          \
        .populate_write = linux_populate_write,                                        \
        .large_faults = linux_large_faults,                                            \
        .drop_pages = ckv_posix_drop_pages,                                            \
        .make_huge = linux_make_huge,                                                  \
        .dont_fork = linux_dont_fork,                                                  \
        .wipe_on_fork = linux_wipe_on_fork,                                            \
        .lock_memory = ckv_posix_lock_memory,                                          \
        .monotonic_ns = ckv_posix_monotonic_ns,                                        \
        .realtime_ns = ckv_posix_realtime_ns,                                          \
        .sleep_ns = ckv_posix_sleep_ns,                                                \
        .random_bytes = linux_random_bytes,                                            \
        .process_id = ckv_posix_process_id,                                            \
        .resolve_path = ckv_posix_resolve_path,                                        \
        .user_id = ckv_posix_user_id,                                                  \
        .file_size_limit = ckv_posix_file_size_limit,                                  \
        .program_name = linux_program_name,                                            \
    }

const int ckv_os_direct_flag = O_DIRECT;

/* Two tables from one list: C has no constant initialiser that names another object. */
const struct ckv_os ckv_os_native = CKV_LINUX_TABLE;
struct ckv_os ckv_os = CKV_LINUX_TABLE;

#endif /* __linux__ */
