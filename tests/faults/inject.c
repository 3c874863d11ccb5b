/* SPDX-License-Identifier: Apache-2.0 */
#include "inject.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- the faults ------------------------------------------------------------------ */

#ifndef EHWPOISON
#define EHWPOISON 133
#endif

#define FAIL(call, code, reason) {CALL_##call, EFFECT_ERROR, code, 0, DUTY_NONE, reason}
#define SHRUG(call, code, reason)                                                      \
    {CALL_##call, EFFECT_ERROR, code, 0, DUTY_ABSORB, reason}
#define AGAIN(call, code, reason)                                                      \
    {CALL_##call, EFFECT_ERROR, code, 20, DUTY_ABSORB, reason}
#define SHORT(call, bytes, burst, reason)                                              \
    {CALL_##call, EFFECT_SHORT, bytes, burst, DUTY_ABSORB, reason}
#define END(call, reason) {CALL_##call, EFFECT_END, 0, 0, DUTY_NONE, reason}

/* Every call of the table with what the kernel or a file system may answer.  Errors
 * that only a bug of ours could bring about (EBADF, EINVAL for a negative length) are
 * left out. */
const struct fault faults[] = {
    AGAIN(open_file, EINTR, "a slow open, and a signal"),
    FAIL(open_file, EMFILE, "RLIMIT_NOFILE"),
    FAIL(open_file, ENFILE, "the table of the whole system is full"),
    FAIL(open_file, ENOMEM, "no kernel memory"),
    FAIL(open_file, ENOSPC, "no room for the directory entry"),
    FAIL(open_file, EDQUOT, "no quota for another inode"),
    FAIL(open_file, EACCES, "permissions, or a security module"),
    FAIL(open_file, EROFS, "remounted read-only after an error"),
    FAIL(open_file, EIO, "the directory cannot be read"),
    FAIL(open_file, ENOENT, "removed since it was looked at"),
    FAIL(open_file, EEXIST, "made since it was looked at"),
    FAIL(open_file, ELOOP, "a link since it was looked at"),
    FAIL(open_file, EINVAL, "O_DIRECT is not known here"),

    SHRUG(close_file, EINTR, "a signal; the descriptor is gone"),
    SHRUG(close_file, EIO, "a late error of write-back; the descriptor is gone"),
    SHRUG(close_file, ENOSPC, "a late error of delayed allocation; likewise"),

    FAIL(stat_file, EIO, "the inode cannot be read"),
    FAIL(stat_file, ENOMEM, "no kernel memory"),
    FAIL(stat_file, EOVERFLOW, "numbers that do not fit"),
    FAIL(stat_path, EIO, "the directory cannot be read"),
    FAIL(stat_path, EACCES, "permissions"),
    FAIL(stat_path, ENOENT, "removed meanwhile"),
    FAIL(stat_path, ENOMEM, "no kernel memory"),
    FAIL(lstat_path, EIO, "the directory cannot be read"),
    FAIL(lstat_path, EACCES, "permissions"),
    FAIL(lstat_path, ENOENT, "removed meanwhile"),
    FAIL(lstat_path, ENOMEM, "no kernel memory"),
    FAIL(file_system, EIO, "the super block cannot be read"),
    FAIL(file_system, ENOSYS, "a sandbox"),
    FAIL(file_system, ENOMEM, "no kernel memory"),
    FAIL(set_no_cow, EOPNOTSUPP, "btrfs, and the file is not empty"),
    FAIL(set_no_cow, EIO, "the inode cannot be written"),
    FAIL(set_no_cow, EPERM, "a security module"),
    AGAIN(truncate_file, EINTR, "a network file system, and a signal"),
    FAIL(truncate_file, EIO, "the medium"),
    FAIL(truncate_file, ENOSPC, "a copy-on-write file system that is full"),
    FAIL(truncate_file, EPERM, "sealed, or append only"),
    FAIL(truncate_file, EROFS, "remounted read-only after an error"),

    AGAIN(allocate, EINTR, "a signal in the middle of it"),
    FAIL(allocate, ENOSPC, "a full disk"),
    FAIL(allocate, EDQUOT, "a quota"),
    FAIL(allocate, EFBIG, "RLIMIT_FSIZE, or the file system"),
    SHRUG(allocate, EOPNOTSUPP, "a file system without the call: zeros are written"),
    FAIL(allocate, EIO, "the medium"),
    FAIL(allocate, ENOMEM, "tmpfs in a memory cgroup"),
    FAIL(allocate, EPERM, "sealed"),

    FAIL(unlink_path, EACCES, "the directory may not be written to"),
    FAIL(unlink_path, EBUSY, "a mount point"),
    FAIL(unlink_path, EIO, "the medium"),
    FAIL(unlink_path, EROFS, "remounted read-only after an error"),
    FAIL(unlink_path, ENOENT, "removed meanwhile"),
    FAIL(rename_path, EIO, "the medium"),
    SHRUG(change_owner, EPERM, "the group of another"),
    SHRUG(change_owner, EROFS, "remounted read-only after an error"),
    FAIL(change_mode, EPERM, "not ours"),
    FAIL(change_mode, EIO, "the medium"),
    FAIL(change_mode, EROFS, "remounted read-only after an error"),

    AGAIN(read_at, EINTR, "a signal before the first byte"),
    FAIL(read_at, EIO, "the medium"),
    FAIL(read_at, ENOMEM, "no page for the cache"),
    FAIL(read_at, EAGAIN, "a file system that answers so under load"),
    FAIL(read_at, EINVAL, "alignment of direct reads"),
    FAIL(read_at, EFAULT, "memory of the caller that went away"),
    FAIL(read_at, ENODATA, "a bad block of some drivers"),
    FAIL(read_at, EBADMSG, "ext4, xfs: a checksum of metadata"),
    END(read_at, "truncated by somebody"),
    SHORT(read_at, 1, 200, "a signal after the first byte"),
    SHORT(read_at, 511, 200, "in the middle of a sector"),
    SHORT(read_at, 4096, 0, "after a page"),
    SHORT(read_at, -1, 30, "all but a byte"),

    AGAIN(write_at, EINTR, "a signal before the first byte"),
    FAIL(write_at, EIO, "the medium"),
    FAIL(write_at, ENOSPC, "a full disk; also a file system's own records"),
    FAIL(write_at, EDQUOT, "a quota"),
    FAIL(write_at, EFBIG, "RLIMIT_FSIZE, SIGXFSZ being ignored"),
    FAIL(write_at, ENOMEM, "no page for the cache"),
    FAIL(write_at, EAGAIN, "a file system that answers so under load"),
    FAIL(write_at, EFAULT, "memory of the caller that went away"),
    FAIL(write_at, EROFS, "remounted read-only after an error"),
    FAIL(write_at, EPERM, "sealed, or a swap file"),
    END(write_at, "no progress and no reason"),
    SHORT(write_at, 1, 200, "a signal after the first byte"),
    SHORT(write_at, 511, 200, "in the middle of a sector"),
    SHORT(write_at, 4096, 0, "after a page"),
    SHORT(write_at, -1, 30, "all but a byte"),

    AGAIN(sync_file, EINTR, "a signal"),
    FAIL(sync_file, EIO, "write-back was lost"),
    FAIL(sync_file, ENOSPC, "delayed allocation on a full disk"),
    FAIL(sync_file, EDQUOT, "likewise, a quota"),
    FAIL(sync_file, EROFS, "remounted read-only after an error"),
    AGAIN(sync_range, EINTR, "a signal"),
    FAIL(sync_range, EIO, "write-back was lost"),
    FAIL(sync_range, ENOMEM, "not mapped any more"),
    FAIL(sync_range, EBUSY, "locked pages"),
    SHRUG(start_write_back, EIO, "advice; asked for afterwards"),
    SHRUG(start_write_back, ENOMEM, "advice"),
    SHRUG(start_write_back, ENOSPC, "advice; asked for afterwards"),
    SHRUG(start_write_back, ENOSYS, "a sandbox"),
    AGAIN(pending_error, EINTR, "a signal"),
    FAIL(pending_error, EIO, "write-back was lost"),
    FAIL(pending_error, ENOSPC, "write-back was lost for want of room"),
    FAIL(pending_error, ENOMEM, "no kernel memory"),
    SHRUG(pending_error, ENOSYS, "a sandbox"),
    SHRUG(advise_file, ENOMEM, "advice"),
    SHRUG(advise_file, EINVAL, "advice"),
    SHRUG(advise_file, EFAULT, "advice"),
    SHRUG(advise_file, EIO, "advice"),
    SHRUG(cached, ENOSYS, "before Linux 6.5"),
    SHRUG(cached, EOPNOTSUPP, "a file system without page cache"),
    SHRUG(cached, EPERM, "since Linux 6.14: neither owner nor writer"),

    AGAIN(lock_byte, EINTR, "a signal"),
    {CALL_lock_byte, EFFECT_ERROR, EAGAIN, 0, DUTY_ABSORB_ONCE,
        "another holds it for a moment"},
    FAIL(lock_byte, ENOLCK, "the table of locks is full"),
    FAIL(lock_byte, EINVAL, "a file system or kernel without such locks"),
    FAIL(lock_byte, EIO, "a network file system"),
    FAIL(unlock_byte, ENOLCK, "to split a lock takes memory"),
    FAIL(byte_held, ENOLCK, "the table of locks is full"),
    FAIL(byte_held, EINVAL, "a file system or kernel without such locks"),
    FAIL(byte_held, EIO, "a network file system"),
    AGAIN(byte_held, EINTR, "a network file system, and a signal"),

    FAIL(map, ENOMEM, "RLIMIT_AS, or too many mappings"),
    FAIL(map, EAGAIN, "RLIMIT_MEMLOCK under MCL_FUTURE"),
    FAIL(map, ENODEV, "a file system without mappings"),
    FAIL(map, EPERM, "noexec, sealed, a security module"),
    FAIL(map, EACCES, "a security module"),
    FAIL(map, ENFILE, "the system's limit"),
    SHRUG(unmap, ENOMEM, "too many mappings to split one"),
    SHRUG(unmap, EINVAL, "nobody can do anything about it"),
    FAIL(populate_read, EFAULT, "the device does not deliver a page"),
    FAIL(populate_read, EHWPOISON, "memory that has failed"),
    FAIL(populate_read, EIO, "the medium"),
    FAIL(populate_read, ENOMEM, "no page"),
    FAIL(populate_read, EAGAIN, "advice, under load"),
    SHRUG(populate_read, EINVAL, "before Linux 5.14"),
    SHRUG(populate_write, ENOMEM, "advice"),
    SHRUG(populate_write, EINVAL, "before Linux 5.14"),
    SHRUG(populate_write, EFAULT, "advice"),
    SHRUG(drop_pages, EINVAL, "locked pages"),
    SHRUG(drop_pages, ENOMEM, "advice"),
    SHRUG(make_huge, EINVAL, "a kernel without huge pages"),
    SHRUG(make_huge, ENOMEM, "no huge page to be had"),
    SHRUG(make_huge, EAGAIN, "no huge page at the moment"),
    SHRUG(large_faults, EINVAL, "a kernel without huge pages"),
    SHRUG(large_faults, ENOMEM, "too many mappings to split one"),
    FAIL(dont_fork, ENOMEM, "too many mappings to split one"),
    FAIL(dont_fork, EINVAL, "a sandbox"),
    SHRUG(wipe_on_fork, EINVAL, "before Linux 4.14"),
    SHRUG(wipe_on_fork, ENOMEM, "too many mappings to split one"),
    SHRUG(lock_memory, ENOMEM, "RLIMIT_MEMLOCK"),
    SHRUG(lock_memory, EPERM, "RLIMIT_MEMLOCK is 0"),
    SHRUG(lock_memory, EAGAIN, "some pages could not be locked"),
    SHRUG(file_size_limit, EPERM, "a sandbox"),
    FAIL(random_bytes, ENOSYS, "a sandbox"),
    FAIL(random_bytes, EAGAIN, "early in boot"),
    AGAIN(resolve_path, EINTR, "a slow directory, and a signal"),
    FAIL(resolve_path, ENOENT, "removed meanwhile"),
    FAIL(resolve_path, EACCES, "permissions"),
    FAIL(resolve_path, ENOMEM, "no memory for the answer"),
    FAIL(resolve_path, EIO, "a directory cannot be read"),
    FAIL(resolve_path, ELOOP, "links in a circle"),

    FAIL(malloc, ENOMEM, "RLIMIT_AS, overcommit"),
    FAIL(calloc, ENOMEM, "likewise"),
    FAIL(strdup, ENOMEM, "likewise"),
    SHRUG(aligned_alloc, ENOMEM, "likewise; a buffer on the stack will do"),
    FAIL(pthread_create, EAGAIN, "RLIMIT_NPROC, pids.max, no stack"),
    SHRUG(pthread_key_create, EAGAIN, "all keys are taken; likewise"),
    SHRUG(pthread_setspecific, ENOMEM, "no memory for another key; likewise"),
    FAIL(pthread_atfork, ENOMEM, "no memory for a handler"),
};
const size_t fault_count = CKV_ARRAY_LENGTH(faults);

const char *
call_name(enum call call)
{
    static const char *const names[] = {
#define X(name) #name,
        TABLE_CALLS(X) LIBRARY_CALLS(X)
#undef X
    };
    return names[call];
}

const char *
fault_text(const struct fault *fault)
{
    static char text[80];
    if (fault->call == CALLS) {
        (void)snprintf(text, sizeof text, "none");
    } else if (fault->effect == EFFECT_ERROR) {
        (void)snprintf(text, sizeof text, "%s %s", call_name(fault->call),
            strerrorname_np(fault->value));
    } else if (fault->effect == EFFECT_SHORT) {
        (void)snprintf(text, sizeof text, "%s short%+d", call_name(fault->call),
            fault->value);
    } else {
        (void)snprintf(text, sizeof text, "%s end", call_name(fault->call));
    }
    return text;
}

/* ---- arming ---------------------------------------------------------------------- */

static ckv_atomic_u64 armed; /* const struct fault *, or 0 */
static unsigned long armed_nth;
static bool armed_persistent;
static struct counts { /* shared with children */
    ckv_atomic_u64 calls[CALLS];
    ckv_atomic_u64 fired;
} *counts;

void
inject_arm(const struct fault *fault, unsigned long nth, bool persistent)
{
    for (int i = 0; i < CALLS; i++) {
        ckv_store_relaxed_u64(&counts->calls[i], 0);
    }
    ckv_store_relaxed_u64(&counts->fired, 0);
    armed_nth = nth;
    armed_persistent = persistent;
    ckv_store_ordered_u64(&armed, (uint64_t)(uintptr_t)fault);
}

unsigned long
inject_fired(void)
{
    return ckv_load_ordered_u64(&counts->fired);
}

unsigned long
inject_disarm(void)
{
    ckv_store_ordered_u64(&armed, 0);
    return inject_fired();
}

unsigned long
inject_calls(enum call call)
{
    return counts == NULL ? ULONG_MAX : ckv_load_relaxed_u64(&counts->calls[call]);
}

/* Counts the call; the fault if this is the one that fails. */
static const struct fault *
strike(enum call call)
{
    if (counts == NULL) {
        return NULL; /* before inject_begin() */
    }
    const uint64_t number = ckv_add_ordered_u64(&counts->calls[call], 1) + 1;
    const struct fault *fault =
        (const struct fault *)(uintptr_t)ckv_load_ordered_u64(&armed);
    if (fault == NULL || fault->call != call || number < armed_nth ||
        (number > armed_nth && !armed_persistent) ||
        (fault->burst != 0 && number >= armed_nth + (unsigned long)fault->burst)) {
        return NULL;
    }
    ckv_add_ordered_u64(&counts->fired, 1);
    return fault;
}

struct pretence pretend;

/* ---- books: allocations ---------------------------------------------------------- */

/* A slot per allocation in use.  Few at a time: a scan is quick. */
enum { ALLOCATIONS_MAX = 4096 };
static struct {
    void *pointer;
    void *caller;
    unsigned long serial;
} in_use[ALLOCATIONS_MAX];
static pthread_mutex_t in_use_lock = PTHREAD_MUTEX_INITIALIZER;
static size_t in_use_end;
static long allocations;
static unsigned long serial;

static void *
note_made(void *pointer, void *caller)
{
    if (pointer == NULL) {
        return NULL;
    }
    (void)pthread_mutex_lock(&in_use_lock);
    size_t at = 0;
    while (at < ALLOCATIONS_MAX && in_use[at].pointer != NULL) {
        at++;
    }
    if (at == ALLOCATIONS_MAX) {
        fprintf(stderr, "more than %d allocations in use\n", ALLOCATIONS_MAX);
        abort();
    }
    in_use[at].pointer = pointer;
    in_use[at].caller = caller;
    in_use[at].serial = ++serial;
    in_use_end = at + 1 > in_use_end ? at + 1 : in_use_end;
    allocations++;
    (void)pthread_mutex_unlock(&in_use_lock);
    return pointer;
}

static void
note_freed(const void *pointer)
{
    (void)pthread_mutex_lock(&in_use_lock);
    for (size_t at = 0; at < in_use_end; at++) {
        if (in_use[at].pointer == pointer) {
            in_use[at].pointer = NULL;
            allocations--;
            break;
        }
    }
    (void)pthread_mutex_unlock(&in_use_lock);
}

unsigned long
inject_serial(void)
{
    return serial;
}

void *
inject_leaked(unsigned long serial_before)
{
    void *caller = NULL;
    (void)pthread_mutex_lock(&in_use_lock);
    for (size_t at = 0; at < in_use_end; at++) {
        if (in_use[at].pointer != NULL && in_use[at].serial > serial_before) {
            caller = in_use[at].caller;
        }
    }
    (void)pthread_mutex_unlock(&in_use_lock);
    return caller;
}

/* ---- functions of the C library (ld --wrap) -------------------------------------- */

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
char *__real_strdup(const char *text);
void __real_free(void *pointer);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
    void *(*run)(void *), void *argument);
int __real_pthread_key_create(pthread_key_t *key, void (*destroy)(void *));
int __real_pthread_setspecific(pthread_key_t key, const void *value);
int __real_pthread_atfork(void (*before)(void), void (*parent)(void),
    void (*child)(void));
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
char *__wrap_strdup(const char *text);
void __wrap_free(void *pointer);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
    void *(*run)(void *), void *argument);
int __wrap_pthread_key_create(pthread_key_t *key, void (*destroy)(void *));
int __wrap_pthread_setspecific(pthread_key_t key, const void *value);
int __wrap_pthread_atfork(void (*before)(void), void (*parent)(void),
    void (*child)(void));

#define CALLER __builtin_return_address(0)

static bool
refuse(enum call call)
{
    const struct fault *fault = strike(call);
    if (fault != NULL) {
        errno = fault->value;
    }
    return fault != NULL;
}

void *
__wrap_malloc(size_t size)
{
    return refuse(CALL_malloc) ? NULL : note_made(__real_malloc(size), CALLER);
}

void *
__wrap_calloc(size_t count, size_t size)
{
    return refuse(CALL_calloc) ? NULL : note_made(__real_calloc(count, size), CALLER);
}

void *
__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return refuse(CALL_aligned_alloc)
               ? NULL
               : note_made(__real_aligned_alloc(alignment, size), CALLER);
}

char *
__wrap_strdup(const char *text)
{
    return refuse(CALL_strdup) ? NULL : note_made(__real_strdup(text), CALLER);
}

void
__wrap_free(void *pointer)
{
    if (pointer != NULL) {
        note_freed(pointer);
    }
    __real_free(pointer);
}

int
__wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
    void *(*run)(void *), void *argument)
{
    const struct fault *fault = strike(CALL_pthread_create);
    return fault != NULL ? fault->value
                         : __real_pthread_create(thread, attributes, run, argument);
}

int
__wrap_pthread_key_create(pthread_key_t *key, void (*destroy)(void *))
{
    const struct fault *fault = strike(CALL_pthread_key_create);
    return fault != NULL ? fault->value : __real_pthread_key_create(key, destroy);
}

int
__wrap_pthread_setspecific(pthread_key_t key, const void *value)
{
    const struct fault *fault = strike(CALL_pthread_setspecific);
    return fault != NULL ? fault->value : __real_pthread_setspecific(key, value);
}

int
__wrap_pthread_atfork(void (*before)(void), void (*parent)(void), void (*child)(void))
{
    const struct fault *fault = strike(CALL_pthread_atfork);
    return fault != NULL ? fault->value : __real_pthread_atfork(before, parent, child);
}

/* ---- books: descriptors, mappings, written pages --------------------------------- */

static ckv_atomic_u64 descriptors;
static ckv_atomic_u64 mapped_bytes;

struct books
inject_books(void)
{
    (void)pthread_mutex_lock(&in_use_lock);
    const struct books books = {
        .descriptors = (long)ckv_load_ordered_u64(&descriptors),
        .mapped_bytes = (long)ckv_load_ordered_u64(&mapped_bytes),
        .allocations = allocations,
    };
    (void)pthread_mutex_unlock(&in_use_lock);
    return books;
}

struct watched *watched;

enum { DESCRIPTORS_MAX = 1024 };
static ckv_atomic_u8 file_of_descriptor[DESCRIPTORS_MAX]; /* index + 1, 0 for another */

static uint8_t
watched_number(const char *path)
{
    int fd = -1;
    if (sscanf(path, "/proc/self/fd/%d", &fd) == 1) {
        return fd >= 0 && fd < DESCRIPTORS_MAX
                   ? ckv_load_relaxed_u8(&file_of_descriptor[fd])
                   : 0;
    }
    for (uint8_t i = 0; i < WATCHED_FILES; i++) {
        if (watched[i].path[0] != '\0' && strcmp(watched[i].path, path) == 0) {
            return (uint8_t)(i + 1);
        }
    }
    return 0;
}

static void
note_written(int fd, uint64_t offset, uint64_t length)
{
    const uint8_t number =
        fd < DESCRIPTORS_MAX ? ckv_load_relaxed_u8(&file_of_descriptor[fd]) : 0;
    if (number == 0 || length == 0) {
        return;
    }
    struct watched *file = &watched[number - 1];
    for (uint64_t page = offset / CKV_PAGE_BYTES;
        page <= (offset + length - 1) / CKV_PAGE_BYTES; page++) {
        if (page < WATCHED_PAGES) {
            file->dirty[page] = 1;
        } else {
            file->replaced = true;
        }
    }
}

static void
note_replaced(int fd)
{
    const uint8_t number =
        fd < DESCRIPTORS_MAX ? ckv_load_relaxed_u8(&file_of_descriptor[fd]) : 0;
    if (number != 0) {
        watched[number - 1].replaced = true;
    }
}

/* ---- members of the table -------------------------------------------------------- */

#define FAULTED(call)                                                                  \
    const struct fault *fault = strike(CALL_##call);                                   \
    if (fault != NULL) {                                                               \
        return -fault->value;                                                          \
    }

#define PLAIN(call, parameters, arguments)                                             \
    static int fake_##call parameters                                                  \
    {                                                                                  \
        FAULTED(call)                                                                  \
        return ckv_os_native.call arguments;                                           \
    }

PLAIN(stat_file, (int fd, struct stat *result), (fd, result))
PLAIN(stat_path, (const char *path, struct stat *result), (path, result))
PLAIN(lstat_path, (const char *path, struct stat *result), (path, result))
PLAIN(set_no_cow, (int fd), (fd))
PLAIN(change_mode, (int fd, mode_t mode), (fd, mode))
PLAIN(change_owner, (int fd, uint32_t user, uint32_t group), (fd, user, group))
PLAIN(sync_file, (int fd), (fd))
PLAIN(sync_range, (int fd, void *mapped, uint64_t offset, uint64_t length),
    (fd, mapped, offset, length))
PLAIN(start_write_back, (int fd, uint64_t offset, uint64_t length),
    (fd, offset, length))
PLAIN(pending_error, (int fd, uint64_t offset, uint64_t length), (fd, offset, length))
PLAIN(advise_file, (int fd, uint64_t offset, uint64_t length, enum ckv_advice advice),
    (fd, offset, length, advice))
PLAIN(lock_byte, (int fd, uint64_t byte), (fd, byte))
PLAIN(unlock_byte, (int fd, uint64_t byte), (fd, byte))
PLAIN(byte_held, (int fd, uint64_t byte, uint64_t count), (fd, byte, count))
PLAIN(populate_read, (void *address, size_t length), (address, length))
PLAIN(populate_write, (void *address, size_t length), (address, length))
PLAIN(drop_pages, (void *address, size_t length), (address, length))
PLAIN(large_faults, (void *address, size_t length), (address, length))
PLAIN(dont_fork, (void *address, size_t length), (address, length))
PLAIN(wipe_on_fork, (void *address, size_t length), (address, length))
PLAIN(lock_memory, (void *address, size_t length), (address, length))
PLAIN(file_size_limit, (uint64_t *limit_bytes), (limit_bytes))
PLAIN(random_bytes, (void *target, size_t length), (target, length))

/* To collapse pages takes a millisecond, and a machine without any would not show
 * more. */
static int
fake_make_huge(void *address, size_t length)
{
    FAULTED(make_huge)
    (void)address;
    (void)length;
    return 0;
}

static int
fake_open_file(const char *path, int flags, mode_t mode)
{
    FAULTED(open_file)
    const uint8_t number = watched_number(path);
    const int fd = ckv_os_native.open_file(path, flags, mode);
    if (fd >= 0) {
        ckv_add_ordered_u64(&descriptors, 1);
        if (fd < DESCRIPTORS_MAX) {
            ckv_store_relaxed_u8(&file_of_descriptor[fd], number);
        }
        if ((flags & O_CREAT) != 0) {
            note_replaced(fd);
        }
    }
    return fd;
}

static int
fake_close_file(int fd)
{
    const struct fault *fault = strike(CALL_close_file);
    if (fd >= 0 && fd < DESCRIPTORS_MAX) {
        ckv_store_relaxed_u8(&file_of_descriptor[fd], 0);
    }
    const int result = ckv_os_native.close_file(fd); /* J2 */
    if (result == 0) {
        ckv_add_ordered_u64(&descriptors, (uint64_t)-1);
    } else {
        fprintf(stderr, "a descriptor that is not open was closed: %d\n", fd);
        abort();
    }
    return fault != NULL ? -fault->value : result;
}

static int
fake_file_system(int fd, struct ckv_file_system *result)
{
    FAULTED(file_system)
    const int code = ckv_os_native.file_system(fd, result);
    if (code == 0 && pretend.local_disk) {
        result->kind = CKV_FS_LOCAL;
        memcpy(result->name, "ext4", 5);
    }
    return code;
}

static int
fake_truncate_file(int fd, uint64_t length)
{
    FAULTED(truncate_file)
    note_replaced(fd);
    return ckv_os_native.truncate_file(fd, length);
}

static int
fake_allocate(int fd, uint64_t offset, uint64_t length)
{
    FAULTED(allocate)
    return ckv_os_native.allocate(fd, offset, length);
}

static int
fake_unlink_path(const char *path)
{
    FAULTED(unlink_path)
    const uint8_t number = watched_number(path);
    if (number != 0) {
        watched[number - 1].replaced = true;
    }
    return ckv_os_native.unlink_path(path);
}

static int
fake_rename_path(const char *from, const char *to)
{
    FAULTED(rename_path)
    return ckv_os_native.rename_path(from, to);
}

/* At most `limit` bytes of the array. */
static ssize_t
transfer(ssize_t (*native)(int, const struct iovec *, int, uint64_t), int fd,
    const struct iovec *iov, int count, uint64_t offset, size_t limit)
{
    enum { VECTORS = 128 };
    struct iovec some[VECTORS];
    int used = 0;
    for (; used < count && used < VECTORS && limit > 0; used++) {
        some[used] = iov[used];
        if (some[used].iov_len > limit) {
            some[used].iov_len = limit;
        }
        limit -= some[used].iov_len;
    }
    return native(fd, some, used, offset);
}

static ssize_t
struck_transfer(const struct fault *fault,
    ssize_t (*native)(int, const struct iovec *, int, uint64_t), int fd,
    const struct iovec *iov, int count, uint64_t offset)
{
    if (fault->effect == EFFECT_ERROR) {
        return -fault->value;
    }
    if (fault->effect == EFFECT_END) {
        return 0;
    }
    size_t length = 0;
    for (int i = 0; i < count; i++) {
        length += iov[i].iov_len;
    }
    const size_t fewer = (size_t)(fault->value < 0 ? -fault->value : 0);
    size_t limit = fault->value > 0 ? (size_t)fault->value
                   : length > fewer ? length - fewer
                                    : length;
    return transfer(native, fd, iov, count, offset, limit < length ? limit : length);
}

static ssize_t
fake_read_at(int fd, const struct iovec *iov, int count, uint64_t offset)
{
    const struct fault *fault = strike(CALL_read_at);
    return fault != NULL
               ? struck_transfer(fault, ckv_os_native.read_at, fd, iov, count, offset)
               : ckv_os_native.read_at(fd, iov, count, offset);
}

static ssize_t
fake_write_at(int fd, const struct iovec *iov, int count, uint64_t offset)
{
    const struct fault *fault = strike(CALL_write_at);
    const ssize_t result =
        fault != NULL
            ? struck_transfer(fault, ckv_os_native.write_at, fd, iov, count, offset)
            : ckv_os_native.write_at(fd, iov, count, offset);
    if (result > 0) {
        note_written(fd, offset, (uint64_t)result);
    }
    return result;
}

static int
fake_cached(int fd, uint64_t offset, uint64_t length, struct ckv_cached *result)
{
    FAULTED(cached)
    const int code = ckv_os_native.cached(fd, offset, length, result);
    if (code == 0 && pretend.cold) {
        *result = (struct ckv_cached){0};
    }
    return code;
}

static int
fake_map(void *hint, size_t length, int protection, int flags, int fd, uint64_t offset,
    void **result)
{
    const struct fault *fault = strike(CALL_map);
    if (fault != NULL) {
        *result = NULL;
        return -fault->value;
    }
    const int code =
        ckv_os_native.map(hint, length, protection, flags, fd, offset, result);
    if (code == 0 && (flags & MAP_FIXED) == 0) {
        ckv_add_ordered_u64(&mapped_bytes, ckv_align_up(length, CKV_PAGE_BYTES));
    }
    return code;
}

static int
fake_unmap(void *address, size_t length)
{
    const struct fault *fault = strike(CALL_unmap);
    const int result = ckv_os_native.unmap(address, length); /* J2 */
    if (result == 0) {
        ckv_add_ordered_u64(&mapped_bytes,
            (uint64_t)-ckv_align_up(length, CKV_PAGE_BYTES));
    }
    return fault != NULL ? -fault->value : result;
}

static int
fake_resolve_path(const char *path, char **resolved)
{
    FAULTED(resolve_path)
    const int result = ckv_os_native.resolve_path(path, resolved);
    if (result == 0) {
        (void)note_made(*resolved, CALLER); /* by the C library, freed by the engine */
    }
    return result;
}

/* ---- time (J3) ------------------------------------------------------------------- */

static ckv_atomic_u64 slept_ns;
static _Thread_local bool is_driver;

void
inject_is_driver(void)
{
    is_driver = true;
}

static uint64_t
fake_monotonic_ns(void)
{
    const uint64_t now_ns =
        ckv_os_native.monotonic_ns() + ckv_load_relaxed_u64(&slept_ns);
    /* The maintenance thread waits until a second after what it reads here. */
    return pretend.hasten && !is_driver
               ? ckv_os_native.monotonic_ns() - UINT64_C(996000000)
               : now_ns;
}

static uint64_t
fake_realtime_ns(void)
{
    return ckv_os_native.realtime_ns() +
           ckv_load_relaxed_u64(&pretend.realtime_shift_ns);
}

static void
fake_sleep_ns(uint64_t duration_ns)
{
    ckv_add_relaxed_u64(&slept_ns, duration_ns);
}

static void *
map_shared(size_t bytes)
{
    void *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("map shared memory");
        exit(2);
    }
    return memory;
}

void
inject_watch(void)
{
    watched = map_shared(sizeof *watched * WATCHED_FILES);
}

void
inject_begin(void)
{
    counts = map_shared(sizeof *counts);
#define X(name) ckv_os.name = fake_##name;
    TABLE_CALLS(X)
#undef X
    ckv_os.monotonic_ns = fake_monotonic_ns;
    ckv_os.realtime_ns = fake_realtime_ns;
    ckv_os.sleep_ns = fake_sleep_ns;
}
