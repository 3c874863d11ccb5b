/* SPDX-License-Identifier: Apache-2.0 */
/* os.h: the only door to the operating system.
 *
 * Every system call of the engine goes through the table `ckv_os`, so that a test can
 * fail, delay and count each of them.  Functions return 0 (or a count) on success and
 * -errno on failure unless they say otherwise.  EINTR is retried behind the table by the
 * ckv_os_... wrappers at the end, not inside it, so that tests can inject it.
 *
 *   os_posix.c   what the systems share
 *   os_linux.c   fallocate, sync_file_range, MADV_POPULATE_READ, OFD locks, statfs
 *   os_darwin.c  their nearest equivalents; compiles, untested until someone runs it
 */
#ifndef CKV_OS_H
#define CKV_OS_H

#include <pthread.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "base.h"

enum ckv_file_system_kind {
    CKV_FS_LOCAL,   /* ext4, xfs, btrfs, ... */
    CKV_FS_MEMORY,  /* tmpfs */
    CKV_FS_OVERLAY, /* works, but what lies below may be anything: warn */
    CKV_FS_NETWORK, /* NFS, CIFS, Lustre, Ceph, 9p: refuse unless allowed */
    CKV_FS_FUSE,    /* refuse unless allowed */
    CKV_FS_COW,     /* cannot reserve space (ZFS, bcachefs): refuse unless allowed */
    CKV_FS_UNKNOWN  /* accepted */
};

struct ckv_file_system {
    enum ckv_file_system_kind kind;
    char name[32];
    uint64_t free_bytes;
};

struct ckv_cached { /* pages of a range of a file, in the page cache */
    uint64_t pages;
    uint64_t dirty_pages;   /* of them, to be written or being written */
    uint64_t evicted_pages; /* of the others: were there until memory ran short, as far
        as the kernel remembers */
    uint64_t recent_pages;  /* of these: would still be there, were memory a little
        larger */
};

enum ckv_advice { CKV_ADVICE_WILL_NEED, CKV_ADVICE_DONT_NEED, CKV_ADVICE_RANDOM };

/* Flag of open_file(): reads go around the page cache; 0 where there is no such flag. */
extern const int ckv_os_direct_flag;

struct ckv_os {
    /* files */
    int (*open_file)(const char *path, int flags, mode_t mode); /* O_CLOEXEC is added */
    int (*close_file)(int fd);
    int (*stat_file)(int fd, struct stat *result);
    int (*stat_path)(const char *path, struct stat *result);  /* follows symlinks */
    int (*lstat_path)(const char *path, struct stat *result); /* does not */
    int (*file_system)(int fd, struct ckv_file_system *result);
    int (*set_no_cow)(int
            fd); /* btrfs: before the first byte; 0 where it means nothing */
    int (*truncate_file)(int fd, uint64_t length);
    int (*allocate)(int fd, uint64_t offset,
        uint64_t length); /* -EOPNOTSUPP if it cannot */
    int (*unlink_path)(const char *path);
    int (*rename_path)(const char *from, const char *to);
    int (*change_mode)(int fd, mode_t mode);
    int (*change_owner)(int fd, uint32_t user, uint32_t group);
    ssize_t (*read_at)(int fd, const struct iovec *iov, int count, uint64_t offset);
    ssize_t (*write_at)(int fd, const struct iovec *iov, int count, uint64_t offset);
    int (*sync_file)(int fd); /* to the medium: fsync, F_FULLFSYNC */
    /* The same for the pages of a range alone, without waiting for the rest of the file.
     * `mapped` is where the range lies in a shared mapping of `fd`, which can write. */
    int (*sync_range)(int fd, void *mapped, uint64_t offset, uint64_t length);
    int (*start_write_back)(int fd, uint64_t offset, uint64_t length);
    /* Waits for write-back of a range nobody writes and returns a pending error of the
     * file; the Linux kernel reports it once per open file description. */
    int (*pending_error)(int fd, uint64_t offset, uint64_t length);
    int (*advise_file)(int fd, uint64_t offset, uint64_t length,
        enum ckv_advice advice);
    int (*cached)(int fd, uint64_t offset, uint64_t length,
        struct ckv_cached *result); /* -ENOSYS: the kernel does not tell */
    /* locks: bytes of the file, owned by the open file description */
    int (*lock_byte)(int fd, uint64_t byte); /* -EAGAIN when another has it */
    int (*unlock_byte)(int fd, uint64_t byte);
    int (*byte_held)(int fd, uint64_t byte,
        uint64_t count); /* 1 held by another, 0 not */
    /* memory */
    int (*map)(void *hint, size_t length, int protection, int flags, int fd,
        uint64_t offset, void **result);
    int (*unmap)(void *address, size_t length);
    int (*populate_read)(void *address, size_t length);  /* -EFAULT: not deliverable */
    int (*populate_write)(void *address, size_t length); /* private memory, at once and
        in the largest pages there are */
    int (*large_faults)(void *address, size_t length);   /* a fault in this mapping of a
        file reads the huge page around it and no more; 0 or -errno: as before */
    int (*drop_pages)(void *address, size_t length);     /* MADV_DONTNEED */
    int (*make_huge)(void *address,
        size_t length); /* of fresh memory; 0: it has only huge pages */
    int (*dont_fork)(void *address, size_t length);
    int (*wipe_on_fork)(void *address, size_t length); /* zero in a child; -EOPNOTSUPP:
        the caller clears the page in a child handler of pthread_atfork */
    int (*lock_memory)(void *address, size_t length);
    /* time and the rest */
    uint64_t (*monotonic_ns)(void);
    uint64_t (*realtime_ns)(void);
    void (*sleep_ns)(uint64_t duration_ns);
    int (*random_bytes)(void *target, size_t length);
    int64_t (*process_id)(void);
    uint32_t (*user_id)(void);                     /* effective */
    int (*file_size_limit)(uint64_t *limit_bytes); /* of this process (ulimit -f) */
    const char *(*program_name)(void);             /* for people; never NULL */
    int (*resolve_path)(const char *path, char **resolved); /* realpath; malloc'd */
};

extern struct ckv_os ckv_os; /* tests replace members; nobody else does */

extern const struct ckv_os
    ckv_os_native; /* what ckv_os starts as (os_linux / os_darwin) */

/* Reads or writes everything, retrying EINTR and short results.  0, -errno, or -ENODATA
 * when the file ends before. */
int ckv_os_read_all(int fd, void *target, size_t length, uint64_t offset);
int ckv_os_write_all(int fd, const void *source, size_t length, uint64_t offset);
/* The same over an array, which is changed while it is used up; count <= 1 024. */
int ckv_os_readv_all(int fd, struct iovec *iov, int count, uint64_t offset);
int ckv_os_writev_all(int fd, struct iovec *iov, int count, uint64_t offset);
/* Starts a thread that takes no signals but those of the guard.  0 or -errno. */
int ckv_os_start_thread(pthread_t *thread, void *(*run)(void *argument),
    void *argument);
/* The members of these names, tried again after EINTR.  Space is allocated in pieces, so
 * that signals of a timer do not keep it from coming to an end. */
int ckv_os_open(const char *path, int flags, mode_t mode);
int ckv_os_truncate(int fd, uint64_t length);
int ckv_os_allocate(int fd, uint64_t length);
int ckv_os_sync(int fd);
int ckv_os_lock_byte(int fd, uint64_t byte);
int ckv_os_byte_held(int fd, uint64_t byte, uint64_t count);

#endif /* CKV_OS_H */
