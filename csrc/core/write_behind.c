/* SPDX-License-Identifier: Apache-2.0 */
/* write_behind.c: a bounded queue of ranges and the thread that works it off.
 *
 *   Y1  `first`, `count` and `ranges` are read and written under `lock`.
 *   Y2  A range is taken out of the queue before its write-back is started; what comes
 *       directly behind the last range that still waits is joined to it.
 *   Y3  Nothing depends on it: a range that is never started is written by the kernel
 *       later or by the next sync.
 *
 * The thread starts with the first range.  If it cannot, the callers do the work.
 */
#include "write_behind.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "os.h"

enum {
    RANGES_MAX = 64,
    JOINED_MAX_BYTES = 8
        << 20 /* so that one call does not fill the queue of the device */
};

struct range {
    int fd;
    uint64_t offset;
    uint64_t length;
};

struct ckv_write_behind {
    pthread_mutex_t lock;
    pthread_cond_t work; /* a range came, or `stop` */
    pthread_t thread;
    bool runs;
    bool failed; /* the thread could not be started */
    bool stop;
    int64_t process_id; /* of the process that made it: the thread is not in a child */
    uint32_t first;
    uint32_t count;
    struct range ranges[RANGES_MAX];
};

static void
start(const struct range *range)
{
    /* Advice: what could not be started is written later (Y3). */
    (void)ckv_os.start_write_back(range->fd, range->offset, range->length);
}

static void *
work(void *argument)
{
    struct ckv_write_behind *behind = argument;
    (void)pthread_mutex_lock(&behind->lock); /* cannot fail: never taken twice */
    for (;;) {
        while (behind->count == 0 && !behind->stop) {
            (void)pthread_cond_wait(&behind->work, &behind->lock);
        }
        if (behind->count == 0) {
            break;
        }
        const struct range range = behind->ranges[behind->first];
        behind->first = (behind->first + 1) % RANGES_MAX;
        behind->count--;
        (void)pthread_mutex_unlock(&behind->lock);
        start(&range);
        (void)pthread_mutex_lock(&behind->lock);
    }
    (void)pthread_mutex_unlock(&behind->lock);
    return NULL;
}

enum ckv_status
ckv_write_behind_new(struct ckv_write_behind **result, struct ckv_error *error)
{
    struct ckv_write_behind *behind = calloc(1, sizeof(*behind));
    if (behind == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM, "no memory for write-behind");
    }
    (void)pthread_mutex_init(&behind->lock, NULL); /* cannot fail with defaults */
    (void)pthread_cond_init(&behind->work, NULL);  /* likewise */
    behind->process_id = ckv_os.process_id();
    *result = behind;
    return CKV_OK;
}

/* Joins the range to the last one that waits (Y2).  Requires: `lock`. */
static bool
join(struct ckv_write_behind *behind, const struct range *added)
{
    if (behind->count == 0) {
        return false;
    }
    struct range *last =
        &behind->ranges[(behind->first + behind->count - 1) % RANGES_MAX];
    if (last->fd != added->fd || last->offset + last->length != added->offset ||
        last->length + added->length > JOINED_MAX_BYTES) {
        return false;
    }
    last->length += added->length;
    return true;
}

void
ckv_write_behind_add(struct ckv_write_behind *behind, int fd, uint64_t offset,
    uint64_t length)
{
    const struct range added = {.fd = fd, .offset = offset, .length = length};
    (void)pthread_mutex_lock(&behind->lock);
    if (!behind->runs && !behind->failed) {
        behind->runs = ckv_os_start_thread(&behind->thread, work, behind) == 0;
        behind->failed = !behind->runs;
    }
    bool queued = behind->runs && join(behind, &added);
    if (behind->runs && !queued && behind->count < RANGES_MAX) {
        behind->ranges[(behind->first + behind->count) % RANGES_MAX] = added;
        behind->count++;
        queued = true;
        if (behind->count == 1) {
            (void)pthread_cond_signal(&behind->work);
        }
    }
    (void)pthread_mutex_unlock(&behind->lock);
    if (!queued) {
        start(&added);
    }
}

void
ckv_write_behind_free(struct ckv_write_behind **pointer)
{
    struct ckv_write_behind *behind = *pointer;
    if (behind == NULL) {
        return;
    }
    *pointer = NULL;
    if (behind->process_id == ckv_os.process_id()) {
        (void)pthread_mutex_lock(&behind->lock);
        behind->stop = true;
        (void)pthread_cond_signal(&behind->work);
        (void)pthread_mutex_unlock(&behind->lock);
        if (behind->runs) {
            (void)pthread_join(behind->thread, NULL); /* ours, not joined before */
        }
        (void)pthread_mutex_destroy(&behind->lock);
        (void)pthread_cond_destroy(&behind->work);
    }
    free(behind);
}
