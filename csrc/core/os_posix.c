/* SPDX-License-Identifier: Apache-2.0 */
/* os_posix.c: system calls that Linux and macOS share, and the retrying wrappers.
 *
 * Members of the table pass EINTR on, so that a test can inject it; the ckv_os_...
 * functions at the end are what retries.
 */
#include "os_posix.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define NANOSECONDS_PER_SECOND  UINT64_C(1000000000)
#define IOVECS_MAX              1024 /* IOV_MAX of both systems */
#define ALLOCATED_AT_ONCE_BYTES (UINT64_C(256) << 20)

_Static_assert(sizeof(off_t) == 8, "files pass 2 GiB");

int
ckv_posix_open_file(const char *path, int flags, mode_t mode)
{
    const int fd = open(path, flags | O_CLOEXEC, mode);
    return fd < 0 ? -errno : fd;
}

/* Also after EINTR the descriptor is gone: nobody may close it again. */
int
ckv_posix_close_file(int fd)
{
    return close(fd) < 0 ? -errno : 0;
}

int
ckv_posix_stat_file(int fd, struct stat *result)
{
    return fstat(fd, result) < 0 ? -errno : 0;
}

int
ckv_posix_stat_path(const char *path, struct stat *result)
{
    return stat(path, result) < 0 ? -errno : 0;
}

int
ckv_posix_lstat_path(const char *path, struct stat *result)
{
    return lstat(path, result) < 0 ? -errno : 0;
}

int
ckv_posix_resolve_path(const char *path, char **resolved)
{
    *resolved = realpath(path, NULL);
    return *resolved == NULL ? -errno : 0;
}

int
ckv_posix_truncate_file(int fd, uint64_t length)
{
    if (length > INT64_MAX) {
        return -EFBIG;
    }
    return ftruncate(fd, (off_t)length) < 0 ? -errno : 0;
}

int
ckv_posix_unlink_path(const char *path)
{
    return unlink(path) < 0 ? -errno : 0;
}

int
ckv_posix_rename_path(const char *from, const char *to)
{
    return rename(from, to) < 0 ? -errno : 0;
}

int
ckv_posix_change_mode(int fd, mode_t mode)
{
    return fchmod(fd, mode) < 0 ? -errno : 0;
}

int
ckv_posix_change_owner(int fd, uint32_t user, uint32_t group)
{
    return fchown(fd, (uid_t)user, (gid_t)group) < 0 ? -errno : 0;
}

ssize_t
ckv_posix_read_at(int fd, const struct iovec *iov, int count, uint64_t offset)
{
    const ssize_t result = count == 1
                               ? pread(fd, iov->iov_base, iov->iov_len, (off_t)offset)
                               : preadv(fd, iov, count, (off_t)offset);
    return result < 0 ? -errno : result;
}

ssize_t
ckv_posix_write_at(int fd, const struct iovec *iov, int count, uint64_t offset)
{
    const ssize_t result = count == 1
                               ? pwrite(fd, iov->iov_base, iov->iov_len, (off_t)offset)
                               : pwritev(fd, iov, count, (off_t)offset);
    return result < 0 ? -errno : result;
}

int
ckv_posix_map(void *hint, size_t length, int protection, int flags, int fd,
    uint64_t offset, void **result)
{
    void *address = mmap(hint, length, protection, flags, fd, (off_t)offset);
    if (address == MAP_FAILED) {
        *result = NULL;
        return -errno;
    }
    *result = address;
    return 0;
}

int
ckv_posix_unmap(void *address, size_t length)
{
    return munmap(address, length) < 0 ? -errno : 0;
}

int
ckv_posix_drop_pages(void *address, size_t length)
{
    return madvise(address, length, MADV_DONTNEED) < 0 ? -errno : 0;
}

int
ckv_posix_lock_memory(void *address, size_t length)
{
    return mlock(address, length) < 0 ? -errno : 0;
}

static uint64_t
read_clock(clockid_t clock)
{
    struct timespec now = {0};
    (void)clock_gettime(clock, &now); /* fails for unknown clocks only */
    return (uint64_t)now.tv_sec * NANOSECONDS_PER_SECOND + (uint64_t)now.tv_nsec;
}

uint64_t
ckv_posix_monotonic_ns(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

uint64_t
ckv_posix_realtime_ns(void)
{
    return read_clock(CLOCK_REALTIME);
}

void
ckv_posix_sleep_ns(uint64_t duration_ns)
{
    struct timespec left = {
        .tv_sec = (time_t)(duration_ns / NANOSECONDS_PER_SECOND),
        .tv_nsec = (long)(duration_ns % NANOSECONDS_PER_SECOND),
    };
    while (nanosleep(&left, &left) < 0 && errno == EINTR) {
    }
}

int64_t
ckv_posix_process_id(void)
{
    return (int64_t)getpid();
}

uint32_t
ckv_posix_user_id(void)
{
    return (uint32_t)geteuid();
}

int
ckv_posix_file_size_limit(uint64_t *limit_bytes)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) < 0) {
        return -errno;
    }
    *limit_bytes =
        limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : (uint64_t)limit.rlim_cur;
    return 0;
}

int
ckv_posix_set_lock(int fd, int command, short type, uint64_t byte)
{
    struct flock lock = {
        .l_type = type,
        .l_whence = SEEK_SET,
        .l_start = (off_t)byte,
        .l_len = 1,
    };
    if (fcntl(fd, command, &lock) == 0) {
        return 0;
    }
    return errno == EACCES ? -EAGAIN : -errno; /* POSIX allows either for "taken" */
}

int
ckv_posix_lock_held(int fd, int command, uint64_t byte, uint64_t count)
{
    struct flock lock = {
        .l_type = F_WRLCK, /* the question is allowed on read-only descriptors too */
        .l_whence = SEEK_SET,
        .l_start = (off_t)byte,
        .l_len = (off_t)count,
    };
    if (fcntl(fd, command, &lock) < 0) {
        return -errno;
    }
    return lock.l_type == F_UNLCK ? 0 : 1;
}

/* Moves past `done` bytes; returns how many elements are left. */
static int
advance(struct iovec **iov, int count, size_t done)
{
    while (count > 0 && done >= (*iov)->iov_len) {
        done -= (*iov)->iov_len;
        (*iov)++;
        count--;
    }
    if (count > 0) {
        (*iov)->iov_base = (char *)(*iov)->iov_base + done;
        (*iov)->iov_len -= done;
    }
    return count;
}

int
ckv_os_readv_all(int fd, struct iovec *iov, int count, uint64_t offset)
{
    CKV_CHECK(count >= 0 && count <= IOVECS_MAX);
    count = advance(&iov, count, 0); /* empty elements must not look like the end */
    while (count > 0) {
        const ssize_t done = ckv_os.read_at(fd, iov, count, offset);
        if (done == -EINTR) {
            continue;
        }
        if (done <= 0) {
            return done == 0 ? -ENODATA : (int)done;
        }
        offset += (uint64_t)done;
        count = advance(&iov, count, (size_t)done);
    }
    return 0;
}

int
ckv_os_writev_all(int fd, struct iovec *iov, int count, uint64_t offset)
{
    CKV_CHECK(count >= 0 && count <= IOVECS_MAX);
    count = advance(&iov, count, 0);
    while (count > 0) {
        const ssize_t done = ckv_os.write_at(fd, iov, count, offset);
        if (done == -EINTR) {
            continue;
        }
        if (done <= 0) {
            return done == 0 ? -EIO
                             : (int)done; /* a write of 0 bytes makes no progress */
        }
        offset += (uint64_t)done;
        count = advance(&iov, count, (size_t)done);
    }
    return 0;
}

int
ckv_os_read_all(int fd, void *target, size_t length, uint64_t offset)
{
    struct iovec iov = {.iov_base = target, .iov_len = length};
    return ckv_os_readv_all(fd, &iov, 1, offset);
}

int
ckv_os_write_all(int fd, const void *source, size_t length, uint64_t offset)
{
    union { /* iovec has no const; the write only reads */
        const void *source;
        void *base;
    } bytes = {.source = source};
    struct iovec iov = {.iov_base = bytes.base, .iov_len = length};
    return ckv_os_writev_all(fd, &iov, 1, offset);
}

int
ckv_os_open(const char *path, int flags, mode_t mode)
{
    int fd = -EINTR;
    while (fd == -EINTR) {
        fd = ckv_os.open_file(path, flags, mode);
    }
    return fd;
}

int
ckv_os_truncate(int fd, uint64_t length)
{
    int result = -EINTR;
    while (result == -EINTR) {
        result = ckv_os.truncate_file(fd, length);
    }
    return result;
}

int
ckv_os_allocate(int fd, uint64_t length)
{
    for (uint64_t offset = 0; offset < length;) {
        const uint64_t piece = ckv_min_u64(ALLOCATED_AT_ONCE_BYTES, length - offset);
        const int result = ckv_os.allocate(fd, offset, piece);
        if (result == 0) {
            offset += piece;
        } else if (result != -EINTR) {
            return result;
        }
    }
    return 0;
}

int
ckv_os_sync(int fd)
{
    int result = -EINTR;
    while (result == -EINTR) {
        result = ckv_os.sync_file(fd);
    }
    return result;
}

int
ckv_os_lock_byte(int fd, uint64_t byte)
{
    int result = -EINTR;
    while (result == -EINTR) {
        result = ckv_os.lock_byte(fd, byte);
    }
    return result;
}

int
ckv_os_byte_held(int fd, uint64_t byte, uint64_t count)
{
    int result = -EINTR;
    while (result == -EINTR) {
        result = ckv_os.byte_held(fd, byte, count);
    }
    return result;
}

int
ckv_os_start_thread(pthread_t *thread, void *(*run)(void *argument), void *argument)
{
    sigset_t blocked;
    sigset_t before;
    (void)sigfillset(&blocked);         /* cannot fail: the set is valid */
    (void)sigdelset(&blocked, SIGBUS);  /* cannot fail: the signal is valid */
    (void)sigdelset(&blocked, SIGSEGV); /* likewise */
    int result = pthread_sigmask(SIG_SETMASK, &blocked, &before);
    if (result == 0) {
        result = pthread_create(thread, NULL, run, argument);
        /* Cannot fail: it was in force before. */
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    return -result;
}
