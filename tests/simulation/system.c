/* SPDX-License-Identifier: Apache-2.0 */
/* system.c: the kernel as simulated processes see it.
 *
 * Files, mappings and byte locks are those of the real kernel: locks belong to open file
 * descriptions, and those of two simulated processes are different ones.  What is ours:
 *
 *   K1  Clocks, sleep, process ids and random numbers come from the scheduler.
 *   K2  Every mapping and descriptor is noted with its process, and taken away when that
 *       process is killed.
 *   K3  Others may run before each page that a read or write call moves, and between the
 *       parts of a short write within a page.  Two writes of one file exclude each other,
 *       as they do in the kernel.  A kill leaves whole pages; a stop waits for the end of
 *       the call.
 *   K4  Nothing fails.  Calls may be short.
 */
#include "simulation.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { DESCRIPTORS_MAX = 4096, MAPPINGS_MAX = 4096, FILES_MAX = 64, PAGE = 4096 };

struct descriptor {
    struct process *process; /* NULL: not ours */
    ino_t inode;
    uint32_t path; /* number of the volume file, or PATHS_MAX */
};

struct mapping {
    struct process *process;
    void *address;
    size_t length;
};

struct inode { /* who writes a file now */
    ino_t inode;
    const struct task *writer;
};

static const struct ckv_os *native;
static struct descriptor descriptors[DESCRIPTORS_MAX];
static struct mapping mappings[MAPPINGS_MAX];
static uint32_t mapping_count;
static struct inode inodes[FILES_MAX];
static bool cold; /* nothing is in the page cache, as far as cached() says */

static void
begin_call(void)
{
    yield_at_access();
    if (current != NULL) {
        current->system_calls++;
    }
}

static void
end_call(void)
{
    if (current != NULL) {
        current->system_calls--;
    }
}

/* ---- files ------------------------------------------------------------------------ */

static uint32_t
path_of(const char *path)
{
    for (uint32_t i = 0; i < path_count(); i++) {
        if (strcmp(path, path_name(i)) == 0) {
            return i;
        }
    }
    return PATHS_MAX;
}

static int
simulated_open_file(const char *path, int flags, mode_t mode)
{
    begin_call();
    const int fd = native->open_file(path, flags & ~O_DIRECT, mode);
    if (fd >= DESCRIPTORS_MAX) {
        finding("descriptor %d is more than the simulation has room for", fd);
    }
    if (fd >= 0 && current != NULL) {
        struct stat facts;
        (void)fstat(fd, &facts);
        descriptors[fd] = (struct descriptor){.process = current->process,
            .inode = facts.st_ino,
            .path = path_of(path)};
        /* An fd of the kernel's own links is the file that it was made from. */
        for (int i = 0; descriptors[fd].path == PATHS_MAX && i < DESCRIPTORS_MAX; i++) {
            if (descriptors[i].process != NULL && i != fd &&
                descriptors[i].inode == facts.st_ino) {
                descriptors[fd].path = descriptors[i].path;
            }
        }
    }
    end_call();
    return fd;
}

static int
simulated_close_file(int fd)
{
    begin_call();
    if (fd >= 0 && fd < DESCRIPTORS_MAX) {
        if (current != NULL && descriptors[fd].process != current->process) {
            finding("descriptor %d is closed and not open", fd);
        }
        descriptors[fd].process = NULL;
    }
    const int result = native->close_file(fd);
    end_call();
    return result;
}

/* A file never has holes that matter here, and tmpfs would clear all of it. */
static int
simulated_allocate(int fd, uint64_t offset, uint64_t length)
{
    struct stat facts;
    begin_call();
    int result = native->stat_file(fd, &facts);
    if (result == 0 && (uint64_t)facts.st_size < offset + length) {
        result = native->truncate_file(fd, offset + length);
    }
    end_call();
    return result;
}

/* As if all of it were allocated. */
static int
simulated_stat_file(int fd, struct stat *result)
{
    begin_call();
    const int answer = native->stat_file(fd, result);
    result->st_blocks = (result->st_size + 511) / 512;
    end_call();
    return answer;
}

static int
simulated_truncate_file(int fd, uint64_t length)
{
    begin_call();
    const int result = native->truncate_file(fd, length);
    end_call();
    return result;
}

static int
simulated_unlink_path(const char *path)
{
    begin_call();
    const int result = native->unlink_path(path);
    end_call();
    return result;
}

static int
simulated_rename_path(const char *from, const char *to)
{
    begin_call();
    const int result = native->rename_path(from, to);
    end_call();
    return result;
}

static int
simulated_stat_path(const char *path, struct stat *result)
{
    begin_call();
    const int answer = native->stat_path(path, result);
    end_call();
    return answer;
}

static int
simulated_lstat_path(const char *path, struct stat *result)
{
    begin_call();
    const int answer = native->lstat_path(path, result);
    end_call();
    return answer;
}

/* A disk, so that reads may go around the page cache; O_DIRECT itself is left out. */
static int
simulated_file_system(int fd, struct ckv_file_system *result)
{
    const int answer = native->file_system(fd, result);
    result->kind = CKV_FS_LOCAL;
    return answer;
}

/* ---- reading and writing ---------------------------------------------------------- */

/* How many bytes go in the next step: to the end of the page; large writes, which lay
 * out files, in larger steps. */
static size_t
step_bytes(size_t left, uint64_t offset, size_t total)
{
    const size_t unit = total > 16 * PAGE ? 16 * (size_t)PAGE : PAGE;
    const size_t step = unit - (size_t)(offset % unit);
    return step < left ? step : left;
}

static ssize_t
move(int fd, const struct iovec *iov, int count, uint64_t offset, bool writes)
{
    size_t total = 0;
    for (int i = 0; i < count; i++) {
        total += iov[i].iov_len;
    }
    const bool small = writes && total < 256;
    const bool is_short = chance(1, 100);
    size_t done = 0;
    for (int i = 0; i < count; i++) {
        for (size_t at = 0; at < iov[i].iov_len;) {
            size_t step = step_bytes(iov[i].iov_len - at, offset + done, total);
            if (small && step > 1 && chance(1, 4)) {
                step = 1 + draw(step - 1);
            }
            void *bytes = (char *)iov[i].iov_base + at;
            const ssize_t moved = writes
                                      ? pwrite(fd, bytes, step, (off_t)(offset + done))
                                      : pread(fd, bytes, step, (off_t)(offset + done));
            if (moved <= 0) {
                return done > 0 ? (ssize_t)done : moved < 0 ? -errno : 0;
            }
            done += (size_t)moved;
            at += (size_t)moved;
            if (current != NULL && done < total) {
                current->in_page = writes && (offset + done) % PAGE != 0;
                if (is_short && !current->in_page) {
                    return (ssize_t)done;
                }
                yield_at_access();
            }
        }
    }
    return (ssize_t)done;
}

static struct inode *
inode_of(int fd)
{
    struct inode *fresh = NULL;
    for (int i = 0; i < FILES_MAX; i++) {
        if (inodes[i].inode == descriptors[fd].inode) {
            return &inodes[i];
        }
        if (fresh == NULL && inodes[i].inode == 0) {
            fresh = &inodes[i];
        }
    }
    if (fresh == NULL) {
        finding("too many files for the simulation");
    }
    fresh->inode = descriptors[fd].inode;
    return fresh;
}

static ssize_t
simulated_read_at(int fd, const struct iovec *iov, int count, uint64_t offset)
{
    begin_call();
    const ssize_t result = move(fd, iov, count, offset, false);
    end_call();
    return result;
}

static ssize_t
simulated_write_at(int fd, const struct iovec *iov, int count, uint64_t offset)
{
    begin_call();
    if (current == NULL || descriptors[fd].process != current->process) {
        finding("descriptor %d is written to and not open", fd);
    }
    struct inode *inode = inode_of(fd);
    while (inode->writer != NULL) {
        (void)wait_for(inode, NEVER, false);
    }
    inode->writer = current;
    size_t total = 0;
    for (int i = 0; i < count; i++) {
        total += iov[i].iov_len;
    }
    if (descriptors[fd].path < PATHS_MAX) {
        oracle_writes(descriptors[fd].path, offset, total);
    }
    const ssize_t result = move(fd, iov, count, offset, true);
    current->in_page = false;
    inode->writer = NULL;
    wake(inode, true);
    end_call();
    yield_at_access();
    return result;
}

static int
simulated_sync_file(int fd)
{
    (void)fd;
    begin_call();
    yield_at_access();
    end_call();
    return 0;
}

static int
nothing_on_range(int fd, uint64_t offset, uint64_t length)
{
    (void)fd;
    (void)offset;
    (void)length;
    begin_call();
    end_call();
    return 0;
}

static int
simulated_advise_file(int fd, uint64_t offset, uint64_t length, enum ckv_advice advice)
{
    (void)advice;
    return nothing_on_range(fd, offset, length);
}

static int
simulated_cached(int fd, uint64_t offset, uint64_t length, struct ckv_cached *result)
{
    (void)fd;
    (void)offset;
    begin_call();
    *result = (struct ckv_cached){.pages = cold ? 0 : (length + PAGE - 1) / PAGE};
    end_call();
    return 0;
}

/* ---- locks ------------------------------------------------------------------------ */

static int
simulated_lock_byte(int fd, uint64_t byte)
{
    begin_call();
    const int result = native->lock_byte(fd, byte);
    end_call();
    return result;
}

static int
simulated_unlock_byte(int fd, uint64_t byte)
{
    begin_call();
    const int result = native->unlock_byte(fd, byte);
    end_call();
    return result;
}

static int
simulated_byte_held(int fd, uint64_t byte, uint64_t count)
{
    begin_call();
    const int result = native->byte_held(fd, byte, count);
    end_call();
    return result;
}

/* ---- memory ----------------------------------------------------------------------- */

static void
note_mapping(struct process *process, void *address, size_t length)
{
    uint32_t i = 0;
    while (i < mapping_count && mappings[i].process != NULL) {
        i++;
    }
    if (i == MAPPINGS_MAX) {
        finding("too many mappings for the simulation");
    }
    mapping_count = i == mapping_count ? i + 1 : mapping_count;
    mappings[i] =
        (struct mapping){.process = process, .address = address, .length = length};
}

/* A range is given back, or mapped anew: what lies before and behind it stays. */
static void
forget_mapping(void *address, size_t length)
{
    char *from = address;
    char *to = from + length;
    for (uint32_t i = 0; i < mapping_count; i++) {
        const struct mapping old = mappings[i];
        char *begin = old.address;
        char *end = begin + old.length;
        if (old.process == NULL || to <= begin || from >= end) {
            continue;
        }
        if (current != NULL && old.process != current->process) {
            finding("a mapping of process %u is given back", old.process->number);
        }
        mappings[i].process = NULL;
        if (from > begin) {
            note_mapping(old.process, begin, (size_t)(from - begin));
        }
        if (to < end) {
            note_mapping(old.process, to, (size_t)(end - to));
        }
    }
}

static int
simulated_map(void *hint, size_t length, int protection, int flags, int fd,
    uint64_t offset, void **result)
{
    begin_call();
    const int answer = native->map(hint, length, protection, flags, fd, offset, result);
    if (answer == 0 && current != NULL) {
        if ((flags & MAP_FIXED) != 0) {
            forget_mapping(*result, (length + PAGE - 1) / PAGE * PAGE);
        }
        note_mapping(current->process, *result, (length + PAGE - 1) / PAGE * PAGE);
    }
    end_call();
    return answer;
}

static int
simulated_unmap(void *address, size_t length)
{
    begin_call();
    forget_mapping(address, (length + PAGE - 1) / PAGE * PAGE);
    const int result = native->unmap(address, length);
    end_call();
    return result;
}

static int
nothing_on_memory(void *address, size_t length)
{
    (void)address;
    (void)length;
    begin_call();
    end_call();
    return 0;
}

void
system_take_away(struct process *process)
{
    for (uint32_t i = 0; i < mapping_count; i++) {
        if (mappings[i].process == process) {
            (void)munmap(mappings[i].address, mappings[i].length);
            mappings[i].process = NULL;
        }
    }
    for (int fd = 0; fd < DESCRIPTORS_MAX; fd++) {
        if (descriptors[fd].process == process) {
            (void)close(fd);
            descriptors[fd].process = NULL;
        }
    }
    for (int i = 0; i < FILES_MAX; i++) {
        if (inodes[i].writer != NULL && inodes[i].writer->process == process) {
            inodes[i].writer = NULL;
            wake(&inodes[i], true);
        }
    }
}

/* ---- time and the rest ------------------------------------------------------------ */

static uint64_t
simulated_monotonic_ns(void)
{
    now_ns += 20;
    return now_ns;
}

static uint64_t
simulated_realtime_ns(void)
{
    return now_ns + UINT64_C(1700000000) * NS_PER_SECOND;
}

static int
simulated_random_bytes(void *target, size_t length)
{
    uint8_t *bytes = target;
    for (size_t i = 0; i < length; i++) {
        bytes[i] = (uint8_t)draw(256);
    }
    return 0;
}

static int64_t
simulated_process_id(void)
{
    return current->process->process_id;
}

static const char *
simulated_program_name(void)
{
    return "simulated";
}

void
system_begin(void)
{
    cold = chance(1, 4);
}

void
system_equip(const struct engine *engine)
{
    if (native == NULL) {
        static struct ckv_os kept;
        kept = *engine->os;
        native = &kept;
    }
    struct ckv_os *os = engine->os;
    os->open_file = simulated_open_file;
    os->close_file = simulated_close_file;
    os->stat_file = simulated_stat_file;
    os->stat_path = simulated_stat_path;
    os->lstat_path = simulated_lstat_path;
    os->truncate_file = simulated_truncate_file;
    os->allocate = simulated_allocate;
    os->unlink_path = simulated_unlink_path;
    os->rename_path = simulated_rename_path;
    os->file_system = simulated_file_system;
    os->read_at = simulated_read_at;
    os->write_at = simulated_write_at;
    os->sync_file = simulated_sync_file;
    os->start_write_back = nothing_on_range;
    os->pending_error = nothing_on_range;
    os->advise_file = simulated_advise_file;
    os->cached = simulated_cached;
    os->lock_byte = simulated_lock_byte;
    os->unlock_byte = simulated_unlock_byte;
    os->byte_held = simulated_byte_held;
    os->map = simulated_map;
    os->unmap = simulated_unmap;
    os->populate_read = nothing_on_memory;
    os->populate_write = nothing_on_memory;
    os->make_huge = nothing_on_memory;
    os->dont_fork = nothing_on_memory;
    os->wipe_on_fork = nothing_on_memory;
    os->lock_memory = nothing_on_memory;
    os->monotonic_ns = simulated_monotonic_ns;
    os->realtime_ns = simulated_realtime_ns;
    os->sleep_ns = sleep_for;
    os->random_bytes = simulated_random_bytes;
    os->process_id = simulated_process_id;
    os->program_name = simulated_program_name;
}
