/* SPDX-License-Identifier: Apache-2.0 */
/* os_darwin.c: the table of system calls on macOS.  Compiles; nobody has run it yet.
 *
 * Where the meaning is weaker than on Linux:
 *
 *   allocate          F_PREALLOCATE reserves blocks behind the end of the file only, so
 *                     ranges must come in ascending order; the length follows.
 *   sync_file         F_FULLFSYNC: fsync alone leaves data in the cache of the device.
 *   sync_range        the same: nothing less reaches the medium.
 *   start_write_back  no such call; the kernel starts when it likes.
 *   pending_error     no such question: 0.  Errors show in sync_file only.
 *   cached, make_huge, large_faults and the flag for direct I/O do not exist: reads are
 *   buffered.
 *   populate_read     no advice reports errors: -ENOSYS; callers read by pread first.
 *   populate_write    the same; the stores fault pages in one by one.
 *   lock_byte         F_OFD_SETLK where the kernel has it.  Elsewhere F_SETLK, which is
 *                     owned by the process: two descriptions of one process do not
 *                     exclude each other, closing any descriptor of the file drops it,
 *                     and a mapping does not keep it.
 *   dont_fork         minherit(VM_INHERIT_NONE).
 *   wipe_on_fork      the kernel cannot: -EOPNOTSUPP.  Callers clear the page in a child
 *                     handler of pthread_atfork.
 */
#include "os_posix.h"

#ifdef __APPLE__

#include <errno.h>
#include <fcntl.h>
#include <mach/vm_inherit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/param.h>
#include <sys/random.h>
#include <unistd.h>

enum { ENTROPY_PIECE_BYTES = 256 }; /* the most that getentropy() gives at once */
#define ADVICE_PIECE_BYTES (UINT64_C(1) << 30) /* radvisory counts in an int */

#if defined(F_OFD_SETLK) && defined(F_OFD_GETLK)
#define LOCK_SET F_OFD_SETLK
#define LOCK_GET F_OFD_GETLK
#else
#define LOCK_SET F_SETLK
#define LOCK_GET F_GETLK
#endif

static const struct {
    const char *prefix;
    enum ckv_file_system_kind kind;
} file_systems[] = {
    {"apfs", CKV_FS_LOCAL},
    {"hfs", CKV_FS_LOCAL},
    {"exfat", CKV_FS_LOCAL},
    {"msdos", CKV_FS_LOCAL},
    {"tmpfs", CKV_FS_MEMORY},
    {"nfs", CKV_FS_NETWORK},
    {"smbfs", CKV_FS_NETWORK},
    {"afpfs", CKV_FS_NETWORK},
    {"webdav", CKV_FS_NETWORK},
    {"osxfuse", CKV_FS_FUSE},
    {"macfuse", CKV_FS_FUSE},
    {"fuse", CKV_FS_FUSE},
    {"zfs", CKV_FS_COW},
};

static int
darwin_file_system(int fd, struct ckv_file_system *result)
{
    struct statfs info;
    if (fstatfs(fd, &info) < 0) {
        return -errno;
    }
    *result = (struct ckv_file_system){.kind = CKV_FS_UNKNOWN};
    if (!ckv_mul_u64(info.f_bavail, info.f_bsize, &result->free_bytes)) {
        result->free_bytes = UINT64_MAX;
    }
    (void)snprintf(result->name, sizeof(result->name), "%s", info.f_fstypename);
    if ((info.f_flags & MNT_LOCAL) == 0) {
        result->kind = CKV_FS_NETWORK;
    }
    for (size_t i = 0; i < CKV_ARRAY_LENGTH(file_systems); i++) {
        const char *prefix = file_systems[i].prefix;
        if (strncmp(result->name, prefix, strlen(prefix)) == 0) {
            result->kind = file_systems[i].kind;
        }
    }
    return 0;
}

/* APFS overwrites in place unless a clone or snapshot shares the block. */
static int
darwin_set_no_cow(int fd)
{
    (void)fd;
    return 0;
}

static int
darwin_allocate(int fd, uint64_t offset, uint64_t length)
{
    struct stat info;
    if (fstat(fd, &info) < 0) {
        return -errno;
    }
    const uint64_t end = offset + length;
    if (end <= (uint64_t)info.st_size) {
        return 0; /* this system makes no holes below the end by itself */
    }
    fstore_t store = {
        .fst_flags = F_ALLOCATEALL,
        .fst_posmode = F_PEOFPOSMODE,
        .fst_length = (off_t)(end - (uint64_t)info.st_size),
    };
    if (fcntl(fd, F_PREALLOCATE, &store) < 0) {
        return errno == ENOTSUP || errno == EINVAL ? -EOPNOTSUPP : -errno;
    }
    return ftruncate(fd, (off_t)end) < 0 ? -errno : 0;
}

static int
darwin_sync_file(int fd)
{
    if (fcntl(fd, F_FULLFSYNC) == 0) {
        return 0;
    }
    if (errno != ENOTSUP && errno != EINVAL && errno != ENOTTY) {
        return -errno;
    }
    return fsync(fd) < 0 ? -errno : 0;
}

static int
darwin_sync_range(int fd, void *mapped, uint64_t offset, uint64_t length)
{
    (void)mapped;
    (void)offset;
    (void)length;
    return darwin_sync_file(fd);
}

static int
darwin_start_write_back(int fd, uint64_t offset, uint64_t length)
{
    (void)fd;
    (void)offset;
    (void)length;
    return 0;
}

static int
darwin_pending_error(int fd, uint64_t offset, uint64_t length)
{
    (void)fd;
    (void)offset;
    (void)length;
    return 0;
}

static int
darwin_advise_file(int fd, uint64_t offset, uint64_t length, enum ckv_advice advice)
{
    if (advice != CKV_ADVICE_WILL_NEED) {
        return 0;
    }
    while (length > 0) {
        const uint64_t piece = ckv_min_u64(length, ADVICE_PIECE_BYTES);
        struct radvisory request = {.ra_offset = (off_t)offset, .ra_count = (int)piece};
        if (fcntl(fd, F_RDADVISE, &request) < 0) {
            return -errno;
        }
        offset += piece;
        length -= piece;
    }
    return 0;
}

static int
darwin_lock_byte(int fd, uint64_t byte)
{
    return ckv_posix_set_lock(fd, LOCK_SET, F_WRLCK, byte);
}

static int
darwin_unlock_byte(int fd, uint64_t byte)
{
    return ckv_posix_set_lock(fd, LOCK_SET, F_UNLCK, byte);
}

static int
darwin_byte_held(int fd, uint64_t byte, uint64_t count)
{
    return ckv_posix_lock_held(fd, LOCK_GET, byte, count);
}

static int
darwin_cached(int fd, uint64_t offset, uint64_t length, struct ckv_cached *result)
{
    (void)fd;
    (void)offset;
    (void)length;
    (void)result;
    return -ENOSYS;
}

static int
darwin_make_huge(void *address, size_t length)
{
    (void)address;
    (void)length;
    return -ENOSYS;
}

static int
darwin_large_faults(void *address, size_t length)
{
    (void)address;
    (void)length;
    return -ENOSYS;
}

static int
darwin_populate_read(void *address, size_t length)
{
    (void)address;
    (void)length;
    return -ENOSYS;
}

static int
darwin_populate_write(void *address, size_t length)
{
    (void)address;
    (void)length;
    return -ENOSYS;
}

static int
darwin_dont_fork(void *address, size_t length)
{
    return minherit(address, length, VM_INHERIT_NONE) < 0 ? -errno : 0;
}

static int
darwin_wipe_on_fork(void *address, size_t length)
{
#ifdef VM_INHERIT_ZERO
    return minherit(address, length, VM_INHERIT_ZERO) < 0 ? -errno : 0;
#else
    (void)address;
    (void)length;
    return -EOPNOTSUPP;
#endif
}

static int
darwin_random_bytes(void *target, size_t length)
{
    unsigned char *next = target;
    while (length > 0) {
        const size_t piece = (size_t)ckv_min_u64(length, ENTROPY_PIECE_BYTES);
        if (getentropy(next, piece) < 0) {
            return -errno;
        }
        next += piece;
        length -= piece;
    }
    return 0;
}

static const char *
darwin_program_name(void)
{
    return getprogname();
}

#define CKV_DARWIN_TABLE                                                               \
    {                                                                                  \
        .open_file = ckv_posix_open_file,                                              \
        .close_file = ckv_posix_close_file,                                            \
        .stat_file = ckv_posix_stat_file,                                              \
        .stat_path = ckv_posix_stat_path,                                              \
        .lstat_path = ckv_posix_lstat_path,                                            \
        .file_system = darwin_file_system,                                             \
        .set_no_cow = darwin_set_no_cow,                                               \
        .truncate_file = ckv_posix_truncate_file,                                      \
        .allocate = darwin_allocate,                                                   \
        .unlink_path = ckv_posix_unlink_path,                                          \
        .rename_path = ckv_posix_rename_path,                                          \
        .change_mode = ckv_posix_change_mode,                                          \
        .change_owner = ckv_posix_change_owner,                                        \
        .read_at = ckv_posix_read_at,                                                  \
        .write_at = ckv_posix_write_at,                                                \
        .sync_file = darwin_sync_file,                                                 \
        .sync_range = darwin_sync_range,                                               \
        .start_write_back = darwin_start_write_back,                                   \
        .pending_error = darwin_pending_error,                                         \
        .advise_file = darwin_advise_file,                                             \
        .cached = darwin_cached,                                                       \
        .lock_byte = darwin_lock_byte,                                                 \
        .unlock_byte = darwin_unlock_byte,                                             \
        .byte_held = darwin_byte_held,                                                 \
        .map = ckv_posix_map,                                                          \
        .unmap = ckv_posix_unmap,                                                      \
        .populate_read = darwin_populate_read,                                         \
        .populate_write = darwin_populate_write,                                       \
        .large_faults = darwin_large_faults,                                           \
        .drop_pages = ckv_posix_drop_pages,                                            \
        .make_huge = darwin_make_huge,                                                 \
        .dont_fork = darwin_dont_fork,                                                 \
        .wipe_on_fork = darwin_wipe_on_fork,                                           \
        .lock_memory = ckv_posix_lock_memory,                                          \
        .monotonic_ns = ckv_posix_monotonic_ns,                                        \
        .realtime_ns = ckv_posix_realtime_ns,                                          \
        .sleep_ns = ckv_posix_sleep_ns,                                                \
        .random_bytes = darwin_random_bytes,                                           \
        .process_id = ckv_posix_process_id,                                            \
        .resolve_path = ckv_posix_resolve_path,                                        \
        .user_id = ckv_posix_user_id,                                                  \
        .file_size_limit = ckv_posix_file_size_limit,                                  \
        .program_name = darwin_program_name,                                           \
    }

const int ckv_os_direct_flag = 0;

/* Two tables from one list: C has no constant initialiser that names another object. */
const struct ckv_os ckv_os_native = CKV_DARWIN_TABLE;
struct ckv_os ckv_os = CKV_DARWIN_TABLE;

#endif /* __APPLE__ */
