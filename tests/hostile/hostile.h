/* SPDX-License-Identifier: Apache-2.0 */
/* hostile.h: what the hostile programs share: input, keys, template volumes, calls whose
 * answers are checked, and a driver that runs each case in a process of its own.
 *
 * A payload is a function of namespace and key, so wrong bytes show without a memory of
 * what was stored.  Each call is timed: one that takes longer than SLOW_SECONDS is a
 * fault like a signal.  A case is a function of its number alone:
 *
 *     PROGRAM FOLDER FIRST COUNT        cases FIRST to FIRST + COUNT - 1
 *     PROGRAM FOLDER - < seeds.txt      the cases that are listed there
 *
 * guided.c has no driver: libFuzzer calls it, in one process, with a clock of its own.
 */
#ifndef CKV_TESTS_HOSTILE_H
#define CKV_TESTS_HOSTILE_H

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "admission.h"
#include "geometry.h"
#include "hit_density.h"
#include "os.h"
#include "sha256.h"

enum {
    KEYS = 40,
    BIG_KEYS = 20, /* numbers KEYS and up: 1 MiB each, to bring the cursor round */
    SPACES = 2,    /* namespaces: the default one and "other" */
    FILES_MAX = 2, /* of a set */
    TEMPLATES = 3,
    HELD_MAX = 4, /* leases held at a time */
    SLOW_SECONDS = 10,
    VERIFY_SECONDS =
        25,            /* 2 s for each stripe whose lock names a live slot, and more */
    HANG_SECONDS = 60, /* a call that takes this long is ended by SIGALRM */
    INPUT_BYTES = 1024,
    FAULT_STATUS = 77,
};

#define BIG_BYTES ((size_t)1 << 20)

#if defined(__SANITIZE_ADDRESS__)
#define UNDER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define UNDER_ASAN 1
#endif
#endif
#ifndef UNDER_ASAN
#define UNDER_ASAN 0
#endif

/* ---- reporting -------------------------------------------------------------------- */

struct board { /* shared with the parent, which tells what a dead case was doing */
    char doing[64];
};

static struct board *board;
static uint64_t case_number;

static void
doing(const char *what)
{
    (void)snprintf(board->doing, sizeof board->doing, "%s", what);
}

static _Noreturn void __attribute__((format(printf, 1, 2)))
fault(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "case %" PRIu64 ", %s: ", case_number, board->doing);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
#ifdef HOSTILE_LIBFUZZER
    abort();
#else
    _exit(FAULT_STATUS);
#endif
}

/* For what must work or there is no test. */
static void
need(bool condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "hostile: %s: %s\n", what, strerror(errno));
        _exit(2);
    }
}

/* As the engine counts them. */
static double
seconds(void)
{
    return (double)ckv_os.monotonic_ns() * 1e-9;
}

/* ---- input ------------------------------------------------------------------------ */

static uint64_t
mix(uint64_t value)
{
    value += UINT64_C(0x9e3779b97f4a7c15);
    value = (value ^ value >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ value >> 27) * UINT64_C(0x94d049bb133111eb);
    return value ^ value >> 31;
}

struct input {
    const uint8_t *data;
    size_t size;
    size_t at;
    uint64_t beyond; /* what follows is a function of what came before */
};

static uint8_t
take8(struct input *input)
{
    if (input->at < input->size) {
        const uint8_t byte = input->data[input->at++];
        input->beyond = input->beyond * 31 + byte;
        return byte;
    }
    input->beyond = mix(input->beyond);
    return (uint8_t)input->beyond;
}

static uint64_t
take64(struct input *input)
{
    uint64_t word = 0;
    for (int i = 0; i < 8; i++) {
        word = word << 8 | take8(input);
    }
    return word;
}

/* Below `limit`, which is not 0. */
static uint64_t
take_below(struct input *input, uint64_t limit)
{
    const uint64_t low = take8(input);
    return limit <= 256 ? low % limit : (low << 56 | take64(input) >> 8) % limit;
}

static bool
one_in(struct input *input, unsigned count)
{
    return take_below(input, count) == 0;
}

/* Numbers at which arithmetic breaks, and some at random. */
static uint64_t
take_evil(struct input *input)
{
    static const uint64_t evil[] = {0, 1, 2, 3, 4, 7, 63, 64, 65, 255, 256, 4095, 4096,
        0x7fff, 0x8000, 0xffff, 0x10000, 0xfffff, 0x100000, 0x7fffffff, 0x80000000u,
        0xfffffff8u, 0xfffffffeu, 0xffffffffu, UINT64_C(1) << 32,
        (UINT64_C(1) << 60) - 1, UINT64_C(1) << 60, (UINT64_C(1) << 61) - 1,
        UINT64_C(1) << 61, INT64_MAX, UINT64_C(1) << 63, UINT64_MAX - 1, UINT64_MAX};
    switch (take8(input) % 4) {
    case 0:
        return take64(input);
    case 1:
        return take_below(input, 5000);
    default:
        return evil[take_below(input, CKV_ARRAY_LENGTH(evil))];
    }
}

/* ---- keys and payloads ------------------------------------------------------------ */

static void
key_bytes(unsigned number, uint8_t bytes[64], struct ckv_key *key)
{
    for (unsigned i = 0; i < 8; i++) {
        const uint64_t word = mix(number * UINT64_C(1000003) + i);
        memcpy(bytes + 8 * i, &word, 8);
    }
    key->data = bytes;
    key->length = number % 8 == 7 ? 33 : 32; /* 33: the file has a digest of it */
}

/* The key as a record has it. */
static bool
stored_key(unsigned number, uint8_t stored[32])
{
    uint8_t bytes[64];
    struct ckv_key key;
    key_bytes(number, bytes, &key);
    if (key.length == 32) {
        memcpy(stored, bytes, 32);
        return false;
    }
    ckv_sha256(bytes, key.length, stored);
    return true;
}

static size_t
payload_length(unsigned number)
{
    static const size_t lengths[] = {0, 1, 33, 4095, 4096, 4097, 20000, 70000, 131072,
        200001};
    return number >= KEYS ? BIG_BYTES - number : lengths[number % 10];
}

static size_t
header_length(unsigned number)
{
    return number % 3 == 0 ? 9 + number : 0;
}

static void
fill(unsigned space, unsigned number, unsigned part, uint8_t *target, size_t length)
{
    uint64_t word = mix(((uint64_t)space << 32 | number) * 7 + part);
    for (size_t at = 0; at < length; at += 8) {
        word = word * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        memcpy(target + at, &word, length - at < 8 ? length - at : 8);
    }
}

static bool
is_filled(unsigned space, unsigned number, unsigned part, const uint8_t *found,
    size_t length)
{
    uint64_t word = mix(((uint64_t)space << 32 | number) * 7 + part);
    for (size_t at = 0; at < length; at += 8) {
        word = word * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        if (memcmp(found + at, &word, length - at < 8 ? length - at : 8) != 0) {
            return false;
        }
    }
    return true;
}

static uint8_t scratch[BIG_BYTES + CKV_PAGE_BYTES];
static uint8_t scratch_header[256];

/* ---- one case: what is open and what may be believed ------------------------------- */

struct setting { /* of one case */
    char paths[FILES_MAX][256];
    unsigned path_count;
    enum ckv_verify verify;
    enum ckv_eviction eviction;
    enum ckv_admission admission;
    bool guard;
    bool degraded;
    bool recreate;
    bool forged[SPACES]; /* somebody sealed other bytes under keys of this namespace */
    bool compare;        /* payloads that arrive are compared */
    bool cut;            /* files were cut while they were open */
    bool write_behind;
    bool one_process; /* nobody else changes the volume: totals have to be right */
    bool sound;       /* nothing but the engine wrote since the region was rebuilt */
    double until;     /* no further calls after this time */
};

static struct setting setting;

struct handle {
    struct ckv_cache *cache;
    struct ckv_lease *held[HELD_MAX];
    unsigned space;
    bool reads;
};

static double call_began;

static void
begin_call(const char *what)
{
    doing(what);
    call_began = seconds();
#ifndef HOSTILE_LIBFUZZER
    (void)alarm(HANG_SECONDS);
#endif
}

static void
end_call(void)
{
    const double took = seconds() - call_began;
    const int limit =
        strncmp(board->doing, "verify", 6) == 0 ? VERIFY_SECONDS : SLOW_SECONDS;
    if (took > limit * (UNDER_ASAN ? 2 : 1)) {
        fault("the call took %.1f s", took);
    }
}

static enum ckv_status
judge(enum ckv_status status)
{
    static const enum ckv_status known[] = {
#define X(name, value, text) name,
        CKV_STATUSES(X)
#undef X
    };
    end_call();
    for (size_t i = 0; i < CKV_ARRAY_LENGTH(known); i++) {
        if (known[i] == status) {
            return status;
        }
    }
    fault("undocumented status %d", (int)status);
}

static void
compare(const struct handle *handle, unsigned number, const uint8_t *data,
    size_t length)
{
    if (!setting.compare || setting.forged[handle->space]) {
        return;
    }
    if (length != payload_length(number) ||
        !is_filled(handle->space, number, 0, data, length)) {
        fault("wrong bytes for key %u (%zu of them)", number, length);
    }
}

/* ---- calls ------------------------------------------------------------------------- */

/* Without sigbus_guard a load from a view may raise SIGBUS when the file was cut.  It is
 * caught in load_view() and nowhere else: in a call of ours it is a fault. */
static sigjmp_buf raw_load;
static volatile sig_atomic_t in_raw_load;

static void
on_bus_error(int number)
{
    (void)number;
    if (in_raw_load) {
        siglongjmp(raw_load, 1);
    }
#ifdef HOSTILE_LIBFUZZER
    abort(); /* of which libFuzzer keeps the input */
#endif
    (void)signal(SIGBUS, SIG_DFL);
    (void)raise(SIGBUS);
}

/* Before the first open, so that the guard calls it for what is not its own. */
static inline void
catch_raw_loads(void)
{
    (void)signal(SIGBUS, on_bus_error);
}

/* Loads from every page of a view; false when one cannot be delivered. */
static inline bool
load_view(const uint8_t *data, size_t length)
{
    volatile uint8_t sum = 0;
    in_raw_load = !setting.guard;
    if (sigsetjmp(raw_load, 1) != 0) {
        in_raw_load = 0;
        return false;
    }
    for (size_t at = 0; at < length; at += 512) {
        sum = (uint8_t)(sum + data[at]);
    }
    in_raw_load = 0;
    return true;
}

static struct ckv_options
options_for(unsigned space, enum ckv_mode mode, struct ckv_path paths[FILES_MAX])
{
    struct ckv_options options;
    ckv_options_init(&options);
    for (unsigned i = 0; i < setting.path_count; i++) {
        paths[i] = (struct ckv_path){.path = setting.paths[i]};
    }
    options.paths = paths;
    options.path_count = setting.path_count;
    options.mode = mode;
    options.verify = setting.verify;
    options.eviction = setting.eviction;
    options.admission = setting.admission;
    options.sigbus_guard = setting.guard;
    options.degraded = setting.degraded;
    options.on_mismatch = setting.recreate ? CKV_MISMATCH_RECREATE : CKV_MISMATCH_RAISE;
    options.open_timeout_ms = 1500;
    options.sync_interval_ms = UINT32_MAX;
    options.io_threads = 1;
    options.event_capacity = 64;
    options.write_behind = setting.write_behind;
    options.allow_shared_directory = true;
    if (space != 0) {
        options.namespace_data = "other";
        options.namespace_length = 5;
    }
    return options;
}

static bool
open_handle(struct handle *handle, unsigned space, enum ckv_mode mode)
{
    struct ckv_path paths[FILES_MAX];
    struct ckv_options options = options_for(space, mode, paths);
    struct ckv_error error = {0};
    *handle = (struct handle){.space = space, .reads = mode == CKV_MODE_READ};
    if (setting.recreate) {
        for (unsigned i = 0; i < setting.path_count; i++) {
            paths[i].capacity_bytes = CKV_CAPACITY_MIN_BYTES;
        }
    }
    begin_call(mode == CKV_MODE_READ ? "open r" : "open rw");
    const enum ckv_status status = judge(ckv_open(&options, &handle->cache, &error));
    if (status > 0 ||
        (status < 0 && (error.status != status || error.text[0] == '\0'))) {
        fault("open answered %d without a sentence", (int)status);
    }
    return status == CKV_OK;
}

static void
release(struct handle *handle, unsigned which)
{
    begin_call("release");
    ckv_lease_release(&handle->held[which]);
    end_call();
}

static void
close_handle(struct handle *handle)
{
    for (unsigned i = 0; i < HELD_MAX; i++) {
        release(handle, i);
    }
    begin_call("close");
    ckv_close(&handle->cache);
    end_call();
}

static void
do_get(struct handle *handle, unsigned number, unsigned which)
{
    uint8_t bytes[64];
    struct ckv_key key;
    struct ckv_error error = {0};
    release(handle, which);
    key_bytes(number, bytes, &key);
    begin_call("get");
    if (judge(ckv_get(handle->cache, &key, &handle->held[which], &error)) != CKV_OK) {
        return;
    }
    struct ckv_lease *lease = handle->held[which];
    size_t length = 0;
    begin_call("look at a view");
    const uint8_t *data = ckv_lease_data(lease, &length);
    const uint8_t *header = ckv_lease_header(lease, &length);
    if (header != NULL && setting.compare && !setting.forged[handle->space] &&
        (length != header_length(number) ||
            !is_filled(handle->space, number, 1, header, length))) {
        fault("wrong header for key %u (%zu bytes)", number, length);
    }
    (void)ckv_lease_data(lease, &length);
    if (!setting.cut || load_view(data, length)) {
        compare(handle, number, data, length);
    }
    (void)ckv_lease_ok(lease);
    end_call();
}

static void
do_get_into(struct handle *handle, unsigned number, size_t room)
{
    uint8_t bytes[64];
    struct ckv_error error = {0};
    const size_t half = room / 2;
    const struct ckv_target targets[3] = {
        {.data = scratch, .length = half},
        {.data = NULL, .length = 0},
        {.data = scratch + half, .length = room - half},
    };
    struct ckv_read read = {.targets = targets, .target_count = 3};
    key_bytes(number, bytes, &read.key);
    begin_call("get_into");
    if (judge(ckv_get_into(handle->cache, &read, &error)) == CKV_OK) {
        if (read.payload_length > room) {
            fault("a payload longer than its buffer");
        }
        compare(handle, number, scratch, (size_t)read.payload_length);
    }
}

static void
do_put(struct handle *handle, unsigned number, uint32_t flags)
{
    uint8_t bytes[64];
    struct ckv_error error = {0};
    const struct ckv_segment segment = {.data = scratch,
        .length = payload_length(number)};
    struct ckv_item item = {.segments = &segment,
        .segment_count = 1,
        .header = scratch_header,
        .header_length = header_length(number)};
    key_bytes(number, bytes, &item.key);
    fill(handle->space, number, 0, scratch, segment.length);
    fill(handle->space, number, 1, scratch_header, item.header_length);
    begin_call("put");
    (void)judge(ckv_put(handle->cache, &item, flags, &error));
}

static void
do_commit(struct handle *handle, unsigned number, bool abort_it)
{
    uint8_t bytes[64];
    struct ckv_error error = {0};
    struct ckv_item item = {.header = scratch_header,
        .header_length = header_length(number)};
    struct ckv_reservation *reservation = NULL;
    size_t length = 0;
    key_bytes(number, bytes, &item.key);
    fill(handle->space, number, 1, scratch_header, item.header_length);
    begin_call("reserve");
    if (judge(ckv_reserve(handle->cache, &item, payload_length(number), &reservation,
            &error)) != CKV_OK) {
        return;
    }
    uint8_t *data = ckv_reservation_data(reservation, &length);
    fill(handle->space, number, 0, data, length);
    begin_call("commit");
    if (abort_it) {
        ckv_abort(&reservation);
    } else {
        (void)judge(ckv_commit(&reservation, CKV_PUT_OVERWRITE, &error));
    }
}

static void
do_many(struct handle *handle, unsigned kind)
{
    static uint8_t bytes[KEYS][64];
    struct ckv_key keys[KEYS];
    bool present[KEYS];
    size_t count = 0;
    struct ckv_error error = {0};
    for (unsigned i = 0; i < KEYS; i++) {
        key_bytes(i, bytes[i], &keys[i]);
    }
    begin_call("lookups");
    switch (kind % 4) {
    case 0:
        (void)judge(ckv_contains_many(handle->cache, keys, KEYS, present, &error));
        return;
    case 1:
        (void)judge(ckv_longest_prefix(handle->cache, keys, KEYS, true, &count,
            &error));
        break;
    case 2:
        (void)judge(ckv_prefetch(handle->cache, keys, KEYS, &count, &error));
        break;
    default:
        (void)judge(ckv_touch(handle->cache, keys, KEYS, &count, &error));
        break;
    }
    if (count > KEYS) {
        fault("%zu of %d keys were found", count, (int)KEYS);
    }
}

static void
do_get_many(struct handle *handle)
{
    enum { BATCH = 6 };
    static uint8_t bytes[BATCH][64];
    struct ckv_read reads[BATCH];
    struct ckv_target targets[BATCH];
    struct ckv_error error = {0};
    for (unsigned i = 0; i < BATCH; i++) {
        targets[i] = (struct ckv_target){.data = scratch + i * 24000, .length = 24000};
        reads[i] = (struct ckv_read){.targets = &targets[i], .target_count = 1};
        key_bytes(i + 1, bytes[i], &reads[i].key);
    }
    begin_call("get_many_into");
    if (judge(ckv_get_many_into(handle->cache, reads, BATCH, &error)) != CKV_OK) {
        return;
    }
    for (unsigned i = 0; i < BATCH; i++) {
        if (judge(reads[i].status) == CKV_OK) {
            compare(handle, i + 1, targets[i].data, (size_t)reads[i].payload_length);
        }
    }
}

static void
do_remove(struct handle *handle, unsigned number)
{
    uint8_t bytes[64];
    struct ckv_key key;
    struct ckv_error error = {0};
    key_bytes(number, bytes, &key);
    begin_call("remove");
    (void)judge(ckv_remove(handle->cache, &key, &error));
}

static void
do_clear(struct handle *handle)
{
    uint64_t removed = 0;
    struct ckv_error error = {0};
    begin_call("clear");
    (void)judge(ckv_clear(handle->cache, &removed, &error));
}

/* No two listed blocks share a page, none lies outside the data area, and all together
 * are no more than the capacity. */
static void
check_extents(struct handle *handle, struct ckv_entry_info *infos, size_t count)
{
    struct ckv_info info;
    struct ckv_error error = {0};
    if (judge(ckv_get_info(handle->cache, &info, &error)) != CKV_OK) {
        return;
    }
    for (uint32_t p = 0; p < info.path_count; p++) {
        const uint64_t offset = info.paths[p].data_offset_bytes;
        const uint64_t pages = info.paths[p].data_bytes / CKV_PAGE_BYTES;
        uint8_t *used = calloc(1, pages + 1);
        for (size_t i = 0; used != NULL && i < count; i++) {
            if (infos[i].path_index != p) {
                continue;
            }
            const uint64_t first = (infos[i].offset_bytes - offset) / CKV_PAGE_BYTES;
            const uint64_t length = ckv_record_pages((uint32_t)infos[i].payload_length,
                (uint16_t)infos[i].header_length);
            if (infos[i].offset_bytes < offset || first + length > pages) {
                fault("a listed block lies outside the data area");
            }
            for (uint64_t page = first; page < first + length; page++) {
                if (used[page]++ != 0) {
                    fault("two listed blocks share page %" PRIu64, page);
                }
            }
        }
        free(used);
    }
}

static void
do_list(struct handle *handle)
{
    enum { LISTED_MAX = 8192 };
    static struct ckv_entry_info infos[LISTED_MAX];
    uint64_t cursor = 0;
    size_t total = 0;
    struct ckv_error error = {0};
    begin_call("list");
    for (size_t count = 1; count != 0 && total < LISTED_MAX;) {
        if (judge(ckv_list(handle->cache, &cursor, infos + total, LISTED_MAX - total,
                &count, &error)) != CKV_OK) {
            return;
        }
        total += count;
    }
    if (setting.sound) {
        check_extents(handle, infos, total);
    }
}

static void
do_events(struct handle *handle, uint64_t since, size_t capacity)
{
    struct ckv_event events[100];
    size_t count = 0;
    uint64_t lost = 0;
    uint64_t last = 0;
    struct ckv_error error = {0};
    capacity = capacity < 100 ? capacity : 100;
    begin_call("events");
    if (judge(ckv_events(handle->cache, since, events, capacity, &count, &lost, &last,
            &error)) == CKV_OK &&
        count > capacity) {
        fault("%zu events in a buffer of %zu", count, capacity);
    }
}

static void
do_verify(struct handle *handle, bool repair)
{
    struct ckv_verify_report report = {0};
    struct ckv_error error = {0};
    begin_call(repair ? "verify with repair" : "verify");
    (void)judge(ckv_verify(handle->cache, repair, NULL, NULL, &report, &error));
}

/* What a rebuild or a repair leaves has no fault. */
static void
do_prove(struct handle *handle, const char *after)
{
    struct ckv_verify_report report = {0};
    struct ckv_error error = {0};
    begin_call("verify (proof)");
    if (judge(ckv_verify(handle->cache, false, NULL, NULL, &report, &error)) ==
            CKV_OK &&
        report.structure_faults != 0) {
        fault("%" PRIu64 " faults after %s: %s", report.structure_faults, after,
            report.first_fault);
    }
}

static void
do_statistics(struct handle *handle)
{
    struct ckv_stats volume;
    struct ckv_stats process;
    struct ckv_error error = {0};
    uint64_t entries = 0;
    begin_call("statistics");
    (void)judge(ckv_count(handle->cache, &entries, &error));
    if (judge(ckv_get_stats(handle->cache, &volume, &process, &error)) == CKV_OK &&
        setting.sound && volume.resident_bytes > volume.capacity_bytes) {
        fault("%" PRId64 " bytes are resident in a capacity of %" PRId64,
            volume.resident_bytes, volume.capacity_bytes);
    }
}

static void
do_locate(struct handle *handle, unsigned number)
{
    uint8_t bytes[64];
    struct ckv_key key;
    struct ckv_lease *lease = NULL;
    int fd = -1;
    uint64_t offset = 0;
    struct ckv_error error = {0};
    key_bytes(number, bytes, &key);
    begin_call("locate");
    if (judge(ckv_locate(handle->cache, &key, &lease, &fd, &offset, &error)) ==
        CKV_OK) {
        size_t length = 0;
        (void)ckv_lease_data(lease, &length);
        if (length <= sizeof scratch &&
            pread(fd, scratch, length, (off_t)offset) == (ssize_t)length) {
            compare(handle, number, scratch, length);
        }
        ckv_lease_release(&lease);
    }
}

static void
do_care(struct handle *handle, bool recover)
{
    uint64_t paths = 0;
    struct ckv_error error = {0};
    begin_call(recover ? "verify (recover)" : "sync");
    (void)judge(recover ? ckv_recover(handle->cache, &paths, &error)
                        : ckv_sync(handle->cache, &error));
}

static void
get_all(struct handle *handle)
{
    for (unsigned i = 0; i < KEYS && seconds() < setting.until; i++) {
        if (i % 2 == 0) {
            do_get(handle, i, i % HELD_MAX);
        } else {
            do_get_into(handle, i, sizeof scratch);
        }
    }
}

static void
one_call(struct handle *handle, struct input *input)
{
    const unsigned number = (unsigned)take_below(input, KEYS + BIG_KEYS);
    const unsigned arg = take8(input);
    switch (take8(input) % 24) {
    case 0:
    case 1:
        do_get(handle, number, arg % HELD_MAX);
        break;
    case 2:
        do_get_into(handle, number, sizeof scratch);
        break;
    case 3:
        do_get_into(handle, number, arg);
        break;
    case 4:
        do_many(handle, arg);
        break;
    case 5:
        do_get_many(handle);
        break;
    case 6:
        do_remove(handle, number);
        break;
    case 7:
        if (arg % 4 == 0) {
            do_clear(handle);
        }
        break;
    case 8:
        do_list(handle);
        break;
    case 9:
        do_events(handle, arg % 2 == 0 ? 0 : take_evil(input), arg);
        break;
    case 10:
        do_verify(handle, false);
        break;
    case 11:
        do_verify(handle, true);
        break;
    case 12:
        do_statistics(handle);
        break;
    case 13:
        do_locate(handle, number);
        break;
    case 14:
        do_care(handle, arg % 2 == 0);
        break;
    case 15:
        do_commit(handle, number, arg % 4 == 0);
        break;
    case 16:
        for (unsigned i = 0; i < arg % 20u && seconds() < setting.until; i++) {
            do_put(handle, KEYS + (number + i) % BIG_KEYS, CKV_PUT_OVERWRITE);
        }
        break;
    case 17:
        release(handle, arg % HELD_MAX);
        break;
    default:
        do_put(handle, number, arg % 2 == 0 ? CKV_PUT_OVERWRITE : 0);
        break;
    }
}

/* ---- template volumes --------------------------------------------------------------- */

struct template_file {
    uint64_t file_bytes;
    uint64_t kept_bytes; /* from the beginning; what follows is zeros */
    uint8_t *content;
};

struct template_set {
    unsigned file_count;
    struct template_file files[FILES_MAX];
};

static struct template_set templates[TEMPLATES];
static char folder[200];

static void
read_template(const char *path, struct template_file *file)
{
    struct stat info;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    need(fd >= 0 && fstat(fd, &info) == 0, "open the template");
    file->file_bytes = (uint64_t)info.st_size;
    file->content = malloc(file->file_bytes);
    need(file->content != NULL &&
             pread(fd, file->content, file->file_bytes, 0) == (ssize_t)file->file_bytes,
        "read the template");
    file->kept_bytes = file->file_bytes;
    while (file->kept_bytes > 0 && file->content[file->kept_bytes - 1] == 0) {
        file->kept_bytes--;
    }
    (void)close(fd);
}

static void
fill_template(const struct ckv_options *options)
{
    struct ckv_options other = *options;
    other.namespace_data = "other";
    other.namespace_length = 5;
    struct handle handles[SPACES] = {{.space = 0}, {.space = 1}};
    struct ckv_error error = {0};
    need(ckv_open(options, &handles[0].cache, &error) == CKV_OK, error.text);
    need(ckv_open(&other, &handles[1].cache, &error) == CKV_OK, error.text);
    for (unsigned i = 0; i < 6; i++) {
        do_put(&handles[1], i, 0);
    }
    do_clear(&handles[1]);
    for (unsigned i = 0; i < KEYS; i++) {
        do_put(&handles[0], i, 0);
        if (i % 3 == 0) {
            do_put(&handles[1], i, 0);
        }
    }
    for (unsigned i = 0; i < KEYS; i += 9) {
        do_put(&handles[0], i, CKV_PUT_OVERWRITE);
        do_remove(&handles[0], i + 1);
    }
    do_many(&handles[0], 1);
    do_care(&handles[0], false);
    close_handle(&handles[0]);
    close_handle(&handles[1]);
}

/* 0: four stripes, 64 KiB granules; 1: one stripe, pages as granules; 2: two files. */
static void
make_templates(void)
{
    setting =
        (struct setting){.until = seconds() + 1e6, .compare = true, .guard = true};
    for (unsigned t = 0; t < TEMPLATES; t++) {
        struct ckv_path paths[FILES_MAX];
        setting.path_count = templates[t].file_count = t == 2 ? 2 : 1;
        for (unsigned i = 0; i < setting.path_count; i++) {
            (void)snprintf(setting.paths[i], sizeof setting.paths[i], "%s/t%u-%u.cyc",
                folder, t, i);
            (void)unlink(setting.paths[i]);
        }
        struct ckv_options options = options_for(0, CKV_MODE_READ_WRITE, paths);
        options.stripe_count = t == 0 ? 4 : t == 1 ? 1 : 2;
        options.expected_object_bytes = t == 1 ? CKV_PAGE_BYTES : 0;
        for (unsigned i = 0; i < setting.path_count; i++) {
            paths[i].capacity_bytes = CKV_CAPACITY_MIN_BYTES;
        }
        fill_template(&options);
        for (unsigned i = 0; i < setting.path_count; i++) {
            read_template(setting.paths[i], &templates[t].files[i]);
            (void)unlink(setting.paths[i]);
        }
        char shm[300];
        (void)snprintf(shm, sizeof shm, "%s-shm", setting.paths[0]);
        (void)unlink(shm);
    }
}

/* Where there is nothing but zeros, nothing is written. */
static void
lay_template(const struct template_file *file, int fd)
{
    enum { PIECE = 16 * CKV_PAGE_BYTES };
    static const uint8_t zeros[PIECE];
    need(ftruncate(fd, (off_t)file->file_bytes) == 0, "lay a file");
    for (uint64_t at = 0; at < file->kept_bytes; at += PIECE) {
        const uint64_t left = file->kept_bytes - at;
        const size_t length = left < PIECE ? left : PIECE;
        if (memcmp(file->content + at, zeros, length) != 0) {
            need(pwrite(fd, file->content + at, length, (off_t)at) == (ssize_t)length,
                "lay a file");
        }
    }
}

/* Lays a fresh copy of a template at the paths of the setting. */
static void
restore(unsigned which, const char *prefix)
{
    const struct template_set *set = &templates[which];
    setting.path_count = set->file_count;
    for (unsigned i = 0; i < set->file_count; i++) {
        (void)snprintf(setting.paths[i], sizeof setting.paths[i], "%s/%s%u.cyc", folder,
            prefix, i);
        (void)unlink(setting.paths[i]);
        const int fd =
            open(setting.paths[i], O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        const struct template_file *file = &set->files[i];
        need(fd >= 0, "restore a volume");
        lay_template(file, fd);
        (void)close(fd);
    }
    char shm[300];
    (void)snprintf(shm, sizeof shm, "%s-shm", setting.paths[0]);
    (void)unlink(shm);
}

/* ---- driver -------------------------------------------------------------------------- */

static void
prepare(const char *where)
{
    need(strlen(where) < sizeof folder, "the name of the folder is too long");
    (void)snprintf(folder, sizeof folder, "%s", where);
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(board != MAP_FAILED, "map the board");
    doing("making templates");
    make_templates();
    (void)alarm(0);
}

/* Hostile sizes must meet a limit here, not the memory of the machine. */
static void
set_limits(void)
{
    const struct rlimit file_limit = {UINT64_C(2) << 30, UINT64_C(2) << 30};
    (void)setrlimit(RLIMIT_FSIZE, &file_limit);
    (void)signal(SIGXFSZ, SIG_IGN);
    const struct rlimit core_limit = {0, 0};
    (void)setrlimit(RLIMIT_CORE, &core_limit);
    if (!UNDER_ASAN) {
        const struct rlimit memory_limit = {UINT64_C(8) << 30, UINT64_C(8) << 30};
        (void)setrlimit(RLIMIT_AS, &memory_limit);
    }
}

static void
input_of(uint64_t number, uint8_t bytes[INPUT_BYTES], struct input *input)
{
    for (size_t i = 0; i < INPUT_BYTES; i += 8) {
        const uint64_t word = mix(number * UINT64_C(0x5851f42d4c957f2d) + i);
        memcpy(bytes + i, &word, 8);
    }
    *input = (struct input){.data = bytes, .size = INPUT_BYTES, .beyond = number};
}

#ifndef HOSTILE_LIBFUZZER

/* True when the case passed. */
static bool
run_case(uint64_t number, void (*body)(struct input *))
{
    case_number = number;
    doing("starting");
    (void)fflush(NULL);
    const pid_t child = fork();
    need(child >= 0, "fork");
    if (child == 0) {
        static uint8_t bytes[INPUT_BYTES];
        struct input input;
        (void)alarm(HANG_SECONDS);
        set_limits();
        input_of(number, bytes, &input);
        body(&input);
        _exit(0);
    }
    int status = 0;
    need(waitpid(child, &status, 0) == child, "wait");
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        return true;
    }
    if (WIFSIGNALED(status)) {
        fprintf(stderr, "case %" PRIu64 ", %s: ended by signal %d (%s)\n", number,
            board->doing, WTERMSIG(status), strsignal(WTERMSIG(status)));
    } else {
        fprintf(stderr, "case %" PRIu64 ", %s: ended with %d\n", number, board->doing,
            WEXITSTATUS(status));
    }
    return false;
}

static int
run_cases(int count, char **arguments, void (*body)(struct input *))
{
    unsigned long cases = 0;
    unsigned long failed = 0;
    if (count != 3 && count != 4) {
        fprintf(stderr, "usage: %s FOLDER FIRST COUNT | FOLDER - < SEEDS\n",
            arguments[0]);
        return 2;
    }
    prepare(arguments[1]);
    if (count == 4) {
        const uint64_t first = strtoull(arguments[2], NULL, 0);
        cases = strtoul(arguments[3], NULL, 0);
        for (uint64_t i = 0; i < cases; i++) {
            failed += !run_case(first + i, body);
        }
    } else {
        char line[200];
        while (fgets(line, sizeof line, stdin) != NULL) {
            char *end = line;
            const uint64_t number = strtoull(line, &end, 0);
            if (end != line) {
                failed += !run_case(number, body);
                cases++;
            }
        }
    }
    printf("%lu cases, %lu failed\n", cases, failed);
    return failed == 0 ? 0 : 1;
}

#endif /* HOSTILE_LIBFUZZER */

#endif /* CKV_TESTS_HOSTILE_H */
