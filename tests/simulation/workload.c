/* SPDX-License-Identifier: Apache-2.0 */
/* workload.c: what the simulated processes do, and the end of each seed.
 *
 * A few keys, a volume of a few dozen pages, up to four processes of one or two threads.
 * Each seed has its own geometry, policies, sizes, and number of deaths and stops.  A
 * process that was killed is followed by another; now and then all are killed at once.
 * At the end nobody dies any more: everything is recounted, read, closed, rebuilt, and
 * read again.
 */
#include "simulation.h"

#include <stdlib.h>
#include <string.h>

enum {
    PAGE = 4096,
    SIZES = 3,
    PAYLOAD_MAX = 12 * PAGE,
    BATCH_MAX = 4,
    PROCESSES_MAX = 4,
    EVENTS_MAX = 64
};

const struct plan *plan;
uint64_t operations;
uint64_t hits, misses, stored;

static struct {
    uint32_t paths, stripes, pages, granule_pages;
    enum ckv_eviction eviction;
    enum ckv_admission admission;
    enum ckv_verify verify;
    bool write_behind;
    uint32_t event_capacity;
    uint32_t processes, threads;
    uint32_t operations_left;
    uint32_t kills_left, stops_left, ends_left; /* ends: of everybody at once */
    uint32_t sizes[SIZES];
    bool readers, chains;
    uint32_t put_weight, remove_weight;
} setup;

static char names[PATHS_MAX][256];
static uint32_t deaths; /* that the accounts have to allow for */

const char *
path_name(uint32_t path)
{
    return names[path];
}

uint32_t
path_count(void)
{
    return setup.paths;
}

/* ---- operations ------------------------------------------------------------------- */

static void
begin(const char *name)
{
    current->operation = name;
    current->waited_ns = 0;
    current->operation_steps = 0;
    operations++;
    current->began = ++stamp;
    current->chooses = current->crowds = current->condemns = false;
}

static void
end(void)
{
    stamp++;
    mix(current->operation_steps);
    current->operation = NULL;
    current->condemns = false;
}

static void
must(enum ckv_status status, const struct ckv_error *error, const char *what)
{
    if (status < 0) {
        finding("%s: %d, %s", what, (int)status, error->text);
    }
}

static void
must_put(enum ckv_status status, const struct ckv_error *error, const char *what)
{
    must(status, error, what);
    if (status == CKV_FAILED_PATH || status == CKV_IO_FAILED || status == CKV_MISS) {
        finding("%s: %d, and nothing has failed", what, (int)status);
    }
    if (status == CKV_BUSY) {
        oracle_busy(current->process->caches[0]->volume);
    }
}

static uint32_t
any_key(void)
{
    return (uint32_t)draw(key_count);
}

static uint32_t
any_length(void)
{
    return setup.sizes[draw(SIZES)];
}

static struct ckv_cache *
cache_of(struct process *process, uint32_t key)
{
    return process->caches[key_space(key)];
}

/* NULL for a reader, whose volume may be exchanged during the call. */
static struct ckv_volume *
volume_for(struct process *process, uint32_t key)
{
    return process->reader ? NULL : cache_of(process, key)->volume;
}

struct block { /* a version on its way into the volume */
    uint32_t version;
    uint8_t *payload;
    uint8_t header[32];
    struct ckv_segment segments[2];
    struct ckv_item item;
};

static void
block_begin(struct block *block, uint32_t key)
{
    const uint32_t length = any_length();
    block->version = version_begin(key, length, chance(1, 4) ? 16 : 0);
    block->payload = malloc(length);
    version_fill(block->version, block->payload);
    const size_t cut = chance(1, 3) ? draw(length) : length;
    block->segments[0] = (struct ckv_segment){.data = block->payload, .length = cut};
    block->segments[1] =
        (struct ckv_segment){.data = block->payload + cut, .length = length - cut};
    block->item = (struct ckv_item){.key = oracle_key(key),
        .segments = block->segments,
        .segment_count = cut == length ? 1 : 2,
        .header = block->header,
        .header_length = version_header(block->version, block->header)};
}

static void
block_end(struct block *block, enum ckv_status status)
{
    version_end(block->version, status);
    free(block->payload);
}

static void
do_put(struct process *process)
{
    struct ckv_error error;
    struct block block;
    const uint32_t key = any_key();
    begin("put");
    block_begin(&block, key);
    const enum ckv_status status = process->engine->put(cache_of(process, key),
        &block.item, chance(1, 2) ? CKV_PUT_OVERWRITE : 0, &error);
    must_put(status, &error, "put");
    block_end(&block, status);
    end();
}

static void
do_put_many(struct process *process)
{
    struct ckv_error error;
    struct block blocks[BATCH_MAX];
    struct ckv_item items[BATCH_MAX];
    const uint32_t space = (uint32_t)draw(space_count);
    const uint32_t keys = key_count / space_count;
    const uint32_t count = 1 + (uint32_t)draw(keys < BATCH_MAX ? keys : BATCH_MAX);
    const uint32_t first = (uint32_t)draw(keys);
    uint32_t flags = chance(1, 2) ? CKV_PUT_OVERWRITE : 0;
    begin("put_many");
    for (uint32_t i = 0; i < count && i < keys; i++) {
        block_begin(&blocks[i], (first + i) % keys * space_count + space);
        items[i] = blocks[i].item;
    }
    const uint32_t real = count < keys ? count : keys;
    struct ckv_key parent = oracle_key((first + keys - 1) % keys * space_count + space);
    if (setup.chains && chance(3, 4)) {
        flags |= CKV_PUT_CHAIN;
    }
    const enum ckv_status status =
        process->engine->put_many(process->caches[space], items, real, flags,
            (flags & CKV_PUT_CHAIN) != 0 && real < keys ? &parent : NULL, &error);
    must(status, &error, "put_many");
    for (uint32_t i = 0; i < real; i++) {
        must_put(items[i].status, &error, "put_many");
        block_end(&blocks[i], items[i].status);
    }
    end();
}

static void
do_reserve(struct process *process)
{
    struct ckv_error error;
    struct block block;
    struct ckv_reservation *reservation = NULL;
    const uint32_t key = any_key();
    begin("reserve");
    block_begin(&block, key);
    size_t length = 0;
    for (size_t i = 0; i < block.item.segment_count; i++) {
        length += block.item.segments[i].length;
    }
    must(process->engine->reserve(cache_of(process, key), &block.item, length,
             &reservation, &error),
        &error, "reserve");
    memcpy(process->engine->reservation_data(reservation, &length), block.payload,
        length);
    enum ckv_status status = CKV_MISS;
    if (chance(1, 5)) {
        process->engine->abort(&reservation);
    } else {
        status = process->engine->commit(&reservation,
            chance(1, 2) ? CKV_PUT_OVERWRITE : 0, &error);
        must_put(status, &error, "commit");
    }
    block_end(&block, status);
    end();
}

static void
let_go(struct process *process, struct held *view)
{
    held_check(view);
    struct ckv_lease *lease = view->lease;
    begin("release");
    held_drop(view); /* from here on the pages may be overwritten */
    process->engine->lease_release(&lease);
    end();
}

static void
do_get(struct process *process)
{
    struct ckv_error error;
    struct look look;
    struct ckv_lease *lease = NULL;
    const uint32_t key = any_key();
    const struct ckv_key name = oracle_key(key);
    begin("get");
    look_begin(&look, volume_for(process, key), key);
    const enum ckv_status status =
        process->engine->get(cache_of(process, key), &name, &lease, &error);
    must(status, &error, "get");
    if (status != CKV_OK) {
        look_miss(&look, volume_for(process, key), "get");
        end();
        return;
    }
    size_t length = 0;
    uint32_t version = 0;
    const uint8_t *data = process->engine->lease_data(lease, &length);
    /* Held from now on: whoever overwrites it is found at that step. */
    struct held *view = held_add(process, lease, 0, data, length);
    look_hit(&look, data, length, &version);
    view->version = version;
    view->busy = true; /* no other thread lets go of it while its header is read */
    if (chance(1, 4) && !process->reader) {
        size_t header_length = 0;
        const uint8_t *header = process->engine->lease_header(lease, &header_length);
        look_header(version, header, header_length);
    }
    view->busy = false;
    end();
    if (chance(1, 2)) {
        let_go(process, view);
    }
}

static void
do_release(struct process *process)
{
    struct held *view = held_any(process);
    if (view != NULL) {
        const uint32_t version = view->version;
        held_check(view);
        /* Another thread of the process may want the same view. */
        mix(version);
        let_go(process, view);
    }
}

static void
prepare_read(struct ckv_read *read, struct ckv_target *targets, uint8_t *buffer,
    uint32_t key)
{
    const size_t cut = chance(1, 3) ? draw(PAYLOAD_MAX) : PAYLOAD_MAX;
    memset(buffer, 0xee, PAYLOAD_MAX);
    targets[0] = (struct ckv_target){.data = buffer, .length = cut};
    targets[1] = (struct ckv_target){.data = buffer + cut, .length = PAYLOAD_MAX - cut};
    *read = (struct ckv_read){.key = oracle_key(key),
        .targets = targets,
        .target_count = 2};
}

static void
do_get_into(struct process *process)
{
    struct ckv_error error;
    struct look look;
    struct ckv_read read;
    struct ckv_target targets[2];
    const uint32_t key = any_key();
    uint8_t *buffer = malloc(PAYLOAD_MAX);
    begin("get_into");
    prepare_read(&read, targets, buffer, key);
    look_begin(&look, volume_for(process, key), key);
    const enum ckv_status status =
        process->engine->get_into(cache_of(process, key), &read, &error);
    must(status, &error, "get_into");
    if (status == CKV_OK) {
        look_hit(&look, buffer, read.payload_length, NULL);
    } else {
        look_miss(&look, volume_for(process, key), "get_into");
    }
    end();
    free(buffer);
}

static void
do_get_many_into(struct process *process)
{
    struct ckv_error error;
    struct look looks[BATCH_MAX];
    struct ckv_read reads[BATCH_MAX];
    struct ckv_target targets[BATCH_MAX][2];
    uint32_t keys[BATCH_MAX];
    const uint32_t space = (uint32_t)draw(space_count);
    const uint32_t count = 1 + (uint32_t)draw(BATCH_MAX);
    uint8_t *buffers = malloc((size_t)BATCH_MAX * PAYLOAD_MAX);
    begin("get_many_into");
    for (uint32_t i = 0; i < count; i++) {
        keys[i] = (uint32_t)draw(key_count / space_count) * space_count + space;
        prepare_read(&reads[i], targets[i], buffers + (size_t)i * PAYLOAD_MAX, keys[i]);
        look_begin(&looks[i], volume_for(process, keys[i]), keys[i]);
    }
    must(process->engine->get_many_into(process->caches[space], reads, count, &error),
        &error, "get_many_into");
    for (uint32_t i = 0; i < count; i++) {
        must(reads[i].status, &error, "get_many_into");
        if (reads[i].status == CKV_OK) {
            look_hit(&looks[i], targets[i][0].data, reads[i].payload_length, NULL);
        } else {
            look_miss(&looks[i], volume_for(process, keys[i]), "get_many_into");
        }
    }
    end();
    free(buffers);
}

static void
do_ask(struct process *process)
{
    struct ckv_error error;
    struct look looks[BATCH_MAX];
    struct ckv_key names_of[BATCH_MAX];
    bool present[BATCH_MAX] = {false};
    uint32_t keys[BATCH_MAX];
    size_t length = 0;
    const uint32_t space = (uint32_t)draw(space_count);
    const uint32_t count = 1 + (uint32_t)draw(BATCH_MAX);
    const uint64_t way = draw(process->reader ? 2 : 4);
    static const char *const ways[] = {"contains", "longest_prefix", "touch",
        "longest_prefix, touching"};
    begin(ways[way]);
    for (uint32_t i = 0; i < count; i++) {
        keys[i] = (uint32_t)draw(key_count / space_count) * space_count + space;
        names_of[i] = oracle_key(keys[i]);
        look_begin(&looks[i], volume_for(process, keys[i]), keys[i]);
    }
    if (way == 0) {
        must(process->engine->contains_many(process->caches[space], names_of, count,
                 present, &error),
            &error, "contains");
        for (uint32_t i = 0; i < count; i++) {
            if (present[i]) {
                look_present(&looks[i], "contains");
            } else {
                look_miss(&looks[i], volume_for(process, keys[i]), "contains");
            }
        }
    } else if (way == 2) {
        must(process->engine->touch(process->caches[space], names_of, count, &length,
                 &error),
            &error, "touch");
        mix(length);
    } else {
        must(process->engine->longest_prefix(process->caches[space], names_of, count,
                 way == 3, &length, &error),
            &error, "longest_prefix");
        for (uint32_t i = 0; i < length; i++) {
            look_present(&looks[i], "longest_prefix");
        }
        if (length < count) {
            look_miss(&looks[length], volume_for(process, keys[length]),
                "longest_prefix");
        }
    }
    end();
}

static void
do_remove(struct process *process)
{
    struct ckv_error error;
    const uint32_t key = any_key();
    const struct ckv_key name = oracle_key(key);
    begin("remove");
    const uint64_t start = ++stamp;
    must(process->engine->remove(cache_of(process, key), &name, &error), &error,
        "remove");
    trace("key %u is removed", key);
    key_gone(key, start);
    end();
}

static void
do_clear(struct process *process)
{
    struct ckv_error error;
    uint64_t removed = 0;
    const uint32_t space = (uint32_t)draw(space_count);
    begin("clear");
    const uint64_t start = ++stamp;
    must(process->engine->clear(process->caches[space], &removed, &error), &error,
        "clear");
    trace("space %u is cleared", space);
    mix(removed);
    space_gone(space, start);
    end();
}

static void
check_events(struct process *process, const struct ckv_event *events, size_t count,
    uint64_t lost, uint64_t last)
{
    uint64_t before = process->events_seen;
    if (last >= before && count + lost != last - before && lost != 1) {
        finding("events: %zu delivered and %llu lost of %llu", count,
            (unsigned long long)lost, (unsigned long long)(last - before));
    }
    for (size_t i = 0; i < count; i++) {
        bool known = events[i].kind == CKV_EVENT_CLEARED;
        for (uint32_t key = 0; !known && key < key_count; key++) {
            const struct ckv_key name = oracle_key(key);
            known = events[i].digested == (name.length != 32) &&
                    (name.length != 32 || memcmp(events[i].key, name.data, 32) == 0);
        }
        if (!known || events[i].kind < CKV_EVENT_STORED ||
            events[i].kind > CKV_EVENT_CLEARED) {
            finding("events: number %llu is torn",
                (unsigned long long)events[i].number);
        }
        if (i > 0 && events[i].number <= events[i - 1].number) {
            finding("events: out of order");
        }
    }
}

static void
do_events(struct process *process)
{
    struct ckv_error error;
    struct ckv_event events[EVENTS_MAX];
    size_t count = 0;
    uint64_t lost = 0;
    uint64_t last = 0;
    begin("events");
    const uint64_t since = process->events_seen;
    must(process->engine->events(process->caches[0], since, events, EVENTS_MAX, &count,
             &lost, &last, &error),
        &error, "events");
    if (process->events_seen == since) { /* not another thread meanwhile */
        check_events(process, events, count, lost, last);
        process->events_seen = last;
    }
    mix(count);
    end();
}

static void
verify(struct process *process, bool repair)
{
    struct ckv_error error;
    struct ckv_verify_report report;
    must(process->engine->verify(process->caches[0], repair, NULL, NULL, &report,
             &error),
        &error, "verify");
    mix(report.entries_checked);
    if (report.structure_faults != 0 || report.damaged_payloads != 0 ||
        report.unreadable != 0) {
        finding("verify: %s", report.first_fault);
    }
}

static void
do_care(struct process *process)
{
    struct ckv_error error;
    uint64_t entries = 0;
    switch (draw(process->reader ? 1 : 4)) {
    case 0:
        begin("count");
        must(process->engine->count(process->caches[0], &entries, &error), &error,
            "count");
        break;
    case 1:
        begin("sync");
        must(process->engine->sync(process->caches[0], &error), &error, "sync");
        break;
    case 2: {
        struct ckv_stats stats;
        begin("stats");
        must(process->engine->get_stats(process->caches[0], &stats, NULL, &error),
            &error, "stats");
        break;
    }
    default:
        begin("verify");
        verify(process, chance(1, 4));
        break;
    }
    end();
}

/* ---- opening and closing ---------------------------------------------------------- */

static bool
open_handles(struct process *process)
{
    struct ckv_path paths[PATHS_MAX];
    struct ckv_options options;
    process->engine->options_init(&options);
    for (uint32_t i = 0; i < setup.paths; i++) {
        paths[i] = (struct ckv_path){.path = names[i],
            .capacity_bytes = process->reader ? 0 : (uint64_t)setup.pages * PAGE};
    }
    options.paths = paths;
    options.path_count = setup.paths;
    options.mode = process->reader ? CKV_MODE_READ : CKV_MODE_READ_WRITE;
    options.verify = setup.verify;
    options.admission = setup.admission;
    options.eviction = setup.eviction;
    options.expected_object_bytes = (uint64_t)setup.granule_pages * PAGE;
    options.stripe_count = setup.stripes;
    options.allow_shared_directory = true;
    options.write_behind = setup.write_behind;
    options.sync_interval_ms = 2000;
    options.io_threads = 2;
    options.page_table_budget_bytes = chance(1, 2) ? 64 : 0;
    options.event_capacity = setup.event_capacity;
    for (uint32_t space = 0; space < space_count; space++) {
        struct ckv_error error = {0};
        struct ckv_cache *cache = NULL;
        options.namespace_data = space == 0 ? NULL : "other";
        options.namespace_length = space == 0 ? 0 : 5;
        begin("open");
        const enum ckv_status status = process->engine->open(&options, &cache, &error);
        trace("open: %d %s", (int)status, status < 0 ? error.text : "");
        end();
        mix((uint8_t)status);
        process->caches[space] = cache;
        /* A reader cannot complete what a creator who died has begun. */
        if (status == CKV_E_TIMEOUT ||
            (process->reader && (status == CKV_E_MISSING_PATH ||
                                    (status == CKV_E_MISMATCH && kills > 0)))) {
            return false;
        }
        must(status, &error, "open");
    }
    return true;
}

static void
close_handles(struct process *process)
{
    for (uint32_t space = 0; space < space_count; space++) {
        struct ckv_cache *cache = process->caches[space];
        process->caches[space] = NULL;
        if (cache != NULL) {
            begin("open, closing"); /* joins threads that may wait themselves */
            process->engine->close(&cache);
            end();
        }
    }
}

static void
release_all(struct process *process)
{
    struct held *view;
    while ((view = held_any(process)) != NULL) {
        let_go(process, view);
    }
}

/* ---- workers ---------------------------------------------------------------------- */

static void
one_operation(struct process *process)
{
    const uint64_t dice = draw(100);
    if (process->reader) {
        if (dice < 30) {
            do_get(process);
        } else if (dice < 50) {
            do_get_into(process);
        } else if (dice < 65) {
            do_get_many_into(process);
        } else if (dice < 90) {
            do_ask(process);
        } else if (dice < 95) {
            do_release(process);
        } else {
            do_care(process);
        }
        return;
    }
    if (dice < setup.put_weight) {
        do_put(process);
    } else if (dice < setup.put_weight + 6) {
        do_put_many(process);
    } else if (dice < setup.put_weight + 8) {
        do_reserve(process);
    } else if (dice < 66) {
        do_get(process);
    } else if (dice < 74) {
        do_get_into(process);
    } else if (dice < 79) {
        do_get_many_into(process);
    } else if (dice < 85) {
        do_ask(process);
    } else if (dice < 88) {
        do_release(process);
    } else if (dice < 88 + setup.remove_weight) {
        do_remove(process);
    } else if (dice < 96) {
        do_events(process);
    } else if (dice < 98 && setup.remove_weight > 0) {
        do_clear(process);
    } else {
        do_care(process);
    }
}

static void
work(struct process *process)
{
    while (setup.operations_left > 0) {
        setup.operations_left--;
        one_operation(process);
        struct held *view = held_any(process);
        if (view != NULL) {
            held_check(view);
        }
        if (chance(1, 40) && process->workers == 1 && setup.threads == 1) {
            if (chance(1, 2)) {
                release_all(process);
            }
            close_handles(process);
            process->events_seen = 0;
            if (!open_handles(process)) {
                return;
            }
        }
    }
}

static void
worker(void *argument)
{
    struct process *process = argument;
    work(process);
    if (process->workers == 1) { /* the last: the harness waits for it */
        release_all(process);
        if (process->reader || chance(1, 2)) {
            close_handles(process);
        }
    }
    process->workers--;
}

static void
first_worker(void *argument)
{
    struct process *process = argument;
    for (int tries = 0; !open_handles(process); tries++) {
        if (tries == 20 || setup.operations_left == 0) {
            process->workers = 0;
            return;
        }
        close_handles(process);
        sleep_for(draw_scale(NS_PER_SECOND));
    }
    for (uint32_t i = 1; i < setup.threads; i++) {
        process->workers++;
        (void)task_start(process, worker, process);
    }
    worker(process);
}

/* What will happen to a process, if anything. */
static void
give_fate(struct process *process)
{
    if (setup.kills_left > 0 && chance(1, 2)) {
        setup.kills_left--;
        if (chance(2, 3)) {
            process->kill_in_points = draw_scale(1500);
        } else {
            process->kill_in_steps = draw_scale(60000);
        }
    }
    if (setup.stops_left > 0 && chance(1, 2)) {
        setup.stops_left--;
        process->stop_in_points = draw_scale(1500);
        process->stop_ns = draw_scale(60 * NS_PER_SECOND);
    }
}

static uint32_t started;

static struct process *
new_process(void)
{
    return process_start(&plan->engines[started++]);
}

static void
start_worker(void)
{
    struct process *process = new_process();
    process->reader = setup.readers && chance(1, 4);
    process->workers = 1;
    give_fate(process);
    trace("process %u begins%s", process->number, process->reader ? ", reading" : "");
    (void)task_start(process, first_worker, process);
}

/* ---- the harness ------------------------------------------------------------------ */

static uint32_t
at_work(void)
{
    uint32_t count = 0;
    for (uint32_t i = 1; i <= started; i++) {
        count += processes[i].alive && processes[i].workers > 0;
    }
    return count;
}

/* A process of the harness, which nobody kills. */
static struct process *
open_alone(void)
{
    struct process *process = new_process();
    current->process = process;
    if (!open_handles(process)) {
        finding("open: times out while nobody else lives");
    }
    return process;
}

static void
end_of_everybody(void)
{
    struct ckv_volume *volume = NULL;
    for (uint32_t i = 1; i <= started; i++) {
        if (processes[i].alive && !processes[i].reader &&
            processes[i].caches[0] != NULL) {
            volume = processes[i].caches[0]->volume;
        }
    }
    if (volume == NULL || started + 2 + setup.processes > ENGINES) {
        return;
    }
    trace("everybody is killed");
    truth_take(volume);
    for (uint32_t i = 1; i <= started; i++) {
        process_kill(&processes[i]);
        deaths++;
    }
    struct process *process = open_alone();
    truth_check(process, false);
    if (chance(1, 2)) {
        close_handles(process);
    }
    current->process = &processes[0];
    for (uint32_t i = 0; i < setup.processes; i++) {
        start_worker();
    }
}

/* Sweeps the dead and reads what there is. */
static void
look_at_everything(struct process *process)
{
    for (uint32_t slot = 0; slot < CKV_PROCESSES_MAX; slot++) {
        struct ckv_volume *volume = process->caches[0]->volume;
        if (volume->region.slots[slot].incarnation != 0) {
            (void)process->engine->slot_sweep(volume, slot);
        }
    }
    oracle_accounts(process->caches[0]->volume, kills > 0);
    begin("open, verifying");
    verify(process, false);
    end();
    for (uint32_t key = 0; key < key_count; key++) {
        struct look look;
        struct ckv_error error;
        struct ckv_read read;
        struct ckv_target targets[2];
        uint8_t *buffer = malloc(PAYLOAD_MAX);
        prepare_read(&read, targets, buffer, key);
        look_begin(&look, volume_for(process, key), key);
        if (process->engine->get_into(cache_of(process, key), &read, &error) ==
            CKV_OK) {
            look_hit(&look, buffer, read.payload_length, NULL);
        } else {
            look_miss(&look, volume_for(process, key), "get_into");
        }
        free(buffer);
    }
}

/* Everything that was announced, folded, is what there is. */
static void
fold_events(struct process *process)
{
    enum { ALL = 4096 };
    static struct ckv_event events[ALL];
    struct ckv_error error;
    struct ckv_stats stats;
    size_t count = 0;
    uint64_t lost = 0;
    uint64_t last = 0;
    bool there[KEYS_MAX] = {false};
    must(process->engine->get_stats(process->caches[0], &stats, NULL, &error), &error,
        "stats");
    must(process->engine->events(process->caches[0], 0, events, ALL, &count, &lost,
             &last, &error),
        &error, "events");
    if (lost != 0 || stats.rebuilt_entries != 0 || count == ALL) {
        return;
    }
    for (size_t i = 0; i < count; i++) {
        trace("event %llu: kind %d, key %02x.., space %02x..",
            (unsigned long long)events[i].number, events[i].kind, events[i].key[0],
            events[i].namespace_tag[0]);
        for (uint32_t key = 0; key < key_count; key++) {
            struct ckv_cache *cache = cache_of(process, key);
            const struct ckv_key name = oracle_key(key);
            struct ckv_identity identity = {0};
            memcpy(identity.key, name.data, name.length == 32 ? 32 : 0);
            if (name.length != 32) {
                process->engine->sha256(name.data, name.length, identity.key);
            }
            if (memcmp(events[i].namespace_tag, cache->namespace_tag, 16) == 0 &&
                (events[i].kind == CKV_EVENT_CLEARED ||
                    memcmp(events[i].key, identity.key, 32) == 0)) {
                there[key] = events[i].kind == CKV_EVENT_STORED;
            }
        }
    }
    for (uint32_t key = 0; key < key_count; key++) {
        const struct ckv_key name = oracle_key(key);
        bool present = false;
        must(process->engine->contains_many(cache_of(process, key), &name, 1, &present,
                 &error),
            &error, "contains");
        if (there[key] != present) {
            finding("events: key %u is announced as %s and is %s", key,
                there[key] ? "stored" : "removed", present ? "there" : "not");
        }
    }
}

static void
conclude(void)
{
    quiet = true;
    struct process *process = open_alone();
    look_at_everything(process);
    fold_events(process);
    /* Those who have not closed the volume leave now, in the hard way. */
    for (uint32_t i = 1; i <= started; i++) {
        if (&processes[i] != process) {
            process_kill(&processes[i]);
        }
    }
    look_at_everything(process);
    truth_take(process->caches[0]->volume);
    close_handles(process);
    process_kill(&processes[0]); /* no task of its own; only for the count */
    processes[0].alive = true;
    struct process *last = open_alone();
    truth_check(last, true);
    look_at_everything(last);
    close_handles(last);
    current->process = &processes[0];
}

static void
harness(void *argument)
{
    (void)argument;
    for (uint32_t i = 0; i < setup.processes; i++) {
        start_worker();
    }
    while (at_work() > 0 || (setup.operations_left > 0 && started + 3 < ENGINES)) {
        sleep_for(draw_scale(5 * NS_PER_MS));
        if (setup.ends_left > 0 && chance(1, 40) && setup.operations_left > 0) {
            setup.ends_left--;
            end_of_everybody();
        }
        while (at_work() < setup.processes && setup.operations_left > 0 &&
               started + 3 < ENGINES) {
            start_worker();
        }
    }
    conclude();
}

static void
choose_setup(void)
{
    setup.paths = chance(1, 5) ? 2 : 1;
    setup.stripes = 1 + (uint32_t)draw(2);
    setup.granule_pages = 1u << draw(3);
    setup.pages = 32 + 8 * (uint32_t)draw(9);
    setup.eviction = chance(1, 3) ? CKV_EVICTION_PREFIX : CKV_EVICTION_CLOCK;
    setup.admission = (enum ckv_admission)(chance(3, 4) ? 0 : draw(3));
    setup.verify = (enum ckv_verify)draw(3);
    setup.write_behind = chance(1, 2);
    setup.event_capacity = chance(1, 2) ? 64 : 4096;
    setup.processes =
        plan->processes != 0 ? plan->processes : 1 + (uint32_t)draw(PROCESSES_MAX);
    setup.threads = 1 + (uint32_t)draw(2);
    setup.operations_left = 20 + (uint32_t)draw_scale(400);
    setup.kills_left = chance(1, 3) ? 0 : (uint32_t)draw_scale(8);
    setup.stops_left = chance(1, 2) ? 0 : (uint32_t)draw_scale(6);
    setup.ends_left = setup.kills_left > 0 && chance(1, 3) ? 1 : 0;
    setup.readers = chance(1, 4);
    setup.chains = chance(1, 2);
    setup.put_weight = 15 + (uint32_t)draw(30);
    setup.remove_weight = chance(1, 3) ? 0 : 1 + (uint32_t)draw(5);
    const uint32_t most = setup.pages / setup.stripes / (1 + (uint32_t)draw(6));
    for (int i = 0; i < SIZES; i++) {
        const uint32_t limit = most * PAGE < PAYLOAD_MAX ? most * PAGE : PAYLOAD_MAX;
        setup.sizes[i] = 8 + (uint32_t)draw(limit - 32);
    }
    if (chance(1, 4)) { /* room for everything: nothing may ever be missing */
        setup.pages = 2048;
    }
}

void
workload_run(const struct plan *chosen)
{
    plan = chosen;
    scheduler_begin(plan->seed);
    choose_setup();
    for (uint32_t i = 0; i < PATHS_MAX; i++) {
        (void)snprintf(names[i], sizeof names[i], "%s/kv%u.cyc", plan->folder, i);
    }
    system_begin();
    oracle_begin();
    scheduler_run(harness);
}
