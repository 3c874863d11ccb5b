/* SPDX-License-Identifier: Apache-2.0 */
/* bounce.c: a stack of free buffers under a mutex.
 *
 *   J1  `made` buffers exist, `free_count` of them in `free`, the others in the hands of
 *       callers; all under `lock`.
 *   J2  A buffer is made only when none is free and made < limit.  The lock is given up
 *       meanwhile, with the place in `made` already taken.
 *   J3  After a refusal of huge pages none is made any more.  Those that exist go on.
 */
#include "bounce.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "os.h"

enum { BUFFERS_MAX = 16 };

struct ckv_bounce_pool {
    pthread_mutex_t lock;
    pthread_cond_t freed;
    uint32_t limit;
    uint32_t made;
    uint32_t free_count;
    bool refused;       /* J3 */
    int64_t process_id; /* of the process that made it */
    void *free[BUFFERS_MAX];
};

enum ckv_status
ckv_bounce_pool_new(uint32_t count, struct ckv_bounce_pool **pool,
    struct ckv_error *error)
{
    CKV_CHECK(count >= 1 && count <= BUFFERS_MAX);
    struct ckv_bounce_pool *made = calloc(1, sizeof *made);
    *pool = made;
    if (made == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM, "no memory for read buffers");
    }
    (void)pthread_mutex_init(&made->lock, NULL); /* cannot fail with defaults */
    (void)pthread_cond_init(&made->freed, NULL); /* likewise */
    made->limit = count;
    made->process_id = ckv_os.process_id();
    return CKV_OK;
}

/* A huge page, which starts at a multiple of its size; NULL without one. */
static void *
make_buffer(void)
{
    void *mapped = NULL;
    if (ckv_os.map(NULL, 2 * CKV_BOUNCE_BYTES, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0, &mapped) != 0) {
        return NULL;
    }
    const uint64_t address = (uint64_t)(uintptr_t)mapped;
    const size_t before = (size_t)(ckv_align_up(address, CKV_BOUNCE_BYTES) - address);
    uint8_t *buffer = (uint8_t *)mapped + before;
    if (before > 0) {
        (void)ckv_os.unmap(mapped, before); /* a part of what was just mapped */
    }
    (void)ckv_os.unmap(buffer + CKV_BOUNCE_BYTES, CKV_BOUNCE_BYTES - before);
    if (ckv_os.make_huge(buffer, CKV_BOUNCE_BYTES) != 0) {
        (void)ckv_os.unmap(buffer, CKV_BOUNCE_BYTES);
        return NULL;
    }
    return buffer;
}

void *
ckv_bounce_take(struct ckv_bounce_pool *pool)
{
    void *buffer = NULL;
    (void)pthread_mutex_lock(&pool->lock); /* cannot fail: never taken twice */
    for (;;) {
        if (pool->free_count > 0) {
            buffer = pool->free[--pool->free_count];
            break;
        }
        if (pool->made < pool->limit && !pool->refused) {
            pool->made++; /* J2 */
            (void)pthread_mutex_unlock(&pool->lock);
            buffer = make_buffer();
            (void)pthread_mutex_lock(&pool->lock);
            if (buffer != NULL) {
                break;
            }
            pool->made--;
            pool->refused = true;
            (void)pthread_cond_broadcast(&pool->freed); /* nobody may wait for it */
        }
        if (pool->made == 0 && pool->refused) {
            break;
        }
        if (pool->free_count == 0 && (pool->made == pool->limit || pool->refused)) {
            (void)pthread_cond_wait(&pool->freed, &pool->lock);
        }
    }
    (void)pthread_mutex_unlock(&pool->lock);
    return buffer;
}

void
ckv_bounce_give(struct ckv_bounce_pool *pool, void *buffer)
{
    (void)pthread_mutex_lock(&pool->lock); /* cannot fail: never taken twice */
    CKV_CHECK(pool->free_count < pool->made);
    pool->free[pool->free_count++] = buffer;
    (void)pthread_cond_signal(&pool->freed);
    (void)pthread_mutex_unlock(&pool->lock);
}

bool
ckv_bounce_usable(struct ckv_bounce_pool *pool)
{
    (void)pthread_mutex_lock(&pool->lock); /* cannot fail: never taken twice */
    const bool usable = !pool->refused || pool->made > 0;
    (void)pthread_mutex_unlock(&pool->lock);
    return usable;
}

void
ckv_bounce_pool_free(struct ckv_bounce_pool **pool)
{
    struct ckv_bounce_pool *old = *pool;
    *pool = NULL;
    if (old == NULL) {
        return;
    }
    if (old->process_id == ckv_os.process_id()) { /* else: a forked child */
        CKV_CHECK(old->free_count == old->made);
        (void)pthread_mutex_destroy(&old->lock); /* cannot fail: nobody has it */
        (void)pthread_cond_destroy(&old->freed); /* cannot fail: nobody waits */
    }
    for (uint32_t i = 0; i < old->free_count; i++) {
        (void)ckv_os.unmap(old->free[i], CKV_BOUNCE_BYTES); /* ours */
    }
    free(old);
}
