/* SPDX-License-Identifier: Apache-2.0 */
/* scenarios.c: what is done while a call fails, and what comes before it. */
#include "world.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guard.h"

/* ---- what comes before ----------------------------------------------------------- */

static void
read_all(struct run *run)
{
    for (unsigned i = 0; i < NEW_BLOCKS; i++) {
        do_get(run, i);
    }
}

/* Verified, mapped, populated. */
static void
opened_and_read(struct run *run)
{
    open_or_end(run);
    read_all(run);
}

static void
opened(struct run *run)
{
    open_or_end(run);
}

/* Any of them may be gone. */
static void
give_up_blocks(struct run *run)
{
    for (unsigned i = 0; i < BLOCKS; i++) {
        struct expectation *expected = &run->blocks[i];
        if (expected->want == WANT_PRESENT) {
            *expected =
                (struct expectation){WANT_EITHER, expected->version, expected->version};
        }
    }
    run->others_may_go = true;
}

/* ---- opening --------------------------------------------------------------------- */

static void
reads(struct ckv_options *options)
{
    options->mode = CKV_MODE_READ;
}

static void
two_paths(struct ckv_options *options)
{
    options->path_count = 2;
}

static void
with_prefixes(struct ckv_options *options)
{
    options->eviction = CKV_EVICTION_PREFIX;
}

static void
with_guard(struct ckv_options *options)
{
    options->sigbus_guard = true;
}

static void
with_adaptive_admission(struct ckv_options *options)
{
    options->admission = CKV_ADMISSION_ADAPTIVE;
}

static void
elsewhere(struct ckv_options *options)
{
    static char directory[300];
    (void)snprintf(directory, sizeof directory, "%s-elsewhere", options->paths[0].path);
    (void)mkdir(directory, 0700);
    options->shm_directory = directory;
}

static void
open_and_use(struct run *run)
{
    do_open(run);
    if (run->cache != NULL) {
        do_get(run, 4);
        do_get_into(run, 7);
    }
}

static void
open_and_put(struct run *run)
{
    do_open(run);
    if (run->cache != NULL) {
        do_put(run, NEW_BLOCKS + 4, 1, 0);
    }
}

/* The second handle has a namespace of its own. */
static void
open_again(struct run *run)
{
    struct ckv_options options = run->options;
    struct ckv_cache *second = NULL;
    struct ckv_error error = {0};
    options.namespace_data = "fourth";
    options.namespace_length = 6;
    const enum ckv_status status = ckv_open(&options, &second, &error);
    if (outcome(run, "open again", status, CKV_OK, MAY_OPEN, &error)) {
        ckv_close(&second);
    }
}

static void
larger(struct ckv_options *options)
{
    options->on_mismatch = CKV_MISMATCH_RECREATE;
}

/* All blocks are given up, with the namespaces that judge() looks for. */
static void
recreate(struct run *run)
{
    give_up_blocks(run); /* until then the old volume may come back */
    run->paths[0].capacity_bytes += UINT64_C(4) << 20;
    do_open(run);
    if (run->cache != NULL) {
        for (unsigned i = 0; i < BLOCKS; i++) {
            run->blocks[i].want = WANT_ABSENT;
        }
    }
}

static void
without_a_member(struct ckv_options *options)
{
    options->degraded = true;
    options->path_count = 1;
}

static void
open_degraded(struct run *run)
{
    do_open(run);
    if (run->cache != NULL) {
        do_put(run, NEW_BLOCKS + 4, 1, 0);
    }
}

/* ---- storing --------------------------------------------------------------------- */

static void
put_all_sizes(struct run *run)
{
    for (unsigned i = NEW_BLOCKS; i < 2 * NEW_BLOCKS; i++) {
        do_put(run, i, 1, 0);
    }
}

static void
put_small(struct run *run)
{
    do_put(run, NEW_BLOCKS + 4, 1, 0);
}

static void
put_large(struct run *run)
{
    do_put(run, NEW_BLOCKS + 15, 1, 0);
}

static void
put_present(struct run *run)
{
    do_put(run, 4, 1, 0);
    do_put(run, 8, 1, 0);
}

static void
overwrite(struct run *run)
{
    do_put(run, 5, 2, CKV_PUT_OVERWRITE);
    do_put(run, 8, 2, CKV_PUT_OVERWRITE);
    do_put(run, 8, 1, CKV_PUT_OVERWRITE);
}

static void
write_behind(struct ckv_options *options)
{
    options->write_behind = true;
}

static void
put_and_close(struct run *run)
{
    do_put(run, NEW_BLOCKS + 7, 1, 0);
    do_put(run, NEW_BLOCKS + 8, 1, 0);
    ckv_close(&run->cache);
}

static void
put_many(struct run *run)
{
    enum { ITEMS = 8 };
    struct ckv_item items[ITEMS];
    struct ckv_segment segments[ITEMS];
    const struct ckv_key parent = key_of(7);
    struct ckv_error error = {0};
    for (unsigned i = 0; i < ITEMS; i++) {
        const struct block *block = block_of(NEW_BLOCKS + i, 1);
        segments[i] =
            (struct ckv_segment){.data = block->payload, .length = block->length};
        items[i] = (struct ckv_item){
            .key = key_of(NEW_BLOCKS + i),
            .segments = &segments[i],
            .segment_count = 1,
            .header = block->header,
            .header_length = block->header_length,
        };
    }
    const bool chain = run->options.eviction == CKV_EVICTION_PREFIX;
    const enum ckv_status status = ckv_put_many(run->cache, items, ITEMS,
        chain ? CKV_PUT_CHAIN : 0, &parent, &error);
    (void)outcome(run, "put_many", status, CKV_OK, MAY(CKV_OK), &error);
    for (unsigned i = 0; i < ITEMS; i++) {
        (void)outcome(run, "put_many (block)", items[i].status, CKV_OK, MAY_PUT,
            &error);
        note_put(run, NEW_BLOCKS + i, 1, items[i].status);
    }
}

static void
reserve(struct run *run)
{
    for (unsigned i = 0; i < 3; i++) {
        const unsigned number = NEW_BLOCKS + 4 + i;
        const struct block *block = block_of(number, 1);
        const struct ckv_item item = {.key = key_of(number),
            .header = block->header,
            .header_length = block->header_length};
        struct ckv_reservation *reservation = NULL;
        struct ckv_error error = {0};
        enum ckv_status status =
            ckv_reserve(run->cache, &item, block->length, &reservation, &error);
        if (!outcome(run, "reserve", status, CKV_OK, MAY(CKV_OK) | MAY(CKV_E_NO_MEMORY),
                &error)) {
            continue;
        }
        size_t length = 0;
        memcpy(ckv_reservation_data(reservation, &length), block->payload,
            block->length);
        if (i == 1) {
            ckv_abort(&reservation);
            continue;
        }
        status = ckv_commit(&reservation, 0, &error);
        (void)outcome(run, "commit", status, CKV_OK, MAY_PUT, &error);
        note_put(run, number, 1, status);
    }
}

/* Each put takes the place of older blocks, some of which are pinned. */
static void
evict(struct run *run)
{
    struct ckv_lease *leases[4] = {NULL};
    for (unsigned i = 0; i < 4; i++) {
        const struct ckv_key key = key_of(6 + i);
        (void)!ckv_get(run->cache, &key, &leases[i], NULL);
    }
    for (unsigned i = NEW_BLOCKS; i < NEW_BLOCKS + 12; i++) {
        do_put(run, i, 1, 0);
    }
    for (unsigned i = 0; i < 4; i++) {
        ckv_lease_release(&leases[i]);
    }
}

static void
removing(struct run *run)
{
    do_remove(run, 3);
    do_remove(run, 8);
    do_remove(run, 13);
}

/* ---- reading --------------------------------------------------------------------- */

static void
get_all(struct run *run)
{
    for (unsigned i = 0; i < NEW_BLOCKS; i++) {
        do_get(run, i);
    }
}

static void
get_into_all(struct run *run)
{
    for (unsigned i = 0; i < NEW_BLOCKS; i++) {
        do_get_into(run, i);
    }
}

static void
get_many_into_all(struct run *run)
{
    do_get_many_into(run, 0, NEW_BLOCKS);
}

static void
narrow_page_tables(struct ckv_options *options)
{
    options->page_table_budget_bytes = 1;
}

static void
locate(struct run *run)
{
    const unsigned number = 7;
    const struct ckv_key key = key_of(number);
    struct ckv_lease *lease = NULL;
    struct ckv_error error = {0};
    int fd = -1;
    uint64_t offset = 0;
    const enum ckv_status status =
        ckv_locate(run->cache, &key, &lease, &fd, &offset, &error);
    if (outcome(run, "locate", status, CKV_OK, MAY_GET | MAY(CKV_E_OS), &error)) {
        const struct block *block = block_of(number, 1);
        uint8_t first = 0;
        if (pread(fd, &first, 1, (off_t)offset) != 1 || first != block->payload[0]) {
            problem(run, "locate leads elsewhere");
        }
        ckv_lease_release(&lease);
    } else if (lease != NULL || fd != -1) {
        problem(run, "locate failed and has left a lease or a descriptor");
    }
}

/* Calls that promise to do without the disk, or to need it for advice alone. */
static void
look(struct run *run)
{
    struct ckv_key keys[BLOCKS];
    bool present[BLOCKS];
    struct ckv_error error = {0};
    size_t found = 0;
    for (unsigned i = 0; i < BLOCKS; i++) {
        keys[i] = key_of(i);
    }
    const uint64_t only = MAY(CKV_OK);
    (void)outcome(run, "contains_many",
        ckv_contains_many(run->cache, keys, BLOCKS, present, &error), CKV_OK, only,
        &error);
    for (unsigned i = 0; i < BLOCKS; i++) {
        if (present[i] != (run->blocks[i].want == WANT_PRESENT)) {
            problem(run, "contains_many is wrong about block %u", i);
        }
    }
    (void)outcome(run, "longest_prefix",
        ckv_longest_prefix(run->cache, keys, BLOCKS, true, &found, &error), CKV_OK,
        only, &error);
    if (found != 13) {
        problem(run, "longest_prefix answers %zu", found);
    }
    (void)outcome(run, "prefetch",
        ckv_prefetch(run->cache, keys, BLOCKS, &found, &error), CKV_OK, only, &error);
    (void)outcome(run, "touch", ckv_touch(run->cache, keys, BLOCKS, &found, &error),
        CKV_OK, only, &error);
    struct ckv_entry_info infos[BLOCKS];
    uint64_t cursor = 0;
    (void)outcome(run, "list",
        ckv_list(run->cache, &cursor, infos, BLOCKS, &found, &error), CKV_OK, only,
        &error);
    struct ckv_event events[BLOCKS];
    uint64_t lost = 0;
    uint64_t last = 0;
    (void)outcome(run, "events",
        ckv_events(run->cache, 0, events, BLOCKS, &found, &lost, &last, &error), CKV_OK,
        only, &error);
    struct ckv_stats stats;
    (void)outcome(run, "stats", ckv_get_stats(run->cache, &stats, NULL, &error), CKV_OK,
        only, &error);
    struct ckv_info info;
    (void)outcome(run, "info", ckv_get_info(run->cache, &info, &error), CKV_OK, only,
        &error);
    if (info.paths[0].path == NULL || info.shm_path == NULL) {
        problem(run, "info hands out no text");
    }
}

/* ---- care ------------------------------------------------------------------------ */

static void
synced(struct run *run)
{
    struct ckv_error error = {0};
    const enum ckv_status status = ckv_sync(run->cache, &error);
    (void)outcome(run, "sync", status, CKV_OK, MAY(CKV_OK) | MAY(CKV_E_OS), &error);
}

static void
put_and_sync(struct run *run)
{
    do_put(run, NEW_BLOCKS + 4, 1, 0);
    synced(run);
}

static void
verified(struct run *run)
{
    struct ckv_verify_report report = {0};
    struct ckv_error error = {0};
    const enum ckv_status status =
        ckv_verify(run->cache, false, NULL, NULL, &report, &error);
    (void)outcome(run, "verify", status, CKV_OK, MAY(CKV_OK) | MAY(CKV_E_NO_MEMORY),
        &error);
    if (report.structure_faults + report.damaged_payloads > 0) {
        problem(run, "verify finds damage where a call failed: %s", report.first_fault);
    }
}

static off_t
place_of(struct run *run, unsigned number)
{
    const struct ckv_key key = key_of(number);
    struct ckv_lease *lease = NULL;
    struct ckv_error error = {0};
    int fd = -1;
    uint64_t offset = 0;
    need(ckv_locate(run->cache, &key, &lease, &fd, &offset, &error) == CKV_OK,
        "locate");
    ckv_lease_release(&lease);
    return (off_t)offset;
}

static void
spoil(struct run *run, unsigned number)
{
    const off_t offset = place_of(run, number);
    const int fd = open(run->names[0], O_RDWR | O_CLOEXEC);
    need(fd >= 0 && pwrite(fd, "spoilt", 6, offset + 8) == 6, "spoil");
    (void)close(fd);
    watched[0].dirty[offset / CKV_PAGE_BYTES] = 1;
}

/* The marks of the spoilt are taken away, as if nobody had read them yet. */
static void
opened_and_spoilt(struct run *run)
{
    open_or_end(run);
    spoil(run, 4);
    spoil(run, 7);
    struct ckv_volume *volume = run->cache->volume;
    for (uint32_t i = 0; i < volume->region.layout.entry_count; i++) {
        ckv_store_relaxed_u32(&volume->region.marks[i], 0);
    }
    run->damaged = true;
    run->blocks[4].want = run->blocks[7].want = WANT_ABSENT;
}

static void
repaired(struct run *run)
{
    struct ckv_verify_report report = {0};
    struct ckv_error error = {0};
    const enum ckv_status status =
        ckv_verify(run->cache, true, NULL, NULL, &report, &error);
    (void)outcome(run, "verify with repair", status, CKV_OK,
        MAY(CKV_OK) | MAY(CKV_E_NO_MEMORY), &error);
    if (report.unreadable > 0) {
        give_up_blocks(run); /* what the device did not deliver: repair removes it */
    }
}

static void
read_spoilt(struct run *run)
{
    do_get(run, 4);
    do_get_into(run, 7);
    do_get_many_into(run, 0, 10);
}

static void
opened_and_failed(struct run *run)
{
    open_or_end(run);
    do_put(run, NEW_BLOCKS + 5, 1, 0);
    ckv_volume_fail_path(run->cache->volume, &run->cache->volume->files[0],
        "the scenario", EIO);
}

static void
recovered(struct run *run)
{
    uint64_t paths = 0;
    struct ckv_error error = {0};
    const enum ckv_status status = ckv_recover(run->cache, &paths, &error);
    (void)outcome(run, "recover", status, CKV_OK, MAY(CKV_OK) | MAY(CKV_E_NO_MEMORY),
        &error);
    if (paths != 1 && run->ideal) {
        run->ideal = false;
        (void)snprintf(run->deviation, sizeof run->deviation, "nothing was recovered");
    }
    /* A block that the device did not deliver while it was verified is given up. */
    struct ckv_stats stats = {0};
    if (ckv_get_stats(run->cache, &stats, NULL, &error) == CKV_OK &&
        stats.read_errors > 0) {
        give_up_blocks(run);
    }
}

static void
cleared(struct run *run)
{
    struct ckv_error error = {0};
    const enum ckv_status status = ckv_clear(run->cache, NULL, &error);
    (void)outcome(run, "clear", status, CKV_OK, MAY(CKV_OK) | MAY(CKV_E_OS), &error);
    for (unsigned i = 0; i < BLOCKS; i++) {
        run->blocks[i].want = WANT_ABSENT;
    }
}

static void
closed(struct run *run)
{
    ckv_close(&run->cache);
}

static void
put_unsettled(struct run *run)
{
    open_or_end(run);
    do_put(run, NEW_BLOCKS + 5, 1, 0);
    get_into_all(run);
}

/* ---- processes ------------------------------------------------------------------- */

/* A child has a handle that refuses, and may open the volume for itself. */
static void
forked(struct run *run)
{
    (void)fflush(NULL);
    const pid_t child = fork();
    need(child >= 0, "fork");
    if (child == 0) {
        struct ckv_error error = {0};
        struct ckv_lease *lease = NULL;
        const struct ckv_key key = key_of(4);
        (void)alarm(20);
        if (ckv_get(run->cache, &key, &lease, &error) != CKV_E_FORKED) {
            problem(run, "a handle of the parent works in a child");
        }
        ckv_close(&run->cache);
        do_open(run);
        if (run->cache != NULL) {
            do_get(run, 4);
            do_put(run, NEW_BLOCKS + 4, 1, 0);
            ckv_close(&run->cache);
        }
        _exit(run->problems != 0 ? 1 : run->ideal ? 0 : 2);
    }
    int status = 0;
    need(waitpid(child, &status, 0) == child, "wait");
    if (!WIFEXITED(status) || WEXITSTATUS(status) == 1) {
        problem(run, "the child ended with %d", status);
    } else if (WEXITSTATUS(status) == 2) {
        run->ideal = false;
        (void)snprintf(run->deviation, sizeof run->deviation, "in the child");
    }
}

/* What a process leaves that was killed: pins, a reservation, a hint, the lock of a
 * stripe.  Nobody holds the byte of its slot. */
static void
opened_after_a_death(struct run *run)
{
    enum { DEAD_SLOT = 5, INCARNATION = 3 };
    open_or_end(run);
    struct ckv_region *region = &run->cache->volume->region;
    uint32_t reserved = 0;
    while (ckv_load_relaxed_u64(&region->states[reserved]) != CKV_STATE_FREE) {
        reserved++;
    }
    ckv_store_relaxed_u32(&region->slots[DEAD_SLOT].incarnation, INCARNATION);
    ckv_store_relaxed_u32(&region->slots[DEAD_SLOT].unswept, 1);
    ckv_store_relaxed_u64(&region->slots[DEAD_SLOT].process_id, 99999);
    ckv_store_relaxed_u64(&region->slots[DEAD_SLOT].pinned_entries, 2);
    for (uint32_t entry = 2; entry < 5; entry++) {
        (void)ckv_or_ordered_u64(&region->masks[entry], UINT64_C(1) << DEAD_SLOT);
    }
    ckv_store_relaxed_u64(&region->states[reserved],
        ckv_state_owned(CKV_STATE_RESERVED, DEAD_SLOT, INCARNATION));
    ckv_store_relaxed_u64(&region->hints[77].word,
        (uint64_t)INCARNATION << 38 | (uint64_t)DEAD_SLOT << 32 | 4711);
    ckv_store_relaxed_u64(&region->stripes[0].lock,
        ckv_owner_word(DEAD_SLOT, INCARNATION));
}

static void
put_and_verify(struct run *run)
{
    do_put(run, NEW_BLOCKS + 4, 1, 0);
    do_put(run, NEW_BLOCKS + 7, 1, 0);
    verified(run);
}

/* ---- seconds --------------------------------------------------------------------- */

static void
often(struct ckv_options *options)
{
    options->sync_interval_ms = 1;
}

/* The thread probes, syncs and writes a checkpoint a few times. */
static void
maintained(struct run *run)
{
    ckv_store_relaxed_u64(&pretend.realtime_shift_ns, UINT64_C(400000000000));
    for (int i = 0;
        i < 500 && inject_calls(CALL_pending_error) < 3 && inject_fired() == 0; i++) {
        const struct timespec pause = {.tv_nsec = 1000000};
        (void)nanosleep(&pause, NULL);
    }
    do_put(run, NEW_BLOCKS + 4, 1, 0);
}

/* ---- readers --------------------------------------------------------------------- */

/* A reader whose region ends: the writers have gone and others have come. */
static void
read_over_two_lives(struct run *run)
{
    do_get(run, 4);
    peer_close();
    peer_open();
    do_get(run, 7);
    do_get_into(run, 8);
}

/* ---- all of them ----------------------------------------------------------------- */

#define COLD  {.local_disk = true, .cold = true}
#define HASTY {.hasten = true}

const struct scenario scenarios[] = {
    {"create", TEMPLATE_NONE, NULL, open_and_put, NULL, false, false, {0}},
    {"create two files", TEMPLATE_NONE, NULL, open_and_put, two_paths, false, false,
        {0}},
    {"open", TEMPLATE_ONE, NULL, open_and_use, NULL, false, false, {0}},
    {"open two files", TEMPLATE_TWO, NULL, open_and_put, NULL, false, false, {0}},
    {"open in a new process", TEMPLATE_ONE, NULL, open_and_use, NULL, false, true, {0}},
    {"open with prefixes", TEMPLATE_ONE, NULL, open_and_use, with_prefixes, false,
        false, {0}},
    {"open with admission", TEMPLATE_FULL, NULL, open_and_use, with_adaptive_admission,
        false, false, {0}},
    {"open with shm_directory", TEMPLATE_ONE, NULL, open_and_use, elsewhere, false,
        false, {0}},
    {"open with the guard", TEMPLATE_ONE, NULL, open_and_use, with_guard, false, false,
        {0}},
    {"open a degraded set", TEMPLATE_TWO, give_up_blocks, open_degraded,
        without_a_member, false, false, {0}},
    {"recreate", TEMPLATE_ONE, NULL, recreate, larger, false, false, {0}},
    {"open beside another", TEMPLATE_ONE, NULL, open_and_put, NULL, true, false, {0}},
    {"open again", TEMPLATE_ONE, opened, open_again, NULL, false, false, {0}},
    {"open for reading", TEMPLATE_ONE, NULL, open_and_use, reads, false, false, {0}},
    {"open for reading beside another", TEMPLATE_ONE, NULL, open_and_use, reads, true,
        false, {0}},
    {"put of all sizes", TEMPLATE_ONE, opened, put_all_sizes, NULL, false, false, {0}},
    {"put", TEMPLATE_ONE, opened, put_small, NULL, false, false, {0}},
    {"put in pieces", TEMPLATE_ONE, opened, put_large, NULL, false, false, {0}},
    {"put to two files", TEMPLATE_TWO, opened, put_all_sizes, NULL, false, false, {0}},
    {"put of a present block", TEMPLATE_ONE, opened, put_present, NULL, false, false,
        {0}},
    {"overwrite", TEMPLATE_ONE, opened, overwrite, NULL, false, false, {0}},
    {"put with write-behind", TEMPLATE_ONE, opened, put_and_close, write_behind, false,
        false, {0}},
    {"put_many", TEMPLATE_ONE, opened, put_many, NULL, false, false, {0}},
    {"put_many of a chain", TEMPLATE_ONE, opened, put_many, with_prefixes, false, false,
        {0}},
    {"reserve", TEMPLATE_ONE, opened, reserve, NULL, false, false, {0}},
    {"evict", TEMPLATE_FULL, opened, evict, NULL, false, false, {0}},
    {"evict by prefix", TEMPLATE_FULL, opened, evict, with_prefixes, false, false, {0}},
    {"remove", TEMPLATE_ONE, opened, removing, NULL, false, false, {0}},
    {"get, first time", TEMPLATE_ONE, opened, get_all, NULL, false, false, {0}},
    {"get in a new process", TEMPLATE_ONE, opened, get_all, NULL, false, true, {0}},
    {"get, again", TEMPLATE_ONE, opened_and_read, get_all, NULL, false, false, {0}},
    {"get with the guard", TEMPLATE_ONE, opened, get_all, with_guard, false, false,
        {0}},
    {"get with few page tables", TEMPLATE_ONE, opened, get_all, narrow_page_tables,
        false, false, {0}},
    {"locate", TEMPLATE_ONE, opened, locate, NULL, false, false, {0}},
    {"get_into, first time", TEMPLATE_ONE, opened, get_into_all, NULL, false, false,
        {0}},
    {"get_into, again", TEMPLATE_ONE, opened_and_read, get_into_all, NULL, false, false,
        {0}},
    {"get_into, cold", TEMPLATE_ONE, opened, get_into_all, NULL, false, false, COLD},
    {"get_many_into, first time", TEMPLATE_ONE, opened, get_many_into_all, NULL, false,
        false, {0}},
    {"get_many_into, again", TEMPLATE_ONE, opened_and_read, get_many_into_all, NULL,
        false, false, {0}},
    {"get_many_into, cold", TEMPLATE_ONE, opened, get_many_into_all, NULL, false, false,
        COLD},
    {"get as a reader", TEMPLATE_ONE, opened, get_all, reads, false, false, {0}},
    {"get as a reader, two lives", TEMPLATE_ONE, opened, read_over_two_lives, reads,
        true, false, {0}},
    {"look", TEMPLATE_ONE, opened, look, NULL, false, false, {0}},
    {"sync", TEMPLATE_ONE, opened, put_and_sync, NULL, false, false, {0}},
    {"sync two files", TEMPLATE_TWO, opened, put_and_sync, NULL, false, false, {0}},
    {"verify", TEMPLATE_ONE, opened, verified, NULL, false, false, {0}},
    {"verify with prefixes", TEMPLATE_ONE, opened, verified, with_prefixes, false,
        false, {0}},
    {"repair", TEMPLATE_ONE, opened_and_spoilt, repaired, NULL, false, false, {0}},
    {"read what is damaged", TEMPLATE_ONE, opened_and_spoilt, read_spoilt, NULL, false,
        false, {0}},
    {"recover", TEMPLATE_ONE, opened_and_failed, recovered, NULL, false, false, {0}},
    {"clear", TEMPLATE_ONE, opened, cleared, NULL, false, false, {0}},
    {"clear two files", TEMPLATE_TWO, opened, cleared, NULL, false, false, {0}},
    {"close", TEMPLATE_ONE, put_unsettled, closed, write_behind, false, false, {0}},
    {"close two files", TEMPLATE_TWO, put_unsettled, closed, write_behind, false, false,
        {0}},
    {"fork", TEMPLATE_ONE, opened, forked, NULL, false, false, {0}},
    {"sweep the dead", TEMPLATE_ONE, opened_after_a_death, put_and_verify, NULL, false,
        false, {0}},
    {"maintenance", TEMPLATE_ONE, opened, maintained, often, false, false, HASTY},
};
const size_t scenario_count = CKV_ARRAY_LENGTH(scenarios);
