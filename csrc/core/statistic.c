/* SPDX-License-Identifier: Apache-2.0 */
/* statistic.c: totals over the slots of all processes, and gauges read from the region.
 *
 * Counters stay in the block of a slot whoever owns it, so a total is a sum over all
 * blocks, dead owners included.  Nothing here takes a lock or is O(entries); the numbers
 * are each right by themselves and may be a few operations apart from each other.
 *
 * Gauges of slots (pins) count only while the owner is alive: what a dead process had
 * pinned is free, swept or not.  Asking costs 0.4 us a process.
 */
#include "statistic.h"

#include "slot.h"

#define NS_PER_SECOND UINT64_C(1000000000)

/* A total that is kept by additions and subtractions of many processes may be seen below
 * zero for a moment, or for good by the one operation that a killed process left half
 * done.  It is shown as zero. */
static int64_t
gauge_value(uint64_t value)
{
    return (int64_t)value < 0 ? 0 : (int64_t)value;
}

static int64_t
age_seconds(uint64_t now_ns, uint64_t since_ns)
{
    return now_ns > since_ns ? (int64_t)((now_ns - since_ns) / NS_PER_SECOND) : 0;
}

static void
set_counters(const uint64_t values[CKV_COUNTER_COUNT], struct ckv_stats *stats)
{
#define SET_counter(name) stats->name = gauge_value(values[CKV_COUNTER_##name]);
#define SET_gauge(name)
#define X(kind, name, unit, sentence) SET_##kind(name)
    CKV_STATISTICS(X)
#undef X
#undef SET_gauge
#undef SET_counter
}

static void
set_gauges_of(struct ckv_stats *stats, const struct ckv_stats *from)
{
#define SET_counter(name)
#define SET_gauge(name)               stats->name = from->name;
#define X(kind, name, unit, sentence) SET_##kind(name)
    CKV_STATISTICS(X)
#undef X
#undef SET_gauge
#undef SET_counter
}

static void
read_totals(const struct ckv_volume *volume, struct ckv_stats *stats)
{
    uint64_t values[CKV_COUNTER_COUNT] = {0};
    for (uint32_t i = 0; i < CKV_PROCESSES_MAX; i++) {
        const struct ckv_slot *slot = &volume->region.slots[i];
        for (uint32_t c = 0; c < CKV_COUNTER_COUNT; c++) {
            values[c] += ckv_load_relaxed_u64(&slot->counters[c]);
        }
    }
    set_counters(values, stats);
}

static void
read_process(const struct ckv_volume *volume, struct ckv_stats *stats)
{
    uint64_t values[CKV_COUNTER_COUNT];
    for (uint32_t c = 0; c < CKV_COUNTER_COUNT; c++) {
        values[c] =
            ckv_load_relaxed_u64(&volume->counters[c]) - volume->counters_at_open[c];
    }
    set_counters(values, stats);
}

static void
read_slots(struct ckv_volume *volume, uint64_t now_ns, struct ckv_stats *stats)
{
    uint64_t oldest_ns = UINT64_MAX;
    uint64_t entries = 0;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < CKV_PROCESSES_MAX; i++) {
        struct ckv_slot *slot = &volume->region.slots[i];
        /* Not unswept: never used, left in order, or swept after a death. */
        if (ckv_load_acquire_u32(&slot->unswept) == 0 ||
            !ckv_slot_alive(volume, i, ckv_load_acquire_u32(&slot->incarnation))) {
            continue;
        }
        stats->processes++;
        entries += ckv_load_relaxed_u64(&slot->pinned_entries);
        bytes += ckv_load_relaxed_u64(&slot->pinned_bytes);
        const uint64_t pinned_ns = ckv_load_relaxed_u64(&slot->oldest_pin_ns);
        if (pinned_ns != 0 && pinned_ns < oldest_ns) {
            oldest_ns = pinned_ns;
            stats->longest_pin_seconds = age_seconds(now_ns, pinned_ns);
            stats->longest_pin_pid =
                gauge_value(ckv_load_relaxed_u64(&slot->process_id));
        }
    }
    stats->pinned_entries = gauge_value(entries);
    stats->pinned_bytes = gauge_value(bytes);
}

static void
read_namespaces(const struct ckv_volume *volume, struct ckv_stats *stats)
{
    uint64_t entries = 0;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < CKV_NAMESPACES_MAX; i++) {
        const struct ckv_namespace *space = &volume->region.namespaces[i];
        entries += (uint64_t)ckv_total_value(ckv_load_relaxed_u64(&space->entries));
        bytes += (uint64_t)ckv_total_value(ckv_load_relaxed_u64(&space->bytes));
    }
    stats->entries = gauge_value(entries);
    stats->resident_bytes = gauge_value(bytes);
}

static void
read_stripes(const struct ckv_volume *volume, struct ckv_stats *stats)
{
    uint64_t laps = 0;
    uint64_t holes = 0;
    for (uint32_t i = 0; i < volume->region.layout.stripe_count; i++) {
        const struct ckv_stripe *stripe = &volume->region.stripes[i];
        laps = ckv_max_u64(laps, ckv_load_relaxed_u64(&stripe->laps));
        holes += ckv_min_u64(ckv_load_relaxed_u32(&stripe->hole_count), CKV_HOLES_MAX);
    }
    stats->laps = gauge_value(laps);
    stats->holes = gauge_value(holes);
}

static void
read_paths(struct ckv_volume *volume, uint64_t now_ns, struct ckv_stats *stats)
{
    uint64_t doomed_pages = 0;
    uint64_t synced_ns = UINT64_MAX; /* of the path that has waited longest */
    for (uint32_t i = 0; i < volume->file_count; i++) {
        const struct ckv_file *file = &volume->files[i];
        const struct ckv_shared_path *path = &volume->region.paths[i];
        if (!file->present) {
            continue;
        }
        stats->capacity_bytes += gauge_value(file->geometry.data_bytes);
        stats->entries_max += file->geometry.entry_count;
        stats->detached += ckv_file_attached(file) ? 0 : 1;
        doomed_pages +=
            (uint64_t)gauge_value(ckv_load_relaxed_u64(&path->doomed_pages));
        if (ckv_volume_file_usable(volume, file)) {
            synced_ns = ckv_min_u64(synced_ns, ckv_load_relaxed_u64(&path->synced_ns));
        } else {
            stats->failed_paths++;
        }
    }
    stats->doomed_bytes = gauge_value(doomed_pages * CKV_PAGE_BYTES);
    stats->last_sync_age_seconds =
        synced_ns == 0 || synced_ns == UINT64_MAX ? -1 : age_seconds(now_ns, synced_ns);
}

static void
read_density(const struct ckv_volume *volume, struct ckv_stats *stats)
{
    const struct ckv_density_head *head = volume->region.density.head;
    if (volume->eviction == CKV_EVICTION_PREFIX) {
        stats->eviction_prefix = 1;
        stats->density_accesses = gauge_value(ckv_load_relaxed_u64(&head->now));
        stats->density_rebuilds = gauge_value(ckv_load_relaxed_u64(&head->rebuilds));
    }
}

static void
read_admission(const struct ckv_volume *volume, struct ckv_stats *stats)
{
    const struct ckv_admission_memory *admission = &volume->region.admission;
    struct ckv_admission_estimate estimate;
    ckv_admission_estimate(admission, &estimate);
    stats->admission_asks_twice = ckv_admission_asks_twice(admission);
    stats->admission_switches = gauge_value(estimate.switches);
    stats->admission_capacity = ckv_admission_capacity(admission);
    stats->admission_requests = gauge_value(estimate.requests);
    stats->admission_misses_always = gauge_value(estimate.misses[0]);
    stats->admission_misses_second_touch = gauge_value(estimate.misses[1]);
}

void
ckv_statistic_read(struct ckv_volume *volume, struct ckv_stats *total,
    struct ckv_stats *process)
{
    struct ckv_stats stats = {0};
    const uint64_t now_ns = ckv_os.realtime_ns();
    read_totals(volume, &stats);
    read_slots(volume, now_ns, &stats);
    read_namespaces(volume, &stats);
    read_stripes(volume, &stats);
    read_paths(volume, now_ns, &stats);
    read_admission(volume, &stats);
    read_density(volume, &stats);
    stats.rebuilt_entries = gauge_value(volume->region.header->rebuilt_entries);
    stats.rebuild_dropped = gauge_value(volume->region.header->rebuild_dropped);

    if (total != NULL) {
        *total = stats;
    }
    if (process != NULL) {
        read_process(volume, process);
        set_gauges_of(process, &stats);
    }
}
