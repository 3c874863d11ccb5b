/* SPDX-License-Identifier: Apache-2.0 */
/* mapped.c: what loads from the mapping of the data area (mapped.h).
 *
 *   X1  Page tables of a window are given back only while no view counts in its `pins`.
 *       A copy counts there too while it runs, and so does not lose them under way.
 *   X2  A copy out of the mapping is made only of a block that is pinned, and lies in the
 *       page cache as a whole or has just been brought there (ckv_mapped_fill).  A page
 *       that goes meanwhile comes back by a fault; one that the device does not deliver
 *       ends the copy (guard.h), and the read call that follows says so with an error.
 *       What needs a check is checked where the copy of it lies.
 *   X3  Once a page of any view was replaced by zeros (guard.h), which stay there, the
 *       mapping is no more than what views already hold: nothing else is taken from it.
 *       A copy looks for that again when it is done, since the page may belong to the
 *       same block.
 *   X4  A get asks no system call what is in memory.  So it counts what came in since the
 *       pages of a block were populated: after 256 MiB they are populated again.  That
 *       brings back what was thrown out, by large requests and with an error instead of a
 *       signal, and tells the kernel that they are in use, which it does not learn from
 *       loads in a mapping with this advice (os.h, large_faults).  Nothing hangs on the
 *       count: pages that are gone come back by faults.
 */
#include "mapped.h"

#include <errno.h>
#include <string.h>

#include "crc32c.h"
#include "guard.h"
#include "pin.h"

#ifndef EHWPOISON
#define EHWPOISON EIO
#endif

enum {
    COPY_MIN_BYTES = 32 * 1024, /* below it asking costs what the copy saves */
    CHECKED_BYTES = 256 * 1024
};

static uint64_t
extent_bytes(const struct ckv_record *record)
{
    return (uint64_t)ckv_record_pages(record->payload_bytes, record->header_bytes) *
           CKV_PAGE_BYTES;
}

/* Gives page tables back: windows that no view uses lose theirs. */
static void
shrink_windows(struct ckv_volume *volume)
{
    for (uint32_t f = 0; f < volume->file_count; f++) {
        struct ckv_file *file = &volume->files[f];
        for (uint32_t w = 0; w < file->window_count; w++) {
            struct ckv_window *window = &file->windows[w];
            const uint64_t address = ckv_load_acquire_u64(&window->address);
            const uint64_t touched = ckv_load_relaxed_u64(&window->touched_bytes);
            if (address == 0 || touched == 0 ||
                ckv_load_ordered_u64(&window->pins) != 0) {
                continue;
            }
            const uint64_t begin = (uint64_t)w * CKV_CHUNK_BYTES;
            const size_t length =
                (size_t)ckv_min_u64(CKV_CHUNK_BYTES, file->geometry.data_bytes - begin);
            /* A view that comes meanwhile faults its pages in again: slower, not
             * wrong. */
            (void)ckv_os.drop_pages((void *)(uintptr_t)address, length);
            ckv_add_relaxed_u64(&volume->touched_bytes, -touched);
            ckv_add_relaxed_u64(&window->touched_bytes, -touched);
            ckv_bump(volume, CKV_COUNTER_window_drops, 1);
        }
    }
}

/* Counts the page tables of a block once for each of its lives. */
static void
note_touched(struct ckv_volume *volume, const struct ckv_found *found,
    struct ckv_window *window)
{
    if (ckv_pin_populated_before(volume, found->entry, found->record.sequence)) {
        return;
    }
    const uint64_t bytes = extent_bytes(&found->record);
    ckv_add_relaxed_u64(&window->touched_bytes, bytes);
    const uint64_t touched = ckv_add_relaxed_u64(&volume->touched_bytes, bytes) + bytes;
    if (touched / CKV_PAGE_BYTES * 8 > volume->page_table_budget_bytes) {
        shrink_windows(volume);
    }
}

/* Counts what is about to come into the page cache.  For less than a huge page a fault
 * would read too much: such a block is asked for by its bounds. */
static void
prepare_to_move(struct ckv_volume *volume, const struct ckv_found *found)
{
    const uint64_t bytes = extent_bytes(&found->record);
    const uint64_t offset = found->file->geometry.data_offset +
                            (uint64_t)found->record.first_page * CKV_PAGE_BYTES;
    struct ckv_cached cached = {0};
    if (ckv_os.cached(found->file->data_fd, offset, bytes, &cached) != 0 ||
        cached.pages * CKV_PAGE_BYTES >= bytes) {
        return;
    }
    ckv_volume_moved(volume, bytes - cached.pages * CKV_PAGE_BYTES);
    if (bytes < CKV_LARGE_FAULT_BYTES) {
        (void)ckv_os.advise_file(found->file->data_fd, offset, bytes,
            CKV_ADVICE_WILL_NEED); /* advice */
    }
}

/* Requires: a count in window->pins (X1). */
static bool
populate(struct ckv_volume *volume, const struct ckv_found *found,
    struct ckv_window *window, const void *address)
{
    union { /* madvise takes no const */
        const void *in;
        void *out;
    } pointer = {.in = address};
    note_touched(volume, found, window);
    prepare_to_move(volume, found);
    const int result =
        ckv_os.populate_read(pointer.out, (size_t)extent_bytes(&found->record));
    if (result == -EFAULT || result == -EIO || result == -EHWPOISON) {
        return false;
    }
    /* Anything else: the kernel does not know the advice; the loads fault one by one. */
    ckv_pin_set_populated(volume, found->entry, found->record.sequence);
    return true;
}

bool
ckv_mapped_populate(struct ckv_volume *volume, const struct ckv_found *found,
    struct ckv_window *window, const void *address)
{
    return ckv_pin_populated(volume, found->entry, found->record.sequence) ||
           populate(volume, found, window, address);
}

bool
ckv_mapped_intact(const struct ckv_volume *volume)
{
    ckv_fence_acquire(); /* behind the loads that it is to judge */
    return ckv_load_acquire_u64(&volume->media_errors) == 0;
}

/* Whether every page of the payload is in memory. */
static bool
resident(const struct ckv_found *found, uint64_t offset)
{
    const uint64_t bytes = ckv_align_up(found->record.payload_bytes, CKV_PAGE_BYTES);
    struct ckv_cached cached = {0};
    return ckv_os.cached(found->file->data_fd,
               found->file->geometry.data_offset + offset, bytes, &cached) == 0 &&
           cached.pages == bytes / CKV_PAGE_BYTES;
}

struct place { /* in the targets of a read */
    const struct ckv_target *target;
    size_t used; /* bytes of it */
};

/* Copies the next bytes, checked piece by piece while they are in cache. */
static bool
scatter(struct place *place, const uint8_t *bytes, uint64_t length, uint32_t *crc)
{
    const uint64_t piece_limit = crc == NULL ? UINT64_MAX : CHECKED_BYTES;
    while (length > 0) {
        const size_t left = place->target->length - place->used;
        if (left == 0) {
            place->target++;
            place->used = 0;
            continue;
        }
        const size_t some = (size_t)ckv_min_u64(ckv_min_u64(length, left), piece_limit);
        uint8_t *to = (uint8_t *)place->target->data + place->used;
        if (ckv_guard_copy(to, bytes, some) != 0) {
            return false;
        }
        if (crc != NULL) {
            *crc = ckv_crc32c(*crc, to, some);
        }
        place->used += some;
        bytes += some;
        length -= some;
    }
    return true;
}

/* The address of a pinned block whose window keeps its page tables until
 * leave_mapping() (X1), its pages present, or made so `again`; NULL: not to be loaded
 * from. */
static const void *
enter_mapping(struct ckv_volume *volume, const struct ckv_found *found,
    struct ckv_window **window, bool again)
{
    const uint64_t offset = (uint64_t)found->record.first_page * CKV_PAGE_BYTES;
    const void *address = ckv_file_data(found->file, offset);
    if (address == NULL) {
        return NULL;
    }
    *window = &found->file->windows[offset / CKV_CHUNK_BYTES];
    ckv_add_ordered_u64(&(*window)->pins, 1);
    if (again ? populate(volume, found, *window, address)
              : ckv_mapped_populate(volume, found, *window, address)) {
        return address;
    }
    ckv_add_ordered_u64(&(*window)->pins, (uint64_t)-1);
    return NULL;
}

static void
leave_mapping(struct ckv_window *window)
{
    ckv_add_ordered_u64(&window->pins, (uint64_t)-1);
}

bool
ckv_mapped_copy(struct ckv_volume *volume, const struct ckv_found *found,
    const struct ckv_read *read, bool known_resident, uint32_t *crc)
{
    const uint64_t offset = (uint64_t)found->record.first_page * CKV_PAGE_BYTES;
    if (volume->mode != CKV_MODE_READ_WRITE ||
        found->record.payload_bytes < COPY_MIN_BYTES || !ckv_mapped_intact(volume) ||
        !(known_resident || resident(found, offset)) || !ckv_guard_ready()) {
        return false;
    }
    struct ckv_window *window = NULL;
    const void *address = enter_mapping(volume, found, &window, false);
    if (address == NULL) {
        return false;
    }
    struct place place = {.target = read->targets};
    const bool copied = scatter(&place, address, found->record.payload_bytes, crc) &&
                        ckv_mapped_intact(volume);
    leave_mapping(window);
    return copied;
}

static bool
load_checksum(const uint8_t *bytes, uint64_t length, void *scratch,
    size_t scratch_bytes, uint32_t *crc)
{
    *crc = 0;
    for (uint64_t done = 0; done < length; done += scratch_bytes) {
        const size_t piece = (size_t)ckv_min_u64(length - done, scratch_bytes);
        if (ckv_guard_copy(scratch, bytes + done, piece) != 0) {
            return false;
        }
        *crc = ckv_crc32c(*crc, scratch, piece);
    }
    return true;
}

bool
ckv_mapped_sound(struct ckv_volume *volume, const struct ckv_found *found,
    void *scratch, size_t scratch_bytes)
{
    const struct ckv_record *record = &found->record;
    struct ckv_window *window = NULL;
    if (!ckv_mapped_intact(volume) || !ckv_guard_ready()) {
        return false;
    }
    const uint8_t *address = enter_mapping(volume, found, &window, false);
    if (address == NULL) {
        return false;
    }
    uint32_t payload_crc = 0;
    uint32_t header_crc = 0;
    const bool loaded =
        load_checksum(address, record->payload_bytes, scratch, scratch_bytes,
            &payload_crc) &&
        load_checksum(address + record->payload_bytes, record->header_bytes, scratch,
            scratch_bytes, &header_crc) &&
        ckv_mapped_intact(volume);
    leave_mapping(window);
    return loaded && payload_crc == record->payload_crc &&
           header_crc == record->header_crc;
}

bool
ckv_mapped_fill(struct ckv_volume *volume, const struct ckv_found *found)
{
    struct ckv_window *window = NULL;
    if (volume->mode != CKV_MODE_READ_WRITE || !ckv_mapped_intact(volume) ||
        enter_mapping(volume, found, &window, true) == NULL) {
        return false;
    }
    leave_mapping(window);
    return true;
}
