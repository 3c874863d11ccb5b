/* SPDX-License-Identifier: Apache-2.0 */
/* hold.c: a hold on the mapping of the data area, for whoever registers it with a driver.
 *
 * A driver that copies to a device by DMA wants to know addresses that stay what they
 * are: a chunk of the data area (1 GiB, never crossed by a block), mapped read-only.  A
 * hold keeps chunks mapped and the volume open in this process, as a lease does, until it
 * is released.  What the driver was told about is its business; the hold only remembers
 * which chunks are selected, so that a batch of keys is sorted in one call.
 *
 *   O1  A chunk that was asked for keeps its page tables (window->pins) and its address
 *       until the hold is released.
 *   O2  ckv_get_selected() pins as ckv_get() does, checksum included: bytes of a block
 *       that is not known to be sound are never handed out.  What it hands out lies in a
 *       chunk that was selected when it was looked up, as a whole.
 *   O3  In a forked child a hold does nothing: mapping and pins are the parent's.
 */
#include <errno.h>
#include <stdlib.h>

#include "cache.h"
#include "os.h"
#include "reader.h"

#define HOLD_MAGIC UINT64_C(0x484f4c44a5a5f00d)

struct held_chunk {
    ckv_atomic_u32 held; /* counted in the pins of its window (O1) */
    ckv_atomic_u32 selected;
};

struct ckv_hold {
    uint64_t magic;
    struct ckv_volume *volume; /* a reference is held */
    size_t chunk_count;        /* over all present files */
    struct held_chunk chunks[];
};

static size_t
chunks_of(const struct ckv_file *file)
{
    return file->present ? file->window_count : 0;
}

enum ckv_status
ckv_hold_open(struct ckv_cache *cache, struct ckv_hold **result,
    struct ckv_error *error)
{
    *result = NULL;
    CKV_TRY(ckv_cache_begin(cache, false, error));
    enum ckv_status status = CKV_OK;
    struct ckv_volume *volume = cache->volume;
    if (cache->read_only) {
        status = ckv_fail(error, CKV_E_READ_ONLY, 0,
            "a hold needs pins, which a cache opened with mode \"r\" cannot take");
    } else {
        size_t count = 0;
        for (uint32_t f = 0; f < volume->file_count; f++) {
            count += chunks_of(&volume->files[f]);
        }
        struct ckv_hold *hold =
            calloc(1, sizeof *hold + count * sizeof(struct held_chunk));
        if (hold == NULL) {
            status = ckv_fail(error, CKV_E_NO_MEMORY, 0, "no memory for a hold");
        } else {
            hold->magic = HOLD_MAGIC;
            hold->volume = volume;
            hold->chunk_count = count;
            ckv_volume_retain(volume);
            *result = hold;
        }
    }
    ckv_cache_end(cache);
    return status;
}

size_t
ckv_hold_chunks(const struct ckv_hold *hold)
{
    return hold->chunk_count;
}

const void *
ckv_hold_volume(const struct ckv_hold *hold)
{
    return hold->volume;
}

/* The file and the place in its data area where a chunk begins. */
static struct ckv_file *
locate_chunk(const struct ckv_hold *hold, size_t index, uint64_t *offset)
{
    *offset = 0;
    struct ckv_volume *volume = hold->volume;
    for (uint32_t f = 0; f < volume->file_count; f++) {
        struct ckv_file *file = &volume->files[f];
        const size_t count = chunks_of(file);
        if (index < count) {
            *offset = (uint64_t)index * CKV_CHUNK_BYTES;
            return file;
        }
        index -= count;
    }
    CKV_CHECK(false); /* files do not come and go while a volume is open */
    return NULL;
}

static enum ckv_status
check_hold(const struct ckv_hold *hold, size_t index, struct ckv_error *error)
{
    CKV_CHECK(hold->magic == HOLD_MAGIC);
    if (ckv_volume_forked(hold->volume)) { /* O3 */
        return ckv_fail(error, CKV_E_FORKED, 0,
            "this hold was taken before fork(); open the cache again in the child");
    }
    if (index >= hold->chunk_count) {
        return ckv_fail(error, CKV_E_INVALID, 0, "chunk %zu of a volume that has %zu",
            index, hold->chunk_count);
    }
    return CKV_OK;
}

enum ckv_status
ckv_hold_chunk(struct ckv_hold *hold, size_t index, struct ckv_chunk *chunk,
    struct ckv_error *error)
{
    *chunk = (struct ckv_chunk){0};
    CKV_TRY(check_hold(hold, index, error));
    uint64_t offset;
    struct ckv_file *file = locate_chunk(hold, index, &offset);
    const void *address = ckv_file_data(file, offset);
    if (address == NULL) {
        return ckv_fail(error, CKV_E_OS, 0,
            "chunk %zu of %s cannot be mapped; see the limits on address space and "
            "mappings (RLIMIT_AS, vm.max_map_count)",
            index, file->path);
    }
    uint32_t held = 0;
    if (ckv_cas_ordered_u32(&hold->chunks[index].held, &held, 1)) {
        ckv_add_ordered_u64(&file->windows[offset / CKV_CHUNK_BYTES].pins, 1); /* O1 */
    }
    chunk->address = address;
    chunk->length = ckv_min_u64(CKV_CHUNK_BYTES, file->geometry.data_bytes - offset);
    return CKV_OK;
}

enum ckv_status
ckv_hold_populate(struct ckv_hold *hold, size_t index, uint64_t offset, uint64_t length,
    struct ckv_error *error)
{
    struct ckv_chunk chunk;
    CKV_TRY(ckv_hold_chunk(hold, index, &chunk, error));
    if (offset % CKV_PAGE_BYTES != 0 || length % CKV_PAGE_BYTES != 0 ||
        offset > chunk.length || length > chunk.length - offset) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "%llu bytes at %llu of a chunk that has %llu; whole pages are needed",
            (unsigned long long)length, (unsigned long long)offset,
            (unsigned long long)chunk.length);
    }
    union { /* madvise takes no const */
        const char *in;
        void *out;
    } pointer = {.in = (const char *)chunk.address + offset};
    const int result = ckv_os.populate_read(pointer.out, (size_t)length);
    if (result == -EFAULT || result == -EIO || result == -ENOMEM) {
        return ckv_fail(error, CKV_E_OS, -result,
            "pages of chunk %zu cannot be brought into memory", index);
    }
    return CKV_OK; /* anything else: an older kernel; who needs the pages faults */
}

void
ckv_hold_select(struct ckv_hold *hold, size_t index, bool selected)
{
    CKV_CHECK(hold->magic == HOLD_MAGIC && index < hold->chunk_count);
    ckv_store_ordered_u32(&hold->chunks[index].selected, selected ? 1 : 0);
}

void
ckv_hold_release(struct ckv_hold **pointer)
{
    struct ckv_hold *hold = *pointer;
    if (hold == NULL) {
        return;
    }
    *pointer = NULL;
    CKV_CHECK(hold->magic == HOLD_MAGIC);
    struct ckv_volume *volume = hold->volume;
    if (ckv_volume_forked(volume)) {
        return; /* O3 */
    }
    for (size_t i = 0; i < hold->chunk_count; i++) {
        uint64_t offset;
        struct ckv_file *file = locate_chunk(hold, i, &offset);
        if (ckv_load_ordered_u32(&hold->chunks[i].held) != 0) {
            ckv_add_ordered_u64(&file->windows[offset / CKV_CHUNK_BYTES].pins,
                (uint64_t)-1);
        }
    }
    hold->magic = 0;
    free(hold);
    ckv_volume_release(volume);
}

/* ---- pinning a batch -------------------------------------------------------------- */

static bool
in_selected(const struct ckv_hold *hold, const struct ckv_file *wanted,
    uint64_t data_offset)
{
    size_t first = 0;
    for (uint32_t f = 0; f < hold->volume->file_count; f++) {
        const struct ckv_file *file = &hold->volume->files[f];
        const size_t count = chunks_of(file);
        const uint64_t index = data_offset / CKV_CHUNK_BYTES;
        if (file == wanted) {
            return index < count &&
                   ckv_load_ordered_u32(&hold->chunks[first + index].selected) != 0;
        }
        first += count;
    }
    return false;
}

static uint64_t
offset_of(const struct ckv_record *record)
{
    return (uint64_t)record->first_page * CKV_PAGE_BYTES;
}

static enum ckv_status
pin_one(struct ckv_cache *cache, const struct ckv_hold *hold, struct ckv_pin *pin,
    struct ckv_error *error)
{
    struct ckv_volume *volume = cache->volume;
    struct ckv_identity identity;
    CKV_TRY(ckv_cache_identify(cache, &pin->key, &identity, error));
    struct ckv_found found;
    if (!ckv_index_find(volume, &identity, &found)) {
        ckv_bump(volume, CKV_COUNTER_lookups, 1);
        ckv_bump(volume, CKV_COUNTER_misses, 1);
        return CKV_MISS;
    }
    pin->payload_length = found.record.payload_bytes;
    if (hold == NULL || !in_selected(hold, found.file, offset_of(&found.record))) {
        return CKV_OK;
    }
    const enum ckv_status status =
        ckv_reader_get(volume, &identity, cache->verify, &pin->lease, error);
    if (status != CKV_OK) {
        return status;
    }
    ckv_volume_retain(volume);
    pin->payload_length = pin->lease->payload_length;
    /* Overwritten meanwhile, or not to be taken from the mapping: O2. */
    if (pin->lease->window == NULL ||
        !in_selected(hold, pin->lease->file, offset_of(&pin->lease->record))) {
        ckv_lease_release(&pin->lease);
    }
    return CKV_OK;
}

enum ckv_status
ckv_get_selected(struct ckv_cache *cache, const struct ckv_hold *hold,
    struct ckv_pin *pins, size_t count, struct ckv_error *error)
{
    CKV_CHECK(hold == NULL || hold->magic == HOLD_MAGIC);
    CKV_TRY(ckv_cache_begin(cache, false, error));
    enum ckv_status status = CKV_OK;
    if (hold != NULL && hold->volume != cache->volume) {
        status = ckv_fail(error, CKV_E_INVALID, 0, "the hold is one of another volume");
    }
    for (size_t i = 0; i < count; i++) {
        pins[i].lease = NULL;
        pins[i].payload_length = 0;
    }
    size_t done = 0;
    for (; status >= 0 && done < count; done++) {
        status = pin_one(cache, hold, &pins[done], error);
        pins[done].status = status;
    }
    ckv_cache_end(cache);
    if (status < 0) {
        for (size_t i = 0; i < done; i++) {
            ckv_lease_release(&pins[i].lease);
        }
        return status;
    }
    return CKV_OK;
}
