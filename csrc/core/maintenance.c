/* SPDX-License-Identifier: Apache-2.0 */
/* maintenance.c: one thread per read-write volume and process; sync; failing a path.
 *
 * Once a second, in this order:
 *
 *   tick      seconds since the thread began; gives pins an age without a clock in get
 *   slot      age of the oldest pin, for statistics of others
 *   moved     what puts brought into the page cache (mapped.c, X4)
 *   probe     asks each usable file for write-back errors, and the SIGBUS handler for
 *             pages that it replaced; any of them fails the path
 *   sync      when the last good sync of anybody is older than the interval
 *   checkpoint  every few minutes, and once more at the end
 *
 *   M1  No lock of the region is taken.  Two processes that sync at once are harmless;
 *       one that is stopped in the middle stops nobody.  Electing one syncer was
 *       rejected: when it is stopped, all syncing ends in silence.
 *   M2  synced_sequence of a path is raised to S only after an fsync that began after S
 *       was read.  A payload is written before its sequence is drawn (W23 -> R23), so
 *       every record with a sequence up to S that is found later has its payload on the
 *       medium.  A put that drew its sequence and has not yet written its record may be
 *       missing after a power cut: it had not returned when the sync began.  S says
 *       nothing about a record whose pages were taken since: a put that was cut off may
 *       have begun to overwrite them, and only the checksum tells.
 *   M3  The header says S only after that fsync.  The other order would promise pages
 *       that are not there.
 *   M4  `failed` of a path goes from 0 to 1 here alone and back only by recovery.
 *   M5  A sync strikes first what dead processes have left half done.  A record that one
 *       of them was about to strike, or had just written, is of a block that nobody sees;
 *       if the key is then removed, that record alone would be left of it, and the block
 *       would be back in the next life.
 *
 *   W23 -> R23  ckv_entry_publish() draws a sequence (add, ordered) after the payload's
 *               last write call; ckv_volume_sync() loads it (ordered) before its first
 *               fsync call.
 *   W24 -> R24  what this process saw before it failed a path is seen by whoever finds
 *               `failed` set (ckv_volume_file_usable()); nothing relies on more than the
 *               word itself.
 *
 * The header is not synced a second time.  The promise of sync() is kept by the first
 * fsync; the header only says how far it went, to those who would skip checks.  When it
 * is lost in a power cut, an older one counts and more is checked: that costs reads,
 * while a second fsync would cost each sync a commit of the journal.  It reaches the
 * medium with the next sync at the latest.
 *
 * While a sync waits for a slow device, this thread asks no questions.  The device that
 * is being synced answers at the end of its fsync; the puts of this process and the
 * threads of others go on asking the rest.
 */
#include "maintenance.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "announce.h"
#include "event.h"
#include "reader.h"
#include "rebuild.h"
#include "region.h"
#include "slot.h"

#define NS_PER_SECOND          UINT64_C(1000000000)
#define NS_PER_MS              UINT64_C(1000000)
#define CHECKPOINT_INTERVAL_NS (300 * NS_PER_SECOND)

/* What the thread remembers between two seconds. */
struct memory {
    uint64_t began_ns;      /* monotonic */
    uint64_t sync_ns;       /* realtime: the last try of this process, or its start */
    uint64_t checkpoint_ns; /* likewise */
    uint64_t written_bytes; /* of the data areas, by all processes */
};

static void
take_lock(pthread_mutex_t *lock)
{
    (void)pthread_mutex_lock(lock); /* cannot fail: never taken twice */
}

static void
give_lock(pthread_mutex_t *lock)
{
    (void)pthread_mutex_unlock(lock); /* cannot fail: we hold it */
}

/* ---- failing a path -------------------------------------------------------------- */

void
ckv_volume_fail_path(struct ckv_volume *volume, struct ckv_file *file, const char *what,
    int os_errno)
{
    if (volume->mode == CKV_MODE_READ && volume->region.path != NULL) {
        return; /* a read-only mapping of the region of others, who meet the error too */
    }
    struct ckv_shared_path *path =
        &volume->region.paths[ckv_volume_file_index(volume, file)];
    uint32_t expected = 0;
    ckv_announce_begin(volume);
    const bool first =
        ckv_cas_ordered_u32(&path->failed, &expected, 1); /* W24 -> R24 */
    if (first) {
        CKV_POINT("maintenance.failed");
        ckv_event_record_gap(volume); /* A5 */
    }
    ckv_announce_end(volume);
    if (!first) {
        return; /* somebody was first, and said so (M4) */
    }
    ckv_log(CKV_LOG_WARNING,
        "%s is out of use: %s failed (%s, errno %d); check the device.  Its blocks are "
        "misses and nothing is stored there until every process has closed the volume "
        "or recover() has verified it",
        file->path, what, strerror(os_errno), os_errno);
}

void
ckv_volume_probe(struct ckv_volume *volume, struct ckv_file *file)
{
    const int result = ckv_file_pending_error(file);
    if (result < 0 && result != -EINTR) { /* interrupted: asked again in a second */
        ckv_volume_fail_path(volume, file, "write-back", -result);
    }
}

/* ---- sync ------------------------------------------------------------------------ */

/* Writes how far syncs have come into the header.  Others of this process may do the same
 * at once; the one who gets the lock later has the larger number or an equal one. */
static enum ckv_status
note_synced(struct ckv_volume *volume, struct ckv_file *file, struct ckv_error *error)
{
    const struct ckv_shared_path *path =
        &volume->region.paths[ckv_volume_file_index(volume, file)];
    enum ckv_status status = CKV_OK;
    take_lock(&volume->maintenance_lock);
    const uint64_t synced = ckv_load_acquire_u64(&path->synced_sequence);
    if (synced > file->header.synced_sequence) {
        file->header.synced_sequence = synced;
        status = ckv_file_write_header(file, error);
    }
    give_lock(&volume->maintenance_lock);
    return status;
}

/* Syncs one file; false when that failed the path. */
static bool
sync_path(struct ckv_volume *volume, struct ckv_file *file, uint64_t sequence)
{
    struct ckv_shared_path *path =
        &volume->region.paths[ckv_volume_file_index(volume, file)];
    const uint64_t began_ns = ckv_os.realtime_ns();
    const int result = ckv_file_sync(file);
    if (result < 0) {
        ckv_volume_fail_path(volume, file, "fsync", -result);
        return false;
    }
    CKV_POINT("maintenance.synced");
    ckv_raise_u64(&path->synced_sequence, sequence); /* M2 */
    /* Not raised: after the clock was set back, a later time would last too long. */
    ckv_store_relaxed_u64(&path->synced_ns, began_ns);

    struct ckv_error error = {0};
    if (note_synced(volume, file, &error) != CKV_OK) { /* M3 */
        ckv_volume_fail_path(volume, file, "writing the header", error.os_errno);
        return false;
    }
    return true;
}

/* False when a path is out of use, now or before: not every put is durable then. */
static bool
sync_all(struct ckv_volume *volume)
{
    ckv_slot_sweep_departed(volume); /* M5 */
    const uint64_t sequence =
        ckv_load_ordered_u64(&volume->region.header->sequence); /* R23 */
    bool error_met = false;
    bool any_failed = false; /* now or before */
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        if (!file->present) {
            continue;
        }
        if (!ckv_volume_file_usable(volume, file)) {
            any_failed = true;
        } else if (!sync_path(volume, file, sequence)) {
            any_failed = true;
            error_met = true;
        }
    }
    ckv_bump(volume, error_met ? CKV_COUNTER_sync_failures : CKV_COUNTER_syncs, 1);
    return !any_failed;
}

enum ckv_status
ckv_volume_sync(struct ckv_volume *volume)
{
    if (volume->mode == CKV_MODE_READ) {
        return CKV_OK; /* it has stored nothing */
    }
    return sync_all(volume) ? CKV_OK : CKV_FAILED_PATH;
}

/* ---- the thread ------------------------------------------------------------------ */

/* Whether `interval_ns` have passed since `last_ns`.  A clock that was set back counts as
 * passed: too often once is better than never. */
static bool
due(uint64_t now_ns, uint64_t last_ns, uint64_t interval_ns)
{
    return now_ns < last_ns || now_ns - last_ns >= interval_ns;
}

/* The interval of this process, 80 to 120 % by slot, so that processes that were started
 * together do not all sync at once. */
static uint64_t
sync_interval_ns(const struct ckv_volume *volume)
{
    const uint64_t percent = 80 + (uint64_t)volume->slot * 40 / (CKV_PROCESSES_MAX - 1);
    return (uint64_t)volume->sync_interval_ms * NS_PER_MS / 100 * percent;
}

static void
publish_oldest_pin(struct ckv_volume *volume, uint64_t now_ns)
{
    const uint64_t tick = ckv_load_relaxed_u64(&volume->tick);
    uint64_t pinned_ns = 0;
    take_lock(&volume->leases_lock);
    const struct ckv_lease *oldest = volume->oldest_lease;
    if (oldest != NULL) {
        const uint64_t age_ns =
            (tick - ckv_min_u64(tick, oldest->pinned_tick)) * NS_PER_SECOND;
        pinned_ns = now_ns > age_ns ? now_ns - age_ns : 1;
    }
    give_lock(&volume->leases_lock);
    ckv_store_relaxed_u64(&volume->region.slots[volume->slot].oldest_pin_ns, pinned_ns);
}

/* The first time everything since the region was made, which only costs a look. */
static void
note_writes(struct ckv_volume *volume, struct memory *memory)
{
    uint64_t written = 0;
    for (uint32_t i = 0; i < CKV_PROCESSES_MAX; i++) {
        const struct ckv_slot *slot = &volume->region.slots[i];
        written +=
            ckv_load_relaxed_u64(&slot->counters[CKV_COUNTER_page_bytes_written]);
    }
    ckv_volume_moved(volume, written - memory->written_bytes);
    memory->written_bytes = written;
}

static bool
sync_due(struct ckv_volume *volume, const struct memory *memory, uint64_t now_ns)
{
    if (volume->sync_interval_ms == UINT32_MAX) {
        return false;
    }
    const uint64_t interval_ns = sync_interval_ns(volume);
    if (!due(now_ns, memory->sync_ns, interval_ns)) {
        return false;
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (ckv_volume_file_usable(volume, &volume->files[i]) &&
            due(now_ns, ckv_load_relaxed_u64(&volume->region.paths[i].synced_ns),
                interval_ns)) {
            return true;
        }
    }
    return false;
}

static bool
checkpoint_due(struct ckv_volume *volume, const struct memory *memory, uint64_t now_ns)
{
    if (!due(now_ns, memory->checkpoint_ns, CHECKPOINT_INTERVAL_NS)) {
        return false;
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (ckv_volume_file_usable(volume, &volume->files[i]) &&
            due(now_ns, ckv_load_relaxed_u64(&volume->region.paths[i].checkpoint_ns),
                CHECKPOINT_INTERVAL_NS)) {
            return true;
        }
    }
    return false;
}

/* A page of table or region that the device no longer delivers reads as zeros here
 * (guard.h), in this process alone.  Zeros in a table are misses; zeros in the region
 * would hide the pins of others, so nothing may be overwritten any more. */
static void
look_for_lost_pages(struct ckv_volume *volume)
{
    const uint64_t media_errors = ckv_load_relaxed_u64(&volume->media_errors);
    ckv_bump(volume, CKV_COUNTER_media_errors,
        media_errors -
            ckv_exchange_ordered_u64(&volume->media_errors_counted, media_errors));
    const bool region_lost = ckv_load_relaxed_u64(&volume->region.lost_pages) != 0;
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        if (!ckv_volume_file_usable(volume, file)) {
            continue;
        }
        if (region_lost) {
            ckv_volume_fail_path(volume, file, "reading the shared region", EIO);
        } else if (ckv_load_relaxed_u64(&file->lost_pages) != 0) {
            ckv_volume_fail_path(volume, file, "reading the table", EIO);
        }
    }
}

static void
work(struct ckv_volume *volume, struct memory *memory)
{
    const uint64_t running_ns = ckv_os.monotonic_ns() - memory->began_ns;
    ckv_store_relaxed_u64(&volume->tick, running_ns / NS_PER_SECOND);
    const uint64_t now_ns = ckv_os.realtime_ns();
    publish_oldest_pin(volume, now_ns);
    note_writes(volume, memory);

    look_for_lost_pages(volume);
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        if (file->present && !ckv_volume_file_usable(volume, file)) {
            /* Heard already: otherwise the old error would be reported to this
             * description after a recovery and fail the path again. */
            (void)ckv_file_pending_error(file);
        } else if (file->present) {
            ckv_volume_probe(volume, file);
        }
    }
    if (sync_due(volume, memory, now_ns)) {
        memory->sync_ns = now_ns;
        (void)sync_all(volume); /* an error has failed the path and was logged */
    }
    if (checkpoint_due(volume, memory, now_ns)) {
        memory->checkpoint_ns = now_ns;
        (void)ckv_checkpoint_write(volume); /* best effort: heat is a hint */
    }
}

/* Waits for a second or for the end.  Requires: maintenance_lock.  False at the end.
 * Where there is a choice, volume.c gave maintenance_wake the monotonic clock. */
static bool
wait_a_second(struct ckv_volume *volume)
{
#if defined(__APPLE__)
    const struct timespec second = {.tv_sec = 1};
#else
    const uint64_t wake_ns = ckv_os.monotonic_ns() + NS_PER_SECOND;
    const struct timespec wake = {.tv_sec = (time_t)(wake_ns / NS_PER_SECOND),
        .tv_nsec = (long)(wake_ns % NS_PER_SECOND)};
#endif
    int result = 0;
    while (!volume->maintenance_stop && result == 0) {
#if defined(__APPLE__)
        result = pthread_cond_timedwait_relative_np(&volume->maintenance_wake,
            &volume->maintenance_lock, &second);
#else
        result = pthread_cond_timedwait(&volume->maintenance_wake,
            &volume->maintenance_lock, &wake);
#endif
    }
    return !volume->maintenance_stop;
}

static void *
maintain(void *argument)
{
    struct ckv_volume *volume = argument;
    struct memory memory = {.began_ns = ckv_os.monotonic_ns()};
    memory.sync_ns = ckv_os.realtime_ns();
    memory.checkpoint_ns = memory.sync_ns;

    ckv_region_keep_resident(volume);
    take_lock(&volume->maintenance_lock);
    while (wait_a_second(volume)) {
        give_lock(&volume->maintenance_lock);
        work(volume, &memory);
        take_lock(&volume->maintenance_lock);
    }
    give_lock(&volume->maintenance_lock);
    return NULL;
}

enum ckv_status
ckv_maintenance_start(struct ckv_volume *volume, struct ckv_error *error)
{
    volume->maintenance_stop = false;
    const int result = ckv_os_start_thread(&volume->maintenance, maintain, volume);
    if (result != 0) {
        return ckv_fail(error, CKV_E_OS, -result,
            "the maintenance thread could not be started; is the number of processes "
            "limited (ulimit -u, or that of the container)?");
    }
    volume->maintenance_runs = true;
    return CKV_OK;
}

void
ckv_maintenance_stop(struct ckv_volume *volume)
{
    if (!volume->maintenance_runs) {
        return;
    }
    volume->maintenance_runs = false;
    if (ckv_volume_forked(volume)) {
        return; /* the thread is in the parent, and perhaps the lock with it */
    }
    take_lock(&volume->maintenance_lock);
    volume->maintenance_stop = true;
    (void)pthread_cond_signal(&volume->maintenance_wake); /* cannot fail */
    give_lock(&volume->maintenance_lock);
    (void)pthread_join(volume->maintenance, NULL); /* cannot fail: joined once */
    (void)ckv_checkpoint_write(volume);            /* best effort: heat is a hint */
}
