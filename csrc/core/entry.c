/* SPDX-License-Identifier: Apache-2.0 */
#include "entry.h"

#include <errno.h>
#include <string.h>

#include "announce.h"
#include "event.h"
#include "policy.h"
#include "prefix.h"

static uint64_t
own_state(const struct ckv_volume *volume, enum ckv_state_kind kind)
{
    return ckv_state_owned(kind, volume->slot, volume->incarnation);
}

static uint64_t
pages_bytes(const struct ckv_volume *volume, uint32_t entry)
{
    return (uint64_t)ckv_load_relaxed_u32(&volume->region.places[entry].pages) *
           CKV_PAGE_BYTES;
}

/* A state that only we may change was changed: the shared region is damaged. */
static bool
moved_as_expected(struct ckv_volume *volume, struct ckv_file *file, bool moved)
{
    if (!moved) {
        ckv_volume_fail_path(volume, file, "using the shared region", EIO);
    }
    return moved;
}

/* Pages of dead entries that are not reusable yet, for people. */
static void
count_doomed(struct ckv_volume *volume, uint32_t entry)
{
    const struct ckv_file *file = ckv_volume_file_of(volume, entry);
    CKV_CHECK(file != NULL);
    ckv_add_relaxed_u64(&volume->region.paths[ckv_volume_file_index(volume, file)]
                            .doomed_pages,
        ckv_load_relaxed_u32(&volume->region.places[entry].pages));
}

bool
ckv_entry_read(struct ckv_volume *volume, uint32_t entry, uint64_t state,
    struct ckv_record *record)
{
    const struct ckv_file *file = ckv_volume_file_of(volume, entry);
    if (file == NULL || file->table == NULL) {
        return false;
    }
    /* R1: the state was loaded with acquire before; W1 is the store of LIVE after the
     * record was written.  The copy may be torn by a later life of the entry, which the
     * second look at the state tells. */
    memcpy(record, &file->table[entry - file->first_entry], sizeof *record);
    ckv_fence_acquire();
    return record->sequence == ckv_state_sequence(state) &&
           ckv_load_relaxed_u64(&volume->region.states[entry]) == state;
}

bool
ckv_entry_cleared(struct ckv_volume *volume, uint8_t namespace_index, uint64_t sequence)
{
    return sequence <= ckv_load_acquire_u64(&volume->region.namespaces[namespace_index]
                               .clear_sequence); /* R5 */
}

/* ---- totals of a namespace --------------------------------------------------------- */

#define TOTAL_VALUE_MASK ((UINT64_C(1) << 48) - 1)

uint64_t
ckv_total_add(ckv_atomic_u64 *total, uint64_t amount)
{
    uint64_t word = ckv_load_relaxed_u64(total);
    uint64_t sum;
    do {
        sum = (word & ~TOTAL_VALUE_MASK) | ((word + amount) & TOTAL_VALUE_MASK);
    } while (!ckv_cas_ordered_u64(total, &word, sum));
    return sum >> 48;
}

bool
ckv_total_take(ckv_atomic_u64 *total, uint64_t amount, uint64_t epoch)
{
    uint64_t word = ckv_load_relaxed_u64(total);
    while (word >> 48 == epoch) {
        const uint64_t rest =
            (word & ~TOTAL_VALUE_MASK) | ((word - amount) & TOTAL_VALUE_MASK);
        if (ckv_cas_ordered_u64(total, &word, rest)) {
            return true;
        }
    }
    return false;
}

uint64_t
ckv_total_reset(ckv_atomic_u64 *total)
{
    uint64_t word = ckv_load_relaxed_u64(total);
    while (!ckv_cas_ordered_u64(total, &word, ((word >> 48) + 1) << 48)) {
    }
    return ckv_total_value(word);
}

/* Takes an entry off the totals unless a clear did; false when it was cleared.  The
 * epoch is read before the question, so a clear in between makes the taking fail and
 * the question be asked again. */
static bool
uncount(struct ckv_volume *volume, uint32_t entry, uint8_t owner, uint64_t sequence)
{
    struct ckv_namespace *space = &volume->region.namespaces[owner];
    for (;;) {
        const uint64_t entries_epoch = ckv_load_ordered_u64(&space->entries) >> 48;
        const uint64_t bytes_epoch = ckv_load_ordered_u64(&space->bytes) >> 48;
        if (ckv_entry_cleared(volume, owner, sequence)) {
            return false;
        }
        if (ckv_total_take(&space->entries, 1, entries_epoch)) {
            (void)ckv_total_take(&space->bytes, pages_bytes(volume, entry),
                bytes_epoch);
            return true;
        }
    }
}

static void
count_kill(struct ckv_volume *volume, uint32_t entry, enum ckv_kill_reason reason,
    uint64_t payload_bytes)
{
    switch (reason) {
    case CKV_KILL_EVICT:
    case CKV_KILL_CROWD:
        ckv_bump(volume, CKV_COUNTER_evictions, 1);
        ckv_bump(volume, CKV_COUNTER_evicted_bytes, payload_bytes);
        if (ckv_load_relaxed_u32(&volume->region.header->eviction_seen) == 0 &&
            ckv_exchange_ordered_u32(&volume->region.header->eviction_seen, 1) == 0) {
            ckv_log(CKV_LOG_INFO,
                "the volume is full: from now on older blocks give way to new ones "
                "(statistics evictions, evicted_bytes)");
        }
        break;
    case CKV_KILL_REMOVE:
    case CKV_KILL_REPLACE:
        ckv_bump(volume, CKV_COUNTER_removed, 1);
        break;
    case CKV_KILL_CORRUPT:
        ckv_bump(volume, CKV_COUNTER_corrupt, 1);
        ckv_log(CKV_LOG_WARNING,
            "a stored block of %llu bytes failed its checksum (entry %u) and was "
            "dropped",
            (unsigned long long)payload_bytes, entry);
        break;
    case CKV_KILL_CLEAR:
        break;
    }
}

/* Of a record that names a block of this namespace. */
static struct ckv_identity
identity_of(const struct ckv_volume *volume, const struct ckv_record *record,
    uint8_t namespace_index)
{
    struct ckv_identity identity = {
        .namespace_index = namespace_index,
        .digested = (record->flags & CKV_RECORD_DIGESTED) != 0,
    };
    memcpy(identity.namespace_tag, record->namespace_tag,
        sizeof identity.namespace_tag);
    memcpy(identity.key, record->key, sizeof identity.key);
    identity.hash =
        ckv_index_hash(volume, identity.namespace_tag, identity.key, identity.digested);
    return identity;
}

bool
ckv_entry_condemn(struct ckv_volume *volume, uint32_t entry, uint64_t live_state,
    enum ckv_kill_reason reason)
{
    struct ckv_record record;
    const bool readable = ckv_entry_read(volume, entry, live_state, &record);
    const uint64_t sequence = ckv_state_sequence(live_state);
    uint64_t hash = 0;
    const uint8_t owner = ckv_load_relaxed_u8(&volume->region.owners[entry]);
    uint64_t expected = live_state;
    ckv_announce_begin(volume);
    CKV_POINT("kill.condemn");
    if (!ckv_cas_ordered_u64(&volume->region.states[entry], &expected,
            own_state(volume, CKV_STATE_DYING))) { /* E1 */
        ckv_announce_end(volume);
        return false;
    }
    CKV_POINT("kill.condemned");
    count_doomed(volume, entry);
    if (!uncount(volume, entry, owner, sequence) &&
        (reason == CKV_KILL_EVICT || reason == CKV_KILL_CROWD)) {
        reason = CKV_KILL_CLEAR;
    }
    if (readable) {
        const struct ckv_identity identity = identity_of(volume, &record, owner);
        hash = identity.hash;
        if (reason == CKV_KILL_EVICT || reason == CKV_KILL_CROWD) {
            ckv_policy_evicted(volume, hash, reason == CKV_KILL_EVICT);
        }
        if (reason != CKV_KILL_REPLACE && reason != CKV_KILL_CLEAR) {
            ckv_announce(volume, &identity, false);
        }
    } else {
        ckv_event_record_gap(volume); /* A5 */
    }
    ckv_announce_end(volume);
    if (ckv_prefix_on(volume)) {
        ckv_prefix_end(volume, entry, hash,
            readable && (reason == CKV_KILL_EVICT || reason == CKV_KILL_CROWD));
    }
    count_kill(volume, entry, reason, readable ? record.payload_bytes : 0);
    return true;
}

void
ckv_entry_strike(struct ckv_volume *volume, struct ckv_file *file, uint32_t entry)
{
    const uint32_t local_entry = entry - file->first_entry;
    CKV_POINT("kill.strike");
    uint32_t seal = 1;
    if (file->table != NULL && ckv_load_relaxed_u64(&file->lost_pages) == 0) {
        memcpy(&seal, &file->table[local_entry].seal, sizeof seal);
    }
    /* 0: never sealed, or struck: no write that could fail.  Zeros in the place of a lost
     * page prove nothing.  A reader alone has a region of its own, and leaves the
     * file. */
    const int result = seal == 0 || volume->mode == CKV_MODE_READ
                           ? 0
                           : ckv_file_strike_record(file, local_entry);
    if (result < 0) {
        ckv_volume_fail_path(volume, file, "striking a record", -result);
    }
    CKV_POINT("kill.struck");
    if (file->table == NULL) {
        return;
    }
    struct ckv_record record; /* ours until the state moves on; it still has its key */
    memcpy(&record, &file->table[local_entry], sizeof record);
    const bool digested = (record.flags & CKV_RECORD_DIGESTED) != 0;
    ckv_index_erase(volume,
        ckv_index_hash(volume, record.namespace_tag, record.key, digested), entry,
        record.sequence); /* E4 */
}

void
ckv_entry_bury(struct ckv_volume *volume, uint32_t entry)
{
    struct ckv_file *file = ckv_volume_file_of(volume, entry);
    CKV_CHECK(file != NULL);
    ckv_entry_strike(volume, file, entry); /* E2: before DEAD */
    uint64_t expected = own_state(volume, CKV_STATE_DYING);
    const bool moved =
        ckv_cas_ordered_u64(&volume->region.states[entry], &expected, CKV_STATE_DEAD);
    (void)moved_as_expected(volume, file, moved);
}

bool
ckv_entry_kill(struct ckv_volume *volume, uint32_t entry, uint64_t live_state,
    enum ckv_kill_reason reason)
{
    if (!ckv_entry_condemn(volume, entry, live_state, reason)) {
        return false;
    }
    ckv_entry_bury(volume, entry);
    return true;
}

enum ckv_status
ckv_entry_publish(struct ckv_volume *volume, const struct ckv_identity *identity,
    uint32_t entry, struct ckv_record *record)
{
    const uint8_t namespace_index = identity->namespace_index;
    struct ckv_file *file = ckv_volume_file_of(volume, entry);
    CKV_CHECK(file != NULL);
    const uint32_t local_entry = entry - file->first_entry;
    record->sequence =
        ckv_add_ordered_u64(&volume->region.header->sequence, 1) + 1; /* F5 */
    ckv_record_seal(record, file->header.file_id, local_entry);
    CKV_POINT("put.sealed");
    if (!ckv_index_insert(volume, identity->hash, entry, record->sequence)) {
        return CKV_NO_RUN;
    }
    CKV_POINT("put.indexed");
    if (ckv_file_write_record(file, local_entry, record) < 0) {
        return CKV_IO_FAILED; /* the slot is stale when the entry is DEAD */
    }
    CKV_POINT("put.recorded");
    ckv_store_relaxed_u8(&volume->region.owners[entry], namespace_index);
    struct ckv_namespace *space = &volume->region.namespaces[namespace_index];
    const uint64_t entries_epoch = ckv_total_add(&space->entries, 1);
    const uint64_t bytes_epoch =
        ckv_total_add(&space->bytes, pages_bytes(volume, entry));
    uint64_t expected = own_state(volume, CKV_STATE_RESERVED);
    const bool moved = ckv_cas_ordered_u64(&volume->region.states[entry], &expected,
        ckv_state_live(record->sequence)); /* W1 */
    if (!moved_as_expected(volume, file, moved)) {
        return CKV_IO_FAILED;
    }
    CKV_POINT("put.published");
    ckv_index_show(volume, identity->hash);
    CKV_POINT("put.shown");
    if (ckv_entry_cleared(volume, namespace_index, record->sequence)) {
        /* Added after the clear began its epoch: taken off again. */
        (void)ckv_total_take(&space->entries, 1, entries_epoch);
        (void)ckv_total_take(&space->bytes, pages_bytes(volume, entry), bytes_epoch);
    }
    return CKV_OK;
}

void
ckv_entry_abort(struct ckv_volume *volume, uint32_t entry)
{
    uint64_t expected = own_state(volume, CKV_STATE_RESERVED);
    CKV_POINT("put.abort");
    const bool moved = ckv_cas_ordered_u64(&volume->region.states[entry], &expected,
        own_state(volume, CKV_STATE_DYING));
    struct ckv_file *file = ckv_volume_file_of(volume, entry);
    if (file == NULL || !moved_as_expected(volume, file, moved)) {
        return;
    }
    count_doomed(volume, entry);
    /* The number may have had a sealed record before, whose pages were overwritten. */
    ckv_entry_bury(volume, entry);
}

bool
ckv_entry_verified(struct ckv_volume *volume, uint32_t entry, uint64_t sequence)
{
    const uint32_t mark = ckv_load_acquire_u32(&volume->region.marks[entry]);
    return mark == (uint32_t)sequence && mark != 0;
}

void
ckv_entry_set_verified(struct ckv_volume *volume, uint32_t entry, uint64_t sequence)
{
    ckv_store_release_u32(&volume->region.marks[entry], (uint32_t)sequence);
}

void
ckv_entry_heat(struct ckv_volume *volume, uint32_t entry, uint8_t amount)
{
    ckv_atomic_u8 *heat = &volume->region.heats[entry];
    const uint8_t seen = ckv_load_relaxed_u8(heat);
    /* Two at once may count as one, or meet the cursor's decrement: a pass more or less
     * for one entry, and no bus lock on every hit. */
    if (seen < 2) {
        ckv_store_relaxed_u8(heat, seen + amount > 2 ? 2 : (uint8_t)(seen + amount));
    }
}
