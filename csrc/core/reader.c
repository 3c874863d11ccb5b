/* SPDX-License-Identifier: Apache-2.0 */
#include "reader.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "direct.h"
#include "io_pool.h"
#include "mapped.h"
#include "pin.h"
#include "policy.h"
#include "prefix.h"

enum {
    PIECE_BYTES = 256 * 1024,      /* of one read: checked while it is in cache */
    TRUSTED_PIECE_BYTES = 1 << 20, /* of one that needs no check */
    PIECE_VECTORS = 64,
    GROUP_BLOCKS = 128, /* of a batch, pinned at the same time */
    LOOKUPS_MAX = 1000  /* a key that is overwritten this often meanwhile is a miss */
};

#define LEASE_MAGIC UINT64_C(0x4c45415345a5f00d)

/* ---- scratch memory: one buffer per thread, so that no read faults in fresh pages -- */

enum { SMALL_BYTES = 8 * 1024 }; /* on the stack, where there is no such buffer */

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static bool scratch_usable;

static void
scratch_init(void)
{
    scratch_usable = pthread_key_create(&scratch_key, free) == 0;
}

static void *
scratch(void)
{
    (void)pthread_once(&scratch_once, scratch_init);
    if (!scratch_usable) {
        return NULL;
    }
    void *buffer = pthread_getspecific(scratch_key);
    if (buffer == NULL) {
        buffer = aligned_alloc(CKV_PAGE_BYTES, PIECE_BYTES);
        if (buffer != NULL && pthread_setspecific(scratch_key, buffer) != 0) {
            free(buffer);
            buffer = NULL;
        }
    }
    return buffer;
}

/* ---- checking --------------------------------------------------------------------- */

static uint64_t
data_offset_of(const struct ckv_record *record)
{
    return (uint64_t)record->first_page * CKV_PAGE_BYTES;
}

static uint64_t
extent_bytes(const struct ckv_record *record)
{
    return (uint64_t)ckv_record_pages(record->payload_bytes, record->header_bytes) *
           CKV_PAGE_BYTES;
}

/* The record of a found entry comes from the file: its extent is believed only inside the
 * bounds and where the region has it. */
static bool
extent_believable(struct ckv_volume *volume, const struct ckv_found *found)
{
    const struct ckv_place *place = &volume->region.places[found->entry];
    const uint32_t pages =
        ckv_record_pages(found->record.payload_bytes, found->record.header_bytes);
    return ckv_record_header_believable(&found->record) &&
           ckv_geometry_extent_valid(&found->file->geometry, found->record.first_page,
               pages) &&
           ckv_load_relaxed_u32(&place->first_page) == found->record.first_page &&
           ckv_load_relaxed_u32(&place->pages) == pages;
}

/* Reads in pieces of the buffer.  0 or -errno. */
static int
checksum_in(void *buffer, size_t buffer_bytes, const struct ckv_file *file,
    uint64_t data_offset, uint64_t length, uint32_t *crc)
{
    *crc = 0;
    for (uint64_t done = 0; done < length;) {
        const size_t piece = (size_t)ckv_min_u64(length - done, buffer_bytes);
        const int result = ckv_os_read_all(file->data_fd, buffer, piece,
            file->geometry.data_offset + data_offset + done);
        if (result < 0) {
            return result;
        }
        *crc = ckv_crc32c(*crc, buffer, piece);
        done += piece;
    }
    return 0;
}

static __attribute__((noinline)) int
checksum_slowly(const struct ckv_file *file, uint64_t data_offset, uint64_t length,
    uint32_t *crc)
{
    uint8_t small[SMALL_BYTES];
    return checksum_in(small, sizeof small, file, data_offset, length, crc);
}

int
ckv_reader_checksum(struct ckv_volume *volume, struct ckv_file *file,
    uint64_t data_offset, uint64_t length, uint32_t *crc)
{
    void *buffer = scratch();
    const int result = buffer != NULL ? checksum_in(buffer, PIECE_BYTES, file,
                                            data_offset, length, crc)
                                      : checksum_slowly(file, data_offset, length, crc);
    if (result == 0) {
        ckv_bump(volume, CKV_COUNTER_page_bytes_read, length);
        ckv_volume_moved(volume, length);
    }
    return result;
}

void
ckv_reader_advise(struct ckv_volume *volume, const struct ckv_found *found)
{
    const uint64_t bytes = extent_bytes(&found->record);
    (void)ckv_os.advise_file(found->file->data_fd,
        found->file->geometry.data_offset + data_offset_of(&found->record), bytes,
        CKV_ADVICE_WILL_NEED); /* advice */
    ckv_bump(volume, CKV_COUNTER_readahead_bytes, bytes);
}

static void
set_verified(struct ckv_volume *volume, const struct ckv_found *found)
{
    ckv_bump(volume, CKV_COUNTER_verified_blocks, 1);
    ckv_bump(volume, CKV_COUNTER_verified_bytes, found->record.payload_bytes);
    if (volume->mode == CKV_MODE_READ_WRITE) {
        CKV_POINT("get.verified");
        ckv_entry_set_verified(volume, found->entry, found->record.sequence);
    }
}

enum ckv_status
ckv_reader_verify(struct ckv_volume *volume, const struct ckv_found *found)
{
    const struct ckv_record *record = &found->record;
    const uint64_t offset = data_offset_of(record);
    uint32_t payload_crc = 0;
    uint32_t header_crc = 0;
    /* No advice before it: the kernel's own readahead runs on into the next blocks and
     * makes large folios, while CKV_ADVICE_WILL_NEED stops at the end of this one and
     * fills the cache with single pages, slower to read, map and copy ever after. */
    int result = ckv_reader_checksum(volume, found->file, offset, record->payload_bytes,
        &payload_crc);
    if (result == 0 && record->header_bytes > 0) {
        result = ckv_reader_checksum(volume, found->file,
            offset + record->payload_bytes, record->header_bytes, &header_crc);
    }
    if (result < 0) {
        ckv_bump(volume, CKV_COUNTER_read_errors, 1);
        return CKV_MISS;
    }
    if (payload_crc != record->payload_crc || header_crc != record->header_crc) {
        if (volume->mode == CKV_MODE_READ_WRITE) {
            (void)ckv_entry_kill(volume, found->entry, found->state, CKV_KILL_CORRUPT);
        } else {
            ckv_bump(volume, CKV_COUNTER_corrupt, 1);
        }
        return CKV_MISS;
    }
    set_verified(volume, found);
    return CKV_OK;
}

/* Whether the policy wants this read checked. */
static bool
wants_check(struct ckv_volume *volume, const struct ckv_found *found,
    enum ckv_verify verify)
{
    const uint64_t sequence = found->record.sequence;
    switch (verify) {
    case CKV_VERIFY_ALWAYS:
        return true;
    case CKV_VERIFY_NEVER:
        /* A record of an earlier life may stand over pages that a put which was cut short
         * has overwritten, whatever was synced before: only what this life stored is
         * trusted. */
        return sequence <= volume->region.header->rebuilt_last_sequence &&
               !ckv_entry_verified(volume, found->entry, sequence);
    case CKV_VERIFY_ONCE:
    default:
        return !ckv_entry_verified(volume, found->entry, sequence);
    }
}

/* What a reader is about to touch of an entry: the locked instructions of a pin would
 * wait for one line of memory after the other. */
static void
prefetch_entry(const struct ckv_volume *volume, uint32_t entry)
{
    __builtin_prefetch(&volume->pins[entry], 1);
    __builtin_prefetch(&volume->region.masks[entry], 1);
    __builtin_prefetch(&volume->region.places[entry]);
    __builtin_prefetch(&volume->region.marks[entry]);
    __builtin_prefetch(&volume->region.heats[entry], 1);
}

/* Finds and pins.  Looks again when the entry was killed in between (index.h, I3). */
static bool
find_pinned(struct ckv_volume *volume, const struct ckv_identity *identity,
    struct ckv_found *found)
{
    ckv_bump(volume, CKV_COUNTER_lookups, 1);
    for (int i = 0; i < LOOKUPS_MAX; i++) {
        if (!ckv_index_find(volume, identity, found)) {
            break;
        }
        CKV_POINT("get.found");
        if (volume->mode == CKV_MODE_READ) {
            if (!extent_believable(volume, found)) {
                break;
            }
            return true;
        }
        prefetch_entry(volume, found->entry);
        if (ckv_pin(volume, found->entry, found->state)) {
            if (extent_believable(volume, found)) {
                return true;
            }
            ckv_unpin(volume, found->entry);
            break;
        }
    }
    ckv_bump(volume, CKV_COUNTER_misses, 1);
    return false;
}

static void
drop_pin(struct ckv_volume *volume, const struct ckv_found *found)
{
    if (volume->mode == CKV_MODE_READ_WRITE) {
        ckv_unpin(volume, found->entry);
    }
}

/* Without a pin the bytes count only if the entry is still the same afterwards. */
static bool
still_valid(struct ckv_volume *volume, const struct ckv_found *found)
{
    ckv_fence_acquire();
    return volume->mode == CKV_MODE_READ_WRITE ||
           (ckv_volume_current(volume) &&
               ckv_load_ordered_u64(&volume->region.states[found->entry]) ==
                   found->state);
}

static enum ckv_status
missed(struct ckv_volume *volume, const struct ckv_found *found)
{
    drop_pin(volume, found);
    ckv_bump(volume, CKV_COUNTER_misses, 1);
    return CKV_MISS;
}

static void
count_hit(struct ckv_volume *volume, const struct ckv_found *found)
{
    ckv_bump(volume, CKV_COUNTER_hits, 1);
    ckv_bump(volume, CKV_COUNTER_payload_bytes_read, found->record.payload_bytes);
    if (volume->mode == CKV_MODE_READ_WRITE) {
        ckv_entry_heat(volume, found->entry, 1);
        ckv_policy_found(volume, found->hash, CKV_ACCESS_READ);
        if (ckv_prefix_on(volume)) {
            ckv_prefix_hit(volume, found, CKV_PREFIX_UNKNOWN, CKV_PREFIX_UNKNOWN);
        }
    }
}

/* ---- copies ----------------------------------------------------------------------- */

/* Where in the targets a byte of the payload goes. */
struct place_in_targets {
    size_t target;
    size_t used; /* bytes of it */
};

/* The vectors of the next piece, at most `limit` bytes; returns their sum. */
static size_t
next_vectors(const struct ckv_read *read, struct place_in_targets *place,
    uint64_t limit, struct iovec *iov, int *count)
{
    size_t piece = 0;
    *count = 0;
    while (piece < limit && *count < PIECE_VECTORS) {
        const struct ckv_target *current = &read->targets[place->target];
        const size_t left = current->length - place->used;
        const size_t length = left < limit - piece ? left : (size_t)(limit - piece);
        if (length > 0) {
            iov[(*count)++] =
                (struct iovec){.iov_base = (uint8_t *)current->data + place->used,
                    .iov_len = length};
            piece += length;
            place->used += length;
        }
        if (place->used == current->length) {
            place->target++;
            place->used = 0;
        }
    }
    return piece;
}

/* Reads the payload into the targets, extending *crc if wanted.  0 or -errno. */
static int
read_payload(const struct ckv_found *found, const struct ckv_read *read,
    uint64_t length, uint32_t *crc)
{
    const uint64_t base =
        found->file->geometry.data_offset + data_offset_of(&found->record);
    const uint64_t piece_limit = crc != NULL ? PIECE_BYTES : TRUSTED_PIECE_BYTES;
    struct place_in_targets place = {0};
    for (uint64_t at = 0; at < length;) {
        struct iovec iov[PIECE_VECTORS];
        struct iovec used_up[PIECE_VECTORS];
        int count = 0;
        const size_t piece = next_vectors(read, &place,
            ckv_min_u64(length - at, piece_limit), iov, &count);
        memcpy(used_up, iov, sizeof *iov * (size_t)count);
        const int result =
            ckv_os_readv_all(found->file->data_fd, used_up, count, base + at);
        if (result < 0) {
            return result;
        }
        for (int i = 0; crc != NULL && i < count; i++) {
            *crc = ckv_crc32c(*crc, iov[i].iov_base, iov[i].iov_len);
        }
        at += piece;
    }
    return 0;
}

/* Brings the payload into the targets.  What needs no check and is in memory is copied
 * out of the mapping; the rest is read in order, which is what the kernel's readahead
 * wants, and checked on the way.  Several threads would spoil the readahead, and gain
 * nothing where the bytes are in memory. */
static int
read_into(struct ckv_volume *volume, const struct ckv_found *found,
    const struct ckv_read *read, enum ckv_way way, uint32_t *crc)
{
    const uint64_t length = found->record.payload_bytes;
    bool copied = false;
    if (way == CKV_WAY_FILL) {
        copied = ckv_mapped_fill(volume, found) &&
                 ckv_mapped_copy(volume, found, read, true, crc);
    } else if (way != CKV_WAY_BUFFERED && crc == NULL) {
        copied = ckv_mapped_copy(volume, found, read, way == CKV_WAY_MEMORY, NULL);
    }
    int result = 0;
    if (!copied) {
        if (crc != NULL) {
            *crc = 0; /* not of what the mapping gave */
        }
        result = read_payload(found, read, length, crc);
        if (way == CKV_WAY_BUFFERED) {
            ckv_volume_moved(volume, length);
        }
    }
    if (result == 0) {
        ckv_bump(volume, CKV_COUNTER_page_bytes_read, length);
    }
    return result;
}

static bool
targets_suffice(const struct ckv_read *read, uint64_t payload_bytes)
{
    uint64_t total = 0;
    for (size_t i = 0; i < read->target_count && total <= payload_bytes; i++) {
        if (!ckv_add_u64(total, read->targets[i].length, &total)) {
            return !read->exact;
        }
    }
    return read->exact ? total == payload_bytes : total >= payload_bytes;
}

/* Whether the user header, which lies behind the payload, may be covered by the mark. */
static bool
header_sound(struct ckv_volume *volume, const struct ckv_found *found)
{
    const struct ckv_record *record = &found->record;
    uint32_t crc = 0;
    return record->header_bytes == 0 ||
           (ckv_reader_checksum(volume, found->file,
                data_offset_of(record) + record->payload_bytes, record->header_bytes,
                &crc) == 0 &&
               crc == record->header_crc);
}

/* Copies a pinned entry through the page cache, checked if the policy wants it. */
static enum ckv_status
copy_found(struct ckv_volume *volume, const struct ckv_found *found,
    enum ckv_verify verify, enum ckv_way way, const struct ckv_read *read)
{
    const bool check =
        wants_check(volume, found, verify) || volume->mode == CKV_MODE_READ;
    uint32_t crc = 0;
    int result = read_into(volume, found, read, way, check ? &crc : NULL);
    if (result == 0 && check && crc != found->record.payload_crc) {
        /* Either the stored bytes are bad, or somebody wrote to the targets meanwhile:
         * a reading of our own decides before an entry is killed. */
        if (!still_valid(volume, found) || ckv_reader_verify(volume, found) != CKV_OK) {
            return CKV_MISS;
        }
        crc = 0;
        result = read_into(volume, found, read, CKV_WAY_UNKNOWN, &crc);
        if (result == 0 && crc != found->record.payload_crc) {
            return CKV_MISS;
        }
    }
    if (result < 0) {
        ckv_bump(volume, CKV_COUNTER_read_errors, 1);
        return CKV_MISS;
    }
    if (!still_valid(volume, found)) {
        return CKV_MISS;
    }
    if (check) {
        ckv_bump(volume, CKV_COUNTER_verified_blocks, 1);
        ckv_bump(volume, CKV_COUNTER_verified_bytes, found->record.payload_bytes);
        if (volume->mode == CKV_MODE_READ_WRITE && header_sound(volume, found)) {
            ckv_entry_set_verified(volume, found->entry, found->record.sequence);
        }
    }
    return CKV_OK;
}

/* Finds and pins the block of a read whose targets hold it; else says why not. */
static bool
begin_copy(struct ckv_volume *volume, const struct ckv_identity *identity,
    struct ckv_read *read, struct ckv_found *found)
{
    read->payload_length = 0;
    if (!find_pinned(volume, identity, found)) {
        read->status = CKV_MISS;
        return false;
    }
    read->payload_length = found->record.payload_bytes;
    if (!targets_suffice(read, found->record.payload_bytes)) {
        drop_pin(volume, found);
        ckv_bump(volume, CKV_COUNTER_hits, 1); /* found, though not served */
        ckv_bump(volume, CKV_COUNTER_short_buffers, 1);
        read->status = CKV_SHORT_BUFFER;
        return false;
    }
    return true;
}

/* Counts, unpins, says how it ended. */
static void
end_copy(struct ckv_volume *volume, const struct ckv_found *found,
    struct ckv_read *read, enum ckv_status status)
{
    if (status != CKV_OK) {
        read->payload_length = 0;
        read->status = missed(volume, found);
        return;
    }
    count_hit(volume, found);
    drop_pin(volume, found);
    read->status = CKV_OK;
}

struct group { /* of pinned blocks that are copied together */
    struct ckv_volume *volume;
    enum ckv_verify verify;
    size_t plain_count;
    size_t direct_count;
    struct ckv_direct_plan *plan; /* of the direct ones, or NULL */
    size_t pieces;                /* of the plan */
    struct ckv_found found[GROUP_BLOCKS];
    struct ckv_read *reads[GROUP_BLOCKS];
    size_t plain[GROUP_BLOCKS]; /* which go through the page cache */
    enum ckv_way ways[GROUP_BLOCKS];
    struct ckv_direct_block direct[GROUP_BLOCKS];
};

static void
copy_plain(struct group *group, size_t index)
{
    const struct ckv_found *found = &group->found[index];
    struct ckv_read *read = group->reads[index];
    end_copy(group->volume, found, read,
        copy_found(group->volume, found, group->verify, group->ways[index], read));
}

static void
run_group_part(void *context, size_t index)
{
    struct group *group = context;
    if (index < group->pieces) {
        ckv_direct_read(group->plan, index);
    } else {
        copy_plain(group, group->plain[index - group->pieces]);
    }
}

/* A block that was read directly: counted like a verified one, or read again in the
 * plain way, which knows what to do about damage. */
static void
end_direct(struct group *group, const struct ckv_direct_block *block)
{
    struct ckv_volume *volume = group->volume;
    const size_t index = (size_t)(block->found - group->found);
    if (!block->sound) {
        copy_plain(group, index);
        return;
    }
    const struct ckv_record *record = &block->found->record;
    ckv_bump(volume, CKV_COUNTER_verified_blocks, 1);
    ckv_bump(volume, CKV_COUNTER_verified_bytes, record->payload_bytes);
    CKV_POINT("get.verified");
    ckv_entry_set_verified(volume, block->found->entry, record->sequence);
    end_copy(volume, block->found, group->reads[index], CKV_OK);
}

/* Copies what is in the group and has been sorted into plain and direct. */
static void
copy_group(struct group *group)
{
    struct ckv_volume *volume = group->volume;
    group->plan = NULL;
    if (group->direct_count > 0) {
        group->plan = ckv_direct_plan(volume, group->direct, group->direct_count);
    }
    group->pieces = group->plan != NULL ? ckv_direct_pieces(group->plan) : 0;
    ckv_io_pool_run(volume->pool, group->pieces + group->plain_count, run_group_part,
        group);
    if (group->plan != NULL) {
        ckv_direct_finish(&group->plan);
    }
    for (size_t i = 0; i < group->direct_count; i++) {
        end_direct(group, &group->direct[i]);
    }
}

static void
add_direct(struct group *group, size_t index)
{
    group->ways[index] = CKV_WAY_UNKNOWN; /* if it goes wrong */
    group->direct[group->direct_count++] =
        (struct ckv_direct_block){.found = &group->found[index],
            .read = group->reads[index]};
}

/* Apart from ckv_reader_copy(), whose stack it would make large. */
static __attribute__((noinline)) void
copy_alone(struct ckv_volume *volume, const struct ckv_found *found,
    enum ckv_verify verify, struct ckv_read *read)
{
    struct group group; /* the arrays are filled in as far as they are used */
    group.volume = volume;
    group.verify = verify;
    group.plain_count = group.direct_count = 0;
    group.found[0] = *found;
    group.reads[0] = read;
    add_direct(&group, 0);
    copy_group(&group);
}

enum ckv_status
ckv_reader_copy(struct ckv_volume *volume, const struct ckv_identity *identity,
    enum ckv_verify verify, struct ckv_read *read)
{
    struct ckv_found found;
    if (!begin_copy(volume, identity, read, &found)) {
        return read->status;
    }
    const enum ckv_way way = ckv_direct_way(volume, &found, found.record.payload_bytes);
    if (way == CKV_WAY_DIRECT) {
        copy_alone(volume, &found, verify, read);
    } else {
        end_copy(volume, &found, read, copy_found(volume, &found, verify, way, read));
    }
    return read->status;
}

void
ckv_reader_copy_many(struct ckv_volume *volume, const struct ckv_identity *identities,
    enum ckv_verify verify, struct ckv_read *const *reads, size_t count)
{
    struct group group; /* the arrays are filled in as far as they are used */
    group.volume = volume;
    group.verify = verify;
    for (size_t done = 0; done < count;) {
        uint64_t call_bytes = 0;
        size_t found = 0;
        for (; done < count && found < GROUP_BLOCKS; done++) {
            if (begin_copy(volume, &identities[done], reads[done],
                    &group.found[found])) {
                call_bytes += group.found[found].record.payload_bytes;
                group.reads[found++] = reads[done];
            }
        }
        group.plain_count = group.direct_count = 0;
        for (size_t i = 0; i < found; i++) {
            group.ways[i] = ckv_direct_way(volume, &group.found[i], call_bytes);
            if (group.ways[i] == CKV_WAY_DIRECT) {
                add_direct(&group, i);
            } else {
                group.plain[group.plain_count++] = i;
            }
        }
        copy_group(&group);
    }
}

/* ---- views ------------------------------------------------------------------------ */

/* A private copy of the payload, for readers without pins and unmappable files. */
static enum ckv_status
lease_copy(struct ckv_volume *volume, const struct ckv_found *found,
    enum ckv_verify verify, struct ckv_lease *lease)
{
    const size_t length = found->record.payload_bytes;
    lease->copy = malloc(length == 0 ? 1 : length);
    if (lease->copy == NULL) {
        return CKV_E_NO_MEMORY;
    }
    const struct ckv_target target = {.data = lease->copy, .length = length};
    const struct ckv_read read = {.targets = &target, .target_count = 1};
    lease->data = lease->copy;
    return copy_found(volume, found, verify, CKV_WAY_UNKNOWN, &read);
}

/* Verifies a block that is about to be mapped.  A large one that is not in memory comes
 * in as it would for a fault, not with the neighbours that readahead adds. */
static enum ckv_status
verify_mapped(struct ckv_volume *volume, const struct ckv_found *found)
{
    if (extent_bytes(&found->record) >= CKV_LARGE_FAULT_BYTES) {
        const enum ckv_way way =
            ckv_direct_way(volume, found, found->record.payload_bytes);
        void *buffer = scratch();
        /* Not by read calls, which would take its pages for the first of many. */
        if (buffer != NULL && (way == CKV_WAY_FILL || way == CKV_WAY_DIRECT) &&
            ckv_mapped_fill(volume, found) &&
            ckv_mapped_sound(volume, found, buffer, PIECE_BYTES)) {
            set_verified(volume, found);
            return CKV_OK;
        }
    }
    return ckv_reader_verify(volume, found);
}

static enum ckv_status
lease_map(struct ckv_volume *volume, const struct ckv_found *found,
    enum ckv_verify verify, struct ckv_lease *lease)
{
    if (wants_check(volume, found, verify)) {
        CKV_TRY(verify_mapped(volume, found));
    }
    const uint64_t offset = data_offset_of(&found->record);
    const void *address = ckv_file_data(found->file, offset);
    if (address == NULL) {
        ckv_bump(volume, CKV_COUNTER_map_failures, 1);
    }
    if (address == NULL || !ckv_mapped_intact(volume)) {
        return lease_copy(volume, found, CKV_VERIFY_ONCE, lease);
    }
    struct ckv_window *window = &found->file->windows[offset / CKV_CHUNK_BYTES];
    ckv_add_ordered_u64(&window->pins, 1);
    if (!ckv_mapped_populate(volume, found, window, address)) {
        ckv_add_ordered_u64(&window->pins, (uint64_t)-1);
        ckv_bump(volume, CKV_COUNTER_read_errors, 1);
        return CKV_MISS;
    }
    lease->window = window;
    lease->data = address;
    return CKV_OK;
}

static void
enlist(struct ckv_volume *volume, struct ckv_lease *lease)
{
    if (volume->mode == CKV_MODE_READ_WRITE) {
        struct ckv_slot *slot = &volume->region.slots[volume->slot];
        ckv_add_relaxed_u64(&slot->pinned_entries, 1);
        ckv_add_relaxed_u64(&slot->pinned_bytes, lease->pinned_bytes);
    }
    pthread_mutex_lock(&volume->leases_lock);
    lease->previous = volume->newest_lease;
    lease->next = NULL;
    if (volume->newest_lease != NULL) {
        volume->newest_lease->next = lease;
    } else {
        volume->oldest_lease = lease;
    }
    volume->newest_lease = lease;
    pthread_mutex_unlock(&volume->leases_lock);
}

static void
delist(struct ckv_volume *volume, struct ckv_lease *lease)
{
    pthread_mutex_lock(&volume->leases_lock);
    if (lease->previous != NULL) {
        lease->previous->next = lease->next;
    } else {
        volume->oldest_lease = lease->next;
    }
    if (lease->next != NULL) {
        lease->next->previous = lease->previous;
    } else {
        volume->newest_lease = lease->previous;
    }
    pthread_mutex_unlock(&volume->leases_lock);
    if (volume->mode == CKV_MODE_READ_WRITE) {
        struct ckv_slot *slot = &volume->region.slots[volume->slot];
        ckv_add_relaxed_u64(&slot->pinned_entries, (uint64_t)-1);
        ckv_add_relaxed_u64(&slot->pinned_bytes, -lease->pinned_bytes);
    }
}

enum ckv_status
ckv_reader_get(struct ckv_volume *volume, const struct ckv_identity *identity,
    enum ckv_verify verify, struct ckv_lease **result, struct ckv_error *error)
{
    struct ckv_found found;
    if (!find_pinned(volume, identity, &found)) {
        return CKV_MISS;
    }
    struct ckv_lease *lease = calloc(1, sizeof *lease);
    if (lease == NULL) {
        (void)missed(volume, &found);
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM, "no memory for a lease");
    }
    *lease = (struct ckv_lease){
        .magic = LEASE_MAGIC,
        .volume = volume,
        .entry = found.entry,
        .file = found.file,
        .sequence = found.record.sequence,
        .state = found.state,
        .record = found.record,
        .payload_length = found.record.payload_bytes,
        .pinned_bytes = extent_bytes(&found.record),
        .fd = -1,
        .pinned_tick = ckv_load_relaxed_u64(&volume->tick),
        .media_errors_before = ckv_load_relaxed_u64(&volume->media_errors),
    };
    const enum ckv_status status = volume->mode == CKV_MODE_READ_WRITE
                                       ? lease_map(volume, &found, verify, lease)
                                       : lease_copy(volume, &found, verify, lease);
    if (status != CKV_OK) {
        free(lease->copy);
        free(lease);
        (void)missed(volume, &found);
        return status < 0
                   ? ckv_fail(error, status, ENOMEM, "no memory for a copy of %u bytes",
                         found.record.payload_bytes)
                   : CKV_MISS;
    }
    count_hit(volume, &found);
    enlist(volume, lease);
    *result = lease;
    return CKV_OK;
}

void
ckv_reader_release(struct ckv_lease *lease)
{
    struct ckv_volume *volume = lease->volume;
    CKV_CHECK(lease->magic == LEASE_MAGIC);
    delist(volume, lease);
    if (lease->window != NULL) {
        ckv_add_ordered_u64(&lease->window->pins, (uint64_t)-1);
    }
    if (volume->mode == CKV_MODE_READ_WRITE) {
        ckv_unpin(volume, lease->entry);
    }
    if (lease->fd >= 0) {
        (void)ckv_os.close_file(lease->fd); /* read-only: nothing to lose */
    }
    lease->magic = 0;
    free(lease->copy);
    free(lease->header);
    free(lease);
}

/* A page that the guard replaced may be another's: the bytes themselves tell. */
bool
ckv_reader_ok(struct ckv_lease *lease)
{
    struct ckv_volume *volume = lease->volume;
    if (lease->window == NULL ||
        ckv_load_acquire_u64(&volume->media_errors) == lease->media_errors_before) {
        return true;
    }
    if (ckv_crc32c(0, lease->data, lease->payload_length) ==
        lease->record.payload_crc) {
        return true;
    }
    (void)ckv_entry_kill(volume, lease->entry, lease->state, CKV_KILL_CORRUPT);
    return false;
}

/* A malloc'd copy of the user header, or NULL. */
static void *
read_header(const struct ckv_lease *lease)
{
    struct ckv_volume *volume = lease->volume;
    void *header = malloc(lease->record.header_bytes);
    const uint64_t at = lease->file->geometry.data_offset +
                        data_offset_of(&lease->record) + lease->record.payload_bytes;
    if (header != NULL &&
        ckv_os_read_all(lease->file->data_fd, header, lease->record.header_bytes, at) ==
            0 &&
        ckv_crc32c(0, header, lease->record.header_bytes) == lease->record.header_crc &&
        (volume->mode == CKV_MODE_READ_WRITE ||
            ckv_load_ordered_u64(&volume->region.states[lease->entry]) ==
                lease->state)) {
        return header;
    }
    free(header);
    ckv_bump(volume, CKV_COUNTER_read_errors, 1);
    return NULL;
}

/* Reads the user header at its first use: it lies behind the payload, and a get that does
 * not ask for it makes no system call. */
const void *
ckv_reader_header(struct ckv_lease *lease, size_t *length)
{
    struct ckv_volume *volume = lease->volume;
    *length = 0;
    if (lease->record.header_bytes == 0) {
        return "";
    }
    pthread_mutex_lock(&volume->leases_lock);
    const bool known = lease->header != NULL;
    pthread_mutex_unlock(&volume->leases_lock);
    void *header =
        known ? NULL : read_header(lease); /* outside the lock: it may wait */
    pthread_mutex_lock(&volume->leases_lock);
    if (lease->header == NULL) {
        lease->header = header;
        header = NULL;
    }
    pthread_mutex_unlock(&volume->leases_lock);
    free(header); /* another thread was first */
    *length = lease->header != NULL ? lease->record.header_bytes : 0;
    return lease->header;
}
