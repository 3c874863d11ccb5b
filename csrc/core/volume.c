/* SPDX-License-Identifier: Apache-2.0 */
/* volume.c: from paths to an open set, and back.
 *
 * Opening, in order:
 *   1. resolve and open the files; a set that this process has open already is shared
 *   2. take the open lock of each file, in the order of their inodes
 *   3. all blank: format them as one set; else read and compare their headers
 *   4. nobody alive: a new region, rebuilt from the tables; else attach to the one in use
 *   5. namespace, slot, pins, threads; then the open locks are given back
 *
 *   O1  A process that is killed anywhere leaves a set that the next open completes: a
 *       blank file is formatted again, a region without `ready` is thrown away.
 *   O2  The nonce of a region is in the headers before its first slot is claimed.
 *   O3  `volumes_lock` is held by one opener or closer of this process at a time, and
 *       given up while another process has the open lock.  fork waits for it, so that a
 *       child never inherits it locked.
 */
#include "volume.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bounce.h"
#include "guard.h"
#include "io_pool.h"
#include "maintenance.h"
#include "pin.h"
#include "rebuild.h"
#include "region.h"
#include "slot.h"
#include "write_behind.h"

#define DEFAULT_OPEN_TIMEOUT_MS  10000u
#define DEFAULT_SYNC_INTERVAL_MS 30000u
#define DEFAULT_IO_THREADS       4u
#define BOUNCE_BUFFERS           4u /* direct reads in flight; 2 MiB each */
#define DEFAULT_EVENT_CAPACITY   16384u
#define PATIENCE_NS              UINT64_C(5000000) /* with volumes_lock held */
#define READER_TRIES             3u
#define DEFAULT_PAGE_TABLE_BYTES (UINT64_C(64) << 20)

static pthread_mutex_t volumes_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ckv_volume *volumes; /* of this process */
static bool fork_handlers_set;

struct opening {
    const struct ckv_options *options;
    struct ckv_volume *volume;
    uint64_t deadline_ns;
    int lock_fds[CKV_PATHS_MAX];
    bool blank[CKV_PATHS_MAX];
    uint64_t capacities[CKV_PATHS_MAX]; /* asked for, in the order of the files */
    uint32_t blank_count;
};

static void
before_fork(void)
{
    (void)pthread_mutex_lock(&volumes_lock);
}

static void
after_fork(void)
{
    (void)pthread_mutex_unlock(&volumes_lock);
}

/* Handlers run in the reverse order of registration, so a fork takes volumes_lock, then
 * the fork gate, then the lock of the guard: the order in which an opener takes them. */
static enum ckv_status
prepare_fork(struct ckv_volume *volume, struct ckv_error *error)
{
    CKV_TRY(ckv_guard_prepare(error));
    CKV_TRY(ckv_slot_prepare_process(volume, error));
    if (!fork_handlers_set) {
        const int result = pthread_atfork(before_fork, after_fork, after_fork);
        if (result != 0) {
            return ckv_fail(error, CKV_E_NO_MEMORY, result,
                "cannot register fork handlers");
        }
        fork_handlers_set = true;
    }
    return CKV_OK;
}

/* ---- 1. files --------------------------------------------------------------------- */

static enum ckv_status
check_options(const struct ckv_options *options, struct ckv_error *error)
{
    if (options->path_count < 1 || options->path_count > CKV_PATHS_MAX) {
        return ckv_fail(error, CKV_E_INVALID, 0, "%zu paths; give 1 to %d",
            options->path_count, (int)CKV_PATHS_MAX);
    }
    const uint32_t events = options->event_capacity;
    if (events != 0 && (events < 64 || events > CKV_EVENT_CAPACITY_MAX ||
                           (events & (events - 1)) != 0)) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "event capacity %u must be a power of two from 64 to %u", events,
            CKV_EVENT_CAPACITY_MAX);
    }
    if (options->admission > CKV_ADMISSION_ADAPTIVE) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "admission %u; give 0 (always), 1 (second touch) or 2 (adaptive)",
            (unsigned int)options->admission);
    }
    if (options->eviction > CKV_EVICTION_PREFIX) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "eviction %u; give 0 (clock) or 1 (prefix)",
            (unsigned int)options->eviction);
    }
    if (options->io_threads > 256) {
        return ckv_fail(error, CKV_E_INVALID, 0, "%u I/O threads; give 0 to 256",
            options->io_threads);
    }
    if ((options->file_mode & ~0777u) != 0) {
        return ckv_fail(error, CKV_E_INVALID, 0, "file mode 0%o has bits beyond 0777",
            options->file_mode);
    }
    if (options->shm_directory != NULL &&
        strlen(options->shm_directory) >=
            sizeof((struct ckv_file_header *)0)->shm_directory) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "the shm directory is longer than 1023 bytes");
    }
    return CKV_OK;
}

static bool
same_inode(const struct ckv_file *a, const struct ckv_file *b)
{
    return a->present && b->present && a->device == b->device && a->inode == b->inode;
}

/* Opens file number i; CKV_MISS when it is absent. */
static enum ckv_status
open_one(struct opening *opening, uint32_t i, bool create, struct ckv_error *error)
{
    struct ckv_options options = *opening->options;
    options.create = create;
    struct ckv_file *file = &opening->volume->files[i];
    char *resolved = NULL;
    CKV_TRY(ckv_file_resolve(options.paths[i].path, &resolved, error));
    const enum ckv_status status = ckv_file_open(&options, resolved, file, error);
    free(resolved);
    if (status == CKV_MISS) {
        free(file->path);
        file->path = NULL;
    }
    if (status != CKV_OK) {
        return status;
    }
    for (uint32_t j = 0; j < opening->volume->file_count; j++) {
        if (j != i && same_inode(file, &opening->volume->files[j])) {
            return ckv_fail(error, CKV_E_INVALID, 0,
                "%s and %s are one file; give each volume file once", file->path,
                opening->volume->files[j].path);
        }
    }
    return CKV_OK;
}

static enum ckv_status
absent(const struct opening *opening, uint32_t i, struct ckv_error *error)
{
    return ckv_fail(error, CKV_E_MISSING_PATH, ENOENT,
        "%s does not exist; open it with create and a capacity, or correct the path",
        opening->options->paths[i].path);
}

static enum ckv_status
plan_file(const struct opening *opening, uint32_t i, struct ckv_geometry *geometry,
    struct ckv_error *error)
{
    if (opening->capacities[i] == 0) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "%s is new and needs a capacity, for example capacity=\"64GiB\"",
            opening->options->paths[i].path);
    }
    return ckv_geometry_plan(opening->capacities[i], opening->options->stripe_count,
        opening->options->expected_object_bytes, geometry, error);
}

/* Opens what exists; creates what does not, unless it belongs to an existing set. */
static enum ckv_status
open_files(struct opening *opening, struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    const bool create =
        opening->options->create && opening->options->mode == CKV_MODE_READ_WRITE;
    bool missing[CKV_PATHS_MAX] = {false};
    bool any_content = false;
    for (uint32_t i = 0; i < volume->file_count; i++) {
        const enum ckv_status status = open_one(opening, i, false, error);
        if (status != CKV_OK && status != CKV_MISS) {
            return status;
        }
        missing[i] = status == CKV_MISS;
        bool blank = true;
        if (!missing[i]) {
            CKV_TRY(ckv_file_is_blank(&volume->files[i], &blank, error));
        }
        any_content |= !blank;
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (!missing[i]) {
            continue;
        }
        if (any_content) { /* another process may have created them all since */
            const enum ckv_status status = open_one(opening, i, false, error);
            if (status != CKV_MISS) {
                return status == CKV_OK ? CKV_BUSY : status;
            }
        }
        if (any_content && opening->options->degraded) {
            continue;
        }
        if (any_content) {
            return ckv_fail(error, CKV_E_MISSING_PATH, ENOENT,
                "%s does not exist while other given files belong to a set, which "
                "cannot "
                "grow; restore it, leave it out, or open with degraded=True to do "
                "without "
                "its blocks",
                opening->options->paths[i].path);
        }
        if (!create) {
            return absent(opening, i, error);
        }
        struct ckv_geometry planned; /* refused before a file exists */
        CKV_TRY(plan_file(opening, i, &planned, error));
        CKV_TRY(open_one(opening, i, true, error));
    }
    return CKV_OK;
}

/* ---- 2. open locks ---------------------------------------------------------------- */

static void
give_locks_back(struct opening *opening)
{
    for (uint32_t i = 0; i < CKV_PATHS_MAX; i++) {
        if (opening->lock_fds[i] >= 0) {
            (void)
                ckv_os.close_file(opening->lock_fds[i]); /* frees the lock either way */
            opening->lock_fds[i] = -1;
            ckv_slot_fork_unblock();
        }
    }
}

/* The present file with the smallest (device, inode) above that of `after`. */
static struct ckv_file *
next_file(struct ckv_volume *volume, const struct ckv_file *after)
{
    struct ckv_file *best = NULL;
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        const bool above =
            after == NULL || file->device > after->device ||
            (file->device == after->device && file->inode > after->inode);
        if (file->present && above &&
            (best == NULL || file->device < best->device ||
                (file->device == best->device && file->inode < best->inode))) {
            best = file;
        }
    }
    return best;
}

static enum ckv_status
take_locks(struct opening *opening, struct ckv_error *error)
{
    struct ckv_file *file = NULL;
    while ((file = next_file(opening->volume, file)) != NULL) {
        const uint32_t i = ckv_volume_file_index(opening->volume, file);
        CKV_POINT("open.lock");
        const uint64_t now_ns = ckv_os.monotonic_ns();
        const enum ckv_status status = ckv_file_lock_open(file,
            ckv_min_u64(opening->deadline_ns, now_ns + PATIENCE_NS),
            &opening->lock_fds[i], error);
        if (status == CKV_E_TIMEOUT && ckv_os.monotonic_ns() < opening->deadline_ns) {
            return CKV_BUSY; /* again, after others of this process had volumes_lock */
        }
        CKV_TRY(status);
        ckv_file_write_note(file, "opening");
    }
    return CKV_OK;
}

/* ---- 3. headers ------------------------------------------------------------------- */

static enum ckv_status
random_id(void *id, size_t length, struct ckv_error *error)
{
    const int result = ckv_os.random_bytes(id, length);
    return result < 0 ? ckv_fail(error, CKV_E_OS, -result, "no random numbers")
                      : CKV_OK;
}

/* Lays out every file as one new set.  Requires: the open locks; nobody alive. */
static enum ckv_status
format_set(struct opening *opening, struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    struct ckv_geometry geometries[CKV_PATHS_MAX];
    const uint32_t events = opening->options->event_capacity;
    struct ckv_file_header identity = {
        .event_capacity = events != 0 ? events : DEFAULT_EVENT_CAPACITY,
        .member_count = volume->file_count,
        .created_ns = ckv_os.realtime_ns(),
    };
    CKV_TRY(random_id(identity.set_id, sizeof identity.set_id, error));
    for (uint32_t i = 0; i < volume->file_count; i++) {
        CKV_TRY(plan_file(opening, i, &geometries[i], error));
        struct ckv_member *member = &identity.members[i];
        CKV_TRY(random_id(member->file_id, sizeof member->file_id, error));
        member->data_bytes = geometries[i].data_bytes;
        member->entry_count = geometries[i].entry_count;
        member->stripe_count = (uint16_t)geometries[i].stripe_count;
        member->granule_shift = (uint8_t)__builtin_ctz(geometries[i].granule_bytes);
    }
    if (opening->options->shm_directory != NULL) {
        strncpy(identity.shm_directory, opening->options->shm_directory,
            sizeof identity.shm_directory - 1);
    }
    /* Whoever made a file may have died before its name was on the medium. */
    for (uint32_t i = 0; i < volume->file_count; i++) {
        CKV_TRY(ckv_file_sync_name(&volume->files[i], error));
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        identity.member_index = i;
        memcpy(identity.file_id, identity.members[i].file_id, sizeof identity.file_id);
        CKV_POINT("open.format");
        CKV_TRY(ckv_file_format(&volume->files[i], opening->options, &geometries[i],
            &identity, error));
    }
    return CKV_OK;
}

static enum ckv_status
mismatch(const struct ckv_file *file, const char *what, uint64_t stored, uint64_t asked,
    struct ckv_error *error)
{
    return ckv_fail(error, CKV_E_MISMATCH, 0,
        "%s has %s %llu, asked for was %llu; a volume keeps its geometry: ask for the "
        "stored "
        "value, or start anew with on_mismatch=\"recreate\"",
        file->path, what, (unsigned long long)stored, (unsigned long long)asked);
}

/* Whether what was asked for is what the file has. */
static enum ckv_status
compare_file(const struct opening *opening, uint32_t i, struct ckv_error *error)
{
    const struct ckv_file *file = &opening->volume->files[i];
    const struct ckv_geometry *stored = &file->geometry;
    const struct ckv_options *options = opening->options;
    const uint64_t expected = options->expected_object_bytes;
    const uint64_t capacity = opening->capacities[i];
    if (options->stripe_count != 0 && options->stripe_count != stored->stripe_count) {
        return mismatch(file, "stripe count", stored->stripe_count,
            options->stripe_count, error);
    }
    if (expected != 0 && expected < CKV_PAGE_BYTES) {
        struct ckv_geometry refused; /* the plan says why */
        return ckv_geometry_plan(CKV_CAPACITY_MIN_BYTES, 1, expected, &refused, error);
    }
    if (expected != 0 &&
        ckv_geometry_granule(stored->data_bytes, expected) != stored->granule_bytes) {
        return mismatch(file, "expected object size", stored->granule_bytes, expected,
            error);
    }
    if (capacity != 0) {
        struct ckv_geometry asked;
        CKV_TRY(ckv_geometry_plan(capacity, stored->stripe_count, stored->granule_bytes,
            &asked, error));
        if (asked.data_bytes != stored->data_bytes) {
            return mismatch(file, "capacity", stored->data_bytes, capacity, error);
        }
    }
    return CKV_OK;
}

/* A member that is not here, from what the others know of it. */
static enum ckv_status
fill_missing(struct ckv_file *file, const struct ckv_member *member,
    struct ckv_error *error)
{
    *file = (struct ckv_file){.data_fd = -1, .path = strdup("(missing member)")};
    if (file->path == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM, "no memory for a path");
    }
    struct ckv_file_header header = {
        .data_bytes = member->data_bytes,
        .stripe_count = member->stripe_count,
        .entry_count = member->entry_count,
    };
    if (header.stripe_count == 0 || member->granule_shift < 12 ||
        member->granule_shift > 20) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "the header describes an impossible member");
    }
    header.granule_bytes = 1u << member->granule_shift;
    header.stripe_bytes = header.data_bytes / header.stripe_count;
    struct ckv_geometry planned;
    CKV_TRY(ckv_geometry_plan(header.stripe_bytes * header.stripe_count,
        header.stripe_count, header.granule_bytes, &planned, error));
    ckv_geometry_write(&planned, &header);
    return ckv_geometry_read(&header, &file->geometry, error);
}

/* Puts the files into the order of the set and checks that they are one. */
static enum ckv_status
arrange_set(struct opening *opening, struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    struct ckv_file *first = next_file(volume, NULL);
    if (first == NULL) {
        return absent(opening, 0, error);
    }
    const uint32_t count = first->header.member_count;
    if (count < volume->file_count || count > CKV_PATHS_MAX) {
        return ckv_fail(error, CKV_E_MISMATCH, 0,
            "%s belongs to a set of %u files, %u were given; give the files of one set",
            first->path, count, volume->file_count);
    }
    struct opening ordered = *opening;
    struct ckv_file files[CKV_PATHS_MAX];
    memset(files, 0, sizeof files);
    for (uint32_t i = 0; i < CKV_PATHS_MAX; i++) {
        files[i].data_fd = -1;
        ordered.lock_fds[i] = -1;
        ordered.capacities[i] = 0;
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        const struct ckv_file *file = &volume->files[i];
        if (!file->present) {
            continue;
        }
        const uint32_t at = file->header.member_index;
        if (memcmp(file->header.set_id, first->header.set_id, 16) != 0 || at >= count ||
            files[at].present ||
            memcmp(first->header.members[at].file_id, file->header.file_id, 16) != 0) {
            return ckv_fail(error, CKV_E_MISMATCH, 0,
                "%s and %s do not belong to one set; give the files of one set",
                first->path, file->path);
        }
        files[at] = *file;
        ordered.lock_fds[at] = opening->lock_fds[i];
        ordered.capacities[at] = opening->capacities[i];
    }
    const struct ckv_file_header header = first->header;
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (!volume->files[i].present) {
            free(volume->files[i].path);
        }
    }
    memcpy(volume->files, files, sizeof files);
    memcpy(opening->lock_fds, ordered.lock_fds, sizeof ordered.lock_fds);
    memcpy(opening->capacities, ordered.capacities, sizeof ordered.capacities);
    volume->file_count = count;
    memcpy(volume->set_id, header.set_id, 16);
    memcpy(&volume->hash_key, header.members[0].file_id, sizeof volume->hash_key);
    for (uint32_t i = 0; i < count; i++) {
        if (volume->files[i].present) {
            continue;
        }
        if (!opening->options->degraded) {
            return ckv_fail(error, CKV_E_MISSING_PATH, 0,
                "the set has %u files and number %u of them was not given; give it, or "
                "open "
                "with degraded=True to do without its blocks",
                count, i + 1);
        }
        ckv_log(CKV_LOG_WARNING, "opened without file number %u of the %u of its set",
            i + 1, count);
        CKV_TRY(fill_missing(&volume->files[i], &header.members[i], error));
    }
    return CKV_OK;
}

static int
anybody_alive(struct ckv_volume *volume)
{
    struct ckv_file *present[CKV_PATHS_MAX];
    uint32_t count = 0;
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (volume->files[i].present) {
            present[count++] = &volume->files[i];
        }
    }
    return ckv_slot_any_alive(present, count);
}

static enum ckv_status
fail_to_ask(const struct ckv_volume *volume, int os_errno, struct ckv_error *error)
{
    return ckv_fail(error, CKV_E_OS, os_errno,
        "cannot ask whether other processes use %s (%s); its file system must support "
        "byte locks",
        volume->files[0].path, strerror(os_errno));
}

static enum ckv_status
count_blanks(struct opening *opening, struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    opening->blank_count = 0;
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (volume->files[i].present) {
            CKV_TRY(ckv_file_is_blank(&volume->files[i], &opening->blank[i], error));
            opening->blank_count += opening->blank[i];
        }
    }
    return CKV_OK;
}

/* A set is not used before all of its files are complete, so one with a header is, if
 * others are in use: a power cut may have brought its "creating" back. */
static enum ckv_status
read_headers(struct opening *opening, struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        if (file->present && opening->blank[i] &&
            ckv_file_read_header(file, NULL) != CKV_OK) {
            return ckv_fail(error, CKV_E_MISMATCH, 0,
                "%s is empty while other given files belong to a set; a set keeps its "
                "members: leave it out, or remove the others",
                file->path);
        }
        if (file->present) {
            CKV_TRY(ckv_file_read_header(file, error));
        }
        if (file->present && volume->mode == CKV_MODE_READ_WRITE) {
            CKV_TRY(ckv_file_check_limit(file, file->geometry.file_bytes, error));
        }
    }
    return CKV_OK;
}

/* Compares with what was asked for; RECREATE starts anew unless somebody uses it. */
static enum ckv_status
compare_set(struct opening *opening, struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    enum ckv_status status = CKV_OK;
    for (uint32_t i = 0; status == CKV_OK && i < volume->file_count; i++) {
        if (volume->files[i].present) {
            status = compare_file(opening, i, error);
        }
    }
    if (status != CKV_E_MISMATCH ||
        opening->options->on_mismatch != CKV_MISMATCH_RECREATE ||
        opening->options->mode != CKV_MODE_READ_WRITE) {
        return status;
    }
    const int alive = anybody_alive(volume);
    if (alive < 0) {
        return fail_to_ask(volume, -alive, error);
    }
    if (alive != 0) {
        return ckv_fail(error, CKV_E_MISMATCH, 0,
            "%s has another geometry and cannot be recreated while other processes "
            "have it "
            "open; close them first",
            volume->files[0].path);
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (opening->capacities[i] == 0) {
            opening->capacities[i] = volume->files[i].geometry.data_bytes;
        }
    }
    CKV_TRY(format_set(opening, error));
    for (uint32_t i = 0; i < volume->file_count; i++) {
        CKV_TRY(ckv_file_read_header(&volume->files[i], error));
    }
    return arrange_set(opening, error);
}

/* Whether a creator was killed when some files of its new set were laid out and others
 * were not: no region was ever made for them. */
static bool
set_unfinished(struct opening *opening)
{
    struct ckv_volume *volume = opening->volume;
    if (opening->options->mode == CKV_MODE_READ || !opening->options->create) {
        return false;
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        if (!file->present ||
            (!opening->blank[i] && (ckv_file_read_header(file, NULL) != CKV_OK ||
                                       file->header.region_nonce != 0))) {
            return false;
        }
    }
    return true;
}

/* Whether a set was being laid out anew when its opener was killed or the power went, and
 * may be now: some files are of the new set, which was never used, some of the old. */
static bool
recreation_unfinished(struct opening *opening)
{
    struct ckv_volume *volume = opening->volume;
    bool unused = false;
    if (opening->options->on_mismatch != CKV_MISMATCH_RECREATE ||
        opening->options->mode == CKV_MODE_READ || anybody_alive(volume) != 0) {
        return false;
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        if (!file->present) {
            return false;
        }
        const bool whole = ckv_file_read_header(file, NULL) == CKV_OK;
        if (!whole && !opening->blank[i]) {
            return false;
        }
        unused = unused || !whole || file->header.region_nonce == 0;
    }
    return unused;
}

static enum ckv_status
load_set(struct opening *opening, struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    CKV_TRY(count_blanks(opening, error));
    if (opening->blank_count == volume->file_count) {
        if (opening->options->mode == CKV_MODE_READ || !opening->options->create) {
            return absent(opening, 0, error);
        }
        CKV_TRY(format_set(opening, error));
        memset(opening->blank, 0, sizeof opening->blank);
    } else if (opening->blank_count > 0 && set_unfinished(opening)) {
        CKV_TRY(format_set(opening, error)); /* O1 */
        memset(opening->blank, 0, sizeof opening->blank);
    }
    enum ckv_status status = read_headers(opening, error);
    if (status == CKV_OK) {
        status = arrange_set(opening, error);
    }
    if (status == CKV_E_MISMATCH && recreation_unfinished(opening)) {
        CKV_TRY(format_set(opening, error));
        CKV_TRY(read_headers(opening, error));
        status = arrange_set(opening, error);
    }
    return status == CKV_OK ? compare_set(opening, error) : status;
}

/* ---- 4. region -------------------------------------------------------------------- */

static const char *
shm_directory(const struct opening *opening)
{
    const struct ckv_volume *volume = opening->volume;
    if (opening->options->shm_directory != NULL) {
        return opening->options->shm_directory;
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (volume->files[i].present) {
            return volume->files[i].header.shm_directory;
        }
    }
    return NULL;
}

/* A new region, and its nonce into every header (O2). */
static enum ckv_status
begin_life(struct opening *opening, const char *path, struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    struct stat found = {.st_mode = 0600, .st_uid = ckv_os.user_id()};
    const struct ckv_file *first = next_file(volume, NULL);
    if (first != NULL) {
        (void)ckv_os.stat_file(first->data_fd, &found); /* else it is ours alone */
    }
    CKV_POINT("open.region");
    CKV_TRY(ckv_region_create(volume, path, &found, error));
    CKV_POINT("open.rebuild");
    CKV_TRY(ckv_rebuild(volume, true, error));
    volume->region.header->rebuilt_last_sequence =
        ckv_load_relaxed_u64(&volume->region.header->sequence);
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        if (!file->present) {
            continue;
        }
        file->header.region_nonce = volume->region.header->nonce;
        const char *directory = opening->options->shm_directory;
        if (directory != NULL) {
            memset(file->header.shm_directory, 0, sizeof file->header.shm_directory);
            strncpy(file->header.shm_directory, directory,
                sizeof file->header.shm_directory - 1);
        }
        CKV_TRY(ckv_file_write_header(file, error));
    }
    CKV_POINT("open.ready");
    ckv_region_set_ready(volume);
    return CKV_OK;
}

static uint64_t
header_nonce(const struct ckv_volume *volume)
{
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (volume->files[i].present) {
            return volume->files[i].header.region_nonce;
        }
    }
    return 0;
}

/* Whether another process holds the open lock of the set. */
static bool
opener_at_work(const struct ckv_volume *volume)
{
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (volume->files[i].present &&
            ckv_os_byte_held(volume->files[i].data_fd, CKV_OPEN_LOCK_BYTE, 1) == 1) {
            return true;
        }
    }
    return false;
}

static enum ckv_status
open_region(struct opening *opening, struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    const bool writable = opening->options->mode == CKV_MODE_READ_WRITE;
    /* An opener may be about to claim its first slot: a reader that finds nobody alive
     * now looks again when that opener is done (ckv_volume_current()). */
    volume->provisional = !writable && opener_at_work(volume);
    const int alive = anybody_alive(volume);
    if (alive < 0) {
        return fail_to_ask(volume, -alive, error);
    }
    char *path = NULL;
    CKV_TRY(ckv_region_path(volume, shm_directory(opening), &path, error));
    enum ckv_status status;
    if (alive != 0 || writable) { /* it may lie elsewhere than the volume files */
        status = ckv_file_check_directory(opening->options, path, error);
        if (status != CKV_OK) {
            free(path);
            return status;
        }
    }
    if (alive == 0 && !writable) {
        status = ckv_region_create_private(volume, error);
        if (status == CKV_OK) {
            status = ckv_rebuild(volume, false, error);
        }
        if (status == CKV_OK) {
            volume->region.header->rebuilt_last_sequence = UINT64_MAX >> 1;
        }
    } else if (alive == 0) {
        status = begin_life(opening, path, error);
    } else {
        status = ckv_region_attach(volume, opening->options, path, header_nonce(volume),
            error);
        volume->provisional = false;
    }
    free(path);
    if (volume->eviction == CKV_EVICTION_PREFIX) {
        volume->admission = CKV_ADMISSION_ALWAYS; /* it has one of its own */
    }
    volume->nonce_seen = header_nonce(volume);
    return status;
}

/* ---- 5. the process's part -------------------------------------------------------- */

static enum ckv_status
join_set(struct opening *opening, const uint8_t tag[16], uint8_t *namespace_index,
    struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    const bool writable = volume->mode == CKV_MODE_READ_WRITE;
    volume->counters = volume->private_counters;
    const int index =
        ckv_region_namespace(volume, tag, writable || volume->region.path == NULL);
    if (index < 0 && writable) {
        return ckv_fail(error, CKV_E_NO_NAMESPACE, 0,
            "the volume already has %d namespaces; clear it or use another volume",
            (int)CKV_NAMESPACES_MAX);
    }
    *namespace_index =
        index < 0 ? 0 : (uint8_t)index; /* readers match by tag as well */
    if (!writable) {
        return CKV_OK;
    }
    CKV_TRY(ckv_slot_claim(volume, error));
    volume->counters = volume->region.slots[volume->slot].counters;
    for (int i = 0; i < CKV_COUNTER_COUNT; i++) {
        volume->counters_at_open[i] = ckv_load_relaxed_u64(&volume->counters[i]);
    }
    CKV_TRY(ckv_pin_open(volume, error));
    return ckv_maintenance_start(volume, error);
}

static uint64_t
payload_max_of(const struct ckv_volume *volume)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (volume->files[i].present) {
            largest = ckv_max_u64(largest,
                ckv_geometry_payload_max(&volume->files[i].geometry));
        }
    }
    return largest;
}

/* Undoes whatever part of opening was done; in order, so also the normal end. */
static void
dismantle(struct ckv_volume *volume)
{
    if (volume->maintenance_runs) {
        ckv_maintenance_stop(volume);
    }
    ckv_io_pool_free(&volume->pool);
    ckv_bounce_pool_free(&volume->bounces);
    ckv_write_behind_free(&volume->behind);
    if (volume->owner_word != 0) {
        ckv_slot_leave(volume);
    }
    ckv_pin_close(volume);
    if (volume->region.base != NULL) {
        ckv_region_unmap(volume);
    }
    for (uint32_t i = 0; i < CKV_PATHS_MAX; i++) {
        if (volume->files[i].path != NULL) {
            ckv_file_close(&volume->files[i]);
        }
    }
    pthread_mutex_destroy(&volume->leases_lock);
    pthread_mutex_destroy(&volume->maintenance_lock);
    pthread_cond_destroy(&volume->maintenance_wake);
    volume->magic = 0;
    free(volume);
}

static enum ckv_status
new_volume(const struct ckv_options *options, struct ckv_volume **result,
    struct ckv_error *error)
{
    struct ckv_volume *volume = calloc(1, sizeof *volume);
    if (volume == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM, "no memory for a volume");
    }
    volume->magic = CKV_VOLUME_MAGIC;
    volume->mode = options->mode;
    volume->file_count = (uint32_t)options->path_count;
    volume->counters = volume->private_counters;
    volume->sigbus_guard = options->sigbus_guard;
    volume->admission = options->mode == CKV_MODE_READ_WRITE ? options->admission
                                                             : CKV_ADMISSION_ALWAYS;
    volume->eviction =
        options->mode == CKV_MODE_READ_WRITE ? options->eviction : CKV_EVICTION_CLOCK;
    volume->sync_interval_ms = options->sync_interval_ms != 0
                                   ? options->sync_interval_ms
                                   : DEFAULT_SYNC_INTERVAL_MS;
    volume->page_table_budget_bytes = options->page_table_budget_bytes != 0
                                          ? options->page_table_budget_bytes
                                          : DEFAULT_PAGE_TABLE_BYTES;
    ckv_store_relaxed_u32(&volume->last_stripe, UINT32_MAX);
    ckv_store_relaxed_u64(&volume->references, 1);
    volume->region.fd = -1;
    for (uint32_t i = 0; i < CKV_PATHS_MAX; i++) {
        volume->files[i].data_fd = -1;
    }
    pthread_condattr_t clock;
    (void)pthread_condattr_init(&clock); /* none of these fails on Linux or macOS */
#ifndef __APPLE__
    (void)pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
#endif
    (void)pthread_mutex_init(&volume->leases_lock, NULL);
    (void)pthread_mutex_init(&volume->maintenance_lock, NULL);
    (void)pthread_cond_init(&volume->maintenance_wake, &clock);
    (void)pthread_condattr_destroy(&clock);
    *result = volume;
    return CKV_OK;
}

/* The volume of this process that has one of the files open in the same mode. */
static struct ckv_volume *
find_open(const struct opening *opening)
{
    for (struct ckv_volume *open = volumes; open != NULL; open = open->next) {
        if (open->mode != opening->options->mode || ckv_volume_forked(open) ||
            !ckv_volume_current(open)) {
            continue;
        }
        for (uint32_t i = 0; i < open->file_count; i++) {
            for (uint32_t j = 0; j < opening->volume->file_count; j++) {
                if (same_inode(&open->files[i], &opening->volume->files[j])) {
                    return open;
                }
            }
        }
    }
    return NULL;
}

/* Another handle on a set that this process has open: compare, register the namespace. */
static enum ckv_status
share(struct opening *opening, struct ckv_volume *open, const uint8_t tag[16],
    uint8_t *namespace_index, struct ckv_error *error)
{
    struct opening compared = {.options = opening->options, .volume = open};
    for (uint32_t i = 0; i < open->file_count; i++) {
        bool given = !open->files[i].present;
        for (uint32_t j = 0; j < opening->volume->file_count; j++) {
            if (same_inode(&open->files[i], &opening->volume->files[j])) {
                compared.capacities[i] = opening->capacities[j];
                given = true;
            }
        }
        if (!given || opening->volume->file_count > open->file_count) {
            return ckv_fail(error, CKV_E_MISMATCH, 0,
                "%s is open in this process as a set of %u files; open it with all of "
                "them",
                open->files[i].path, open->file_count);
        }
        if (open->files[i].present) {
            CKV_TRY(compare_file(&compared, i, error));
        }
    }
    int index = ckv_region_namespace(open, tag, false);
    if (index < 0 && open->mode == CKV_MODE_READ_WRITE) {
        CKV_TRY(take_locks(opening, error));
        index = ckv_region_namespace(open, tag, true);
        if (index < 0) {
            return ckv_fail(error, CKV_E_NO_NAMESPACE, 0,
                "the volume already has %d namespaces; clear it or use another volume",
                (int)CKV_NAMESPACES_MAX);
        }
    }
    *namespace_index = index < 0 ? 0 : (uint8_t)index;
    ckv_volume_retain(open);
    return CKV_OK;
}

static enum ckv_status
map_files(struct ckv_volume *volume, struct ckv_error *error)
{
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (volume->files[i].present) {
            volume->files[i].window_note =
                volume->sigbus_guard ? &volume->media_errors : NULL;
            CKV_TRY(ckv_file_map(&volume->files[i], error));
        }
    }
    return CKV_OK;
}

/* Steps 2 to 5. */
static enum ckv_status
open_set(struct opening *opening, const uint8_t tag[16], uint8_t *namespace_index,
    struct ckv_error *error)
{
    struct ckv_volume *volume = opening->volume;
    if (volume->mode == CKV_MODE_READ_WRITE) {
        CKV_TRY(take_locks(opening, error));
    }
    CKV_TRY(load_set(opening, error));
    CKV_TRY(map_files(volume, error));
    CKV_TRY(open_region(opening, error));
    const uint32_t threads = opening->options->io_threads != 0
                                 ? opening->options->io_threads
                                 : DEFAULT_IO_THREADS;
    CKV_TRY(ckv_io_pool_new(threads, &volume->pool, error));
    if (volume->mode == CKV_MODE_READ_WRITE) {
        CKV_TRY(ckv_bounce_pool_new(BOUNCE_BUFFERS, &volume->bounces, error));
    }
    if (volume->mode == CKV_MODE_READ_WRITE && opening->options->write_behind) {
        CKV_TRY(ckv_write_behind_new(&volume->behind, error));
    }
    volume->payload_max_bytes = payload_max_of(volume);
    CKV_TRY(join_set(opening, tag, namespace_index, error));
    CKV_POINT("open.joined");
    return CKV_OK;
}

/* What this open created and could not finish is removed again: while its open lock keeps
 * others from having begun with it, or if they have not. */
static void
remove_unfinished(struct opening *opening)
{
    const char *region_path = opening->volume->region.path;
    for (uint32_t i = 0; i < opening->volume->file_count; i++) {
        struct ckv_file *file = &opening->volume->files[i];
        if (opening->lock_fds[i] >= 0) {
            if (file->created && region_path != NULL) {
                (void)ckv_os.unlink_path(region_path); /* made by this open as well */
                region_path = NULL;
            }
            ckv_file_discard(file);
        } else if (file->present && file->created) {
            ckv_file_withdraw(file); /* it stopped before the locks */
        }
    }
}

/* A reader takes no open lock, so it may have looked at a set while another process laid
 * it out or rebuilt it: then it tries again, CKV_BUSY. */
static enum ckv_status
excuse(const struct opening *opening, enum ckv_status status, struct ckv_error *error)
{
    const struct ckv_file *file = next_file(opening->volume, NULL);
    if (opening->options->mode != CKV_MODE_READ || file == NULL ||
        !opener_at_work(opening->volume)) {
        return status;
    }
    return ckv_os.monotonic_ns() < opening->deadline_ns
               ? CKV_BUSY
               : ckv_file_fail_locked(file, error);
}

/* Whether an error of a reader may come from what an opener has changed under its eyes,
 * who is done by now. */
static bool
may_be_passing(enum ckv_status status)
{
    return status == CKV_E_FORMAT || status == CKV_E_MISMATCH || status == CKV_E_OS ||
           status == CKV_E_MISSING_PATH;
}

/* One try; CKV_BUSY when a file was replaced meanwhile. */
static enum ckv_status
try_open(const struct ckv_options *options, uint64_t deadline_ns, const uint8_t tag[16],
    struct ckv_volume **result, uint8_t *namespace_index, struct ckv_error *error)
{
    struct opening opening = {.options = options, .deadline_ns = deadline_ns};
    CKV_TRY(new_volume(options, &opening.volume, error));
    for (uint32_t i = 0; i < CKV_PATHS_MAX; i++) {
        opening.lock_fds[i] = -1;
        opening.capacities[i] =
            i < options->path_count ? options->paths[i].capacity_bytes : 0;
    }
    enum ckv_status status = prepare_fork(opening.volume, error);
    if (status == CKV_OK) {
        status = open_files(&opening, error);
    }
    struct ckv_volume *open = status == CKV_OK ? find_open(&opening) : NULL;
    if (open != NULL) {
        status = share(&opening, open, tag, namespace_index, error);
    } else if (status == CKV_OK) {
        status = open_set(&opening, tag, namespace_index, error);
    }
    if (status == CKV_OK && open == NULL) {
        opening.volume->next = volumes;
        volumes = opening.volume;
        *result = opening.volume;
    } else {
        *result = open;
        if (status < 0) {
            remove_unfinished(&opening);
            status = excuse(&opening, status, error);
        }
        dismantle(opening.volume);
    }
    give_locks_back(&opening);
    return status;
}

enum ckv_status
ckv_volume_open(const struct ckv_options *options, const uint8_t namespace_tag[16],
    struct ckv_volume **volume, uint8_t *namespace_index, struct ckv_error *error)
{
    CKV_TRY(check_options(options, error));
    const uint64_t timeout_ms = options->open_timeout_ms != 0 ? options->open_timeout_ms
                                                              : DEFAULT_OPEN_TIMEOUT_MS;
    const uint64_t deadline_ns = ckv_os.monotonic_ns() + timeout_ms * UINT64_C(1000000);
    uint32_t failures = 0; /* of a reader, while nobody was opening any more */
    enum ckv_status status;
    for (;;) {
        (void)
            pthread_mutex_lock(&volumes_lock); /* cannot fail: a plain, static mutex */
        status = try_open(options, deadline_ns, namespace_tag, volume, namespace_index,
            error);
        (void)pthread_mutex_unlock(&volumes_lock);
        const bool again = options->mode == CKV_MODE_READ && may_be_passing(status) &&
                           ++failures < READER_TRIES;
        if (status != CKV_BUSY && status != CKV_MISS && !again) {
            break;
        }
        if (ckv_os.monotonic_ns() >= deadline_ns) {
            status = ckv_fail(error, CKV_E_TIMEOUT, 0,
                "%s was replaced again and again while it was being opened",
                options->paths[0].path);
            break;
        }
        ckv_os.sleep_ns(1000000);
    }
    return status;
}

void
ckv_volume_retain(struct ckv_volume *volume)
{
    ckv_add_ordered_u64(&volume->references, 1);
}

void
ckv_volume_release(struct ckv_volume *volume)
{
    CKV_CHECK(volume->magic == CKV_VOLUME_MAGIC);
    uint64_t references = ckv_load_relaxed_u64(&volume->references);
    while (references > 1) { /* not the last: no lock */
        if (ckv_cas_ordered_u64(&volume->references, &references, references - 1)) {
            return;
        }
    }
    (void)pthread_mutex_lock(&volumes_lock);
    const bool last = ckv_add_ordered_u64(&volume->references, (uint64_t)-1) == 1;
    if (last) {
        struct ckv_volume **link = &volumes;
        while (*link != volume) {
            link = &(*link)->next;
        }
        *link = volume->next;
        dismantle(volume);
    }
    (void)pthread_mutex_unlock(&volumes_lock);
}

bool
ckv_volume_current(const struct ckv_volume *volume)
{
    if (volume->mode == CKV_MODE_READ_WRITE) {
        return true;
    }
    if (volume->provisional && !opener_at_work(volume)) {
        return false;
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        const struct ckv_file *file = &volume->files[i];
        if (!file->present || file->head == NULL) {
            continue;
        }
        return ckv_file_names_region(file, volume->nonce_seen);
    }
    return true;
}
