/* SPDX-License-Identifier: Apache-2.0 */
/* race.c: threads of one process that pin, kill, overwrite and evict the same few
 * blocks, and yield at random before any access to shared memory (-DCKV_POINTS).
 *
 *     race PATH [--seconds S] [--seed N]
 *
 *   overwrite  one writer, room for all: a lookup never misses, versions never go back
 *   evict      several writers, no room: right bytes or a miss; a view never changes
 *   pin        pins of a few entries by number against kills of them: while a pin is
 *              held our bit is set, and the entry is not given away
 *
 * Each phase ends with a look at every mask and with ckv_verify().
 */
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cache.h"
#include "entry.h"
#include "pin.h"
#include "stripe.h"

enum { KEYS_MAX = 250, THREADS = 6, PAYLOAD_MAX = 192 * 1024, HELD = 3 };

static struct ckv_cache *cache;
static uint32_t keys; /* of this phase */
static _Atomic(uint32_t) stop;
static _Atomic(uint64_t) versions[KEYS_MAX]; /* the newest that put has answered for */
static _Atomic(uint64_t) started[KEYS_MAX];  /* the newest that a put was begun for */
static _Atomic(uint64_t) hits, misses, stored, refused;
static _Thread_local uint64_t random_state;

_Noreturn static void
fail(const char *what, uint64_t a, uint64_t b)
{
    fprintf(stderr, "race: %s: %" PRIu64 ", %" PRIu64 "\n", what, a, b);
    abort();
}

static uint64_t
draw(uint64_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % limit;
}

static void
yield_at_random(void)
{
    if (random_state != 0 && draw(400) == 0) {
        (void)sched_yield();
        if (draw(20) == 0) {
            const struct timespec moment = {.tv_nsec = 20000};
            (void)nanosleep(&moment, NULL);
        }
    }
}

static uint64_t
word_of(uint32_t key, uint64_t version, size_t at)
{
    return ((uint64_t)key << 56 | version << 24 | at) * UINT64_C(0x9e3779b97f4a7c15);
}

static size_t
length_of(uint32_t key, uint64_t version)
{
    return 8 * (1 + (key * 977 + version * 3001) % (PAYLOAD_MAX / 8));
}

/* The version that a payload is of; ends the program when it is none of this key. */
static uint64_t
version_of(uint32_t key, const uint64_t *words, size_t length)
{
    const uint64_t first = words[0] * UINT64_C(0xf1de83e19937733d); /* the inverse */
    const uint64_t version = first >> 24 & UINT32_MAX;
    if (first >> 56 != key || length != length_of(key, version)) {
        fail("bytes of another block", key, first >> 56);
    }
    for (size_t i = 0; i < length / 8; i += 1 + (i > 4 ? draw(64) : 0)) {
        if (words[i] != word_of(key, version, i)) {
            fail("torn", key, i);
        }
    }
    if (words[length / 8 - 1] != word_of(key, version, length / 8 - 1)) {
        fail("torn at the end", key, version);
    }
    return version;
}

static struct ckv_key
name_of(const uint32_t *key)
{
    return (struct ckv_key){.data = key, .length = sizeof *key};
}

static enum ckv_status
put(uint32_t key, uint64_t version, uint32_t flags, uint64_t *words)
{
    const size_t length = length_of(key, version);
    for (size_t i = 0; i < length / 8; i++) {
        words[i] = word_of(key, version, i);
    }
    const size_t cut = draw(length);
    const struct ckv_segment segments[2] = {
        {.data = words, .length = cut},
        {.data = (const uint8_t *)words + cut, .length = length - cut},
    };
    struct ckv_item item = {.key = name_of(&key),
        .segments = segments,
        .segment_count = 2};
    const enum ckv_status status = ckv_put(cache, &item, flags, NULL);
    if (status < 0) {
        fail("put", (uint64_t)-status, key);
    }
    (void)atomic_fetch_add(status == CKV_OK ? &stored : &refused, 1);
    return status;
}

static void *
must_allocate(size_t length)
{
    void *memory = aligned_alloc(64, length);
    if (memory == NULL) {
        fail("no memory", length, 0);
    }
    return memory;
}

/* ---- readers -------------------------------------------------------------------- */

struct held {
    struct ckv_lease *lease;
    uint32_t key;
    uint64_t version;
};

static void
let_go(struct held *held)
{
    if (held->lease != NULL) {
        size_t length = 0;
        const uint64_t *words = ckv_lease_data(held->lease, &length);
        if (version_of(held->key, words, length) != held->version) {
            fail("a view changed", held->key, held->version);
        }
        ckv_lease_release(&held->lease);
    }
}

/* Looks a key up; `certain`: it is stored and nobody removes or evicts it. */
static void
look(uint32_t key, struct held *held, uint64_t *buffer, bool certain)
{
    const uint64_t least = atomic_load(&versions[key]);
    uint64_t version = 0;
    enum ckv_status status = CKV_MISS;
    if (draw(2) == 0) {
        let_go(held);
        const struct ckv_key name = name_of(&key);
        status = ckv_get(cache, &name, &held->lease, NULL);
        if (status == CKV_OK) {
            size_t length = 0;
            const uint64_t *words = ckv_lease_data(held->lease, &length);
            version = version_of(key, words, length);
            held->key = key;
            held->version = version;
        }
    } else {
        const struct ckv_target target = {.data = buffer, .length = PAYLOAD_MAX};
        struct ckv_read read = {.key = name_of(&key),
            .targets = &target,
            .target_count = 1};
        status = ckv_get_into(cache, &read, NULL);
        if (status == CKV_OK) {
            version = version_of(key, buffer, read.payload_length);
        }
    }
    if (status == CKV_OK) {
        (void)atomic_fetch_add(&hits, 1);
        if (version < least) {
            fail("an older version", version, least);
        }
        if (version > atomic_load(&started[key])) {
            fail("a version from the future", version, key);
        }
    } else {
        (void)atomic_fetch_add(&misses, 1);
        if (certain) {
            fail("a lookup missed", key, least);
        }
    }
}

static void
read_until_stopped(bool certain)
{
    struct held held[HELD] = {{.lease = NULL}};
    uint64_t *buffer = must_allocate(PAYLOAD_MAX);
    while (atomic_load(&stop) == 0) {
        const uint32_t key = (uint32_t)draw(keys);
        if (draw(4) == 0) {
            const struct ckv_key name = name_of(&key);
            bool present = false;
            if (ckv_contains_many(cache, &name, 1, &present, NULL) != CKV_OK ||
                (certain && !present)) {
                fail("contains missed", key, 0);
            }
        } else {
            look(key, &held[draw(HELD)], buffer, certain);
        }
    }
    for (int i = 0; i < HELD; i++) {
        let_go(&held[i]);
    }
    free(buffer);
}

/* ---- phases --------------------------------------------------------------------- */

struct thread {
    pthread_t handle;
    uint32_t number;
    uint64_t seed;
    const char *phase;
};

static void
overwrite(uint32_t key, uint64_t *words)
{
    const uint64_t version = atomic_fetch_add(&started[key], 1) + 1;
    if (put(key, version, CKV_PUT_OVERWRITE, words) == CKV_OK) {
        atomic_store(&versions[key], version);
    }
}

/* Keys that are this thread's alone to store. */
static void
write_until_stopped(uint32_t number, uint32_t writers, bool removes)
{
    uint64_t *words = must_allocate(PAYLOAD_MAX);
    for (uint32_t i = number; atomic_load(&stop) == 0; i += writers) {
        const uint32_t key = i % keys;
        if (key % writers != number) {
            continue;
        }
        if (removes && draw(8) == 0) {
            const struct ckv_key name = name_of(&key);
            const enum ckv_status status = ckv_remove(cache, &name, NULL);
            if (status < 0) {
                fail("remove", key, (uint64_t)-status);
            }
        } else {
            overwrite(key, words);
        }
    }
    free(words);
}

/* Few numbers half of the time, so that threads meet. */
static uint32_t
some_entry(const struct ckv_volume *volume)
{
    return (uint32_t)draw(draw(2) == 0 ? 4 : volume->region.layout.entry_count);
}

/* Pins entries by number, as lookups do, and looks at what N1 and E3 say. */
static void
pin_until_stopped(void)
{
    struct ckv_volume *volume = cache->volume;
    const uint64_t bit = UINT64_C(1) << volume->slot;
    while (atomic_load(&stop) == 0) {
        const uint32_t entry = some_entry(volume);
        const uint64_t state = ckv_load_acquire_u64(&volume->region.states[entry]);
        if (ckv_state_kind(state) != CKV_STATE_LIVE || !ckv_pin(volume, entry, state)) {
            continue;
        }
        const uint32_t page =
            ckv_load_relaxed_u32(&volume->region.places[entry].first_page);
        const uint64_t rounds = 1 + draw(20);
        for (uint64_t i = 0; i < rounds; i++) {
            const uint64_t now = ckv_load_ordered_u64(&volume->region.states[entry]);
            if ((ckv_load_ordered_u64(&volume->region.masks[entry]) & bit) == 0) {
                fail("a pin is not in the mask", entry, i);
            }
            if (now != state && ckv_state_kind(now) != CKV_STATE_DYING &&
                ckv_state_kind(now) != CKV_STATE_DEAD) {
                fail("a pinned entry was given away", entry, now);
            }
            if (ckv_load_relaxed_u32(&volume->region.places[entry].first_page) !=
                page) {
                fail("a pinned entry was moved", entry, page);
            }
            if (draw(4) == 0 && ckv_pin(volume, entry, state)) {
                ckv_pin_set_populated(volume, entry, ckv_state_sequence(state));
                ckv_unpin(volume, entry);
            }
        }
        ckv_unpin(volume, entry);
    }
}

static void
kill_until_stopped(void)
{
    struct ckv_volume *volume = cache->volume;
    while (atomic_load(&stop) == 0) {
        const uint32_t entry = some_entry(volume);
        const uint64_t state = ckv_load_acquire_u64(&volume->region.states[entry]);
        if (ckv_state_kind(state) == CKV_STATE_LIVE && draw(8) == 0) {
            (void)ckv_entry_kill(volume, entry, state, CKV_KILL_REMOVE);
        }
        (void)sched_yield();
    }
}

static void *
run(void *argument)
{
    const struct thread *thread = argument;
    random_state = thread->seed;
    if (strcmp(thread->phase, "overwrite") == 0) {
        if (thread->number == 0) {
            write_until_stopped(0, 1, false);
        } else {
            read_until_stopped(true);
        }
    } else if (strcmp(thread->phase, "evict") == 0) {
        if (thread->number < 3) {
            write_until_stopped(thread->number, 3, true);
        } else {
            read_until_stopped(false);
        }
    } else if (thread->number < 2) {
        write_until_stopped(thread->number, 2, false);
    } else if (thread->number == 2) {
        kill_until_stopped();
    } else {
        pin_until_stopped();
    }
    random_state = 0;
    return NULL;
}

static void
check_at_the_end(const char *phase)
{
    struct ckv_volume *volume = cache->volume;
    for (uint32_t i = 0; i < volume->region.layout.entry_count; i++) {
        if (ckv_load_relaxed_u64(&volume->region.masks[i]) != 0 ||
            (ckv_load_relaxed_u64(&volume->pins[i]) & UINT32_MAX) != 0) {
            fail("a pin was left behind", i, 0);
        }
        const enum ckv_state_kind kind =
            ckv_state_kind(ckv_load_relaxed_u64(&volume->region.states[i]));
        if (kind == CKV_STATE_RESERVED || kind == CKV_STATE_DYING) {
            fail("an entry was left behind", i, (uint64_t)kind);
        }
    }
    struct ckv_verify_report report;
    struct ckv_error error;
    if (ckv_verify(cache, false, NULL, NULL, &report, &error) != CKV_OK ||
        report.structure_faults != 0 || report.damaged_payloads != 0 ||
        report.unreadable != 0) {
        fprintf(stderr, "race: after %s: %s\n", phase, report.first_fault);
        abort();
    }
    struct ckv_stats stats;
    if (ckv_get_stats(cache, &stats, NULL, &error) != CKV_OK) {
        fail("stats", 0, 0);
    }
    if (stats.puts_stored - stats.evictions - stats.removed - stats.corrupt !=
            stats.entries ||
        stats.corrupt != 0) {
        fail("the counters do not add up", (uint64_t)stats.entries,
            (uint64_t)stats.corrupt);
    }
    printf("%s: %" PRIu64 " stored, %" PRIu64 " refused, %" PRIu64 " hits, %" PRIu64
           " misses, %" PRId64 " evictions, %" PRIu64 " entries\n",
        phase, atomic_load(&stored), atomic_load(&refused), atomic_load(&hits),
        atomic_load(&misses), stats.evictions, report.entries_checked);
}

static void
play(const char *path, const char *phase, double seconds, uint64_t seed)
{
    /* 12 blocks have room for ever, 250 of 96 KiB each have none. */
    const bool roomy = strcmp(phase, "overwrite") == 0;
    const uint64_t capacity = UINT64_C(1) << (roomy ? 28 : 24);
    keys = roomy ? 12 : KEYS_MAX;
    const struct ckv_path where = {.path = path, .capacity_bytes = capacity};
    struct ckv_options options;
    struct ckv_error error;
    ckv_options_init(&options);
    options.paths = &where;
    options.path_count = 1;
    options.on_mismatch = CKV_MISMATCH_RECREATE;
    options.allow_shared_directory = true;
    if (ckv_open(&options, &cache, &error) != CKV_OK) {
        fprintf(stderr, "race: %s\n", error.text);
        abort();
    }
    struct thread threads[THREADS];
    uint64_t *words = must_allocate(PAYLOAD_MAX);
    random_state = seed | 1;
    for (uint32_t key = 0; key < keys; key++) {
        overwrite(key, words);
    }
    random_state = 0;
    free(words);
    atomic_store(&stop, 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        threads[i] = (struct thread){.number = i,
            .seed = (seed + i + 1) * UINT64_C(0x9e3779b97f4a7c15),
            .phase = phase};
        if (pthread_create(&threads[i].handle, NULL, run, &threads[i]) != 0) {
            fail("no thread", i, 0);
        }
    }
    struct timespec left = {.tv_sec = (time_t)seconds,
        .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    (void)nanosleep(&left, NULL);
    atomic_store(&stop, 1);
    for (uint32_t i = 0; i < THREADS; i++) {
        (void)pthread_join(threads[i].handle, NULL);
    }
    check_at_the_end(phase);
    ckv_close(&cache);
    char other[4096];
    (void)unlink(path);
    (void)snprintf(other, sizeof other, "%s-shm", path);
    (void)unlink(other);
}

int
main(int argc, char **argv)
{
    double seconds = 3;
    uint64_t seed = (uint64_t)time(NULL);
    if (argc < 2) {
        fprintf(stderr, "race PATH [--seconds S] [--seed N]\n");
        return 2;
    }
    for (int i = 2; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seconds") == 0) {
            seconds = strtod(argv[i + 1], NULL);
        } else if (strcmp(argv[i], "--seed") == 0) {
            seed = strtoull(argv[i + 1], NULL, 10);
        }
    }
    fprintf(stderr, "race: seed %" PRIu64 "\n", seed);
    ckv_yield_hook = yield_at_random;
    play(argv[1], "overwrite", seconds / 3, seed);
    play(argv[1], "evict", seconds / 3, seed + 100);
    play(argv[1], "pin", seconds / 3, seed + 200);
    return 0;
}
