/* SPDX-License-Identifier: Apache-2.0 */
/* api.c: the functions of cyclone_kv.h: check arguments, call the parts, wrap results. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "announce.h"
#include "cache.h"
#include "chain.h"
#include "check.h"
#include "crc32c.h"
#include "event.h"
#include "maintenance.h"
#include "reader.h"
#include "region.h"
#include "statistic.h"
#include "writer.h"

enum { READS_AT_ONCE = 128 }; /* of a batch: identified, found and pinned together */

#define RESERVATION_MAGIC UINT64_C(0x52455356a5a5f00d)

struct ckv_reservation {
    uint64_t magic;
    struct ckv_cache *cache;
    void *key;
    size_t key_length;
    void *header;
    size_t header_length;
    void *data;
    size_t length;
};

/* ---- storing ---------------------------------------------------------------------- */

/* Sums up the segments; CKV_E_TOO_LARGE for what no stripe can hold. */
static enum ckv_status
check_item(struct ckv_volume *volume, const struct ckv_item *item,
    struct ckv_error *error)
{
    if (item->header_length > UINT16_MAX) {
        return ckv_fail(error, CKV_E_TOO_LARGE, 0,
            "a user header of %zu bytes; at most 65535 are allowed",
            item->header_length);
    }
    uint64_t total = item->header_length;
    bool sum_fits = true;
    for (size_t i = 0; sum_fits && i < item->segment_count; i++) {
        sum_fits = ckv_add_u64(total, item->segments[i].length, &total);
    }
    if (!sum_fits || total > volume->payload_max_bytes) {
        return ckv_fail(error, CKV_E_TOO_LARGE, 0,
            "a block of %llu bytes never fits: the largest that this volume takes has "
            "%llu "
            "(one stripe, at most 1 GiB)",
            (unsigned long long)(sum_fits ? total : UINT64_MAX),
            (unsigned long long)volume->payload_max_bytes);
    }
    return CKV_OK;
}

static enum ckv_status
put_one(struct ckv_cache *cache, const struct ckv_item *item, uint32_t flags,
    struct ckv_offer *offer, uint64_t *deadline_ns, struct ckv_error *error)
{
    struct ckv_identity identity;
    enum ckv_status status = ckv_cache_identify(cache, &item->key, &identity, error);
    if (status == CKV_OK) {
        status = check_item(cache->volume, item, error);
    }
    if (status == CKV_OK) {
        status =
            ckv_writer_put(cache->volume, &identity, item, flags, offer, deadline_ns);
    }
    return status;
}

enum ckv_status
ckv_put(struct ckv_cache *cache, struct ckv_item *item, uint32_t flags,
    struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, true, error));
    uint64_t deadline_ns = 0;
    struct ckv_offer offer = {0};
    item->status = put_one(cache, item, flags, &offer, &deadline_ns, error);
    ckv_cache_end(cache);
    return item->status;
}

/* The identities of a chain; NULL when nobody needs them, or without memory, which makes
 * single blocks of them. */
static struct ckv_chain_item *
chain_items(struct ckv_cache *cache, const struct ckv_item *items, size_t count)
{
    struct ckv_chain_item *links =
        ckv_prefix_on(cache->volume) ? calloc(count, sizeof *links) : NULL;
    for (size_t i = 0; links != NULL && i < count; i++) {
        links[i].valid = ckv_cache_identify(cache, &items[i].key, &links[i].identity,
                             NULL) == CKV_OK;
    }
    return links;
}

static void
put_chain(struct ckv_cache *cache, struct ckv_item *items, size_t count, uint32_t flags,
    const struct ckv_key *parent)
{
    uint64_t deadline_ns = 0; /* of all items together */
    struct ckv_chain chain = {.items = chain_items(cache, items, count),
        .count = count};
    struct ckv_identity above;
    if (chain.items != NULL) {
        const bool known =
            parent != NULL && ckv_cache_identify(cache, parent, &above, NULL) == CKV_OK;
        ckv_chain_begin(cache->volume, &chain, known ? &above : NULL);
    }
    struct ckv_offer towards_head = {0}; /* Y5 in policy.h */
    for (size_t i = count; i-- > 0;) {   /* so that the head outlives the tail */
        items[i].status = put_one(cache, &items[i], flags,
            chain.items != NULL ? &chain.items[i].offer : &towards_head, &deadline_ns,
            NULL);
        if (chain.items != NULL) {
            ckv_chain_stored(cache->volume, &chain, i);
        }
    }
    if (chain.items != NULL) {
        ckv_chain_finish(cache->volume, &chain);
        free(chain.items);
    }
}

enum ckv_status
ckv_put_many(struct ckv_cache *cache, struct ckv_item *items, size_t count,
    uint32_t flags, const struct ckv_key *parent, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, true, error));
    if ((flags & CKV_PUT_CHAIN) != 0) {
        put_chain(cache, items, count, flags, parent);
    } else {
        uint64_t deadline_ns = 0; /* of all items together */
        for (size_t i = 0; i < count; i++) {
            struct ckv_offer offer = {0};
            items[i].status =
                put_one(cache, &items[i], flags, &offer, &deadline_ns, NULL);
        }
    }
    ckv_cache_end(cache);
    return CKV_OK;
}

static void
free_reservation(struct ckv_reservation *reservation)
{
    reservation->magic = 0;
    free(reservation->key);
    free(reservation->header);
    free(reservation->data);
    free(reservation);
}

static void *
copy_bytes(const void *data, size_t length)
{
    void *copy = malloc(length == 0 ? 1 : length);
    if (copy != NULL && length > 0) {
        memcpy(copy, data, length);
    }
    return copy;
}

enum ckv_status
ckv_reserve(struct ckv_cache *cache, const struct ckv_item *item, size_t payload_length,
    struct ckv_reservation **result, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, true, error));
    const struct ckv_segment segment = {.data = NULL, .length = payload_length};
    const struct ckv_item sized = {.key = item->key,
        .segments = &segment,
        .segment_count = 1,
        .header_length = item->header_length};
    struct ckv_identity identity;
    enum ckv_status status = ckv_cache_identify(cache, &item->key, &identity, error);
    if (status == CKV_OK) {
        status = check_item(cache->volume, &sized, error);
    }
    ckv_cache_end(cache);
    if (status != CKV_OK) {
        return status;
    }
    struct ckv_reservation *reservation = calloc(1, sizeof *reservation);
    if (reservation != NULL) {
        reservation->magic = RESERVATION_MAGIC;
        reservation->cache = cache;
        reservation->key = copy_bytes(item->key.data, item->key.length);
        reservation->key_length = item->key.length;
        reservation->header = copy_bytes(item->header, item->header_length);
        reservation->header_length = item->header_length;
        /* Zeroed, so that what the producer leaves out is not memory of the process. */
        reservation->data = calloc(1, payload_length == 0 ? 1 : payload_length);
        reservation->length = payload_length;
        if (reservation->key != NULL && reservation->header != NULL &&
            reservation->data != NULL) {
            *result = reservation;
            return CKV_OK;
        }
        free_reservation(reservation);
    }
    return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM,
        "no memory for a reservation of %zu bytes", payload_length);
}

void *
ckv_reservation_data(struct ckv_reservation *reservation, size_t *payload_length)
{
    CKV_CHECK(reservation->magic == RESERVATION_MAGIC);
    *payload_length = reservation->length;
    return reservation->data;
}

enum ckv_status
ckv_commit(struct ckv_reservation **pointer, uint32_t flags, struct ckv_error *error)
{
    struct ckv_reservation *reservation = *pointer;
    CKV_CHECK(reservation->magic == RESERVATION_MAGIC);
    *pointer = NULL;
    const struct ckv_segment segment = {.data = reservation->data,
        .length = reservation->length};
    struct ckv_item item = {
        .key = {.data = reservation->key, .length = reservation->key_length},
        .segments = &segment,
        .segment_count = 1,
        .header = reservation->header,
        .header_length = reservation->header_length,
    };
    const enum ckv_status status = ckv_put(reservation->cache, &item, flags, error);
    free_reservation(reservation);
    return status;
}

void
ckv_abort(struct ckv_reservation **pointer)
{
    if (*pointer != NULL) {
        CKV_CHECK((*pointer)->magic == RESERVATION_MAGIC);
        free_reservation(*pointer);
        *pointer = NULL;
    }
}

/* ---- reading ---------------------------------------------------------------------- */

enum ckv_status
ckv_get(struct ckv_cache *cache, const struct ckv_key *key, struct ckv_lease **lease,
    struct ckv_error *error)
{
    *lease = NULL;
    CKV_TRY(ckv_cache_begin(cache, false, error));
    struct ckv_identity identity;
    enum ckv_status status = ckv_cache_identify(cache, key, &identity, error);
    if (status == CKV_OK) {
        status = ckv_reader_get(cache->volume, &identity, cache->verify, lease, error);
    }
    if (status == CKV_OK) {
        ckv_volume_retain(cache->volume);
    }
    ckv_cache_end(cache);
    return status;
}

const void *
ckv_lease_data(const struct ckv_lease *lease, size_t *payload_length)
{
    *payload_length = lease->payload_length;
    return lease->data;
}

const void *
ckv_lease_header(const struct ckv_lease *lease, size_t *header_length)
{
    union {
        const struct ckv_lease *in;
        struct ckv_lease *out;
    } pointer = {.in = lease};
    if (ckv_volume_forked(lease->volume)) {
        *header_length = 0;
        return NULL;
    }
    return ckv_reader_header(pointer.out, header_length);
}

bool
ckv_lease_ok(const struct ckv_lease *lease)
{
    union {
        const struct ckv_lease *in;
        struct ckv_lease *out;
    } pointer = {.in = lease};
    return ckv_volume_forked(lease->volume) || ckv_reader_ok(pointer.out);
}

void
ckv_lease_release(struct ckv_lease **pointer)
{
    struct ckv_lease *lease = *pointer;
    if (lease == NULL) {
        return;
    }
    *pointer = NULL;
    struct ckv_volume *volume = lease->volume;
    if (ckv_volume_forked(volume)) {
        return; /* the pin belongs to the parent; the child only forgets it */
    }
    ckv_reader_release(lease);
    ckv_volume_release(volume);
}

enum ckv_status
ckv_locate(struct ckv_cache *cache, const struct ckv_key *key, struct ckv_lease **lease,
    int *fd, uint64_t *offset_bytes, struct ckv_error *error)
{
    *fd = -1;
    *lease = NULL;
    if (cache->read_only) { /* without a slot nothing keeps the place as it is */
        return ckv_fail(error, CKV_E_READ_ONLY, 0,
            "locate needs a pin, which a cache opened with mode \"r\" cannot take");
    }
    CKV_TRY(ckv_get(cache, key, lease, error));
    struct ckv_lease *located = *lease;
    const int result = ckv_file_reopen(located->file, O_RDONLY);
    if (result < 0) {
        /* The file outlives the lease, whose handle is open. */
        const char *path = located->file->path;
        ckv_lease_release(lease);
        return ckv_fail(error, CKV_E_OS, -result,
            "no descriptor for %s; raise the limit of open files", path);
    }
    located->fd = result;
    *fd = result;
    *offset_bytes = located->file->geometry.data_offset +
                    (uint64_t)located->record.first_page * CKV_PAGE_BYTES;
    return CKV_OK;
}

enum ckv_status
ckv_get_into(struct ckv_cache *cache, struct ckv_read *read, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, false, error));
    struct ckv_identity identity;
    enum ckv_status status = ckv_cache_identify(cache, &read->key, &identity, error);
    if (status == CKV_OK) {
        status = ckv_reader_copy(cache->volume, &identity, cache->verify, read);
    }
    read->status = status;
    ckv_cache_end(cache);
    return status;
}

enum ckv_status
ckv_get_many_into(struct ckv_cache *cache, struct ckv_read *reads, size_t count,
    struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, false, error));
    struct ckv_identity identities[READS_AT_ONCE];
    struct ckv_read *valid[READS_AT_ONCE];
    for (size_t done = 0; done < count;) {
        size_t some = 0;
        for (; done < count && some < READS_AT_ONCE; done++) {
            struct ckv_read *read = &reads[done];
            read->status =
                ckv_cache_identify(cache, &read->key, &identities[some], NULL);
            if (read->status == CKV_OK) {
                valid[some++] = read;
            }
        }
        ckv_reader_copy_many(cache->volume, identities, cache->verify, valid, some);
    }
    ckv_cache_end(cache);
    return CKV_OK;
}

/* ---- lookups ---------------------------------------------------------------------- */

enum { AHEAD = 8 }; /* keys whose buckets are being loaded while one is compared */

/* Looks keys up in order until `visit` says stop.  Counts them as lookups. */
static enum ckv_status
look_up(struct ckv_cache *cache, const struct ckv_key *keys, size_t count,
    bool (*visit)(void *context, size_t index, const struct ckv_found *found),
    void *context, struct ckv_error *error)
{
    struct ckv_volume *volume = cache->volume;
    struct ckv_identity ring[AHEAD];
    size_t looked = 0;
    size_t hits = 0;
    for (size_t ready = 0; looked < count; looked++) {
        for (; ready < count && ready < looked + AHEAD; ready++) {
            CKV_TRY(ckv_cache_identify(cache, &keys[ready], &ring[ready % AHEAD],
                error));
            ckv_index_prefetch(volume, ring[ready % AHEAD].hash);
        }
        struct ckv_found found;
        const bool present = ckv_index_find(volume, &ring[looked % AHEAD], &found);
        hits += present;
        if (!visit(context, looked, present ? &found : NULL)) {
            looked++;
            break;
        }
    }
    ckv_bump(volume, CKV_COUNTER_lookups, looked);
    ckv_bump(volume, CKV_COUNTER_hits, hits);
    ckv_bump(volume, CKV_COUNTER_misses, looked - hits);
    return CKV_OK;
}

static bool
note_present(void *context, size_t index, const struct ckv_found *found)
{
    bool *present = context;
    present[index] = found != NULL;
    return true;
}

enum ckv_status
ckv_contains_many(struct ckv_cache *cache, const struct ckv_key *keys, size_t count,
    bool *present, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, false, error));
    const enum ckv_status status =
        look_up(cache, keys, count, note_present, present, error);
    ckv_cache_end(cache);
    return status;
}

struct walk {
    struct ckv_volume *volume;
    size_t count;
    bool stop_at_miss;
    bool heat;
    bool advise;
    size_t asked;              /* keys of a prefix, 0 for keys in no order */
    struct ckv_found previous; /* of that prefix */
};

/* For eviction="prefix": an access, and in a prefix a link that a restart or a put of
 * single blocks left out. */
static void
walk_chain(struct walk *walk, size_t index, const struct ckv_found *found)
{
    if (walk->asked == 0) {
        ckv_prefix_hit(walk->volume, found, CKV_PREFIX_UNKNOWN, CKV_PREFIX_UNKNOWN);
        return;
    }
    ckv_prefix_hit(walk->volume, found, (uint32_t)ckv_min_u64(index, UINT16_MAX),
        (uint32_t)ckv_min_u64(walk->asked - 1 - index, UINT16_MAX));
    if (index > 0) {
        ckv_prefix_link(walk->volume, &walk->previous, found);
    }
    walk->previous = *found;
}

static bool
walk_one(void *context, size_t index, const struct ckv_found *found)
{
    struct walk *walk = context;
    if (found == NULL) {
        return !walk->stop_at_miss;
    }
    walk->count++;
    if (walk->heat) {
        ckv_entry_heat(walk->volume, found->entry, 2);
        ckv_policy_found(walk->volume, found->hash, CKV_ACCESS_TOUCH);
        if (ckv_prefix_on(walk->volume)) {
            walk_chain(walk, index, found);
        }
    }
    if (walk->advise) {
        ckv_reader_advise(walk->volume, found);
    }
    return true;
}

static enum ckv_status
walk_keys(struct ckv_cache *cache, const struct ckv_key *keys, size_t count,
    struct walk walk, size_t *found, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, false, error));
    walk.volume = cache->volume;
    walk.heat = walk.heat && !cache->read_only;
    const enum ckv_status status = look_up(cache, keys, count, walk_one, &walk, error);
    *found = walk.count;
    ckv_cache_end(cache);
    return status;
}

enum ckv_status
ckv_longest_prefix(struct ckv_cache *cache, const struct ckv_key *keys, size_t count,
    bool touch, size_t *length, struct ckv_error *error)
{
    /* Heat is a number of passes and not an order, so head first is as good here. */
    return walk_keys(cache, keys, count,
        (struct walk){.stop_at_miss = true, .heat = touch, .asked = count}, length,
        error);
}

enum ckv_status
ckv_prefetch(struct ckv_cache *cache, const struct ckv_key *keys, size_t count,
    size_t *found, struct ckv_error *error)
{
    return walk_keys(cache, keys, count, (struct walk){.advise = true}, found, error);
}

enum ckv_status
ckv_touch(struct ckv_cache *cache, const struct ckv_key *keys, size_t count,
    size_t *found, struct ckv_error *error)
{
    return walk_keys(cache, keys, count, (struct walk){.heat = true}, found, error);
}

/* ---- removing --------------------------------------------------------------------- */

enum ckv_status
ckv_remove(struct ckv_cache *cache, const struct ckv_key *key, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, true, error));
    struct ckv_identity identity;
    enum ckv_status status = ckv_cache_identify(cache, key, &identity, error);
    if (status == CKV_OK) {
        status = CKV_MISS;
        struct ckv_found found;
        while (ckv_index_find(cache->volume, &identity, &found)) {
            CKV_POINT("remove.found");
            if (ckv_entry_kill(cache->volume, found.entry, found.state,
                    CKV_KILL_REMOVE)) {
                status = CKV_OK;
            }
        }
        ckv_index_kill_hidden(cache->volume, &identity);
        uint64_t deadline_ns = 0;
        ckv_index_settle(cache->volume, &identity, &deadline_ns);
    }
    ckv_cache_end(cache);
    return status;
}

enum ckv_status
ckv_clear(struct ckv_cache *cache, uint64_t *removed, struct ckv_error *error)
{
    uint64_t ignored;
    CKV_TRY(ckv_cache_begin(cache, true, error));
    const enum ckv_status status =
        ckv_cache_clear(cache, removed != NULL ? removed : &ignored, error);
    ckv_cache_end(cache);
    return status;
}

/* ---- care ------------------------------------------------------------------------- */

enum ckv_status
ckv_count(struct ckv_cache *cache, uint64_t *entries, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, false, error));
    /* A reader may have come before its namespace did. */
    const int index = cache->read_only ? ckv_region_namespace(cache->volume,
                                             cache->namespace_tag, false)
                                       : cache->namespace_index;
    *entries = index < 0 ? 0
                         : ckv_total_value(ckv_load_acquire_u64(&cache->volume->region
                                   .namespaces[index]
                                   .entries));
    ckv_cache_end(cache);
    return CKV_OK;
}

enum ckv_status
ckv_sync(struct ckv_cache *cache, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, true, error));
    enum ckv_status status = ckv_volume_sync(cache->volume);
    ckv_cache_end(cache);
    if (status > 0) {
        status = ckv_fail(error, CKV_E_OS, EIO,
            "a path did not take the data and is out of use; see the log and "
            "recover()");
    }
    return status;
}

enum ckv_status
ckv_verify(struct ckv_cache *cache, bool repair,
    int (*progress)(void *context, uint64_t entries_done, uint64_t entries_total),
    void *context, struct ckv_verify_report *report, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, true, error));
    const enum ckv_status status =
        ckv_check(cache->volume, repair, progress, context, report, error);
    ckv_cache_end(cache);
    return status;
}

enum ckv_status
ckv_recover(struct ckv_cache *cache, uint64_t *recovered_paths, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, true, error));
    struct ckv_volume *volume = cache->volume;
    *recovered_paths = 0;
    ckv_announce_begin(volume);
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        if (file->present && !ckv_volume_file_usable(volume, file)) {
            *recovered_paths += ckv_check_recover_file(volume, file);
        }
    }
    if (*recovered_paths > 0) {
        ckv_event_record_gap(volume); /* A5 */
    }
    ckv_announce_end(volume);
    ckv_cache_end(cache);
    return CKV_OK;
}

enum ckv_status
ckv_events(struct ckv_cache *cache, uint64_t since, struct ckv_event *events,
    size_t capacity, size_t *count, uint64_t *lost, uint64_t *last,
    struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, false, error));
    ckv_announce_read(cache->volume, since, events, capacity, count, lost, last);
    ckv_cache_end(cache);
    return CKV_OK;
}

static bool
describe(struct ckv_volume *volume, uint32_t entry, struct ckv_entry_info *info)
{
    const uint64_t state = ckv_load_acquire_u64(&volume->region.states[entry]);
    struct ckv_record record;
    struct ckv_file *file = ckv_volume_file_of(volume, entry);
    if (ckv_state_kind(state) != CKV_STATE_LIVE || file == NULL ||
        !ckv_volume_file_usable(volume, file) ||
        !ckv_entry_read(volume, entry, state, &record) ||
        ckv_entry_cleared(volume, ckv_load_relaxed_u8(&volume->region.owners[entry]),
            record.sequence)) {
        return false;
    }
    *info = (struct ckv_entry_info){
        .digested = (record.flags & CKV_RECORD_DIGESTED) != 0,
        .verified = ckv_entry_verified(volume, entry, record.sequence),
        .heat = ckv_load_relaxed_u8(&volume->region.heats[entry]),
        .path_index = ckv_volume_file_index(volume, file),
        .header_length = record.header_bytes,
        .offset_bytes =
            file->geometry.data_offset + (uint64_t)record.first_page * CKV_PAGE_BYTES,
        .payload_length = record.payload_bytes,
        .sequence = record.sequence,
    };
    memcpy(info->namespace_tag, record.namespace_tag, sizeof info->namespace_tag);
    memcpy(info->key, record.key, sizeof info->key);
    return true;
}

enum ckv_status
ckv_list(struct ckv_cache *cache, uint64_t *cursor, struct ckv_entry_info *infos,
    size_t capacity, size_t *count, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, false, error));
    struct ckv_volume *volume = cache->volume;
    *count = 0;
    while (*cursor < volume->region.layout.entry_count && *count < capacity) {
        *count += describe(volume, (uint32_t)*cursor, &infos[*count]);
        ++*cursor;
    }
    ckv_cache_end(cache);
    return CKV_OK;
}

enum ckv_status
ckv_get_stats(struct ckv_cache *cache, struct ckv_stats *volume,
    struct ckv_stats *process, struct ckv_error *error)
{
    struct ckv_stats ignored;
    CKV_TRY(ckv_cache_begin(cache, false, error));
    ckv_statistic_read(cache->volume, volume != NULL ? volume : &ignored,
        process != NULL ? process : &ignored);
    ckv_cache_end(cache);
    return CKV_OK;
}

static void
describe_path(struct ckv_cache *cache, struct ckv_file *file,
    struct ckv_path_info *info)
{
    struct ckv_file_system system = {0};
    if (file->present) {
        (void)ckv_os.file_system(file->data_fd,
            &system); /* zero free bytes if unknown */
    }
    *info = (struct ckv_path_info){
        .path = ckv_cache_keep(cache, file->path),
        .file_system = ckv_cache_keep(cache, file->file_system.name),
        .file_bytes = file->geometry.file_bytes,
        .data_bytes = file->geometry.data_bytes,
        .data_offset_bytes = file->geometry.data_offset,
        .stripe_count = file->geometry.stripe_count,
        .entry_count = file->geometry.entry_count,
        .free_bytes = system.free_bytes,
        .failed = file->present && !ckv_volume_file_usable(cache->volume, file),
        .detached = file->present && !ckv_file_attached(file),
        .present = file->present,
    };
}

enum ckv_status
ckv_get_info(struct ckv_cache *cache, struct ckv_info *info, struct ckv_error *error)
{
    CKV_TRY(ckv_cache_begin(cache, false, error));
    struct ckv_volume *volume = cache->volume;
    *info = (struct ckv_info){
        .format_version = CKV_FORMAT_VERSION,
        .path_count = volume->file_count,
        .payload_max_bytes = volume->payload_max_bytes,
        .shm_bytes = volume->region.bytes,
        .shm_path = ckv_cache_keep(cache,
            volume->region.path != NULL ? volume->region.path : ""),
        .crc32c_kernel = ckv_crc32c_kernel(),
    };
    memcpy(info->set_id, volume->set_id, sizeof info->set_id);
    for (uint32_t i = 0; i < volume->file_count; i++) {
        describe_path(cache, &volume->files[i], &info->paths[i]);
        info->overhead_bytes += volume->files[i].geometry.data_offset;
    }
    ckv_cache_end(cache);
    return CKV_OK;
}
