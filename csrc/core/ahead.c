/* SPDX-License-Identifier: Apache-2.0 */
/* ahead.c: readers in stored order, and what is read ahead of them (ahead.h).
 *
 * The kernel reads ahead too, but by one request after another into small pages, and it
 * asks for the next window only when the reader has come to it: the device waits while
 * blocks are checked and copied.  Here the I/O threads fault one huge page after another
 * in, up to 16 MiB ahead, and so keep some requests of 2 MiB in flight.
 *
 *   V1  read_ends[i] is where a first read ended lately, read_aheads[i] up to where it was
 *       read ahead.  Threads that race lose notes, which costs speed and nothing else.
 *   V2  An errand names a huge page of a file by its number.  It needs nothing of the
 *       block that lies there, and runs only while the pool does, which is freed before
 *       the mappings are.
 *   V3  It asks by advice, which meets an error of the device without a signal, and keeps
 *       it to itself: who reads the block meets it again.
 */
#include "ahead.h"

#include "io_pool.h"

#define AHEAD_BYTES (8 * CKV_LARGE_FAULT_BYTES)

bool
ckv_ahead_follows(struct ckv_file *file, uint64_t begin, uint64_t end)
{
    for (uint32_t i = 0; i < CKV_READ_ENDS && begin != 0; i++) { /* 0: no note yet */
        if (ckv_load_relaxed_u64(&file->read_ends[i]) == begin) {
            ckv_store_relaxed_u64(&file->read_ends[i], end);
            return true;
        }
    }
    const uint64_t next = ckv_add_relaxed_u64(&file->read_end_next, 1) % CKV_READ_ENDS;
    ckv_store_relaxed_u64(&file->read_ends[next], end);
    ckv_store_relaxed_u64(&file->read_aheads[next], 0);
    return false;
}

static void
fault_in(void *context, size_t number)
{
    struct ckv_file *file = context;
    const uint64_t offset = (uint64_t)number * CKV_LARGE_FAULT_BYTES;
    const void *address = ckv_file_data(file, offset);
    if (address == NULL) {
        return;
    }
    union { /* madvise takes no const */
        const void *in;
        void *out;
    } pointer = {.in = address};
    struct ckv_window *window = &file->windows[offset / CKV_CHUNK_BYTES];
    ckv_add_ordered_u64(&window->pins, 1); /* X1 of mapped.c */
    (void)ckv_os.populate_read(pointer.out, CKV_PAGE_BYTES); /* V3 */
    ckv_add_ordered_u64(&window->pins, (uint64_t)-1);
}

void
ckv_ahead_post(struct ckv_volume *volume, struct ckv_file *file, uint64_t from,
    uint64_t end)
{
    uint32_t reader = 0;
    while (reader < CKV_READ_ENDS &&
           ckv_load_relaxed_u64(&file->read_ends[reader]) != end) {
        reader++;
    }
    if (reader == CKV_READ_ENDS) {
        return; /* another thread took the note */
    }
    const uint64_t limit = ckv_min_u64(from + AHEAD_BYTES, file->geometry.data_bytes);
    uint64_t next = ckv_align_up(from, CKV_LARGE_FAULT_BYTES);
    const uint64_t asked = ckv_load_relaxed_u64(&file->read_aheads[reader]);
    if (asked > next && asked <= limit) {
        next = asked;
    }
    for (; next < limit; next += CKV_LARGE_FAULT_BYTES) {
        ckv_io_pool_post(volume->pool, fault_in, file, next / CKV_LARGE_FAULT_BYTES);
        ckv_volume_moved(volume, CKV_LARGE_FAULT_BYTES);
    }
    ckv_store_relaxed_u64(&file->read_aheads[reader], next);
}
