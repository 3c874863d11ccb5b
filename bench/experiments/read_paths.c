/* SPDX-License-Identifier: Apache-2.0 */
/* read_paths.c: one way of reading blocks of a file into memory, timed once.
 *
 *     read_paths FILE BLOCK METHOD SEED SHIFT THREADS PIECE BATCH
 *
 * Reads every block of FILE (in order with SEED 0, else shuffled) by METHOD, in pieces
 * of PIECE bytes spread over THREADS threads, BATCH blocks a call: the next call begins
 * when the last piece of the one before is there.  SHIFT is added to aligned
 * destinations; a call of one block goes to the same place each time.  A checksum runs
 * over each piece unless METHOD ends in "-raw".  Prints seconds.  read_paths.py says
 * what the methods are, and prepares the page cache.
 *
 * Measures, and is no example: errors end the process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <linux/io_uring.h>

#include "crc32c.h"

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

enum {
    SUB_BYTES = 256 * 1024, /* of one pread and its checksum */
    THREADS_MAX = 64,
    BATCH_MAX = 256
};
#define HUGE_PAGE ((size_t)2 << 20)

enum method {
    M_PREAD,
    M_WHOLE,
    M_WILLNEED,
    M_FAULT,
    M_POPULATE,
    M_NOWAIT,
    M_DONTCACHE,
    M_DIRECT,
    M_BOUNCE,
    M_SMALL,
    M_OWN,
    M_URING
};

static const struct {
    const char *name;
    enum method method;
} methods[] = {{"pread", M_PREAD}, {"whole", M_WHOLE}, {"willneed", M_WILLNEED},
    {"fault", M_FAULT}, {"populate", M_POPULATE}, {"nowait", M_NOWAIT},
    {"dontcache", M_DONTCACHE}, {"direct", M_DIRECT}, {"bounce", M_BOUNCE},
    {"small", M_SMALL}, {"own", M_OWN}, {"uring", M_URING}};

static struct {
    const char *path;
    int fd, direct_fd;
    const uint8_t *mapping;
    uint64_t file_bytes;
    size_t block, piece, batch, threads, shift;
    enum method method;
    bool checked;
    uint8_t *targets[BATCH_MAX];
} run;

static _Noreturn void
fail(const char *what)
{
    perror(what);
    exit(1);
}

static uint8_t *
memory_of(size_t bytes, int advice)
{
    const size_t rounded = (bytes + HUGE_PAGE) / HUGE_PAGE * HUGE_PAGE;
    uint8_t *found = aligned_alloc(HUGE_PAGE, rounded);
    if (found == NULL) {
        fail("memory");
    }
    (void)madvise(found, rounded, advice);
    memset(found, 1, rounded);
    return found;
}

static uint8_t *
memory(size_t bytes)
{
    return memory_of(bytes, MADV_HUGEPAGE);
}

struct worker { /* what a thread has for itself */
    int fd;
    uint8_t *bounce;
};

static struct worker
worker(void)
{
    struct worker made = {.fd = run.fd};
    made.bounce =
        memory_of(run.piece, run.method == M_SMALL ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    if (run.method == M_OWN) {
        made.fd = open(run.path, O_RDONLY | O_CLOEXEC); /* its own readahead */
    }
    return made;
}

static _Atomic uint32_t sum; /* so that no checksum is optimised away */

static void
check(const uint8_t *data, size_t length)
{
    if (run.checked) {
        sum ^= ckv_crc32c(0, data, length);
    }
}

static void
read_all(int fd, uint8_t *target, size_t length, uint64_t at, int flags)
{
    while (length > 0) {
        struct iovec iov = {.iov_base = target, .iov_len = length};
        const ssize_t done = preadv2(fd, &iov, 1, (off_t)at, flags);
        if (done < 0 && errno == EAGAIN && (flags & RWF_NOWAIT) != 0) {
            flags &= ~RWF_NOWAIT;
            continue;
        }
        if (done <= 0) {
            fail("read");
        }
        target += done;
        at += (uint64_t)done;
        length -= (size_t)done;
    }
}

static void
one_piece(uint8_t *target, uint64_t at, size_t length, const struct worker *own)
{
    switch (run.method) {
    case M_WHOLE:
        read_all(run.fd, target, length, at, 0);
        check(target, length);
        break;
    case M_WILLNEED:
        (void)posix_fadvise(run.fd, (off_t)at, (off_t)length, POSIX_FADV_WILLNEED);
        /* fall through */
    case M_PREAD:
    case M_NOWAIT:
    case M_DONTCACHE:
    case M_OWN:
        for (size_t done = 0; done < length; done += SUB_BYTES) {
            const size_t sub = length - done < SUB_BYTES ? length - done : SUB_BYTES;
            read_all(own->fd, target + done, sub, at + done,
                run.method == M_NOWAIT      ? RWF_NOWAIT
                : run.method == M_DONTCACHE ? RWF_DONTCACHE
                                            : 0);
            check(target + done, sub);
        }
        break;
    case M_POPULATE:
        if (madvise((void *)(uintptr_t)(run.mapping + at), length,
                MADV_POPULATE_READ) != 0) {
            fail("populate");
        }
        /* fall through */
    case M_FAULT:
        for (size_t done = 0; done < length; done += SUB_BYTES) {
            const size_t sub = length - done < SUB_BYTES ? length - done : SUB_BYTES;
            memcpy(target + done, run.mapping + at + done, sub);
            check(target + done, sub);
        }
        break;
    case M_DIRECT:
        read_all(run.direct_fd, target, length, at, 0);
        check(target, length);
        break;
    case M_BOUNCE:
    case M_SMALL:
        read_all(run.direct_fd, own->bounce, length, at, 0);
        for (size_t done = 0; done < length; done += SUB_BYTES) {
            const size_t sub = length - done < SUB_BYTES ? length - done : SUB_BYTES;
            memcpy(target + done, own->bounce + done, sub);
            check(target + done, sub);
        }
        break;
    case M_URING:
    default:
        abort();
    }
}

/* ---- threads: a call is a list of pieces ------------------------------------------ */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    const uint64_t *blocks;
    size_t count; /* pieces of this call */
    size_t begun, ended;
    bool stop;
} call = {.lock = PTHREAD_MUTEX_INITIALIZER,
    .work = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER};

static void
run_pieces(const struct worker *own)
{
    const size_t pieces = (run.block + run.piece - 1) / run.piece;
    while (call.begun < call.count) {
        const size_t index = call.begun++;
        pthread_mutex_unlock(&call.lock);
        const size_t begin = index % pieces * run.piece;
        const size_t left = run.block - begin;
        one_piece(run.targets[index / pieces] + begin,
            call.blocks[index / pieces] * run.block + begin,
            left < run.piece ? left : run.piece, own);
        pthread_mutex_lock(&call.lock);
        if (++call.ended == call.count) {
            pthread_cond_signal(&call.done);
        }
    }
}

static void *
help(void *argument)
{
    (void)argument;
    const struct worker own = worker();
    pthread_mutex_lock(&call.lock);
    while (!call.stop) {
        run_pieces(&own);
        pthread_cond_wait(&call.work, &call.lock);
    }
    pthread_mutex_unlock(&call.lock);
    return NULL;
}

static void
one_call(const uint64_t *blocks, size_t count, const struct worker *own)
{
    pthread_mutex_lock(&call.lock);
    call.blocks = blocks;
    call.count = count * ((run.block + run.piece - 1) / run.piece);
    call.begun = call.ended = 0;
    if (call.count > 1) {
        pthread_cond_broadcast(&call.work);
    }
    run_pieces(own);
    while (call.ended < call.count) {
        pthread_cond_wait(&call.done, &call.lock);
    }
    pthread_mutex_unlock(&call.lock);
}

/* ---- io_uring: one thread, THREADS requests in flight ----------------------------- */

static struct {
    int fd;
    _Atomic uint32_t *sq_tail, *cq_head, *cq_tail;
    uint32_t sq_mask, cq_mask, *sq_array;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    uint8_t *bounces;
} ring;

static void
ring_open(void)
{
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    ring.fd = (int)syscall(SYS_io_uring_setup, (unsigned int)run.threads, &params);
    if (ring.fd < 0) {
        fail("io_uring_setup");
    }
    const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    const size_t cq_bytes =
        params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    uint8_t *sq = mmap(NULL, sq_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd,
        IORING_OFF_SQ_RING);
    uint8_t *cq = mmap(NULL, cq_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd,
        IORING_OFF_CQ_RING);
    ring.sqes = mmap(NULL, params.sq_entries * sizeof *ring.sqes,
        PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, IORING_OFF_SQES);
    if (sq == MAP_FAILED || cq == MAP_FAILED || (void *)ring.sqes == MAP_FAILED) {
        fail("io_uring mmap");
    }
    ring.sq_tail = (void *)(sq + params.sq_off.tail);
    ring.sq_mask = *(uint32_t *)(void *)(sq + params.sq_off.ring_mask);
    ring.sq_array = (void *)(sq + params.sq_off.array);
    ring.cq_head = (void *)(cq + params.cq_off.head);
    ring.cq_tail = (void *)(cq + params.cq_off.tail);
    ring.cq_mask = *(uint32_t *)(void *)(cq + params.cq_off.ring_mask);
    ring.cqes = (void *)(cq + params.cq_off.cqes);
    ring.bounces = memory(run.threads * run.piece);
}

static void
ring_submit(uint64_t slot, size_t length, uint64_t at)
{
    const uint32_t tail = *ring.sq_tail;
    struct io_uring_sqe *sqe = &ring.sqes[tail & ring.sq_mask];
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = IORING_OP_READ;
    sqe->fd = run.direct_fd;
    sqe->addr = (uint64_t)(uintptr_t)(ring.bounces + slot * run.piece);
    sqe->len = (uint32_t)length;
    sqe->off = at;
    sqe->user_data = slot;
    ring.sq_array[tail & ring.sq_mask] = tail & ring.sq_mask;
    atomic_store_explicit(ring.sq_tail, tail + 1, memory_order_release);
}

static void
ring_call(const uint64_t *blocks, size_t count)
{
    const size_t pieces = (run.block + run.piece - 1) / run.piece;
    const size_t total = count * pieces;
    size_t of_slot[THREADS_MAX];
    size_t begun = 0;
    unsigned int fresh = 0;
    for (size_t slot = 0; slot < run.threads && begun < total; slot++) {
        of_slot[slot] = begun;
        ring_submit(slot, run.piece,
            blocks[begun / pieces] * run.block + begun % pieces * run.piece);
        begun++;
        fresh++;
    }
    for (size_t ended = 0; ended < total;) {
        if (syscall(SYS_io_uring_enter, ring.fd, fresh, 1u, IORING_ENTER_GETEVENTS,
                NULL, 0) < 0) {
            fail("io_uring_enter");
        }
        fresh = 0;
        uint32_t head = *ring.cq_head;
        while (head != atomic_load_explicit(ring.cq_tail, memory_order_acquire)) {
            const struct io_uring_cqe *cqe = &ring.cqes[head & ring.cq_mask];
            const size_t slot = (size_t)cqe->user_data;
            const size_t index = of_slot[slot];
            if (cqe->res != (int)run.piece) {
                errno = -cqe->res;
                fail("io_uring read");
            }
            atomic_store_explicit(ring.cq_head, ++head, memory_order_release);
            uint8_t *target = run.targets[index / pieces] + index % pieces * run.piece;
            memcpy(target, ring.bounces + slot * run.piece, run.piece);
            check(target, run.piece);
            ended++;
            if (begun < total) {
                of_slot[slot] = begun;
                ring_submit(slot, run.piece,
                    blocks[begun / pieces] * run.block + begun % pieces * run.piece);
                begun++;
                fresh++;
            }
        }
    }
}

/* ---- main ------------------------------------------------------------------------- */

static uint64_t *
order_of(size_t count, uint64_t seed)
{
    uint64_t *blocks = malloc(count * sizeof *blocks);
    if (blocks == NULL) {
        fail("memory");
    }
    for (size_t i = 0; i < count; i++) {
        blocks[i] = i;
    }
    for (size_t i = count; seed != 0 && i > 1; i--) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        const size_t other = (size_t)((seed >> 33) % i);
        const uint64_t kept = blocks[i - 1];
        blocks[i - 1] = blocks[other];
        blocks[other] = kept;
    }
    return blocks;
}

static void
parse(char **arguments)
{
    char *name = arguments[3];
    const size_t length = strlen(name);
    run.checked = !(length > 4 && strcmp(name + length - 4, "-raw") == 0);
    if (!run.checked) {
        name[length - 4] = '\0';
    }
    bool known = false;
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        if (strcmp(methods[i].name, name) == 0) {
            run.method = methods[i].method;
            known = true;
        }
    }
    run.block = strtoull(arguments[2], NULL, 10);
    run.shift = strtoull(arguments[5], NULL, 10);
    run.threads = strtoull(arguments[6], NULL, 10);
    run.piece = strtoull(arguments[7], NULL, 10);
    run.batch = strtoull(arguments[8], NULL, 10);
    if (run.piece > run.block) {
        run.piece = run.block;
    }
    if (!known || run.threads < 1 || run.threads > THREADS_MAX || run.batch < 1 ||
        run.batch > BATCH_MAX || run.piece == 0 || run.block % run.piece != 0) {
        errno = EINVAL;
        fail("arguments");
    }
    run.path = arguments[1];
    run.fd = open(arguments[1], O_RDONLY | O_CLOEXEC);
    run.direct_fd = open(arguments[1], O_RDONLY | O_CLOEXEC | O_DIRECT);
    struct stat info;
    if (run.fd < 0 || fstat(run.fd, &info) != 0) {
        fail(arguments[1]);
    }
    run.file_bytes = (uint64_t)info.st_size;
    run.mapping = mmap(NULL, run.file_bytes, PROT_READ, MAP_SHARED, run.fd, 0);
    if (run.mapping == MAP_FAILED) {
        fail("mmap");
    }
}

static double
now(void)
{
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

int
main(int count, char **arguments)
{
    if (count != 9) {
        fprintf(stderr,
            "read_paths FILE BLOCK METHOD SEED SHIFT THREADS PIECE BATCH\n");
        return 2;
    }
    parse(arguments);
    const size_t blocks = (size_t)(run.file_bytes / run.block);
    const uint64_t *order = order_of(blocks, strtoull(arguments[4], NULL, 10));
    for (size_t i = 0; i < run.batch && i < blocks; i++) {
        run.targets[i] = memory(run.block + run.shift) + run.shift;
    }
    const struct worker own = worker();
    pthread_t threads[THREADS_MAX];
    const size_t helpers = run.method == M_URING ? 0 : run.threads - 1;
    if (run.method == M_URING) {
        ring_open();
    }
    for (size_t i = 0; i < helpers; i++) {
        if (pthread_create(&threads[i], NULL, help, NULL) != 0) {
            fail("thread");
        }
    }
    usleep(20000); /* the helpers touch their memory */
    const double begin = now();
    for (size_t first = 0; first < blocks; first += run.batch) {
        const size_t some = blocks - first < run.batch ? blocks - first : run.batch;
        if (run.method == M_URING) {
            ring_call(order + first, some);
        } else {
            one_call(order + first, some, &own);
        }
    }
    printf("%.9f\n", now() - begin);
    pthread_mutex_lock(&call.lock);
    call.stop = true;
    pthread_cond_broadcast(&call.work);
    pthread_mutex_unlock(&call.lock);
    for (size_t i = 0; i < helpers; i++) {
        pthread_join(threads[i], NULL);
    }
    return 0;
}
