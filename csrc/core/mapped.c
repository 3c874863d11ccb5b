/* SPDX-License-Identifier: Apache-2.0 */
/* mapped.c: what loads from the mapping of the data area (mapped.h).
 *
 *   X1  Page tables of a window are given back only while no view counts in its `pins`.
 *       A copy counts there too while it runs, and so does not lose them under way.
 *   X2  A copy out of the mapping is made only of a block that is pinned, needs no check,
 *       and lies in the page cache as a whole.  A page that goes meanwhile comes back by
 *       a fault; one that the device does not deliver ends the copy (guard.h), and the
 *       read call that follows says so with an error.
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

#include "guard.h"
#include "pin.h"

#ifndef EHWPOISON
#define EHWPOISON EIO
#endif

enum { COPY_MIN_BYTES = 32 * 1024 }; /* below it asking costs what the copy saves */

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

/* Requires: a count in window->pins (X1). */
static bool
populate(struct ckv_volume *volume, const struct ckv_found *found,
    struct ckv_window *window, const void *address)
{
    union { /* madvise takes no const */
        const void *in;
        void *out;
    } pointer = {.in = address};
    const uint64_t bytes = extent_bytes(&found->record);
    if (!ckv_pin_populated_before(volume, found->entry, found->record.sequence)) {
        ckv_add_relaxed_u64(&window->touched_bytes, bytes);
        const uint64_t touched =
            ckv_add_relaxed_u64(&volume->touched_bytes, bytes) + bytes;
        if (touched / CKV_PAGE_BYTES * 8 > volume->page_table_budget_bytes) {
            shrink_windows(volume);
        }
    }
    const int result = ckv_os.populate_read(pointer.out, (size_t)bytes);
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

void
ckv_mapped_moved(struct ckv_volume *volume, uint64_t bytes)
{
    ckv_add_relaxed_u64(&volume->moved_bytes, bytes);
}

void
ckv_mapped_fill(struct ckv_volume *volume, const struct ckv_found *found)
{
    const uint64_t offset = (uint64_t)found->record.first_page * CKV_PAGE_BYTES;
    const void *address = ckv_file_data(found->file, offset);
    if (address == NULL || !ckv_mapped_intact(volume)) {
        return; /* read calls bring it in */
    }
    struct ckv_window *window = &found->file->windows[offset / CKV_CHUNK_BYTES];
    ckv_add_ordered_u64(&window->pins, 1); /* X1 */
    ckv_mapped_moved(volume, extent_bytes(&found->record));
    (void)populate(volume, found, window, address); /* who reads it meets the error */
    ckv_add_ordered_u64(&window->pins, (uint64_t)-1);
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

static bool
scatter(const struct ckv_read *read, const uint8_t *bytes, uint64_t length)
{
    for (const struct ckv_target *target = read->targets; length > 0; target++) {
        const size_t some = (size_t)ckv_min_u64(length, target->length);
        if (some > 0 && ckv_guard_copy(target->data, bytes, some) != 0) {
            return false;
        }
        bytes += some;
        length -= some;
    }
    return true;
}

bool
ckv_mapped_copy(struct ckv_volume *volume, const struct ckv_found *found,
    const struct ckv_read *read, bool known_resident)
{
    const uint64_t offset = (uint64_t)found->record.first_page * CKV_PAGE_BYTES;
    if (volume->mode != CKV_MODE_READ_WRITE ||
        found->record.payload_bytes < COPY_MIN_BYTES || !ckv_mapped_intact(volume) ||
        !(known_resident || resident(found, offset)) || !ckv_guard_ready()) {
        return false;
    }
    const void *address = ckv_file_data(found->file, offset);
    if (address == NULL) {
        return false;
    }
    struct ckv_window *window = &found->file->windows[offset / CKV_CHUNK_BYTES];
    ckv_add_ordered_u64(&window->pins, 1); /* X1 */
    const bool copied = ckv_mapped_populate(volume, found, window, address) &&
                        scatter(read, address, found->record.payload_bytes) &&
                        ckv_mapped_intact(volume);
    ckv_add_ordered_u64(&window->pins, (uint64_t)-1);
    return copied;
}
