/* SPDX-License-Identifier: Apache-2.0 */
/* rebuild.c: from the tables of the files to a complete region.
 *
 *   1  namespaces and their clear sequences, from every file
 *   2  tables, in order of the file: what can be believed becomes LIVE and enters the
 *      index, where two of one key meet
 *   3  stripes, in order of the ring: overlaps, page map, cursor
 *   4  heat and admission from the checkpoints, totals
 *
 * A record that lost one comparison still counts in the others: what overlaps it or
 * shares its key was overwritten or replaced when it was stored, whatever became of it
 * later.  Which records survive is therefore independent of the order in which they are
 * read.
 *
 * Tables are read by read calls: an error of the device is a result here, and a
 * signal in a mapping.  The region is ours alone until it is ready, so words are
 * stored relaxed.
 */
#include "rebuild.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "entry.h"
#include "prefix.h"
#include "region.h"
#include "stripe.h"

#define SEQUENCE_MAX                                                                   \
    (UINT64_C(1) << 60) /* a larger one is damage; leaves room to grow */
#define UNSEEN_SEQUENCES (UINT64_C(1) << 40)

enum {
    PIECE_RECORDS = 12800, /* 250 pages */
    LOOKAHEAD = 16,        /* records between prefetch and use of their buckets */
    NOTE_LOST = 1,
    NOTE_HOLE = 2
};

struct waiting { /* a LIVE entry that is not in the index yet */
    uint32_t entry;
    struct ckv_identity identity;
};

struct active { /* an extent that the sweep in ring order has begun and not ended */
    uint64_t sequence;
    uint32_t entry;
    uint32_t end_page;
};

struct rebuild {
    struct ckv_volume *volume;
    struct ckv_checkpoint_head checkpoints[CKV_PATHS_MAX]; /* zeros: none */
    bool strike;
    uint64_t last_sequence;
    uint64_t entries;
    uint64_t dropped;
    uint64_t namespace_entries[CKV_NAMESPACES_MAX];
    uint64_t namespace_bytes[CKV_NAMESPACES_MAX];
    uint8_t
        namespace_hints[256]; /* index by the first byte of the tag; to be checked */
    struct ckv_record *piece; /* PIECE_RECORDS */
    uint8_t *notes;           /* NOTE_... per entry */
    uint64_t *order;          /* first page << 32 | entry, of one stripe */
    uint64_t *scratch;        /* as large, for sorting */
    struct active *heap;      /* the newest on top */
    uint32_t heap_count;
    struct waiting waiting[LOOKAHEAD];
    uint32_t waiting_begin, waiting_count;
};

static void
see_sequence(struct rebuild *rebuild, uint64_t sequence)
{
    if (sequence < SEQUENCE_MAX && sequence > rebuild->last_sequence) {
        rebuild->last_sequence = sequence; /* B4 */
    }
}

/* What the table has and we have not seen must not be taken for dead later on: no
 * recovery in this life puts the path back into use. */
static void
fail_file(struct rebuild *rebuild, struct ckv_file *file, const char *what, int result)
{
    struct ckv_volume *volume = rebuild->volume;
    ckv_store_relaxed_u32(&volume->region.paths[ckv_volume_file_index(volume, file)]
                              .unread,
        1);
    ckv_volume_fail_path(rebuild->volume, file, what, -result);
}

/* ---- namespaces ----------------------------------------------------------------- */

enum { NAMESPACE_RECORDS = CKV_NAMESPACES_MAX * CKV_NAMESPACE_COPIES };

static bool
namespace_sealed(const struct ckv_namespace_record *record)
{
    return record->seal != 0 &&
           record->seal ==
               ckv_seal_of(record, offsetof(struct ckv_namespace_record, seal));
}

/* Takes one durable record over: the later clear of all files counts.  False when
 * its tag had to move to another index than the one it has in this file. */
static bool
adopt_namespace(struct rebuild *rebuild, int index,
    const struct ckv_namespace_record *record)
{
    struct ckv_volume *volume = rebuild->volume;
    see_sequence(rebuild, record->clear_sequence);
    int place = ckv_region_namespace(volume, record->tag, false);
    if (place < 0 &&
        ckv_load_relaxed_u64(&volume->region.namespaces[index].used) == 0) {
        struct ckv_namespace *space = &volume->region.namespaces[index];
        memcpy(space->tag, record->tag, sizeof space->tag);
        ckv_store_relaxed_u64(&space->used, 1);
        place = index;
    }
    if (place < 0) {
        place = ckv_region_namespace(volume, record->tag, true);
    }
    if (place < 0) { /* more tags over all files than one set can have */
        ckv_log(CKV_LOG_WARNING,
            "more than %d namespaces were cleared over all files; one of them is no "
            "longer "
            "known as cleared",
            (int)CKV_NAMESPACES_MAX);
        return true;
    }
    struct ckv_namespace *space = &volume->region.namespaces[place];
    ckv_raise_u64(&space->clear_sequence, record->clear_sequence);
    ckv_raise_u64(&space->clear_count, record->clear_count);
    return place == index;
}

/* Files that were used apart may have two tags at one index.  Each copy is then written
 * anew everywhere, under a count above all others, moved ones first. */
static void
rewrite_namespaces(struct rebuild *rebuild)
{
    struct ckv_volume *volume = rebuild->volume;
    uint64_t count = 0;
    for (int i = 0; i < CKV_NAMESPACES_MAX; i++) {
        count = ckv_max_u64(count,
            ckv_load_relaxed_u64(&volume->region.namespaces[i].clear_count));
    }
    for (int i = CKV_NAMESPACES_MAX - 1; i >= 0; i--) {
        struct ckv_namespace *space = &volume->region.namespaces[i];
        if (ckv_load_relaxed_u64(&space->clear_count) == 0) {
            continue;
        }
        ckv_store_relaxed_u64(&space->clear_count, count + 1);
        struct ckv_namespace_record record = {.clear_count = count + 1};
        memcpy(record.tag, space->tag, sizeof record.tag);
        record.clear_sequence = ckv_load_relaxed_u64(&space->clear_sequence);
        record.seal = ckv_seal_of(&record, offsetof(struct ckv_namespace_record, seal));
        const uint64_t copy =
            (uint64_t)i * CKV_NAMESPACE_COPIES + (count + 1) % CKV_NAMESPACE_COPIES;
        for (uint32_t f = 0; f < volume->file_count; f++) {
            struct ckv_file *file = &volume->files[f];
            if (!ckv_volume_file_usable(volume, file)) {
                continue;
            }
            CKV_POINT("rebuild.namespace");
            const int result = ckv_os_write_all(file->data_fd, &record, sizeof record,
                file->geometry.namespaces_offset + copy * sizeof record);
            if (result < 0) {
                fail_file(rebuild, file, "writing a namespace", result);
            }
        }
    }
}

static enum ckv_status
read_namespaces(struct rebuild *rebuild, struct ckv_error *error)
{
    struct ckv_volume *volume = rebuild->volume;
    struct ckv_namespace_record *records = malloc(NAMESPACE_RECORDS * sizeof *records);
    if (records == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM,
            "no memory to rebuild the index");
    }
    bool in_place = true;
    for (uint32_t f = 0; f < volume->file_count; f++) {
        struct ckv_file *file = &volume->files[f];
        if (!file->present) {
            continue;
        }
        CKV_POINT("rebuild.namespaces");
        const int result = ckv_os_read_all(file->data_fd, records,
            NAMESPACE_RECORDS * sizeof *records, file->geometry.namespaces_offset);
        if (result < 0) {
            /* Cleared blocks would come back: no block of this file may be used. */
            fail_file(rebuild, file, "reading the namespaces", result);
            continue;
        }
        for (int i = 0; i < CKV_NAMESPACES_MAX; i++) {
            const struct ckv_namespace_record *best = NULL;
            for (int c = 0; c < CKV_NAMESPACE_COPIES; c++) {
                const struct ckv_namespace_record *copy =
                    &records[i * CKV_NAMESPACE_COPIES + c];
                if (namespace_sealed(copy) && copy->clear_sequence < SEQUENCE_MAX &&
                    (best == NULL || copy->clear_count > best->clear_count)) {
                    best = copy;
                }
            }
            if (best != NULL) {
                in_place = adopt_namespace(rebuild, i, best) && in_place;
            }
        }
    }
    free(records);
    if (!in_place && rebuild->strike) {
        rewrite_namespaces(rebuild);
    }
    return CKV_OK;
}

/* Index of the namespace of a record, -1 when all are taken. */
static int
namespace_of(struct rebuild *rebuild, const struct ckv_record *record)
{
    struct ckv_volume *volume = rebuild->volume;
    uint8_t *hint = &rebuild->namespace_hints[record->namespace_tag[0]];
    const struct ckv_namespace *space = &volume->region.namespaces[*hint];
    if (ckv_load_relaxed_u64(&space->used) != 0 &&
        memcmp(space->tag, record->namespace_tag, sizeof space->tag) == 0) {
        return *hint;
    }
    const int index = ckv_region_namespace(volume, record->namespace_tag, true);
    *hint = index < 0 ? *hint : (uint8_t)index;
    return index;
}

/* ---- tables --------------------------------------------------------------------- */

/* Whether what a sealed record says about its place can be true (B2). */
static bool
in_bounds(const struct ckv_file *file, uint32_t local_entry,
    const struct ckv_record *record)
{
    const struct ckv_geometry *geometry = &file->geometry;
    const uint32_t stripe = local_entry / geometry->stripe_entries;
    const uint32_t pages =
        ckv_record_pages(record->payload_bytes, record->header_bytes);
    return record->sequence > 0 && record->sequence < SEQUENCE_MAX &&
           (record->flags & ~(unsigned)CKV_RECORD_FLAGS) == 0 &&
           ckv_record_header_believable(record) &&
           ckv_geometry_extent_valid(geometry, record->first_page, pages) &&
           record->first_page / ckv_geometry_stripe_pages(geometry) == stripe;
}

/* The younger of two records is the one to believe; numbers break ties that only damage
 * can make (F5). */
static bool
is_newer(uint64_t sequence, uint32_t entry, uint64_t other_sequence,
    uint32_t other_entry)
{
    return sequence != other_sequence ? sequence > other_sequence : entry > other_entry;
}

/* Puts a LIVE entry into the index; of two with one identity the older loses. */
static void
enter(struct rebuild *rebuild, const struct waiting *waiting)
{
    struct ckv_volume *volume = rebuild->volume;
    const uint64_t hash = waiting->identity.hash;
    const uint64_t sequence = ckv_state_sequence(ckv_load_relaxed_u64(&volume->region
            .states[waiting->entry]));
    struct ckv_found other;
    if (ckv_index_find(volume, &waiting->identity, &other)) {
        const uint64_t other_sequence = ckv_state_sequence(other.state);
        if (!is_newer(sequence, waiting->entry, other_sequence, other.entry)) {
            rebuild->notes[waiting->entry] |= NOTE_LOST;
            return;
        }
        rebuild->notes[other.entry] |= NOTE_LOST;
        ckv_index_erase(volume, hash, other.entry, other_sequence);
    }
    if (!ckv_index_fill(volume, hash, waiting->entry, sequence) &&
        !ckv_index_insert(volume, hash, waiting->entry, sequence)) {
        rebuild->notes[waiting->entry] |= NOTE_LOST; /* not without pins */
    }
}

static void
enter_oldest(struct rebuild *rebuild)
{
    enter(rebuild, &rebuild->waiting[rebuild->waiting_begin]);
    rebuild->waiting_begin = (rebuild->waiting_begin + 1) % LOOKAHEAD;
    rebuild->waiting_count--;
}

/* Registers a believed record as LIVE and queues it for the index. */
static void
take(struct rebuild *rebuild, uint32_t entry, const struct ckv_record *record,
    int index)
{
    struct ckv_volume *volume = rebuild->volume;
    struct ckv_region *region = &volume->region;
    const bool digested = (record->flags & CKV_RECORD_DIGESTED) != 0;
    ckv_store_relaxed_u32(&region->places[entry].first_page, record->first_page);
    ckv_store_relaxed_u32(&region->places[entry].pages,
        ckv_record_pages(record->payload_bytes, record->header_bytes));
    ckv_store_relaxed_u8(&region->owners[entry], (uint8_t)index);
    ckv_store_relaxed_u64(&region->states[entry], ckv_state_live(record->sequence));
    if ((record->flags & CKV_RECORD_HOLE) != 0) {
        rebuild->notes[entry] |= NOTE_HOLE;
    }
    if (rebuild->waiting_count == LOOKAHEAD) {
        enter_oldest(rebuild);
    }
    struct waiting *waiting =
        &rebuild
             ->waiting[(rebuild->waiting_begin + rebuild->waiting_count) % LOOKAHEAD];
    rebuild->waiting_count++;
    waiting->entry = entry;
    waiting->identity.digested = digested;
    waiting->identity.namespace_index = (uint8_t)index;
    memcpy(waiting->identity.namespace_tag, record->namespace_tag, 16);
    memcpy(waiting->identity.key, record->key, 32);
    waiting->identity.hash =
        ckv_index_hash(volume, record->namespace_tag, record->key, digested);
    ckv_index_prefetch(volume, waiting->identity.hash);
}

enum verdict { VERDICT_DEAD, VERDICT_TAKEN, VERDICT_UNSEALED, VERDICT_REFUSED };

static enum verdict
judge(struct rebuild *rebuild, const struct ckv_file *file, uint32_t local_entry,
    const struct ckv_record *record)
{
    if (record->seal == 0) {
        /* A struck record still says which sequence was given out. */
        if (record->sequence != 0 && in_bounds(file, local_entry, record)) {
            see_sequence(rebuild, record->sequence);
        }
        return VERDICT_DEAD;
    }
    if (!ckv_record_sealed(record, file->header.file_id, local_entry)) {
        return VERDICT_UNSEALED;
    }
    see_sequence(rebuild, record->sequence);
    if (!in_bounds(file, local_entry, record)) {
        return VERDICT_REFUSED;
    }
    const int index = namespace_of(rebuild, record);
    if (index < 0 ||
        ckv_entry_cleared(rebuild->volume, (uint8_t)index, record->sequence)) {
        return VERDICT_REFUSED;
    }
    take(rebuild, file->first_entry + local_entry, record, index);
    return VERDICT_TAKEN;
}

/* Judges `count` records; those to be struck get a zero seal here, and [low, high)
 * spans them. */
static void
judge_piece(struct rebuild *rebuild, const struct ckv_file *file, uint32_t first,
    uint32_t count, uint32_t *low, uint32_t *high)
{
    *low = count;
    *high = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct ckv_record *record = &rebuild->piece[i];
        const enum verdict verdict = judge(rebuild, file, first + i, record);
        if (verdict == VERDICT_UNSEALED || verdict == VERDICT_REFUSED) {
            rebuild->dropped++;
        }
        if (verdict == VERDICT_REFUSED) {
            record->seal = 0;
            *low = i < *low ? i : *low;
            *high = i + 1;
        }
    }
}

/* After a clear nearly all records of a piece are struck, so this writes the stretch
 * that spans them; the records between are written as they were read. */
static int
strike_piece(struct rebuild *rebuild, const struct ckv_file *file, uint32_t first,
    uint32_t low, uint32_t high)
{
    const size_t record_bytes = sizeof(struct ckv_record);
    CKV_POINT("rebuild.strike");
    return ckv_os_write_all(file->data_fd, &rebuild->piece[low],
        (high - low) * record_bytes,
        file->geometry.table_offset + (uint64_t)(first + low) * record_bytes);
}

/* An error fails the path: what was read so far is then a miss like the rest of it. */
static void
read_table(struct rebuild *rebuild, struct ckv_file *file)
{
    const struct ckv_geometry *geometry = &file->geometry;
    const size_t record_bytes = sizeof(struct ckv_record);
    for (uint32_t first = 0; first < geometry->entry_count; first += PIECE_RECORDS) {
        const uint32_t left = geometry->entry_count - first;
        const uint32_t count = left < PIECE_RECORDS ? left : PIECE_RECORDS;
        CKV_POINT("rebuild.piece");
        int result =
            ckv_os_read_all(file->data_fd, rebuild->piece, count * record_bytes,
                geometry->table_offset + (uint64_t)first * record_bytes);
        if (result < 0) {
            fail_file(rebuild, file, "reading the table", result);
            break;
        }
        uint32_t low = 0;
        uint32_t high = 0;
        judge_piece(rebuild, file, first, count, &low, &high);
        if (rebuild->strike && low < high) {
            result = strike_piece(rebuild, file, first, low, high);
        }
        if (result < 0) {
            fail_file(rebuild, file, "striking records", result);
            break;
        }
    }
    while (rebuild->waiting_count > 0) {
        enter_oldest(rebuild);
    }
}

/* ---- ring order ----------------------------------------------------------------- */

/* Lists the LIVE entries of a stripe; returns how many. */
static uint32_t
list_stripe(struct rebuild *rebuild, uint32_t first_entry, uint32_t count, bool *sorted)
{
    struct ckv_region *region = &rebuild->volume->region;
    uint32_t listed = 0;
    *sorted = true;
    for (uint32_t entry = first_entry; entry < first_entry + count; entry++) {
        const uint64_t state = ckv_load_relaxed_u64(&region->states[entry]);
        if (ckv_state_kind(state) != CKV_STATE_LIVE) {
            if (state != CKV_STATE_FREE) { /* evicted from a full bucket just now */
                ckv_store_relaxed_u64(&region->states[entry], CKV_STATE_FREE);
                rebuild->dropped++;
            }
            continue;
        }
        const uint64_t page = ckv_load_relaxed_u32(&region->places[entry].first_page);
        rebuild->order[listed] = page << 32 | entry;
        *sorted = *sorted && (listed == 0 || rebuild->order[listed - 1] >> 32 <= page);
        listed++;
    }
    return listed;
}

/* By first page, stable, so that entries of one page stay in order of their number. */
static void
sort_order(struct rebuild *rebuild, uint32_t count)
{
    enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };
    for (unsigned shift = 32; shift < 64; shift += DIGIT_BITS) {
        uint32_t begins[DIGITS] = {0};
        for (uint32_t i = 0; i < count; i++) {
            begins[rebuild->order[i] >> shift & (DIGITS - 1)]++;
        }
        uint32_t begin = 0;
        for (uint32_t d = 0; d < DIGITS; d++) {
            const uint32_t in_digit = begins[d];
            begins[d] = begin;
            begin += in_digit;
        }
        for (uint32_t i = 0; i < count; i++) {
            const uint64_t key = rebuild->order[i];
            rebuild->scratch[begins[key >> shift & (DIGITS - 1)]++] = key;
        }
        uint64_t *sorted = rebuild->scratch;
        rebuild->scratch = rebuild->order;
        rebuild->order = sorted;
    }
}

static bool
above(const struct active *a, const struct active *b)
{
    return is_newer(a->sequence, a->entry, b->sequence, b->entry);
}

static void
heap_push(struct rebuild *rebuild, struct active added)
{
    struct active *heap = rebuild->heap;
    uint32_t at = rebuild->heap_count++;
    while (at > 0 && above(&added, &heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = added;
}

static void
heap_pop(struct rebuild *rebuild)
{
    struct active *heap = rebuild->heap;
    const struct active moved = heap[--rebuild->heap_count];
    uint32_t at = 0;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= rebuild->heap_count) {
            break;
        }
        if (child + 1 < rebuild->heap_count && above(&heap[child + 1], &heap[child])) {
            child++;
        }
        if (!above(&heap[child], &moved)) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

/* Marks every entry that overlaps a newer one.  Of the extents over one page all but
 * the newest lose, so each beginning is compared with the newest that reaches it.
 * Without overlaps the heap never holds more than one; with any number the cost is n
 * log n. */
static void
mark_overlaps(struct rebuild *rebuild, uint32_t count)
{
    const struct ckv_region *region = &rebuild->volume->region;
    rebuild->heap_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t entry = (uint32_t)rebuild->order[i];
        const uint32_t first_page = (uint32_t)(rebuild->order[i] >> 32);
        const struct active added = {
            .sequence =
                ckv_state_sequence(ckv_load_relaxed_u64(&region->states[entry])),
            .entry = entry,
            .end_page = first_page + ckv_load_relaxed_u32(&region->places[entry].pages),
        };
        while (rebuild->heap_count > 0 && rebuild->heap[0].end_page <= first_page) {
            heap_pop(rebuild);
        }
        if (rebuild->heap_count > 0) {
            const struct active *newest = &rebuild->heap[0];
            if (above(newest, &added)) {
                rebuild->notes[entry] |= NOTE_LOST;
            } else {
                rebuild->notes[newest->entry] |= NOTE_LOST;
                if (newest->end_page <= added.end_page) {
                    heap_pop(rebuild); /* `added` is above it to its end */
                }
            }
        }
        heap_push(rebuild, added);
    }
}

/* Frees an entry that lost, in its file and here. */
static void
drop(struct rebuild *rebuild, struct ckv_file *file, uint32_t entry)
{
    struct ckv_volume *volume = rebuild->volume;
    struct ckv_region *region = &volume->region;
    const uint32_t local_entry = entry - file->first_entry;
    const uint64_t sequence =
        ckv_state_sequence(ckv_load_relaxed_u64(&region->states[entry]));
    struct ckv_record record;
    if (ckv_os_read_all(file->data_fd, &record, sizeof record,
            file->geometry.table_offset + (uint64_t)local_entry * sizeof record) == 0) {
        ckv_index_erase(volume,
            ckv_index_hash(volume, record.namespace_tag, record.key,
                (record.flags & CKV_RECORD_DIGESTED) != 0),
            entry, sequence);
    } /* else its slot is stale, which is as good as empty (I1) */
    if (rebuild->strike) {
        CKV_POINT("rebuild.lost");
        const int result = ckv_file_strike_record(file, local_entry);
        if (result < 0) {
            fail_file(rebuild, file, "striking a record", result);
        }
    }
    ckv_store_relaxed_u64(&region->states[entry], CKV_STATE_FREE);
    ckv_store_relaxed_u32(&region->places[entry].pages, 0);
    rebuild->dropped++;
}

/* Pages from the beginning of the stripe to where the cursor stands (B3).  Sequences
 * are given out at publish, so a neighbour that was reserved later may have a
 * slightly lower one: what lies ahead of the newest entry's end and is nearly as new
 * was stored before the cursor, too, and must not be the next to go. */
static uint32_t
cursor_position(const struct rebuild *rebuild, uint32_t begin, uint32_t stripe_pages,
    uint32_t newest, uint32_t count)
{
    enum {
        IN_FLIGHT_MAX = 256
    }; /* puts at once that the order may have been shuffled by */
    const struct ckv_region *region = &rebuild->volume->region;
    const struct ckv_place *place = &region->places[newest];
    const uint64_t newest_sequence =
        ckv_state_sequence(ckv_load_relaxed_u64(&region->states[newest]));
    const uint64_t window = count / 4 < IN_FLIGHT_MAX ? count / 4 : IN_FLIGHT_MAX;
    const uint32_t end = ckv_load_relaxed_u32(&place->first_page) +
                         ckv_load_relaxed_u32(&place->pages) - begin;
    uint32_t ahead = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t entry = (uint32_t)rebuild->order[i];
        const uint64_t sequence =
            ckv_state_sequence(ckv_load_relaxed_u64(&region->states[entry]));
        const uint32_t first =
            ckv_load_relaxed_u32(&region->places[entry].first_page) - begin;
        const uint32_t distance = (first + stripe_pages - end) % stripe_pages;
        if ((rebuild->notes[entry] & (NOTE_LOST | NOTE_HOLE)) == 0 && entry != newest &&
            sequence + window > newest_sequence && distance < stripe_pages / 4) {
            const uint32_t reach =
                distance + ckv_load_relaxed_u32(&region->places[entry].pages);
            ahead = reach > ahead ? reach : ahead;
        }
    }
    return (end + ahead) % stripe_pages;
}

static void
set_cursor(struct rebuild *rebuild, const struct ckv_file *file, uint32_t local_stripe,
    uint32_t newest, uint32_t count)
{
    struct ckv_region *region = &rebuild->volume->region;
    struct ckv_stripe *stripe = &region->stripes[file->first_stripe + local_stripe];
    const uint32_t stripe_pages = ckv_geometry_stripe_pages(&file->geometry);
    const uint32_t begin = local_stripe * stripe_pages;
    uint32_t position = 0;
    if (newest != UINT32_MAX) {
        position = cursor_position(rebuild, begin, stripe_pages, newest, count);
        ckv_store_relaxed_u32(&stripe->entry_hand,
            (newest - file->first_entry) % file->geometry.stripe_entries);
    }
    ckv_store_relaxed_u32(&stripe->cursor_page, begin + position);
    ckv_store_relaxed_u64(&stripe->virtual_time,
        ((uint64_t)position << 32) / stripe_pages);
}

static void
finish_stripe(struct rebuild *rebuild, struct ckv_file *file, uint32_t local_stripe)
{
    struct ckv_volume *volume = rebuild->volume;
    struct ckv_region *region = &volume->region;
    const uint32_t stripe_entries = file->geometry.stripe_entries;
    bool sorted = true;
    CKV_POINT("rebuild.stripe");
    const uint32_t count = list_stripe(rebuild,
        file->first_entry + local_stripe * stripe_entries, stripe_entries, &sorted);
    if (!sorted) {
        sort_order(rebuild, count);
    }
    mark_overlaps(rebuild, count);
    uint32_t newest = UINT32_MAX;
    uint64_t newest_sequence = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t entry = (uint32_t)rebuild->order[i];
        const uint64_t sequence =
            ckv_state_sequence(ckv_load_relaxed_u64(&region->states[entry]));
        if ((rebuild->notes[entry] & NOTE_LOST) != 0) {
            drop(rebuild, file, entry);
            continue;
        }
        ckv_stripe_link(volume, entry);
        const uint8_t owner = ckv_load_relaxed_u8(&region->owners[entry]);
        rebuild->entries++;
        rebuild->namespace_entries[owner]++;
        rebuild->namespace_bytes[owner] +=
            (uint64_t)ckv_load_relaxed_u32(&region->places[entry].pages) *
            CKV_PAGE_BYTES;
        if ((rebuild->notes[entry] & NOTE_HOLE) == 0 &&
            is_newer(sequence, entry, newest_sequence, newest)) {
            newest = entry;
            newest_sequence = sequence;
        }
    }
    set_cursor(rebuild, file, local_stripe, newest, count);
}

/* ---- checkpoints: heat and admission ---------------------------------------------- */

static uint64_t
checkpoint_offset(const struct ckv_file *file, uint64_t generation)
{
    return file->geometry.checkpoint_offset +
           (generation & 1) * file->geometry.checkpoint_bytes;
}

/* Reads one copy; NULL unless it is whole. */
static uint8_t *
read_checkpoint(const struct ckv_file *file, uint64_t copy,
    struct ckv_checkpoint_head *head)
{
    const uint64_t offset = checkpoint_offset(file, copy);
    const uint32_t count = file->geometry.entry_count;
    if (ckv_os_read_all(file->data_fd, head, sizeof *head, offset) < 0 ||
        head->magic != CKV_CHECKPOINT_MAGIC || head->entry_count != count ||
        head->seal != ckv_seal_of(head, offsetof(struct ckv_checkpoint_head, seal)) ||
        (head->generation & 1) != copy) {
        return NULL;
    }
    uint8_t *heats = malloc(count);
    if (heats != NULL &&
        (ckv_os_read_all(file->data_fd, heats, count, offset + CKV_PAGE_BYTES) < 0 ||
            ckv_crc32c(0, heats, count) != head->heat_crc)) {
        free(heats);
        heats = NULL;
    }
    return heats;
}

/* The words of the ghost that the checkpoint of a file has: files share them in order,
 * each with room for as many as a tier of its entries alone would have. */
struct ghost_part {
    ckv_atomic_u32 *words;
    uint32_t count;
    uint64_t offset; /* in a copy of the checkpoint */
};

static struct ghost_part
ghost_part_of(const struct ckv_volume *volume, uint32_t file_index)
{
    const struct ckv_region *region = &volume->region;
    const uint64_t all = ckv_admission_ghost_words(region->layout.entry_count);
    uint64_t begin = 0;
    for (uint32_t f = 0; f < file_index; f++) {
        begin += ckv_admission_ghost_words(volume->files[f].geometry.entry_count);
    }
    begin = ckv_min_u64(begin, all);
    const uint32_t entries = volume->files[file_index].geometry.entry_count;
    return (struct ghost_part){
        .words = region->admission.ghost.words + begin,
        .count = (uint32_t)ckv_min_u64(ckv_admission_ghost_words(entries), all - begin),
        .offset = CKV_PAGE_BYTES + ckv_align_up(entries, CKV_PAGE_BYTES),
    };
}

/* Words of another time than the ghost's clock would have a wrong age: more than half
 * of what an epoch can count apart, or from its future. */
static bool
same_time(uint64_t clock, uint64_t other)
{
    return (clock >> 32) - (other >> 32) < 2048;
}

static void
restore_ghost(struct ckv_volume *volume, uint32_t file_index,
    const struct ckv_checkpoint_head *head)
{
    const struct ckv_file *file = &volume->files[file_index];
    const struct ghost_part part = ghost_part_of(volume, file_index);
    if (head->ghost_words == 0 || head->ghost_words != part.count) {
        return;
    }
    const uint64_t bytes = (uint64_t)part.count * sizeof(uint32_t);
    uint32_t *words = malloc(bytes);
    if (words != NULL &&
        ckv_os_read_all(file->data_fd, words, bytes,
            checkpoint_offset(file, head->generation) + part.offset) == 0 &&
        ckv_crc32c(0, words, bytes) == head->ghost_crc) {
        for (uint32_t i = 0; i < part.count; i++) {
            ckv_store_relaxed_u32(&part.words[i], words[i]);
        }
    }
    free(words);
}

/* The counts of one set are in each of its files; the newest of them count.  True for
 * numbers that can have been written. */
static bool
restore_counts(struct ckv_volume *volume, const struct ckv_checkpoint_head *head)
{
    struct ckv_admission_memory *admission = &volume->region.admission;
    struct ckv_admission_head *counts = admission->head;
    const uint64_t requests_max = UINT64_C(1) << 40;
    const uint64_t entries = volume->region.layout.entry_count;
    if (head->capacity == 0 || head->capacity > entries || head->second_touch > 1 ||
        head->live_sum > entries * 64 ||
        head->full_bytes > CKV_PATHS_MAX * CKV_CAPACITY_MAX_BYTES ||
        head->requests > requests_max || head->misses[0] > requests_max ||
        head->misses[1] > requests_max) {
        return false;
    }
    ckv_admission_resize(admission, head->capacity);
    ckv_store_relaxed_u32(&counts->second_touch, head->second_touch);
    ckv_store_relaxed_u64(&counts->ghost_clock, head->ghost_clock);
    ckv_store_relaxed_u64(&counts->full_bytes, head->full_bytes);
    ckv_store_relaxed_u64(&counts->live_sum, head->live_sum);
    ckv_store_relaxed_u64(&counts->requests, head->requests);
    ckv_store_relaxed_u64(&counts->misses[0], head->misses[0]);
    ckv_store_relaxed_u64(&counts->misses[1], head->misses[1]);
    return true;
}

/* The newer copy that is whole; returns its heats, or NULL. */
static uint8_t *
newest_checkpoint(const struct ckv_file *file, struct ckv_checkpoint_head *head)
{
    struct ckv_checkpoint_head other_head = {0};
    uint8_t *heats = read_checkpoint(file, 0, head);
    uint8_t *other = read_checkpoint(file, 1, &other_head);
    if (other != NULL && (heats == NULL || other_head.generation > head->generation)) {
        free(heats);
        *head = other_head;
        return other;
    }
    free(other);
    return heats;
}

/* Best effort: without a checkpoint every entry is cold. */
static void
restore_heats(struct rebuild *rebuild, uint32_t file_index)
{
    struct ckv_region *region = &rebuild->volume->region;
    const struct ckv_file *file = &rebuild->volume->files[file_index];
    struct ckv_checkpoint_head *head = &rebuild->checkpoints[file_index];
    CKV_POINT("rebuild.heats");
    uint8_t *heats = newest_checkpoint(file, head);
    if (heats == NULL) {
        *head = (struct ckv_checkpoint_head){0};
        return;
    }
    ckv_store_relaxed_u64(&region->paths[file_index].checkpoint_generation,
        head->generation);
    for (uint32_t i = 0; i < file->geometry.entry_count; i++) {
        const uint32_t entry = file->first_entry + i;
        const uint64_t state = ckv_load_relaxed_u64(&region->states[entry]);
        if (heats[i] != 0 && ckv_state_kind(state) == CKV_STATE_LIVE &&
            ckv_state_sequence(state) <= head->sequence) {
            ckv_store_relaxed_u8(&region->heats[entry], heats[i] > 2 ? 2 : heats[i]);
        }
    }
    free(heats);
}

/* Likewise: without a checkpoint nothing is known, and all is admitted until the volume
 * evicts. */
static void
restore_admission(struct rebuild *rebuild)
{
    struct ckv_volume *volume = rebuild->volume;
    const struct ckv_checkpoint_head *newest = NULL;
    CKV_POINT("rebuild.admission");
    for (uint32_t f = 0; f < volume->file_count; f++) {
        const struct ckv_checkpoint_head *head = &rebuild->checkpoints[f];
        if (head->ghost_words != 0 &&
            (newest == NULL || head->ghost_clock > newest->ghost_clock)) {
            newest = head;
        }
    }
    if (newest == NULL || !restore_counts(volume, newest)) {
        return;
    }
    for (uint32_t f = 0; f < volume->file_count; f++) {
        const struct ckv_checkpoint_head *head = &rebuild->checkpoints[f];
        if (same_time(newest->ghost_clock, head->ghost_clock)) {
            restore_ghost(volume, f, head);
        }
    }
}

/* Copies what a checkpoint says about admission; ghost_words stays 0 when there is
 * nothing to say. */
static void
describe_admission(const struct ckv_volume *volume, struct ckv_checkpoint_head *head,
    const struct ghost_part *part, uint32_t *words)
{
    const struct ckv_admission_head *counts = volume->region.admission.head;
    head->ghost_clock = ckv_load_relaxed_u64(&counts->ghost_clock);
    head->capacity = ckv_admission_capacity(&volume->region.admission);
    if (head->ghost_clock == 0 || head->capacity == 0) {
        return;
    }
    for (uint32_t i = 0; i < part->count; i++) {
        words[i] = ckv_load_relaxed_u32(&part->words[i]);
    }
    head->ghost_words = part->count;
    head->ghost_crc = ckv_crc32c(0, words, (uint64_t)part->count * sizeof *words);
    head->second_touch = ckv_load_relaxed_u32(&counts->second_touch) & 1;
    head->full_bytes = ckv_load_relaxed_u64(&counts->full_bytes);
    head->live_sum = ckv_load_relaxed_u64(&counts->live_sum);
    head->requests = ckv_load_relaxed_u64(&counts->requests);
    head->misses[0] = ckv_load_relaxed_u64(&counts->misses[0]);
    head->misses[1] = ckv_load_relaxed_u64(&counts->misses[1]);
}

static int
write_checkpoint(struct ckv_volume *volume, uint32_t file_index)
{
    const struct ckv_file *file = &volume->files[file_index];
    struct ckv_shared_path *path = &volume->region.paths[file_index];
    const struct ghost_part part = ghost_part_of(volume, file_index);
    const uint32_t count = file->geometry.entry_count;
    struct ckv_checkpoint_head head = {
        .magic = CKV_CHECKPOINT_MAGIC,
        .sequence = ckv_load_ordered_u64(&volume->region.header->sequence),
        .entry_count = count,
    };
    uint8_t *heats = malloc(count);
    uint32_t *words = malloc((uint64_t)part.count * sizeof *words + 1);
    if (heats == NULL || words == NULL) {
        free(heats);
        free(words);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < count; i++) {
        heats[i] = ckv_load_relaxed_u8(&volume->region.heats[file->first_entry + i]);
    }
    describe_admission(volume, &head, &part, words);
    /* Two processes at once write different copies, or spoil one that its checksum then
     * refuses while the other copy stays. */
    head.generation = ckv_add_ordered_u64(&path->checkpoint_generation, 1) + 1;
    head.heat_crc = ckv_crc32c(0, heats, count);
    head.seal = ckv_seal_of(&head, offsetof(struct ckv_checkpoint_head, seal));
    const uint64_t offset = checkpoint_offset(file, head.generation);
    CKV_POINT("checkpoint.heats");
    int result = ckv_os_write_all(file->data_fd, heats, count, offset + CKV_PAGE_BYTES);
    CKV_POINT("checkpoint.ghost");
    if (result == 0 && head.ghost_words != 0) {
        result = ckv_os_write_all(file->data_fd, words,
            (uint64_t)head.ghost_words * sizeof *words, offset + part.offset);
    }
    CKV_POINT("checkpoint.head");
    if (result == 0) {
        result = ckv_os_write_all(file->data_fd, &head, sizeof head, offset);
    }
    free(heats);
    free(words);
    if (result == 0) {
        ckv_store_relaxed_u64(&path->checkpoint_ns, ckv_os.realtime_ns());
    }
    return result;
}

int
ckv_checkpoint_write(struct ckv_volume *volume)
{
    int failure = 0;
    if (volume->mode == CKV_MODE_READ) {
        return 0;
    }
    for (uint32_t f = 0; f < volume->file_count; f++) {
        if (ckv_volume_file_usable(volume, &volume->files[f])) {
            const int result = write_checkpoint(volume, f);
            failure = result < 0 ? result : failure;
        }
    }
    return failure;
}

/* ---- all of it ------------------------------------------------------------------ */

static enum ckv_status
allocate(struct rebuild *rebuild, struct ckv_error *error)
{
    const struct ckv_volume *volume = rebuild->volume;
    uint32_t longest = 0; /* stripe, in entries */
    for (uint32_t f = 0; f < volume->file_count; f++) {
        const uint32_t entries = volume->files[f].geometry.stripe_entries;
        longest = entries > longest ? entries : longest;
    }
    rebuild->piece = malloc(PIECE_RECORDS * sizeof *rebuild->piece);
    rebuild->notes = calloc(volume->region.layout.entry_count, 1);
    rebuild->order = malloc(longest * sizeof *rebuild->order);
    rebuild->scratch = malloc(longest * sizeof *rebuild->scratch);
    rebuild->heap = malloc(longest * sizeof *rebuild->heap);
    if (rebuild->piece == NULL || rebuild->notes == NULL || rebuild->order == NULL ||
        rebuild->scratch == NULL || rebuild->heap == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM,
            "no memory to rebuild the index");
    }
    return CKV_OK;
}

static void
release(struct rebuild *rebuild)
{
    free(rebuild->piece);
    free(rebuild->notes);
    free(rebuild->order);
    free(rebuild->scratch);
    free(rebuild->heap);
    free(rebuild);
}

static void
begin_paths(struct rebuild *rebuild)
{
    struct ckv_volume *volume = rebuild->volume;
    uint64_t synced = UINT64_MAX;
    for (uint32_t f = 0; f < volume->file_count; f++) {
        const struct ckv_file *file = &volume->files[f];
        struct ckv_shared_path *path = &volume->region.paths[f];
        if (!file->present) {
            ckv_store_relaxed_u32(&path->failed, 1);
            continue;
        }
        see_sequence(rebuild, file->header.synced_sequence);
        ckv_store_relaxed_u64(&path->synced_sequence, file->header.synced_sequence);
        synced = ckv_min_u64(synced, file->header.synced_sequence);
    }
    /* What is newer in any file may not be whole on its medium. */
    volume->region.header->rebuilt_synced_sequence = synced == UINT64_MAX ? 0 : synced;
}

static void
finish_totals(struct rebuild *rebuild)
{
    struct ckv_region *region = &rebuild->volume->region;
    for (int i = 0; i < CKV_NAMESPACES_MAX; i++) {
        struct ckv_namespace *space = &region->namespaces[i];
        ckv_store_relaxed_u64(&space->entries, rebuild->namespace_entries[i]);
        ckv_store_relaxed_u64(&space->bytes, rebuild->namespace_bytes[i]);
    }
    region->header->rebuilt_entries = rebuild->entries;
    region->header->rebuild_dropped = rebuild->dropped;
    for (uint32_t f = 0; f < rebuild->volume->file_count; f++) {
        if (!ckv_volume_file_usable(rebuild->volume, &rebuild->volume->files[f])) {
            /* What it holds was not seen: none of its sequences may be given out again,
             * or its older blocks would win when it comes back (B4). */
            rebuild->last_sequence += UNSEEN_SEQUENCES;
            break;
        }
    }
    region->header->rebuilt_last_sequence = rebuild->last_sequence;
    ckv_store_ordered_u64(&region->header->sequence, rebuild->last_sequence);
    CKV_POINT("rebuild.done");
}

static void
run(struct rebuild *rebuild)
{
    struct ckv_volume *volume = rebuild->volume;
    for (uint32_t f = 0; f < volume->file_count; f++) {
        if (ckv_volume_file_usable(volume, &volume->files[f])) {
            read_table(rebuild, &volume->files[f]);
        }
    }
    for (uint32_t f = 0; f < volume->file_count; f++) {
        struct ckv_file *file = &volume->files[f];
        if (!file->present) {
            continue;
        }
        for (uint32_t s = 0; s < file->geometry.stripe_count; s++) {
            finish_stripe(rebuild, file, s);
        }
        restore_heats(rebuild, f);
    }
    restore_admission(rebuild);
    if (ckv_prefix_on(rebuild->volume)) {
        ckv_prefix_rebuilt(rebuild->volume);
    }
    finish_totals(rebuild);
}

enum ckv_status
ckv_rebuild(struct ckv_volume *volume, bool strike, struct ckv_error *error)
{
    ckv_atomic_u64 uncounted[CKV_COUNTER_COUNT] = {0}; /* no slot is owned yet */
    ckv_atomic_u64 *const counters = volume->counters;
    struct rebuild *rebuild = calloc(1, sizeof *rebuild);
    if (rebuild == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM,
            "no memory to rebuild the index");
    }
    rebuild->volume = volume;
    rebuild->strike = strike;
    volume->counters = counters != NULL ? counters : uncounted;
    CKV_POINT("rebuild.begin");
    enum ckv_status status = allocate(rebuild, error);
    if (status == CKV_OK) {
        begin_paths(rebuild);
        status = read_namespaces(rebuild, error);
    }
    if (status == CKV_OK) {
        run(rebuild);
    }
    volume->counters = counters;
    release(rebuild);
    return status == CKV_OK ? ckv_region_publish(volume, error) : status;
}
