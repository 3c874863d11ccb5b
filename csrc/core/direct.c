/* SPDX-License-Identifier: Apache-2.0 */
/* direct.c: which blocks are read around the page cache, and how (direct.h).
 *
 * The rule, for a block of at least 64 KiB that is to be copied:
 *
 *   1. More than an eighth of it is in the page cache, or any page of it is dirty (a
 *      direct read would write that back first).  Through the page cache.
 *   2. It begins where a recent first read ended, and the call copies less than 4 MiB:
 *      somebody reads in stored order, which the kernel's readahead does best.  Through
 *      the page cache.
 *   3. It was verified in this life of the region and has heat: it was read before and
 *      may be wanted again.  Through the page cache, which then keeps it; unless it was
 *      there and found no room (found_no_room()).
 *   4. Else directly.  Blocks of a call that lie one after the other are read together,
 *      in pieces of at most 2 MiB:
 *
 *        extents   |  A  |  B  |       C       |            D             |
 *        pieces    |           0           |           1           |   2  |
 *        segments  |  A  |  B  |   C   |   C   |        D      |     D    |
 *
 * Through the page cache means by read calls, or, from 2 MiB on and but for stored order,
 * by faults that read a huge page each (mapped.c): no neighbours come along.
 *
 *   K1  A segment is the part of one block in one piece.  Those of a block follow each
 *       other in the plan, in the order of its bytes.
 *   K2  A piece writes to targets of its own segments only, so that pieces need no lock.
 *   K3  What is checked is the bounce buffer, which nobody else can change; a caller that
 *       writes to its targets meanwhile cannot make a good block look damaged.
 *   K4  A target that cannot be stored to leaves its piece undelivered (guard.h); the
 *       plain way then says so with the error of a read call.
 */
#include "direct.h"

#include <errno.h>
#include <stdlib.h>

#include "bounce.h"
#include "crc32c.h"
#include "entry.h"
#include "guard.h"

enum {
    BLOCK_MIN_BYTES = 64 * 1024, /* below it a read is latency, however it is done */
    LARGE_CALL_BYTES = 4 << 20,  /* two pieces: enough to keep the device busy */
    CACHED_PART = 8,             /* rule 1 */
    PERSISTENCE = 16,            /* rule 3 */
    CHECKED_BYTES = 256 * 1024   /* checked and copied while in cache */
};

struct segment {
    struct ckv_direct_block *block;
    uint64_t at;     /* in its extent */
    uint32_t offset; /* in the piece */
    uint32_t bytes;  /* of payload and header; the fill is left out */
    uint32_t payload_crc;
    uint32_t header_crc;
};

struct piece {
    struct ckv_file *file;
    uint64_t offset; /* in the data area */
    uint64_t bytes;
    uint32_t first_segment;
    uint32_t segment_count;
    bool delivered;
};

struct ckv_direct_plan {
    struct ckv_volume *volume;
    struct ckv_direct_block *blocks;
    size_t block_count;
    struct piece *pieces;
    size_t piece_count;
    struct segment *segments;
    size_t segment_count;
};

static uint64_t
extent_begin(const struct ckv_found *found)
{
    return (uint64_t)found->record.first_page * CKV_PAGE_BYTES;
}

static uint64_t
extent_bytes(const struct ckv_found *found)
{
    return (uint64_t)ckv_record_pages(found->record.payload_bytes,
               found->record.header_bytes) *
           CKV_PAGE_BYTES;
}

/* ---- the rule --------------------------------------------------------------------- */

/* Whether a first read ended here lately; notes where this one ends.  Threads that race
 * lose a note, which costs speed and nothing else. */
static bool
follows(struct ckv_file *file, uint64_t begin, uint64_t end)
{
    for (uint32_t i = 0; i < CKV_READ_ENDS && begin != 0; i++) { /* 0: no note yet */
        if (ckv_load_relaxed_u64(&file->read_ends[i]) == begin) {
            ckv_store_relaxed_u64(&file->read_ends[i], end);
            return true;
        }
    }
    const uint64_t next = ckv_add_relaxed_u64(&file->read_end_next, 1);
    ckv_store_relaxed_u64(&file->read_ends[next % CKV_READ_ENDS], end);
    return false;
}

/* Whether a block that is wanted again was in the page cache before and found no room
 * there: to bring it in once more would only drive out another.  The kernel remembers
 * what it threw out, and whether that would have stayed had memory been a little larger.
 * One such block in PERSISTENCE is brought in all the same: what is wanted changes. */
static bool
found_no_room(struct ckv_volume *volume, const struct ckv_cached *cached,
    uint64_t pages)
{
    return cached->evicted_pages * 2 > pages && cached->recent_pages * 2 <= pages &&
           ckv_add_relaxed_u64(&volume->crowded_reads, 1) % PERSISTENCE != 0;
}

enum ckv_way
ckv_direct_way(struct ckv_volume *volume, const struct ckv_found *found,
    uint64_t call_bytes)
{
    struct ckv_file *file = found->file;
    if (volume->bounces == NULL || found->record.payload_bytes < BLOCK_MIN_BYTES ||
        ckv_file_direct(file) < 0) {
        return CKV_WAY_UNKNOWN;
    }
    const uint64_t begin = extent_begin(found);
    const uint64_t bytes = extent_bytes(found);
    const uint64_t pages = bytes / CKV_PAGE_BYTES;
    const bool again = ckv_load_relaxed_u8(&volume->region.heats[found->entry]) > 0 &&
                       ckv_entry_verified(volume, found->entry, found->record.sequence);
    /* A first reading is noted even where readahead was first: the next follows it. */
    bool stored_order = !again && follows(file, begin, begin + bytes);
    struct ckv_cached cached = {0};
    if (ckv_os.cached(file->data_fd, file->geometry.data_offset + begin, bytes,
            &cached) < 0) {
        ckv_file_no_direct(file); /* an old kernel, or a sandbox: never asked again */
        return CKV_WAY_UNKNOWN;
    }
    if (cached.pages == pages) {
        return CKV_WAY_MEMORY;
    }
    const bool large =
        bytes >= CKV_LARGE_FAULT_BYTES && ckv_file_large_faults(file, begin);
    stored_order = stored_order || (again && follows(file, begin, begin + bytes));
    const enum ckv_way through =
        large && !stored_order ? CKV_WAY_FILL : CKV_WAY_BUFFERED;
    if (cached.dirty_pages > 0 || cached.pages * CACHED_PART > pages) {
        return through;
    }
    if (stored_order && call_bytes < LARGE_CALL_BYTES) {
        return CKV_WAY_BUFFERED;
    }
    if (again && !found_no_room(volume, &cached, pages)) {
        return through;
    }
    return ckv_bounce_usable(volume->bounces) ? CKV_WAY_DIRECT : through;
}

/* ---- the plan --------------------------------------------------------------------- */

static int
by_place(const void *left, const void *right)
{
    const struct ckv_found *a = ((const struct ckv_direct_block *)left)->found;
    const struct ckv_found *b = ((const struct ckv_direct_block *)right)->found;
    if (a->file != b->file) {
        return a->file < b->file ? -1 : 1;
    }
    return (a->record.first_page > b->record.first_page) -
           (a->record.first_page < b->record.first_page);
}

/* The piece that the next byte of a file goes to: the last one while it goes on there
 * and has room, else a new one. */
static struct piece *
piece_for(struct ckv_direct_plan *plan, struct ckv_file *file, uint64_t offset)
{
    if (plan->piece_count > 0) {
        struct piece *last = &plan->pieces[plan->piece_count - 1];
        if (last->file == file && last->offset + last->bytes == offset &&
            last->bytes < CKV_BOUNCE_BYTES) {
            return last;
        }
    }
    struct piece *piece = &plan->pieces[plan->piece_count++];
    *piece = (struct piece){.file = file,
        .offset = offset,
        .first_segment = (uint32_t)plan->segment_count};
    return piece;
}

static void
add_block(struct ckv_direct_plan *plan, struct ckv_direct_block *block)
{
    const struct ckv_found *found = block->found;
    const uint64_t begin = extent_begin(found);
    const uint64_t bytes = extent_bytes(found);
    const uint64_t content =
        (uint64_t)found->record.payload_bytes + found->record.header_bytes;
    block->first_segment = (uint32_t)plan->segment_count;
    for (uint64_t at = 0; at < bytes;) {
        struct piece *piece = piece_for(plan, found->file, begin + at);
        const uint64_t length =
            ckv_min_u64(bytes - at, CKV_BOUNCE_BYTES - piece->bytes);
        plan->segments[plan->segment_count++] = (struct segment){.block = block,
            .at = at,
            .offset = (uint32_t)piece->bytes,
            .bytes = (uint32_t)(at < content ? ckv_min_u64(length, content - at) : 0)};
        piece->bytes += length;
        piece->segment_count++;
        at += length;
    }
    block->segments = (uint32_t)plan->segment_count - block->first_segment;
}

struct ckv_direct_plan *
ckv_direct_plan(struct ckv_volume *volume, struct ckv_direct_block *blocks,
    size_t count)
{
    size_t most = 0; /* pieces, and segments */
    for (size_t i = 0; i < count; i++) {
        blocks[i].sound = false;
        most += (size_t)(extent_bytes(blocks[i].found) / CKV_BOUNCE_BYTES) + 2;
    }
    const size_t bytes = most * (sizeof(struct segment) + sizeof(struct piece));
    struct ckv_direct_plan *plan = malloc(sizeof *plan + bytes);
    if (plan == NULL) {
        return NULL;
    }
    *plan = (struct ckv_direct_plan){.volume = volume,
        .blocks = blocks,
        .block_count = count};
    _Static_assert(sizeof *plan % _Alignof(struct segment) == 0 &&
                       sizeof(struct segment) % _Alignof(struct piece) == 0,
        "three arrays in one");
    plan->segments = (struct segment *)(void *)(plan + 1);
    plan->pieces = (struct piece *)(void *)(plan->segments + most);
    qsort(blocks, count, sizeof *blocks, by_place);
    for (size_t i = 0; i < count; i++) {
        add_block(plan, &blocks[i]);
    }
    CKV_DCHECK(plan->segment_count <= most && plan->piece_count <= most);
    return plan;
}

size_t
ckv_direct_pieces(const struct ckv_direct_plan *plan)
{
    return plan->piece_count;
}

/* ---- reading ---------------------------------------------------------------------- */

struct place { /* in the targets of a read */
    const struct ckv_target *target;
    size_t used; /* bytes of it */
};

static struct place
find_place(const struct ckv_read *read, uint64_t offset)
{
    struct place place = {.target = read->targets};
    while (offset > 0 && offset >= place.target->length) {
        offset -= place.target->length;
        place.target++;
    }
    place.used = (size_t)offset;
    return place;
}

static bool
scatter(struct place *place, const uint8_t *bytes, size_t length)
{
    while (length > 0) {
        if (place->used == place->target->length) {
            place->target++;
            place->used = 0;
            continue;
        }
        const size_t some =
            (size_t)ckv_min_u64(length, place->target->length - place->used);
        uint8_t *target = (uint8_t *)place->target->data + place->used;
        if (ckv_guard_copy(target, bytes, some) != 0) {
            return false;
        }
        place->used += some;
        bytes += some;
        length -= some;
    }
    return true;
}

/* Checks a segment and hands out its payload.  False: not to these targets (K4). */
static bool
deliver(struct segment *segment, const uint8_t *piece)
{
    const uint8_t *bytes = piece + segment->offset;
    const uint64_t payload_left =
        segment->block->found->record.payload_bytes -
        ckv_min_u64(segment->at, segment->block->found->record.payload_bytes);
    const size_t payload = (size_t)ckv_min_u64(segment->bytes, payload_left);
    if (payload > 0) {
        struct place place = find_place(segment->block->read, segment->at);
        for (size_t done = 0; done < payload; done += CHECKED_BYTES) {
            const size_t some = (size_t)ckv_min_u64(payload - done, CHECKED_BYTES);
            segment->payload_crc = ckv_crc32c(segment->payload_crc, bytes + done, some);
            if (!scatter(&place, bytes + done, some)) {
                return false;
            }
        }
    }
    segment->header_crc = ckv_crc32c(0, bytes + payload, segment->bytes - payload);
    return true;
}

void
ckv_direct_read(struct ckv_direct_plan *plan, size_t index)
{
    struct piece *piece = &plan->pieces[index];
    const int fd = ckv_guard_ready() ? ckv_file_direct(piece->file) : -1; /* K4 */
    uint8_t *buffer = fd < 0 ? NULL : ckv_bounce_take(plan->volume->bounces);
    if (buffer == NULL) {
        return; /* not delivered */
    }
    const int result = ckv_os_read_all(fd, buffer, (size_t)piece->bytes,
        piece->file->geometry.data_offset + piece->offset);
    if (result == 0) {
        piece->delivered = true;
        for (uint32_t i = 0; i < piece->segment_count && piece->delivered; i++) {
            piece->delivered =
                deliver(&plan->segments[piece->first_segment + i], buffer);
        }
        ckv_bump(plan->volume, CKV_COUNTER_page_bytes_read, piece->bytes);
        ckv_bump(plan->volume, CKV_COUNTER_direct_bytes, piece->bytes);
    } else if (result == -EINVAL || result == -EOPNOTSUPP) {
        ckv_file_no_direct(piece->file); /* not on this file system */
    }
    ckv_bounce_give(plan->volume->bounces, buffer);
}

/* The checksums of a block from those of its segments (K1). */
static bool
is_sound(const struct ckv_direct_plan *plan, const struct ckv_direct_block *block)
{
    const struct ckv_record *record = &block->found->record;
    uint32_t payload_crc = 0;
    uint32_t header_crc = 0;
    for (uint32_t i = 0; i < block->segments; i++) {
        const struct segment *segment = &plan->segments[block->first_segment + i];
        const uint64_t payload = ckv_min_u64(segment->bytes,
            record->payload_bytes - ckv_min_u64(segment->at, record->payload_bytes));
        payload_crc = ckv_crc32c_combine(payload_crc, segment->payload_crc, payload);
        header_crc = ckv_crc32c_combine(header_crc, segment->header_crc,
            segment->bytes - payload);
    }
    return payload_crc == record->payload_crc && header_crc == record->header_crc;
}

void
ckv_direct_finish(struct ckv_direct_plan **pointer)
{
    struct ckv_direct_plan *plan = *pointer;
    *pointer = NULL;
    for (size_t i = 0; i < plan->block_count; i++) {
        plan->blocks[i].sound = is_sound(plan, &plan->blocks[i]);
    }
    for (size_t i = 0; i < plan->piece_count; i++) {
        const struct piece *piece = &plan->pieces[i];
        for (uint32_t j = 0; !piece->delivered && j < piece->segment_count; j++) {
            plan->segments[piece->first_segment + j].block->sound = false;
        }
    }
    free(plan);
}
