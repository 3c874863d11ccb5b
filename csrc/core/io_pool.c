/* SPDX-License-Identifier: Apache-2.0 */
/* io_pool.c: threads that help a caller with the pieces of its batch.
 *
 * A batch lives on the stack of the thread that brought it.  Batches with pieces left
 * form a queue; a helper takes one piece from the first batch and moves that batch to the
 * end, so that a short batch does not wait for a long one.  The caller takes pieces of
 * its own batch only: it can always finish alone, so a batch never depends on a helper
 * being there, and a failed pthread_create() costs speed and nothing else.
 *
 *       first                        last
 *         v                            v
 *      [batch A: 5 of 9 begun] -> [batch B: 0 of 64 begun] -> NULL
 *
 *   Q1  Everything here is read and written under `lock`, but for `run` and `context`,
 *       which do not change while a batch is known to others.
 *   Q2  A batch is in the queue exactly while begun < count.
 *   Q3  begun - ended pieces are being run.  The caller returns only when ended == count,
 *       so nobody touches the batch after its stack frame is gone.
 *
 * One mutex for all: a piece is a read of 64 KiB to 32 MiB, next to which a lock is
 * nothing.  Lock-free counters were rejected for that reason.
 *
 * A pool that was made before fork() has no helpers in the child and perhaps a mutex that
 * nobody will ever unlock.  Callers refuse such handles (ckv_volume_forked()); here the
 * child only gives the memory back.
 */
#include "io_pool.h"

#include <pthread.h>
#include <stdlib.h>

#include "os.h"

enum { THREADS_MAX = 256 };

struct batch {
    struct batch *next;
    void (*run)(void *context, size_t index);
    void *context;
    size_t count;
    size_t begun;
    size_t ended;
    pthread_cond_t done;
};

struct ckv_io_pool {
    pthread_mutex_t lock;
    pthread_cond_t work; /* a batch came, or `stop` */
    struct batch *first;
    struct batch *last;
    int64_t process_id; /* of the process that made the pool */
    uint32_t thread_limit;
    uint32_t thread_count;
    bool stop;
    pthread_t threads[];
};

static void
take_lock(struct ckv_io_pool *pool)
{
    (void)pthread_mutex_lock(&pool->lock); /* cannot fail: never taken twice */
}

static void
give_lock(struct ckv_io_pool *pool)
{
    (void)pthread_mutex_unlock(&pool->lock); /* cannot fail: we hold it */
}

static void
enqueue(struct ckv_io_pool *pool, struct batch *batch)
{
    batch->next = NULL;
    if (pool->last == NULL) {
        pool->first = batch;
    } else {
        pool->last->next = batch;
    }
    pool->last = batch;
}

static void
dequeue(struct ckv_io_pool *pool, struct batch *batch)
{
    struct batch *before = NULL;
    for (struct batch *other = pool->first; other != batch; other = other->next) {
        before = other;
    }
    if (before == NULL) {
        pool->first = batch->next;
    } else {
        before->next = batch->next;
    }
    if (pool->last == batch) {
        pool->last = before;
    }
    batch->next = NULL;
}

/* Runs the next piece of a queued batch.  Requires: `lock`, which is given up meanwhile.
 * `rotate` sends the batch to the end of the queue. */
static void
run_piece(struct ckv_io_pool *pool, struct batch *batch, bool rotate)
{
    const size_t index = batch->begun++;
    const bool more = batch->begun < batch->count;
    if (!more || rotate) {
        dequeue(pool, batch); /* Q2 */
    }
    if (more && rotate) {
        enqueue(pool, batch);
    }
    give_lock(pool);

    batch->run(batch->context, index);

    take_lock(pool);
    batch->ended++;
    if (batch->ended == batch->count) {
        /* Under the lock, since the batch is gone as soon as its caller sees this
         * (Q3). */
        (void)pthread_cond_signal(&batch->done);
    }
}

static void *
help(void *argument)
{
    struct ckv_io_pool *pool = argument;
    take_lock(pool);
    while (!pool->stop) {
        if (pool->first == NULL) {
            (void)pthread_cond_wait(&pool->work, &pool->lock); /* a loop is around it */
            continue;
        }
        run_piece(pool, pool->first, true);
    }
    give_lock(pool);
    return NULL;
}

/* Starts helpers until there is one for each of `wanted` pieces.  Requires: `lock`. */
static void
start_helpers(struct ckv_io_pool *pool, size_t wanted)
{
    if (pool->thread_count == pool->thread_limit || pool->thread_count >= wanted) {
        return;
    }
    while (pool->thread_count < pool->thread_limit && pool->thread_count < wanted) {
        if (ckv_os_start_thread(&pool->threads[pool->thread_count], help, pool) != 0) {
            break; /* the caller works with what there is; the next batch tries again */
        }
        pool->thread_count++;
    }
}

enum ckv_status
ckv_io_pool_new(uint32_t threads, struct ckv_io_pool **pool, struct ckv_error *error)
{
    *pool = NULL;
    if (threads > THREADS_MAX) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "%u I/O threads are too many: at most %d make sense", threads, THREADS_MAX);
    }
    struct ckv_io_pool *made =
        calloc(1, sizeof *made + threads * sizeof made->threads[0]);
    if (made == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, 0, "no memory for the I/O threads");
    }
    made->thread_limit = threads;
    made->process_id = ckv_os.process_id();

    int result = pthread_mutex_init(&made->lock, NULL);
    if (result == 0) {
        result = pthread_cond_init(&made->work, NULL);
        if (result != 0) {
            (void)pthread_mutex_destroy(&made->lock); /* cannot fail: it is free */
        }
    }
    if (result != 0) {
        free(made);
        return ckv_fail(error, CKV_E_OS, result, "no lock for the I/O threads");
    }
    *pool = made;
    return CKV_OK;
}

void
ckv_io_pool_run(struct ckv_io_pool *pool, size_t count,
    void (*run)(void *context, size_t index), void *context)
{
    struct batch batch = {.run = run, .context = context, .count = count};
    if (count < 2 || pthread_cond_init(&batch.done, NULL) != 0) {
        for (size_t i = 0; i < count; i++) {
            run(context, i);
        }
        return;
    }

    take_lock(pool);
    start_helpers(pool, count - 1);
    enqueue(pool, &batch);
    if (count - 1 < pool->thread_count) {
        for (size_t i = 1; i < count; i++) {
            (void)pthread_cond_signal(&pool->work); /* cannot fail */
        }
    } else {
        (void)pthread_cond_broadcast(&pool->work); /* cannot fail */
    }
    while (batch.begun < batch.count) {
        run_piece(pool, &batch, false);
    }
    while (batch.ended < batch.count) {
        (void)pthread_cond_wait(&batch.done, &pool->lock); /* a loop is around it */
    }
    give_lock(pool);
    (void)pthread_cond_destroy(&batch.done); /* cannot fail: nobody waits */
}

void
ckv_io_pool_free(struct ckv_io_pool **pool)
{
    struct ckv_io_pool *old = *pool;
    *pool = NULL;
    if (old == NULL) {
        return;
    }
    if (old->process_id == ckv_os.process_id()) { /* else: a forked child */
        take_lock(old);
        CKV_CHECK(old->first == NULL);
        old->stop = true;
        (void)pthread_cond_broadcast(&old->work); /* cannot fail */
        give_lock(old);
        for (uint32_t i = 0; i < old->thread_count; i++) {
            (void)pthread_join(old->threads[i], NULL); /* cannot fail: joined once */
        }
        (void)pthread_cond_destroy(&old->work);  /* cannot fail: nobody waits */
        (void)pthread_mutex_destroy(&old->lock); /* cannot fail: it is free */
    }
    free(old);
}
