/* SPDX-License-Identifier: Apache-2.0 */
/* check.c: three walks: entries (record, index, payload), rings (page map, overlaps),
 * totals.
 *
 * The volume is in use meanwhile, so nothing is a fault because it looked wrong once.
 * A suspect is looked at again until it is right, has changed, or stayed wrong; what
 * belongs to the holder of a stripe lock is looked at under that lock, a few hundred
 * entries at a time.  No lock is held over I/O.
 *
 * A process may die between any two steps of a put.  What that leaves in the index
 * and in the totals is harmless (index.h, I4) and is told from a fault by the count
 * of swept slots; a repair puts it right as well.
 */
#include "check.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "announce.h"
#include "entry.h"
#include "pin.h"
#include "prefix.h"
#include "reader.h"
#include "slot.h"
#include "stripe.h"

enum {
    LOOKS = 6,              /* at a suspect, before it is a fault */
    CHAIN_LOOKS = 4,        /* at numbers of successors */
    PATIENCE = 16,          /* suspects that are waited for */
    LOCKED_ENTRIES = 512,   /* looked at under one stripe lock */
    LOCKED_GRANULES = 4096, /* likewise, of empty ones */
    CHAIN_MAX = 256,        /* entries that start in one granule: 1 MiB of pages */
    LOSERS_MAX = 64,        /* of overlaps, killed after the lock is released */
    PROGRESS_ENTRIES = 256
};

#define LOOK_AGAIN_NS   UINT64_C(2000000)
#define LOCK_TIMEOUT_NS UINT64_C(2000000000)
#define PROGRESS_BYTES  (UINT64_C(16) << 20)

struct check {
    struct ckv_volume *volume;
    bool repair;
    bool shared;   /* other processes may change what we look at */
    bool may_pin;  /* we own a slot */
    bool may_lock; /* likewise, or nobody else has the region */
    int (*progress)(void *context, uint64_t done, uint64_t total);
    void *context;
    struct ckv_verify_report *report;
    uint64_t done;
    uint64_t total;
    uint64_t bytes_at_progress;
    uint32_t lasting; /* suspects that stayed wrong to the last look */
    bool stopped;
};

static void CKV_PRINTF(2, 3) fault(struct check *check, const char *format, ...)
{
    check->report->structure_faults++;
    if (check->report->first_fault[0] == '\0') {
        va_list arguments;
        va_start(arguments, format);
        (void)vsnprintf(check->report->first_fault, sizeof check->report->first_fault,
            format, arguments); /* may be cut */
        va_end(arguments);
    }
}

static void CKV_PRINTF(2, 3) note_damage(struct check *check, const char *format, ...)
{
    if (check->report->first_fault[0] == '\0') {
        va_list arguments;
        va_start(arguments, format);
        (void)vsnprintf(check->report->first_fault, sizeof check->report->first_fault,
            format, arguments); /* may be cut */
        va_end(arguments);
    }
}

/* Whether any process died while it had the volume open, in this life of the region. */
static bool
somebody_died(const struct ckv_volume *volume)
{
    for (uint32_t s = 0; s < CKV_PROCESSES_MAX; s++) {
        if (ckv_load_relaxed_u64(&volume->region.slots[s]
                    .counters[CKV_COUNTER_swept_slots]) != 0) {
            return true;
        }
    }
    return false;
}

static bool
put_in_flight(const struct ckv_volume *volume)
{
    for (uint32_t i = 0; i < CKV_HINTS; i++) {
        if (ckv_load_relaxed_u64(&volume->region.hints[i].word) != 0) {
            return true;
        }
    }
    return false;
}

/* With many faults the volume is damaged, not busy: waiting for each would take
 * hours. */
static void
look_again_later(const struct check *check, int look)
{
    if (check->shared && look > 0 && check->lasting < PATIENCE) {
        ckv_os.sleep_ns(LOOK_AGAIN_NS << look);
    }
}

/* ---- one entry: record and index ------------------------------------------------ */

enum finding {
    FOUND_SOUND,
    FOUND_GONE,      /* killed or replaced meanwhile */
    FOUND_RECORD,    /* record not sealed, out of bounds, not where the region has it */
    FOUND_NAMESPACE, /* the region has it under another namespace */
    FOUND_SEQUENCE,  /* above the last one given out */
    FOUND_UNREACHABLE, /* not in the index */
    FOUND_DUPLICATE    /* a newer one of the same identity is live */
};

static const char *
finding_text(enum finding finding)
{
    switch (finding) {
    case FOUND_RECORD:
        return "its record does not agree with the shared region";
    case FOUND_NAMESPACE:
        return "it is counted under another namespace";
    case FOUND_SEQUENCE:
        return "its sequence was never given out";
    case FOUND_UNREACHABLE:
        return "the index does not lead to it";
    case FOUND_DUPLICATE:
        return "a newer block of the same key is live as well";
    case FOUND_SOUND:
    case FOUND_GONE:
        break;
    }
    return "nothing is wrong with it";
}

static struct ckv_identity
identity_of(const struct ckv_volume *volume, uint32_t entry,
    const struct ckv_record *record)
{
    struct ckv_identity identity = {
        .digested = (record->flags & CKV_RECORD_DIGESTED) != 0,
        .namespace_index = ckv_load_relaxed_u8(&volume->region.owners[entry]),
    };
    memcpy(identity.namespace_tag, record->namespace_tag,
        sizeof identity.namespace_tag);
    memcpy(identity.key, record->key, sizeof identity.key);
    identity.hash =
        ckv_index_hash(volume, identity.namespace_tag, identity.key, identity.digested);
    return identity;
}

static bool
record_sound(struct ckv_volume *volume, const struct ckv_file *file, uint32_t entry,
    const struct ckv_record *record)
{
    const struct ckv_geometry *geometry = &file->geometry;
    const uint32_t local_entry = entry - file->first_entry;
    const struct ckv_place *place = &volume->region.places[entry];
    const uint32_t pages =
        ckv_record_pages(record->payload_bytes, record->header_bytes);
    return ckv_record_sealed(record, file->header.file_id, local_entry) &&
           (record->flags & ~(unsigned)CKV_RECORD_FLAGS) == 0 &&
           ckv_geometry_extent_valid(geometry, record->first_page, pages) &&
           record->first_page / ckv_geometry_stripe_pages(geometry) ==
               local_entry / geometry->stripe_entries &&
           ckv_load_relaxed_u32(&place->first_page) == record->first_page &&
           ckv_load_relaxed_u32(&place->pages) == pages;
}

static enum finding
look_at_index(struct ckv_volume *volume, const struct ckv_found *found,
    const struct ckv_file *file)
{
    if (!ckv_volume_file_usable(volume, file)) {
        return FOUND_SOUND; /* lookups pass over it anyway */
    }
    const struct ckv_identity identity =
        identity_of(volume, found->entry, &found->record);
    struct ckv_found answer;
    if (ckv_index_find(volume, &identity, &answer) && answer.entry != found->entry &&
        answer.record.sequence > found->record.sequence) {
        return FOUND_DUPLICATE;
    }
    return ckv_index_holds(volume, identity.hash, found->entry, found->record.sequence)
               ? FOUND_SOUND
               : FOUND_UNREACHABLE;
}

/* One look at an entry whose LIVE word is found->state; fills in its record. */
static enum finding
look_at_live(struct ckv_volume *volume, struct ckv_file *file, struct ckv_found *found)
{
    ckv_atomic_u64 *state = &volume->region.states[found->entry];
    enum finding finding = FOUND_SOUND;
    if (!ckv_entry_read(volume, found->entry, found->state, &found->record) ||
        !record_sound(volume, file, found->entry, &found->record)) {
        finding = FOUND_RECORD;
    } else if (found->record.sequence >
               ckv_load_ordered_u64(&volume->region.header->sequence)) {
        finding = FOUND_SEQUENCE;
    } else {
        const struct ckv_namespace *space =
            &volume->region
                 .namespaces[ckv_load_relaxed_u8(&volume->region.owners[found->entry])];
        if (ckv_load_acquire_u64(&space->used) == 0 ||
            memcmp(space->tag, found->record.namespace_tag, sizeof space->tag) != 0) {
            finding = FOUND_NAMESPACE;
        } else {
            finding = look_at_index(volume, found, file);
        }
    }
    return ckv_load_ordered_u64(state) == found->state ? finding : FOUND_GONE;
}

static bool
repair_live(struct check *check, const struct ckv_found *found, enum finding finding)
{
    struct ckv_volume *volume = check->volume;
    switch (finding) {
    case FOUND_RECORD:
    case FOUND_NAMESPACE:
    case FOUND_SEQUENCE:
        return ckv_entry_kill(volume, found->entry, found->state, CKV_KILL_CORRUPT);
    case FOUND_UNREACHABLE: {
        const struct ckv_identity identity =
            identity_of(volume, found->entry, &found->record);
        ckv_announce_begin(volume);
        const bool entered = ckv_index_insert(volume, identity.hash, found->entry,
            found->record.sequence);
        ckv_index_show(volume, identity.hash);
        (void)ckv_index_keep_newest(volume, &identity); /* the sequence is not needed */
        ckv_announce(volume, &identity, true);          /* A1 */
        ckv_announce_end(volume);
        return entered;
    }
    case FOUND_DUPLICATE:
        return ckv_entry_kill(volume, found->entry, found->state, CKV_KILL_REPLACE);
    case FOUND_SOUND:
    case FOUND_GONE:
        break;
    }
    return false;
}

/* Whether a lasting finding is what a death in the middle of a put leaves behind, or
 * what a put does that is stopped there. */
static bool
is_leftover(const struct ckv_volume *volume, enum finding finding)
{
    return finding == FOUND_DUPLICATE &&
           (somebody_died(volume) || put_in_flight(volume));
}

/* Looks at a LIVE entry; true when it is sound and its record is in *found. */
static bool
check_live(struct check *check, struct ckv_file *file, struct ckv_found *found)
{
    struct ckv_volume *volume = check->volume;
    enum finding finding = FOUND_GONE;
    for (int look = 0; look < LOOKS; look++) {
        look_again_later(check, look);
        finding = look_at_live(volume, file, found);
        if (finding == FOUND_SOUND || finding == FOUND_GONE) {
            return finding == FOUND_SOUND;
        }
    }
    CKV_POINT("check.suspect");
    check->lasting++;
    if (!is_leftover(volume, finding)) {
        fault(check, "%s, entry %u (sequence %llu): %s", file->path,
            found->entry - file->first_entry,
            (unsigned long long)ckv_state_sequence(found->state),
            finding_text(finding));
    }
    if (check->repair && repair_live(check, found, finding)) {
        check->report->repaired++;
    }
    return false;
}

/* ---- one entry: payload ---------------------------------------------------------- */

/* 0 sound, 1 damaged, -errno.  Requires: a pin, or the caller looks at the state
 * again. */
static int
check_payload(struct ckv_volume *volume, struct ckv_file *file,
    const struct ckv_record *record)
{
    const uint64_t offset = (uint64_t)record->first_page * CKV_PAGE_BYTES;
    uint32_t payload_crc = 0;
    uint32_t header_crc = 0;
    int result =
        ckv_reader_checksum(volume, file, offset, record->payload_bytes, &payload_crc);
    if (result == 0 && record->header_bytes > 0) {
        result = ckv_reader_checksum(volume, file, offset + record->payload_bytes,
            record->header_bytes, &header_crc);
    }
    if (result < 0) {
        return result;
    }
    return payload_crc != record->payload_crc || header_crc != record->header_crc;
}

/* Whether a read error says something about the stored bytes.  Others are about this
 * moment: memory, an argument, a file system under load. */
static bool
is_of_the_medium(int result)
{
    return result == -EIO || result == -ENODATA || result == -EBADMSG;
}

static void
report_payload(struct check *check, const struct ckv_file *file,
    const struct ckv_found *found, int result)
{
    struct ckv_volume *volume = check->volume;
    struct ckv_verify_report *report = check->report;
    const uint32_t local_entry = found->entry - file->first_entry;
    report->bytes_checked +=
        (uint64_t)found->record.payload_bytes + found->record.header_bytes;
    if (result == 0) {
        if (check->may_pin) {
            ckv_entry_set_verified(volume, found->entry, found->record.sequence);
        }
        return;
    }
    if (result < 0) {
        report->unreadable++;
        ckv_bump(volume, CKV_COUNTER_read_errors, 1);
        note_damage(check, "%s, entry %u: the device does not deliver page %u (%s)",
            file->path, local_entry, found->record.first_page, strerror(-result));
    } else {
        report->damaged_payloads++;
        note_damage(check, "%s, entry %u: the checksum of page %u on differs",
            file->path, local_entry, found->record.first_page);
    }
    if (check->repair && (result > 0 || is_of_the_medium(result)) &&
        ckv_entry_kill(volume, found->entry, found->state, CKV_KILL_CORRUPT)) {
        report->repaired++;
    }
}

static void
check_data(struct check *check, struct ckv_file *file, const struct ckv_found *found)
{
    struct ckv_volume *volume = check->volume;
    if (check->may_pin && !ckv_pin(volume, found->entry, found->state)) {
        return;
    }
    CKV_POINT("check.pinned");
    const int result = check_payload(volume, file, &found->record);
    /* Without a pin the pages may have gone to another block meanwhile. */
    if (check->may_pin ||
        ckv_load_ordered_u64(&volume->region.states[found->entry]) == found->state) {
        report_payload(check, file, found, result);
    }
    if (check->may_pin) {
        ckv_unpin(volume, found->entry);
    }
}

/* ---- one entry: all states ------------------------------------------------------- */

/* A free number has no believable record, or it would come back in the next life. */
static void
check_dead(struct check *check, const struct ckv_file *file, uint32_t entry)
{
    struct ckv_volume *volume = check->volume;
    const uint32_t local_entry = entry - file->first_entry;
    ckv_atomic_u64 *word = &volume->region.states[entry];
    uint64_t state = ckv_load_ordered_u64(word);
    for (int look = 0; look < LOOKS; look++) {
        look_again_later(check, look);
        state = ckv_load_ordered_u64(word);
        struct ckv_record record;
        memcpy(&record, &file->table[local_entry], sizeof record);
        if ((state != CKV_STATE_FREE && state != CKV_STATE_DEAD) ||
            !ckv_record_sealed(&record, file->header.file_id, local_entry)) {
            return;
        }
    }
    check->lasting++;
    fault(check, "%s, entry %u is free but its record is still believable", file->path,
        local_entry);
    const uint64_t dying =
        ckv_state_owned(CKV_STATE_DYING, volume->slot, volume->incarnation);
    if (check->repair && ckv_cas_ordered_u64(word, &state, dying)) { /* E2 */
        ckv_entry_bury(volume, entry);
        check->report->repaired++;
    }
}

static void
check_live_entry(struct check *check, struct ckv_file *file, uint32_t entry,
    uint64_t state)
{
    struct ckv_volume *volume = check->volume;
    const uint8_t owner = ckv_load_relaxed_u8(&volume->region.owners[entry]);
    if (ckv_entry_cleared(volume, owner, ckv_state_sequence(state))) {
        return; /* dead for everybody, and in nobody's way */
    }
    struct ckv_found found = {.entry = entry, .state = state, .file = file};
    if (check_live(check, file, &found)) {
        check->report->entries_checked++;
        check_data(check, file, &found);
    }
}

static void
check_entry(struct check *check, struct ckv_file *file, uint32_t entry)
{
    struct ckv_volume *volume = check->volume;
    ckv_atomic_u64 *word = &volume->region.states[entry];
    uint64_t state = ckv_load_acquire_u64(word);
    switch (ckv_state_kind(state)) {
    case CKV_STATE_LIVE:
        check_live_entry(check, file, entry, state);
        return;
    case CKV_STATE_FREE:
    case CKV_STATE_DEAD:
        /* A reader alone does not strike what its rebuild dropped. */
        if (volume->mode == CKV_MODE_READ_WRITE) {
            check_dead(check, file, entry);
        }
        return;
    case CKV_STATE_RESERVED:
    case CKV_STATE_DYING:
        return; /* in somebody's hands; those of the dead were swept before */
    default:
        break;
    }
    fault(check, "%s, entry %u has the impossible state %016llx", file->path,
        entry - file->first_entry, (unsigned long long)state);
    if (check->repair && ckv_cas_ordered_u64(word, &state, CKV_STATE_DEAD)) {
        check->report->repaired++;
    }
}

static void
tell_progress(struct check *check)
{
    check->bytes_at_progress = check->report->bytes_checked;
    if (check->progress != NULL &&
        check->progress(check->context, check->done, check->total) != 0) {
        check->stopped = true;
    }
}

static void
check_entries(struct check *check, struct ckv_file *file)
{
    const uint32_t count = file->geometry.entry_count;
    for (uint32_t i = 0; i < count && !check->stopped; i++) {
        check_entry(check, file, file->first_entry + i);
        check->done++;
        if (check->done % PROGRESS_ENTRIES == 0 ||
            check->report->bytes_checked - check->bytes_at_progress >= PROGRESS_BYTES) {
            tell_progress(check);
        }
    }
}

/* ---- rings ----------------------------------------------------------------------- */

struct loser {
    uint32_t entry;
    uint64_t state;
};

struct ring { /* the walk over one stripe */
    struct ckv_file *file;
    uint32_t index;       /* of the stripe in the set */
    uint32_t first_entry; /* number in the set */
    uint32_t granule_pages;
    uint32_t begin, end; /* pages */
    uint64_t *seen;      /* per entry: the state that it was met in, 0 for not met */
    uint32_t reach;      /* where the extent that reaches farthest so far ends */
    uint32_t reach_entry;
    uint64_t reach_state;
    struct loser losers[LOSERS_MAX];
    uint32_t loser_count;
};

struct link { /* an entry of a chain */
    uint32_t entry;
    uint32_t first_page;
    uint32_t pages;
};

static bool
lock_ring(const struct check *check, const struct ring *ring)
{
    return check->volume->mode == CKV_MODE_READ ||
           ckv_stripe_lock(check->volume, ring->index, LOCK_TIMEOUT_NS);
}

static void
unlock_ring(const struct check *check, const struct ring *ring)
{
    if (check->volume->mode != CKV_MODE_READ) {
        ckv_stripe_unlock(check->volume, ring->index);
    }
}

static ckv_atomic_u32 *
chain_head(const struct check *check, const struct ring *ring, uint32_t page)
{
    return &check->volume->region
                .page_map[ring->file->first_granule + page / ring->granule_pages];
}

static struct link
link_of(const struct check *check, uint32_t entry)
{
    const struct ckv_place *place = &check->volume->region.places[entry];
    return (struct link){
        .entry = entry,
        .first_page = ckv_load_relaxed_u32(&place->first_page),
        .pages = ckv_load_relaxed_u32(&place->pages),
    };
}

/* Reads the chain of the granule of `page`, sorted by place; returns its length.
 * *sound is false when it has an entry that does not belong there, or the same
 * twice.  Requires: the lock. */
static uint32_t
read_chain(const struct check *check, const struct ring *ring, uint32_t page,
    struct link links[CHAIN_MAX], bool *sound)
{
    const struct ckv_region *region = &check->volume->region;
    const uint32_t base = page - page % ring->granule_pages;
    uint32_t count = 0;
    uint32_t word = ckv_load_acquire_u32(chain_head(check, ring, page));
    *sound = true;
    while (word != 0) {
        const uint32_t entry = word - 1;
        *sound = count < ring->granule_pages && count < CHAIN_MAX &&
                 entry - ring->first_entry < ring->file->geometry.stripe_entries;
        if (!*sound) {
            return count;
        }
        const struct link link = link_of(check, entry);
        *sound = link.first_page - base < ring->granule_pages &&
                 ckv_geometry_extent_valid(&ring->file->geometry, link.first_page,
                     link.pages) &&
                 ckv_load_acquire_u64(&region->states[entry]) != CKV_STATE_FREE;
        uint32_t at = count;
        for (; at > 0 && links[at - 1].first_page > link.first_page; at--) {
            links[at] = links[at - 1];
        }
        links[at] = link;
        count++;
        if (!*sound) {
            return count;
        }
        word = ckv_load_acquire_u32(&region->links[entry]);
    }
    return count;
}

/* Whether the pages of an entry must not be given to another. */
static bool
holds_pages(const struct check *check, uint32_t entry)
{
    const struct ckv_region *region = &check->volume->region;
    switch (ckv_state_kind(ckv_load_ordered_u64(&region->states[entry]))) {
    case CKV_STATE_LIVE:
    case CKV_STATE_RESERVED:
        return true;
    case CKV_STATE_DYING:
    case CKV_STATE_DEAD:
        return ckv_load_ordered_u64(&region->masks[entry]) != 0;
    case CKV_STATE_FREE:
    default:
        return false;
    }
}

/* Makes the chain of a granule anew from the places of all entries of the stripe.
 * Longer under the lock than anything else, but it follows damage only.  Requires:
 * the lock. */
static void
relink_granule(struct check *check, const struct ring *ring, uint32_t page)
{
    const uint32_t base = page - page % ring->granule_pages;
    CKV_POINT("check.relink");
    ckv_store_release_u32(chain_head(check, ring, page), 0);
    for (uint32_t i = 0; i < ring->file->geometry.stripe_entries; i++) {
        const uint32_t entry = ring->first_entry + i;
        const struct link link = link_of(check, entry);
        if (link.first_page - base < ring->granule_pages && holds_pages(check, entry) &&
            ckv_geometry_extent_valid(&ring->file->geometry, link.first_page,
                link.pages)) {
            ckv_stripe_link(check->volume, entry);
        }
    }
    check->report->repaired++;
}

/* Of two that overlap the older one loses, if it is LIVE; a reservation loses
 * nothing, its block fails its checksum if it was hurt. */
static void
note_overlap(struct check *check, struct ring *ring, uint32_t entry, uint64_t state)
{
    fault(check, "%s: entries %u and %u overlap at page %u", ring->file->path,
        ring->reach_entry - ring->file->first_entry, entry - ring->file->first_entry,
        link_of(check, entry).first_page);
    struct loser loser = {.entry = entry, .state = state};
    const bool reach_live = ckv_state_kind(ring->reach_state) == CKV_STATE_LIVE;
    if (ckv_state_kind(state) != CKV_STATE_LIVE ||
        (reach_live && ring->reach_state < state)) {
        loser = (struct loser){.entry = ring->reach_entry, .state = ring->reach_state};
    }
    if (ckv_state_kind(loser.state) == CKV_STATE_LIVE &&
        ring->loser_count < LOSERS_MAX) {
        ring->losers[ring->loser_count++] = loser;
    }
}

/* Requires: the lock. */
static void
check_link(struct check *check, struct ring *ring, const struct link *link)
{
    const uint64_t state =
        ckv_load_ordered_u64(&check->volume->region.states[link->entry]);
    uint64_t *seen = &ring->seen[link->entry - ring->first_entry];
    if (ckv_state_kind(state) == CKV_STATE_LIVE && *seen == state) {
        fault(check, "%s: entry %u is linked twice", ring->file->path,
            link->entry - ring->file->first_entry);
        return;
    }
    *seen = state;
    if (!holds_pages(check, link->entry)) {
        return; /* its pages go with the next pass of the cursor */
    }
    if (link->first_page < ring->reach) {
        note_overlap(check, ring, link->entry, state);
    }
    const uint32_t end = link->first_page + link->pages;
    if (end > ring->reach) {
        ring->reach = end;
        ring->reach_entry = link->entry;
        ring->reach_state = state;
    }
}

/* The extent carried over from before the lock was free may be gone.  Requires: the
 * lock. */
static void
renew_reach(const struct check *check, struct ring *ring)
{
    if (ring->reach_entry != UINT32_MAX &&
        ckv_load_ordered_u64(&check->volume->region.states[ring->reach_entry]) !=
            ring->reach_state) {
        ring->reach = ring->begin;
        ring->reach_entry = UINT32_MAX;
    }
}

/* Looks at granules from `page` on; returns where to go on.  Requires: the lock. */
static uint32_t
check_granules(struct check *check, struct ring *ring, uint32_t page)
{
    uint32_t entries = 0;
    uint32_t granules = 0;
    renew_reach(check, ring);
    while (page < ring->end && entries < LOCKED_ENTRIES && granules < LOCKED_GRANULES &&
           ring->loser_count < LOSERS_MAX) {
        struct link links[CHAIN_MAX];
        bool sound = true;
        const uint32_t count = read_chain(check, ring, page, links, &sound);
        if (!sound) {
            fault(check,
                "%s: the chain of page %u has an entry that does not belong there",
                ring->file->path, page);
            if (check->repair) {
                relink_granule(check, ring, page);
            }
        }
        for (uint32_t i = 0; sound && i < count; i++) {
            check_link(check, ring, &links[i]);
        }
        entries += count;
        granules++;
        page += ring->granule_pages;
    }
    return page;
}

static void
kill_losers(struct check *check, struct ring *ring)
{
    for (uint32_t i = 0; check->repair && i < ring->loser_count; i++) {
        const struct loser *loser = &ring->losers[i];
        if (ckv_entry_kill(check->volume, loser->entry, loser->state,
                CKV_KILL_REMOVE)) {
            check->report->repaired++;
        }
    }
    ring->loser_count = 0;
}

/* Requires: the lock. */
static bool
is_linked(const struct check *check, const struct ring *ring, const struct link *link)
{
    if (!ckv_geometry_extent_valid(&ring->file->geometry, link->first_page,
            link->pages) ||
        link->first_page < ring->begin || link->first_page >= ring->end) {
        return true; /* not a place: found with the record */
    }
    struct link links[CHAIN_MAX];
    bool sound = true;
    const uint32_t count = read_chain(check, ring, link->first_page, links, &sound);
    for (uint32_t i = 0; i < count; i++) {
        if (links[i].entry == link->entry) {
            return true;
        }
    }
    return false;
}

/* An entry that the walk did not meet: it may have come behind it, or be lost. */
static void
check_missed(struct check *check, struct ring *ring, uint32_t entry)
{
    for (int look = 0; look < LOOKS; look++) {
        look_again_later(check, look);
        if (!lock_ring(check, ring)) {
            return;
        }
        const struct link link = link_of(check, entry);
        const bool lost = holds_pages(check, entry) && !is_linked(check, ring, &link);
        const bool last = look == LOOKS - 1;
        if (lost && last && check->repair) {
            ckv_stripe_link(check->volume, entry);
            check->report->repaired++;
        }
        unlock_ring(check, ring);
        if (!lost) {
            return;
        }
        if (last) {
            check->lasting++;
            fault(check, "%s: entry %u is missing from the page map at page %u",
                ring->file->path, entry - ring->file->first_entry, link.first_page);
        }
    }
}

/* Requires: the lock. */
static void
check_cursor(struct check *check, const struct ring *ring)
{
    struct ckv_stripe *stripe = &check->volume->region.stripes[ring->index];
    const uint32_t cursor = ckv_load_relaxed_u32(&stripe->cursor_page);
    const uint32_t holes = ckv_load_relaxed_u32(&stripe->hole_count);
    if (cursor >= ring->begin && cursor < ring->end && holes <= CKV_HOLES_MAX) {
        return;
    }
    fault(check, "%s: stripe %u has its cursor at page %u and %u holes",
        ring->file->path, ring->index - ring->file->first_stripe, cursor, holes);
    if (check->repair) {
        ckv_store_relaxed_u32(&stripe->hole_count, 0);
        ckv_store_relaxed_u32(&stripe->cursor_page, ring->begin);
        check->report->repaired++;
    }
}

/* False when the lock was not to be had: its owner is stopped. */
static bool
walk_ring(struct check *check, struct ring *ring)
{
    uint32_t page = ring->begin;
    while (page < ring->end) {
        if (!lock_ring(check, ring)) {
            return false;
        }
        CKV_POINT("check.locked");
        if (page == ring->begin) {
            check_cursor(check, ring);
        }
        page = check_granules(check, ring, page);
        unlock_ring(check, ring);
        kill_losers(check, ring);
    }
    for (uint32_t i = 0; i < ring->file->geometry.stripe_entries; i++) {
        const uint32_t entry = ring->first_entry + i;
        const uint64_t state =
            ckv_load_ordered_u64(&check->volume->region.states[entry]);
        if (state != ring->seen[i] && holds_pages(check, entry)) {
            check_missed(check, ring, entry);
        }
    }
    return true;
}

static enum ckv_status
check_rings(struct check *check, struct ckv_file *file, struct ckv_error *error)
{
    const struct ckv_geometry *geometry = &file->geometry;
    const uint32_t stripe_pages = ckv_geometry_stripe_pages(geometry);
    uint64_t *seen = malloc(geometry->stripe_entries * sizeof *seen);
    if (seen == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM, "no memory to verify");
    }
    for (uint32_t s = 0; s < geometry->stripe_count && !check->stopped; s++) {
        struct ring ring = {
            .file = file,
            .index = file->first_stripe + s,
            .first_entry = file->first_entry + s * geometry->stripe_entries,
            .granule_pages = geometry->granule_bytes / CKV_PAGE_BYTES,
            .begin = s * stripe_pages,
            .end = (s + 1) * stripe_pages,
            .seen = seen,
            .reach = s * stripe_pages,
            .reach_entry = UINT32_MAX,
        };
        memset(seen, 0, geometry->stripe_entries * sizeof *seen);
        if (!walk_ring(check, &ring)) {
            ckv_log(CKV_LOG_WARNING,
                "stripe %u of %s stayed locked by a stopped process and was not "
                "verified",
                s, file->path);
        }
        tell_progress(check);
    }
    free(seen);
    return CKV_OK;
}

/* ---- totals ---------------------------------------------------------------------- */

struct totals {
    uint64_t entries[CKV_NAMESPACES_MAX];
    uint64_t bytes[CKV_NAMESPACES_MAX];
};

/* A number that grows with every put, kill and clear. */
static uint64_t
activity(const struct ckv_volume *volume)
{
    const struct ckv_region *region = &volume->region;
    uint64_t sum = ckv_load_ordered_u64(&region->header->sequence);
    for (uint32_t s = 0; s < CKV_PROCESSES_MAX; s++) {
        const ckv_atomic_u64 *counters = region->slots[s].counters;
        sum += ckv_load_ordered_u64(&counters[CKV_COUNTER_evictions]) +
               ckv_load_ordered_u64(&counters[CKV_COUNTER_removed]) +
               ckv_load_ordered_u64(&counters[CKV_COUNTER_corrupt]) +
               ckv_load_ordered_u64(&counters[CKV_COUNTER_swept_slots]);
    }
    for (uint32_t i = 0; i < CKV_NAMESPACES_MAX; i++) {
        sum += ckv_load_ordered_u64(&region->namespaces[i].clear_count);
    }
    return sum;
}

/* False when a block is coming or going: its state and the counts change one after the
 * other, and whoever does it may have been stopped between the two. */
static bool
count_live(struct ckv_volume *volume, struct totals *totals)
{
    struct ckv_region *region = &volume->region;
    memset(totals, 0, sizeof *totals);
    for (uint32_t entry = 0; entry < region->layout.entry_count; entry++) {
        const uint64_t state = ckv_load_acquire_u64(&region->states[entry]);
        const uint8_t owner = ckv_load_relaxed_u8(&region->owners[entry]);
        if (ckv_state_kind(state) == CKV_STATE_RESERVED ||
            ckv_state_kind(state) == CKV_STATE_DYING) {
            return false;
        }
        if (ckv_state_kind(state) == CKV_STATE_LIVE &&
            !ckv_entry_cleared(volume, owner, ckv_state_sequence(state))) {
            totals->entries[owner]++;
            totals->bytes[owner] +=
                (uint64_t)ckv_load_relaxed_u32(&region->places[entry].pages) *
                CKV_PAGE_BYTES;
        }
    }
    return true;
}

/* Counts while nobody changes anything; false when there was no such moment. */
static bool
count_quietly(struct check *check, struct totals *totals)
{
    for (int look = 0; look < LOOKS; look++) {
        look_again_later(check, look);
        const uint64_t before = activity(check->volume);
        if (put_in_flight(check->volume) || !count_live(check->volume, totals)) {
            continue;
        }
        if (activity(check->volume) == before && !put_in_flight(check->volume)) {
            return true;
        }
    }
    return false;
}

/* The count of a namespace is exact but for puts and removals that ran at the same time
 * as a clear of it, so one that was cleared in this life of the region is not
 * judged. */
static bool
totals_right(const struct ckv_volume *volume, const struct totals *totals, int *wrong)
{
    for (int i = 0; i < CKV_NAMESPACES_MAX; i++) {
        const struct ckv_namespace *space = &volume->region.namespaces[i];
        if (ckv_load_relaxed_u64(&space->clear_sequence) >
            volume->region.header->rebuilt_last_sequence) {
            continue;
        }
        if (ckv_total_value(ckv_load_relaxed_u64(&space->entries)) !=
                totals->entries[i] ||
            ckv_total_value(ckv_load_relaxed_u64(&space->bytes)) != totals->bytes[i]) {
            *wrong = i;
            return false;
        }
    }
    return true;
}

/* By difference, so that a put at the same time is not lost. */
static void
repair_totals(struct check *check, const struct totals *totals)
{
    for (int i = 0; i < CKV_NAMESPACES_MAX; i++) {
        struct ckv_namespace *space = &check->volume->region.namespaces[i];
        const uint64_t entries =
            totals->entries[i] - ckv_total_value(ckv_load_relaxed_u64(&space->entries));
        const uint64_t bytes =
            totals->bytes[i] - ckv_total_value(ckv_load_relaxed_u64(&space->bytes));
        if (entries != 0 || bytes != 0) {
            (void)ckv_total_add(&space->entries, entries);
            (void)ckv_total_add(&space->bytes, bytes);
            check->report->repaired++;
        }
    }
}

static void
check_totals(struct check *check)
{
    struct ckv_volume *volume = check->volume;
    struct totals totals;
    int wrong = 0;
    for (int look = 0; look < 3; look++) {
        if (!count_quietly(check, &totals) || totals_right(volume, &totals, &wrong)) {
            return;
        }
    }
    CKV_POINT("check.totals");
    /* The count of a namespace is exact up to one operation per killed process. */
    if (!somebody_died(volume)) {
        fault(check, "namespace %d counts %lld blocks, %llu are live", wrong,
            (long long)ckv_total_value(ckv_load_relaxed_u64(&volume->region
                    .namespaces[wrong]
                    .entries)),
            (unsigned long long)totals.entries[wrong]);
    }
    if (check->repair) {
        repair_totals(check, &totals);
    }
}

/* ---- chains ---------------------------------------------------------------------- */

/* Counts the links that lead to each block. */
static void
count_links(struct ckv_volume *volume, uint32_t *links)
{
    const uint32_t entries = volume->region.layout.entry_count;
    memset(links, 0, sizeof *links * entries);
    for (uint32_t entry = 0; entry < entries; entry++) {
        const uint32_t parent = ckv_prefix_live_parent(volume, entry);
        if (parent != UINT32_MAX) {
            links[parent]++;
        }
    }
}

/* A number of successors that is too large would keep a block for ever; one that is too
 * small is what a death may leave (K1 in prefix.h) and is put right without a word.  A
 * block that was found wrong counts only if it is so at each look. */
static uint32_t
compare_links(struct check *check, const uint32_t *links, bool *suspect, bool first,
    bool last)
{
    struct ckv_volume *volume = check->volume;
    uint32_t suspects = 0;
    for (uint32_t entry = 0; entry < volume->region.layout.entry_count; entry++) {
        const uint32_t stored = ckv_prefix_successors(volume, entry);
        const bool live =
            ckv_state_kind(ckv_load_ordered_u64(&volume->region.states[entry])) ==
            CKV_STATE_LIVE;
        suspect[entry] = live && stored != links[entry] && (first || suspect[entry]);
        suspects += suspect[entry];
        if (!last || !suspect[entry]) {
            continue;
        }
        if (stored > links[entry] && !somebody_died(volume)) {
            fault(check, "entry %u counts %u blocks that follow it, %u do", entry,
                stored, links[entry]);
        }
        if (check->repair) {
            ckv_prefix_set_successors(volume, entry, links[entry]);
            check->report->repaired++;
        }
    }
    return suspects;
}

static void
check_chains(struct check *check)
{
    const uint32_t entries = check->volume->region.layout.entry_count;
    uint32_t *links = calloc(entries, sizeof *links);
    bool *suspect = calloc(entries, sizeof *suspect);
    for (int look = 0; links != NULL && suspect != NULL && look < CHAIN_LOOKS; look++) {
        look_again_later(check, look);
        const uint64_t before = activity(check->volume);
        if (put_in_flight(check->volume)) {
            break; /* not judged while blocks come and go */
        }
        count_links(check->volume, links);
        if (activity(check->volume) != before ||
            compare_links(check, links, suspect, look == 0, look == CHAIN_LOOKS - 1) ==
                0) {
            break;
        }
    }
    free(links);
    free(suspect);
}

/* ---- slots ----------------------------------------------------------------------- */

static uint64_t
slots_in_columns(const struct ckv_volume *volume)
{
    const struct ckv_region *region = &volume->region;
    uint64_t slots = 0;
    for (uint32_t entry = 0; entry < region->layout.entry_count; entry++) {
        const uint64_t state = ckv_load_relaxed_u64(&region->states[entry]);
        const enum ckv_state_kind kind = ckv_state_kind(state);
        slots |= ckv_load_relaxed_u64(&region->masks[entry]);
        if (kind == CKV_STATE_RESERVED || kind == CKV_STATE_DYING) {
            slots |= UINT64_C(1) << ckv_state_slot(state);
        }
    }
    for (uint32_t slot = 0; slot < CKV_PROCESSES_MAX; slot++) {
        if (ckv_load_relaxed_u64(&region->slots[slot].announcing) != 0) {
            slots |= UINT64_C(1) << slot;
        }
    }
    return slots;
}

/* What the dead left is swept first (S2), so that it is not taken for a fault. */
static void
check_slots(struct check *check)
{
    struct ckv_volume *volume = check->volume;
    for (int look = 0; look < LOOKS; look++) {
        const uint64_t slots = slots_in_columns(volume);
        const uint64_t left = ckv_slot_sweep_dead(volume, slots);
        if (left == slots) {
            return; /* all of them are alive */
        }
    }
    fault(check,
        "pins or reservations of process slots that nobody owns keep coming back");
}

/* ---- all of it ------------------------------------------------------------------- */

enum ckv_status
ckv_check(struct ckv_volume *volume, bool repair,
    int (*progress)(void *context, uint64_t done, uint64_t total), void *context,
    struct ckv_verify_report *report, struct ckv_error *error)
{
    const bool reading = volume->mode == CKV_MODE_READ;
    struct check check = {
        .volume = volume,
        .repair = repair,
        .shared = volume->region.path != NULL,
        .may_pin = !reading,
        .may_lock = !reading || volume->region.path == NULL,
        .progress = progress,
        .context = context,
        .report = report,
    };
    *report = (struct ckv_verify_report){0};
    if (repair && reading) {
        return ckv_fail(error, CKV_E_READ_ONLY, 0,
            "a cache that is open for reading only cannot be repaired; open it with "
            "mode "
            "\"rw\"");
    }
    if (!reading) {
        check_slots(&check);
    }
    for (uint32_t f = 0; f < volume->file_count; f++) {
        if (ckv_volume_file_usable(volume, &volume->files[f])) {
            check.total += volume->files[f].geometry.entry_count;
        }
    }
    for (uint32_t f = 0; f < volume->file_count && !check.stopped; f++) {
        struct ckv_file *file = &volume->files[f];
        if (!ckv_volume_file_usable(volume, file)) {
            continue;
        }
        if (check.may_lock) {
            CKV_TRY(check_rings(&check, file, error));
        }
        check_entries(&check, file);
    }
    if (!check.stopped) {
        check_totals(&check);
        if (ckv_prefix_on(volume) && !reading) {
            check_chains(&check);
        }
        tell_progress(&check);
    }
    return CKV_OK;
}

/* ---- recovery of a failed path -------------------------------------------------- */

/* Everything that the kernel will say about this file has been said, and what it
 * keeps of it in memory only because it was read is given up, so that reads ask the
 * device. */
static bool
ask_device(const struct ckv_file *file)
{
    /* The error that failed the path is reported once more; a second one is a new
     * one. */
    (void)ckv_os_sync(file->data_fd);
    if (ckv_os_sync(file->data_fd) < 0) {
        return false;
    }
    (void)ckv_os.advise_file(file->data_fd, file->geometry.data_offset,
        file->geometry.data_bytes, CKV_ADVICE_DONT_NEED); /* advice */
    return true;
}

/* The page of the table that holds a record may be one that was never written: write it
 * again.  A kill meanwhile struck it, perhaps before that; the number cannot have been
 * given away, for the path takes no puts. */
static bool
renew_record(struct ckv_volume *volume, const struct ckv_found *found)
{
    const struct ckv_file *file = found->file;
    const uint32_t local_entry = found->entry - file->first_entry;
    CKV_POINT("recover.record");
    if (ckv_file_write_record(file, local_entry, &found->record) < 0) {
        return false;
    }
    if (ckv_load_ordered_u64(&volume->region.states[found->entry]) != found->state) {
        return ckv_file_strike_record(file, local_entry) == 0;
    }
    return true;
}

/* So may the one that a strike was written to: what was removed would be back in the next
 * life. */
static bool
renew_strike(struct ckv_volume *volume, const struct ckv_file *file, uint32_t entry)
{
    const uint32_t local_entry = entry - file->first_entry;
    ckv_atomic_u64 *word = &volume->region.states[entry];
    uint64_t state = ckv_load_ordered_u64(word);
    const uint64_t dying =
        ckv_state_owned(CKV_STATE_DYING, volume->slot, volume->incarnation);
    if ((state != CKV_STATE_FREE && state != CKV_STATE_DEAD) ||
        file->table[local_entry].sequence == 0 || /* never a block */
        !ckv_cas_ordered_u64(word, &state, dying)) {
        return true;
    }
    CKV_POINT("recover.strike");
    const int result = ckv_file_strike_record(file, local_entry);
    ckv_store_ordered_u64(word, state);
    return result == 0;
}

/* False when the device fails again. */
static bool
recover_entry(struct check *check, struct ckv_file *file, uint32_t entry)
{
    struct ckv_volume *volume = check->volume;
    const uint64_t state = ckv_load_acquire_u64(&volume->region.states[entry]);
    ckv_store_release_u32(&volume->region.marks[entry], 0);
    if (ckv_state_kind(state) != CKV_STATE_LIVE) {
        check_entry(check, file, entry);
        return renew_strike(volume, file, entry);
    }
    struct ckv_found found = {.entry = entry, .state = state, .file = file};
    if (!check_live(check, file, &found) || !ckv_pin(volume, entry, state)) {
        return true;
    }
    const int result = check_payload(volume, file, &found.record);
    report_payload(check, file, &found, result);
    const bool renewed = result == 0 ? renew_record(volume, &found)
                                     : result > 0 || is_of_the_medium(result);
    ckv_unpin(volume, entry);
    /* A key that was stored again on another path while this one was out of use. */
    const struct ckv_identity identity = identity_of(volume, entry, &found.record);
    (void)ckv_index_keep_newest(volume, &identity); /* the sequence is not needed */
    return renewed;
}

bool
ckv_check_recover_file(struct ckv_volume *volume, struct ckv_file *file)
{
    struct ckv_verify_report report = {0};
    struct check check = {
        .volume = volume,
        .repair = true,
        .shared = true,
        .may_pin = true,
        .may_lock = true,
        .report = &report,
    };
    if (volume->mode == CKV_MODE_READ || !file->present) {
        return false;
    }
    if (ckv_load_relaxed_u32(&volume->region.paths[ckv_volume_file_index(volume, file)]
                .unread) != 0) {
        ckv_log(CKV_LOG_WARNING,
            "%s stays out of use: its table was not read when the volume was opened; "
            "close the volume in every process and open it again",
            file->path);
        return false;
    }
    CKV_POINT("recover.begin");
    if (!ask_device(file)) {
        return false;
    }
    check_slots(&check);
    for (uint32_t i = 0; i < file->geometry.entry_count; i++) {
        if (!recover_entry(&check, file, file->first_entry + i)) {
            return false;
        }
    }
    if (check_rings(&check, file, NULL) != CKV_OK || ckv_os_sync(file->data_fd) < 0) {
        return false;
    }
    CKV_POINT("recover.done");
    ckv_store_ordered_u32(&volume->region.paths[ckv_volume_file_index(volume, file)]
                              .failed,
        0);
    return true;
}
