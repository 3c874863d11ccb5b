/* SPDX-License-Identifier: Apache-2.0 */
/* stress_cache.c: threads and processes that use one small volume as hard as they can.
 *
 * Knows cyclone_kv.h, and the table of system calls for --cold.  A payload says which
 * key and version it belongs to, and each of its words depends on both, so that
 * foreign, stale, torn or changed bytes show in the word where they begin.  A board in
 * memory that all processes share has, for each key, the oldest version that may still
 * be seen:
 *
 *   K1  Only its owner (one thread of one process) stores or removes a key; versions of a
 *       key only grow.
 *   K2  oldest[key] is raised to a version after the put of it returned CKV_OK, and above
 *       every version given out so far after a remove returned.
 *   K3  Whoever looks reads oldest[key] first; what the lookup then finds is not older.
 *
 *     stress_cache PATH [--seconds S] [--threads T] [--processes P] [--kills K] [--seed
 *     N] [--cold 1]
 *
 * With --cold the engine is told that nothing is in memory, so that every first copy of a
 * larger block goes around the page cache, over pages that are still dirty too.
 *
 * A build with -DCKV_POINTS gives up the processor now and then before an access to
 * shared memory, so that steps which lie a few instructions apart interleave too.
 *
 * With --processes each opens the volume for itself; with --kills the parent ends one of
 * them by SIGKILL now and then and starts another.  At the end everything is verified:
 * before the last handle is closed, and once more by a process that rebuilds.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cyclone_kv.h"
#include "os.h"

enum {
    KEYS = 192,
    WORKERS_MAX = 64,
    PROCESSES_MAX = 16,
    BATCH = 8,
    HELD = 6,
    PAYLOAD_MAX = 1 << 20,
    EVENTS = 64,
};

static const uint64_t capacity_bytes = UINT64_C(32) << 20;

struct board {
    _Atomic(uint64_t) next_version[KEYS];
    _Atomic(uint64_t) oldest[KEYS];
    _Atomic(uint64_t) stored, hits, misses, refused, removed, checked_bytes;
    _Atomic(uint32_t) stop;
    _Atomic(uint32_t) failed;
};

static struct board *board;

struct settings {
    const char *path;
    double seconds;
    uint32_t threads;
    uint32_t processes;
    uint32_t kills;
    uint64_t seed;
    bool cold;
};

struct held { /* a lease that is looked at again before it ends */
    struct ckv_lease *lease;
    uint32_t key;
};

struct worker {
    struct ckv_cache *cache;
    uint32_t number; /* over all processes */
    uint32_t workers;
    uint64_t random;
    uint8_t *payload;
    uint8_t *target;
    struct held held[HELD];
};

_Noreturn static void
fail(const char *what, uint32_t key, uint64_t found, uint64_t expected)
{
    fprintf(stderr,
        "stress_cache: %s: key %" PRIu32 ", found %" PRIx64 ", expected %" PRIx64 "\n",
        what, key, found, expected);
    atomic_store(&board->failed, 1);
    abort();
}

static void
require(enum ckv_status status, const char *what, const struct ckv_error *error)
{
    if (status < 0) {
        fprintf(stderr, "stress_cache: %s: %s: %s\n", what, ckv_status_text(status),
            error->text);
        atomic_store(&board->failed, 1);
        abort();
    }
}

static double
now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static uint64_t
mix(uint64_t value)
{
    value ^= value >> 31;
    value *= UINT64_C(0x7fb5d329728ea185);
    value ^= value >> 27;
    value *= UINT64_C(0x81dadef4bc2dd44d);
    return value ^ value >> 33;
}

static uint64_t
next_random(struct worker *worker)
{
    worker->random += UINT64_C(0x9e3779b97f4a7c15);
    return mix(worker->random);
}

#ifdef CKV_POINTS
extern void (*ckv_yield_hook)(void); /* point.h; no other name of the engine is used */

static void
tempt_races(void)
{
    static _Thread_local uint64_t count;
    count += UINT64_C(0x9e3779b97f4a7c15) + 2 * (uint64_t)(uintptr_t)pthread_self();
    const uint64_t dice = mix(count);
    if (dice % 64 == 0) {
        sched_yield();
    } else if (dice % 8192 == 1) {
        const struct timespec pause = {.tv_nsec = (long)(dice >> 48)};
        nanosleep(&pause, NULL);
    }
}
#endif

/* ---- keys and payloads ------------------------------------------------------------ */

struct key_text {
    char bytes[48];
};

/* Most keys have 32 bytes and are used as they are; every fourth is digested. */
static struct ckv_key
key_of(uint32_t key, struct key_text *text)
{
    memset(text->bytes, 'k', sizeof text->bytes);
    memcpy(text->bytes, &key, sizeof key);
    return (struct ckv_key){
        .data = text->bytes,
        .length = key % 4 == 3 ? 40 : 32,
    };
}

/* Mostly small, some of many pages, never a whole number of words. */
static size_t
length_of(uint32_t key, uint64_t version)
{
    const uint64_t dice = mix(version * KEYS + key);
    const uint64_t limit = dice % 16 == 0 ? PAYLOAD_MAX : dice % 4 == 0 ? 65536 : 9000;
    return 24 + (size_t)((dice >> 8) % (limit - 24));
}

static uint64_t
word_of(uint32_t key, uint64_t version, size_t index)
{
    return mix(version * KEYS + key) + index * UINT64_C(0x9e3779b97f4a7c15);
}

/* [key][version][word 2][word 3] ... [a part of the last word] */
static size_t
fill(uint8_t *payload, uint32_t key, uint64_t version)
{
    const size_t length = length_of(key, version);
    for (size_t offset = 0; offset < length; offset += 8) {
        uint64_t word = word_of(key, version, offset / 8);
        word = offset == 0 ? key : offset == 8 ? version : word;
        const size_t rest = length - offset;
        memcpy(payload + offset, &word, rest < 8 ? rest : 8);
    }
    return length;
}

static uint64_t
load_word(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

/* Whether the payload is a whole one of this key, no older than allowed (K3). */
static void
check(const uint8_t *payload, size_t length, uint32_t key, uint64_t oldest)
{
    if (length < 24) {
        fail("length", key, length, 24);
    }
    if (load_word(payload) != key) {
        fail("bytes of another key", key, load_word(payload), key);
    }
    const uint64_t version = load_word(payload + 8);
    if (version < oldest) {
        fail("a version that is gone", key, version, oldest);
    }
    if (length != length_of(key, version)) {
        fail("length of another version", key, length, length_of(key, version));
    }
    for (size_t offset = 16; offset < length; offset += 8) {
        const uint64_t expected = word_of(key, version, offset / 8);
        const size_t rest = length - offset;
        if (memcmp(payload + offset, &expected, rest < 8 ? rest : 8) != 0) {
            fail("torn payload", key, offset, version);
        }
    }
    atomic_fetch_add(&board->checked_bytes, length);
}

static void
raise_oldest(uint32_t key, uint64_t version)
{
    uint64_t seen = atomic_load(&board->oldest[key]);
    while (seen < version &&
           !atomic_compare_exchange_weak(&board->oldest[key], &seen, version)) {
    }
}

/* ---- operations ------------------------------------------------------------------- */

static uint32_t
any_key(struct worker *worker)
{
    return (uint32_t)(next_random(worker) % KEYS);
}

/* K1 */
static uint32_t
own_key(struct worker *worker)
{
    const uint32_t own =
        (KEYS - worker->number + worker->workers - 1) / worker->workers;
    return worker->number + worker->workers * (uint32_t)(next_random(worker) % own);
}

static void
note_put(uint32_t key, uint64_t version, enum ckv_status status)
{
    switch (status) {
    case CKV_OK:
        raise_oldest(key, version); /* K2 */
        atomic_fetch_add(&board->stored, 1);
        break;
    case CKV_PRESENT:
        break;
    case CKV_BUSY:
    case CKV_NO_RUN:
    case CKV_NOT_ADMITTED:
    case CKV_IN_FLIGHT:
        atomic_fetch_add(&board->refused, 1);
        break;
    default:
        fail("put", key, (uint64_t)status, 0);
    }
}

/* In three segments that end anywhere; the user header repeats key and version. */
static void
do_put(struct worker *worker, uint32_t flags)
{
    const uint32_t key = own_key(worker);
    const uint64_t version = atomic_fetch_add(&board->next_version[key], 1) + 1;
    const size_t length = fill(worker->payload, key, version);
    const size_t first = next_random(worker) % length;
    const size_t second = next_random(worker) % (length - first);
    const struct ckv_segment segments[3] = {
        {worker->payload, first},
        {worker->payload + first, second},
        {worker->payload + first + second, length - first - second},
    };
    const uint64_t header[2] = {key, version};
    struct key_text text;
    struct ckv_error error;
    struct ckv_item item = {
        .key = key_of(key, &text),
        .segments = segments,
        .segment_count = 3,
        .header = header,
        .header_length = sizeof header,
    };
    const enum ckv_status status = ckv_put(worker->cache, &item, flags, &error);
    require(status, "ckv_put", &error);
    note_put(key, version, status);
}

static void
do_put_many(struct worker *worker)
{
    struct key_text texts[BATCH];
    struct ckv_segment segments[BATCH];
    struct ckv_item items[BATCH];
    uint64_t versions[BATCH], headers[BATCH][2];
    uint32_t keys[BATCH];
    size_t used = 0, count = 0;
    while (count < BATCH && used + PAYLOAD_MAX <= 2 * (size_t)PAYLOAD_MAX) {
        const uint32_t key = own_key(worker);
        bool again = false;
        for (size_t i = 0; i < count; i++) {
            again = again || keys[i] == key;
        }
        if (again) {
            break; /* one call may not carry two versions of a key in an unknown order */
        }
        keys[count] = key;
        versions[count] = atomic_fetch_add(&board->next_version[key], 1) + 1;
        const size_t length = fill(worker->payload + used, key, versions[count]);
        headers[count][0] = key;
        headers[count][1] = versions[count];
        segments[count] = (struct ckv_segment){worker->payload + used, length};
        items[count] = (struct ckv_item){
            .key = key_of(key, &texts[count]),
            .segments = &segments[count],
            .segment_count = 1,
            .header = headers[count],
            .header_length = sizeof headers[count],
        };
        used += length;
        count++;
    }
    struct ckv_error error;
    const uint32_t flags =
        CKV_PUT_CHAIN | (next_random(worker) % 2 ? CKV_PUT_OVERWRITE : 0);
    require(ckv_put_many(worker->cache, items, count, flags, NULL, &error),
        "ckv_put_many", &error);
    for (size_t i = 0; i < count; i++) {
        note_put(keys[i], versions[i], items[i].status);
    }
}

static void
do_reserve(struct worker *worker)
{
    const uint32_t key = own_key(worker);
    const uint64_t version = atomic_fetch_add(&board->next_version[key], 1) + 1;
    const uint64_t header[2] = {key, version};
    struct key_text text;
    struct ckv_error error;
    const struct ckv_item item = {
        .key = key_of(key, &text),
        .header = header,
        .header_length = sizeof header,
    };
    struct ckv_reservation *reservation;
    enum ckv_status status = ckv_reserve(worker->cache, &item, length_of(key, version),
        &reservation, &error);
    require(status, "ckv_reserve", &error);
    if (status != CKV_OK) {
        note_put(key, version, status);
        return;
    }
    size_t length;
    uint8_t *data = ckv_reservation_data(reservation, &length);
    if (length != length_of(key, version)) {
        fail("length of a reservation", key, length, length_of(key, version));
    }
    for (size_t i = 0; i < length; i++) {
        if (data[i] != 0) {
            fail("a reservation that is not zeroed", key, i, 0);
        }
    }
    fill(data, key, version);
    if (next_random(worker) % 4 == 0) {
        ckv_abort(&reservation);
        return;
    }
    status = ckv_commit(&reservation, CKV_PUT_OVERWRITE, &error);
    require(status, "ckv_commit", &error);
    note_put(key, version, status);
}

static void
check_lease(const struct ckv_lease *lease, uint32_t key, uint64_t oldest)
{
    size_t length, header_length;
    const uint8_t *data = ckv_lease_data(lease, &length);
    check(data, length, key, oldest);
    const uint8_t *header = ckv_lease_header(lease, &header_length);
    if (header_length != 16 || memcmp(header, data, 16) != 0) {
        fail("user header", key, header_length, 16);
    }
}

static void
note_lookup(enum ckv_status status, uint32_t key)
{
    if (status != CKV_OK && status != CKV_MISS) {
        fail("lookup", key, (uint64_t)status, 0);
    }
    atomic_fetch_add(status == CKV_OK ? &board->hits : &board->misses, 1);
}

static void
let_go(struct held *held)
{
    if (held->lease != NULL) {
        /* Overwritten, removed or evicted meanwhile, perhaps; never changed. */
        check_lease(held->lease, held->key, 0);
        ckv_lease_release(&held->lease);
    }
}

static void
do_get(struct worker *worker)
{
    struct held *held = &worker->held[next_random(worker) % HELD];
    let_go(held);
    const uint32_t key = any_key(worker);
    const uint64_t oldest = atomic_load(&board->oldest[key]); /* K3 */
    struct key_text text;
    const struct ckv_key name = key_of(key, &text);
    struct ckv_error error;
    const enum ckv_status status = ckv_get(worker->cache, &name, &held->lease, &error);
    require(status, "ckv_get", &error);
    note_lookup(status, key);
    if (status != CKV_OK) {
        held->lease = NULL;
        return;
    }
    held->key = key;
    check_lease(held->lease, key, oldest);
}

static void
do_locate(struct worker *worker)
{
    const uint32_t key = any_key(worker);
    const uint64_t oldest = atomic_load(&board->oldest[key]);
    struct key_text text;
    const struct ckv_key name = key_of(key, &text);
    struct ckv_lease *lease;
    struct ckv_error error;
    int fd;
    uint64_t offset;
    const enum ckv_status status =
        ckv_locate(worker->cache, &name, &lease, &fd, &offset, &error);
    require(status, "ckv_locate", &error);
    note_lookup(status, key);
    if (status != CKV_OK) {
        return;
    }
    size_t length;
    ckv_lease_data(lease, &length);
    const ssize_t got = pread(fd, worker->target, length, (off_t)offset);
    if (got != (ssize_t)length) {
        fail("pread of a place", key, (uint64_t)got, length);
    }
    check(worker->target, length, key, oldest);
    ckv_lease_release(&lease);
}

/* Puts the whole file out of memory, so that what was stored and not looked at yet is
 * read from the device. */
static void
do_forget(struct worker *worker)
{
#ifdef __linux__
    const uint32_t key = any_key(worker);
    struct key_text text;
    const struct ckv_key name = key_of(key, &text);
    struct ckv_lease *lease;
    struct ckv_error error;
    int fd;
    uint64_t offset;
    const enum ckv_status status =
        ckv_locate(worker->cache, &name, &lease, &fd, &offset, &error);
    require(status, "ckv_locate", &error);
    note_lookup(status, key);
    if (status == CKV_OK) {
        /* Advice: only clean pages go, so they are written first. */
        (void)sync_file_range(fd, 0, 0,
            SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                SYNC_FILE_RANGE_WAIT_AFTER);
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        ckv_lease_release(&lease);
    }
#else
    (void)worker;
#endif
}

static void
do_copy(struct worker *worker)
{
    struct key_text texts[BATCH];
    struct ckv_target targets[BATCH][2];
    struct ckv_read reads[BATCH];
    uint64_t oldest[BATCH];
    uint32_t keys[BATCH];
    const size_t count = 1 + next_random(worker) % BATCH;
    for (size_t i = 0; i < count; i++) {
        keys[i] = any_key(worker);
        oldest[i] = atomic_load(&board->oldest[keys[i]]);
        uint8_t *start = worker->target + i * (PAYLOAD_MAX + 64) + i;
        const size_t first = next_random(worker) % PAYLOAD_MAX;
        targets[i][0] = (struct ckv_target){start, first};
        targets[i][1] = (struct ckv_target){start + first, PAYLOAD_MAX - first};
        reads[i] = (struct ckv_read){
            .key = key_of(keys[i], &texts[i]),
            .targets = targets[i],
            .target_count = 2,
        };
    }
    struct ckv_error error;
    if (count == 1) {
        require(ckv_get_into(worker->cache, &reads[0], &error), "ckv_get_into", &error);
    } else {
        require(ckv_get_many_into(worker->cache, reads, count, &error),
            "ckv_get_many_into", &error);
    }
    for (size_t i = 0; i < count; i++) {
        note_lookup(reads[i].status, keys[i]);
        if (reads[i].status == CKV_OK) {
            check(targets[i][0].data, (size_t)reads[i].payload_length, keys[i],
                oldest[i]);
        }
    }
}

static void
do_remove(struct worker *worker)
{
    const uint32_t key = own_key(worker);
    struct key_text text;
    const struct ckv_key name = key_of(key, &text);
    struct ckv_error error;
    const enum ckv_status status = ckv_remove(worker->cache, &name, &error);
    require(status, "ckv_remove", &error);
    raise_oldest(key, atomic_load(&board->next_version[key]) + 1); /* K2 */
    atomic_fetch_add(&board->next_version[key], 1);
    atomic_fetch_add(&board->removed, status == CKV_OK);
}

static void
do_look(struct worker *worker)
{
    struct key_text texts[BATCH];
    struct ckv_key keys[BATCH];
    bool present[BATCH];
    size_t length;
    struct ckv_error error;
    for (size_t i = 0; i < BATCH; i++) {
        keys[i] = key_of(any_key(worker), &texts[i]);
    }
    require(ckv_contains_many(worker->cache, keys, BATCH, present, &error),
        "ckv_contains_many", &error);
    require(ckv_longest_prefix(worker->cache, keys, BATCH, true, &length, &error),
        "ckv_longest_prefix", &error);
    require(ckv_prefetch(worker->cache, keys, BATCH, &length, &error), "ckv_prefetch",
        &error);
    require(ckv_touch(worker->cache, keys, BATCH, &length, &error), "ckv_touch",
        &error);
}

/* What people and metrics do while servers work. */
static void
do_care(struct worker *worker)
{
    struct ckv_error error;
    struct ckv_stats volume, process;
    struct ckv_event events[EVENTS];
    struct ckv_entry_info infos[EVENTS];
    struct ckv_verify_report report;
    uint64_t lost, last, removed, cursor = 0, entries;
    size_t count;
    switch (next_random(worker) % 16) {
    case 0:
        require(ckv_clear(worker->cache, &removed, &error), "ckv_clear", &error);
        break;
    case 1:
        require(ckv_verify(worker->cache, false, NULL, NULL, &report, &error),
            "ckv_verify", &error);
        if (report.damaged_payloads + report.structure_faults + report.unreadable !=
            0) {
            fprintf(stderr, "stress_cache: verify: %s\n", report.first_fault);
            fail("verify", 0, report.structure_faults, report.damaged_payloads);
        }
        break;
    case 2:
        require(ckv_sync(worker->cache, &error), "ckv_sync", &error);
        break;
    case 3:
        do {
            require(ckv_list(worker->cache, &cursor, infos, EVENTS, &count, &error),
                "ckv_list", &error);
        } while (count != 0);
        break;
    default:
        require(ckv_get_stats(worker->cache, &volume, &process, &error),
            "ckv_get_stats", &error);
        require(ckv_count(worker->cache, &entries, &error), "ckv_count", &error);
        require(ckv_events(worker->cache, 0, events, EVENTS, &count, &lost, &last,
                    &error),
            "ckv_events", &error);
    }
}

static void
one_step(struct worker *worker)
{
    const uint64_t dice = next_random(worker) % 256;
    if (dice < 60) {
        do_get(worker);
    } else if (dice < 110) {
        do_copy(worker);
    } else if (dice < 150) {
        do_put(worker, 0);
    } else if (dice < 190) {
        do_put(worker, CKV_PUT_OVERWRITE);
    } else if (dice < 205) {
        do_put_many(worker);
    } else if (dice < 220) {
        do_reserve(worker);
    } else if (dice < 232) {
        do_remove(worker);
    } else if (dice < 242) {
        do_look(worker);
    } else if (dice < 252) {
        do_locate(worker);
    } else if (dice < 254) {
        do_forget(worker);
    } else {
        do_care(worker);
    }
}

static void *
run_worker(void *context)
{
    struct worker *worker = context;
    worker->payload = malloc((size_t)3 * PAYLOAD_MAX);
    worker->target = malloc((size_t)BATCH * (PAYLOAD_MAX + 128));
    if (worker->payload == NULL || worker->target == NULL) {
        fail("out of memory", 0, 0, 0);
    }
    while (atomic_load(&board->stop) == 0) {
        one_step(worker);
    }
    for (size_t i = 0; i < HELD; i++) {
        let_go(&worker->held[i]);
    }
    free(worker->payload);
    free(worker->target);
    return NULL;
}

/* ---- processes -------------------------------------------------------------------- */

static struct ckv_cache *
open_cache(const struct settings *settings, enum ckv_verify verify)
{
    const struct ckv_path path = {settings->path, capacity_bytes};
    struct ckv_options options;
    struct ckv_error error;
    struct ckv_cache *cache;
    ckv_options_init(&options);
    options.paths = &path;
    options.path_count = 1;
    options.verify = verify;
    options.stripe_count = 2;
    options.expected_object_bytes = 16384;
    require(ckv_open(&options, &cache, &error), "ckv_open", &error);
    return cache;
}

static void
verify_all(struct ckv_cache *cache)
{
    struct ckv_verify_report report;
    struct ckv_stats stats;
    struct ckv_error error;
    require(ckv_verify(cache, false, NULL, NULL, &report, &error), "ckv_verify",
        &error);
    require(ckv_get_stats(cache, &stats, NULL, &error), "ckv_get_stats", &error);
    if (report.damaged_payloads + report.structure_faults + report.unreadable != 0 ||
        stats.corrupt + stats.read_errors + stats.failed_paths != 0) {
        fprintf(stderr, "stress_cache: at the end: %s; corrupt %" PRId64 "\n",
            report.first_fault, stats.corrupt);
        fail("verify at the end", 0, report.structure_faults, report.damaged_payloads);
    }
}

/* The threads of one process; half of them through a handle that verifies every read. */
static void
run_process(const struct settings *settings, uint32_t index)
{
    static struct worker workers[WORKERS_MAX];
    pthread_t threads[WORKERS_MAX];
    struct ckv_cache *caches[2] = {
        open_cache(settings, CKV_VERIFY_ONCE),
        open_cache(settings, CKV_VERIFY_ALWAYS),
    };
    for (uint32_t i = 0; i < settings->threads; i++) {
        const uint32_t number = index * settings->threads + i;
        workers[i] = (struct worker){
            .cache = caches[i % 2],
            .number = number,
            .workers = settings->threads * settings->processes,
            .random = mix(settings->seed + number),
        };
        if (pthread_create(&threads[i], NULL, run_worker, &workers[i]) != 0) {
            fail("pthread_create", 0, i, 0);
        }
    }
    for (uint32_t i = 0; i < settings->threads; i++) {
        pthread_join(threads[i], NULL);
    }
    verify_all(caches[0]);
    ckv_close(&caches[0]);
    ckv_close(&caches[1]);
}

static pid_t
start_process(const struct settings *settings, uint32_t index)
{
    const pid_t pid = fork();
    if (pid == 0) {
        run_process(settings, index);
        _exit(0);
    }
    if (pid < 0) {
        fail("fork", 0, index, 0);
    }
    return pid;
}

static void
wait_for(pid_t pid, bool killed)
{
    int result;
    if (waitpid(pid, &result, 0) != pid) {
        fail("waitpid", 0, (uint64_t)pid, 0);
    }
    const bool expected = killed && WIFSIGNALED(result) && WTERMSIG(result) == SIGKILL;
    if (result != 0 && !expected) {
        fail("a process ended badly", 0, (uint64_t)result, 0);
    }
}

static void
sleep_seconds(double seconds)
{
    const struct timespec pause = {
        .tv_sec = (time_t)seconds,
        .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9),
    };
    nanosleep(&pause, NULL);
}

static void
run_processes(const struct settings *settings)
{
    pid_t pids[PROCESSES_MAX];
    const double slice = settings->seconds / (settings->kills + 1);
    struct settings changed = *settings;
    for (uint32_t i = 0; i < settings->processes; i++) {
        pids[i] = start_process(settings, i);
    }
    for (uint32_t kill_index = 0; kill_index <= settings->kills; kill_index++) {
        sleep_seconds(slice);
        if (kill_index == settings->kills) {
            break;
        }
        const uint32_t victim = kill_index % settings->processes;
        kill(pids[victim], SIGKILL);
        wait_for(pids[victim], true);
        changed.seed += 1000;
        pids[victim] = start_process(&changed, victim);
    }
    atomic_store(&board->stop, 1);
    for (uint32_t i = 0; i < settings->processes; i++) {
        wait_for(pids[i], false);
    }
}

static void *
stop_later(void *context)
{
    const struct settings *settings = context;
    sleep_seconds(settings->seconds);
    atomic_store(&board->stop, 1);
    return NULL;
}

/* ---- the program ------------------------------------------------------------------ */

static uint64_t
number_of(const char *text)
{
    char *end;
    const unsigned long long value = strtoull(text, &end, 10);
    if (*text == '\0' || *end != '\0') {
        fprintf(stderr, "stress_cache: not a number: %s\n", text);
        exit(2);
    }
    return value;
}

static struct settings
parse(int argc, char **argv)
{
    struct settings settings = {
        .path = argc > 1 ? argv[1] : NULL,
        .seconds = 3,
        .threads = 4,
        .processes = 1,
        .seed = (uint64_t)time(NULL),
    };
    for (int i = 2; i + 1 < argc; i += 2) {
        const uint64_t value = number_of(argv[i + 1]);
        if (strcmp(argv[i], "--seconds") == 0) {
            settings.seconds = (double)value;
        } else if (strcmp(argv[i], "--threads") == 0) {
            settings.threads = (uint32_t)value;
        } else if (strcmp(argv[i], "--processes") == 0) {
            settings.processes = (uint32_t)value;
        } else if (strcmp(argv[i], "--kills") == 0) {
            settings.kills = (uint32_t)value;
        } else if (strcmp(argv[i], "--seed") == 0) {
            settings.seed = value;
        } else if (strcmp(argv[i], "--cold") == 0) {
            settings.cold = value != 0;
        } else {
            settings.path = NULL;
        }
    }
    const uint64_t workers = (uint64_t)settings.threads * settings.processes;
    if (settings.path == NULL || argc % 2 != 0 || workers == 0 || workers > KEYS ||
        settings.threads > WORKERS_MAX || settings.processes > PROCESSES_MAX) {
        fprintf(stderr, "usage: stress_cache PATH [--seconds S] [--threads T] "
                        "[--processes P] [--kills K] [--seed N] [--cold 1]\n");
        exit(2);
    }
    return settings;
}

static int
nothing_cached(int fd, uint64_t offset, uint64_t length, struct ckv_cached *result)
{
    (void)fd;
    (void)offset;
    (void)length;
    *result = (struct ckv_cached){0};
    return 0;
}

int
main(int argc, char **argv)
{
    struct settings settings = parse(argc, argv);
    if (settings.cold) {
        ckv_os.cached = nothing_cached;
    }
    printf("stress_cache: seed %" PRIu64 ", %" PRIu32 " processes of %" PRIu32
           " threads, %" PRIu32 " kills, %.0f s\n",
        settings.seed, settings.processes, settings.threads, settings.kills,
        settings.seconds);
    fflush(stdout);
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED) {
        perror("mmap");
        return 2;
    }
#ifdef CKV_POINTS
    ckv_yield_hook = tempt_races;
#endif
    const double start = now_seconds();
    if (settings.processes == 1 && settings.kills == 0) {
        pthread_t timer;
        if (pthread_create(&timer, NULL, stop_later, &settings) != 0) {
            fail("pthread_create", 0, 0, 0);
        }
        run_process(&settings, 0);
        pthread_join(timer, NULL);
    } else {
        run_processes(&settings);
    }
    /* Alone now: the region is rebuilt from the table, and must pass again. */
    struct ckv_cache *cache = open_cache(&settings, CKV_VERIFY_ALWAYS);
    verify_all(cache);
    struct worker reader = {
        .cache = cache,
        .workers = 1,
        .random = settings.seed,
    };
    reader.target = malloc((size_t)BATCH * (PAYLOAD_MAX + 128));
    for (uint32_t i = 0; i < 4 * KEYS / BATCH && reader.target != NULL; i++) {
        do_copy(&reader);
    }
    free(reader.target);
    ckv_close(&cache);

    const uint64_t hits = atomic_load(&board->hits);
    const uint64_t stored = atomic_load(&board->stored);
    printf("stress_cache: %.1f s, stored %" PRIu64 ", hits %" PRIu64 ", misses %" PRIu64
           ", refused %" PRIu64 ", removed %" PRIu64 ", checked %" PRIu64 " MiB\n",
        now_seconds() - start, stored, hits, atomic_load(&board->misses),
        atomic_load(&board->refused), atomic_load(&board->removed),
        atomic_load(&board->checked_bytes) >> 20);
    if (hits == 0 || stored == 0 || atomic_load(&board->failed) != 0) {
        fprintf(stderr, "stress_cache: nothing was proved\n");
        return 1;
    }
    return 0;
}
