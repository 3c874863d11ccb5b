/* SPDX-License-Identifier: Apache-2.0 */
/* file.c: header copies, mappings and records of a volume file.
 *
 * A header copy is believed if its seal agrees.  A sealed copy of another version, byte
 * order or page size makes the file somebody else's even when the other copy is ours: it
 * may be in the middle of an upgrade.  Without any sealed copy the first fields, which
 * every version has at the same place, decide what the refusal says.
 */
#include "file_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "guard.h"

/* ---- mapping -------------------------------------------------------------------- */

/* Areas start on 4 096 bytes; mappings start on pages of this system, perhaps larger. */
static uint64_t
offset_in_page(uint64_t offset)
{
    static const uint64_t fallback = CKV_PAGE_BYTES;
    const long page = sysconf(_SC_PAGESIZE); /* from memory, no system call */
    return offset % (page > 0 ? (uint64_t)page : fallback);
}

int
ckv_file_map_range(int fd, uint64_t offset, uint64_t length, const void **address)
{
    const uint64_t before = offset_in_page(offset);
    void *mapped = NULL;
    const int result = ckv_os.map(NULL, (size_t)(length + before), PROT_READ,
        MAP_SHARED, fd, offset - before, &mapped);
    *address = result == 0 ? (const char *)mapped + before : NULL;
    return result;
}

void
ckv_file_unmap_range(const void *address, uint64_t length)
{
    union { /* munmap takes no const */
        const char *mapped;
        void *unmapped;
    } range = {.mapped = address};
    const uint64_t before = offset_in_page((uint64_t)(uintptr_t)address);
    range.mapped -= before;
    /* Fails for addresses that are none of ours only. */
    (void)ckv_os.unmap(range.unmapped, (size_t)(length + before));
}

static enum ckv_status
map_guarded(struct ckv_file *file, uint64_t offset, uint64_t length,
    const void **address, struct ckv_error *error)
{
    const void *mapped = NULL;
    const int result = ckv_file_map_range(file->data_fd, offset, length, &mapped);
    if (result < 0) {
        return ckv_fail(error, result == -ENOMEM ? CKV_E_NO_MEMORY : CKV_E_UNSUPPORTED,
            -result, "cannot map %llu bytes of \"%s\" (%s): %s%s",
            (unsigned long long)length, ckv_file_shown(file->path).text,
            file->file_system.name, strerror(-result),
            result == -ENOMEM ? "; raise the limit of address space (ulimit -v)" : "");
    }
    const enum ckv_status status =
        ckv_guard_add(mapped, length, &file->lost_pages, error);
    if (status != CKV_OK) {
        ckv_file_unmap_range(mapped, length);
        return status;
    }
    *address = mapped;
    return CKV_OK;
}

static void
unmap_guarded(const void *address, uint64_t length)
{
    ckv_guard_remove(address);
    ckv_file_unmap_range(address, length);
}

enum ckv_status
ckv_file_map(struct ckv_file *file, struct ckv_error *error)
{
    CKV_CHECK(file->table == NULL && file->head == NULL && file->windows == NULL);
    const struct ckv_geometry *geometry = &file->geometry;
    const uint64_t chunks =
        (geometry->data_bytes + CKV_CHUNK_BYTES - 1) / CKV_CHUNK_BYTES;
    struct ckv_window *windows = calloc((size_t)chunks, sizeof(*windows));
    if (windows == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM,
            "out of memory for the windows of \"%s\"", ckv_file_shown(file->path).text);
    }
    const void *head = NULL;
    const void *table = NULL;
    enum ckv_status status = map_guarded(file, 0, CKV_HEAD_BYTES, &head, error);
    if (status == CKV_OK) {
        status = map_guarded(file, geometry->table_offset, geometry->table_bytes,
            &table, error);
    }
    if (status != CKV_OK) {
        if (head != NULL) {
            unmap_guarded(head, CKV_HEAD_BYTES);
        }
        free(windows);
        return status;
    }
    file->head = head;
    file->table = table;
    file->windows = windows;
    file->window_count = (uint32_t)chunks;
    return CKV_OK;
}

static uint64_t
window_bytes(const struct ckv_file *file, uint64_t index)
{
    return ckv_min_u64(CKV_CHUNK_BYTES,
        file->geometry.data_bytes - index * CKV_CHUNK_BYTES);
}

static void
close_window(const struct ckv_file *file, uint64_t index, const void *address)
{
    if (file->window_note != NULL) {
        ckv_guard_remove(address);
    }
    ckv_file_unmap_range(address, window_bytes(file, index));
}

/* Blocks are large: what is not in memory comes in by requests of 2 MiB, where readahead
 * around a fault would read neighbours that nobody asked for (mapped.c).  In memory there
 * is nothing to read, and what lies below an overlay or behind a server has its own
 * ways. */
static bool
advise_window(const struct ckv_file *file, const void *address, uint64_t length)
{
    const enum ckv_file_system_kind kind = file->file_system.kind;
    union { /* advice takes no const */
        const void *in;
        void *out;
    } pointer = {.in = address};
    return (kind == CKV_FS_LOCAL || kind == CKV_FS_UNKNOWN) &&
           ckv_os.large_faults(pointer.out, (size_t)length) == 0;
}

/* Guarded and advised before anybody can see it. */
static const void *
open_window(const struct ckv_file *file, uint64_t index)
{
    const uint64_t offset = file->geometry.data_offset + index * CKV_CHUNK_BYTES;
    const uint64_t length = window_bytes(file, index);
    const void *address = NULL;
    if (ckv_file_map_range(file->data_fd, offset, length, &address) < 0) {
        return NULL;
    }
    if (file->window_note != NULL &&
        ckv_guard_add(address, length, file->window_note, NULL) != CKV_OK) {
        ckv_file_unmap_range(address, length);
        return NULL;
    }
    if (advise_window(file, address, length)) {
        ckv_store_relaxed_u64(&file->windows[index].large, 1);
    }
    return address;
}

const void *
ckv_file_data(struct ckv_file *file, uint64_t data_offset)
{
    const uint64_t index = data_offset / CKV_CHUNK_BYTES;
    if (data_offset >= file->geometry.data_bytes || index >= file->window_count) {
        return NULL;
    }
    struct ckv_window *window = &file->windows[index];
    uint64_t address = ckv_load_acquire_u64(&window->address);
    if (address == 0) {
        const void *opened = open_window(file, index);
        if (opened == NULL) {
            return NULL;
        }
        CKV_POINT("file.window");
        /* Several threads may get here; the first one's mapping stays. */
        if (ckv_cas_ordered_u64(&window->address, &address,
                (uint64_t)(uintptr_t)opened)) {
            address = (uint64_t)(uintptr_t)opened;
        } else {
            close_window(file, index, opened);
        }
    }
    return (const char *)(uintptr_t)address + data_offset % CKV_CHUNK_BYTES;
}

bool
ckv_file_large_faults(struct ckv_file *file, uint64_t data_offset)
{
    return ckv_file_data(file, data_offset) != NULL &&
           ckv_load_relaxed_u64(&file->windows[data_offset / CKV_CHUNK_BYTES].large) !=
               0;
}

/* ---- header --------------------------------------------------------------------- */

/* Numbers go round, so that whatever a copy says there is a newer one. */
static bool
is_newer(uint64_t generation, uint64_t other)
{
    return generation != other && generation - other < UINT64_C(1) << 63;
}

enum copy_state {
    COPY_FOREIGN, /* no magic */
    COPY_OTHER,   /* ours, of another version, byte order or page size */
    COPY_DAMAGED, /* ours, broken */
    COPY_GOOD
};

struct header_copies {
    struct ckv_file_header headers[2];
};
_Static_assert(sizeof(struct header_copies) == 2 * CKV_PAGE_BYTES, "pages 0 and 1");

static bool
header_sealed(const struct ckv_file_header *header)
{
    return header->seal != 0 &&
           header->seal == ckv_seal_of(header, offsetof(struct ckv_file_header, seal));
}

static enum copy_state
judge_copy(const struct ckv_file_header *header)
{
    if (header->magic != CKV_FORMAT_MAGIC &&
        header->magic != __builtin_bswap64(CKV_FORMAT_MAGIC)) {
        return COPY_FOREIGN;
    }
    if (header->magic != CKV_FORMAT_MAGIC || header->version != CKV_FORMAT_VERSION ||
        header->endian_mark != CKV_ENDIAN_MARK ||
        header->page_bytes != CKV_PAGE_BYTES) {
        return COPY_OTHER;
    }
    return header_sealed(header) ? COPY_GOOD : COPY_DAMAGED;
}

int
ckv_file_put_header(int fd, struct ckv_file_header *header, unsigned int copy)
{
    header->seal = ckv_seal_of(header, offsetof(struct ckv_file_header, seal));
    return ckv_os_write_all(fd, header, sizeof(*header),
        (uint64_t)copy * CKV_PAGE_BYTES);
}

static enum ckv_status
fail_other(const struct ckv_file *file, const struct ckv_file_header *header,
    struct ckv_error *error)
{
    const struct ckv_shown_path shown = ckv_file_shown(file->path);
    if (header->magic != CKV_FORMAT_MAGIC || header->endian_mark != CKV_ENDIAN_MARK) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "\"%s\" was written with byte order mark %#010x, expected %#010x; it "
            "cannot be "
            "read on this machine: give another path, or remove it",
            shown.text, header->endian_mark, CKV_ENDIAN_MARK);
    }
    if (header->version != CKV_FORMAT_VERSION) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "\"%s\" has format version %u, expected %u; use a matching release, give "
            "another path, or remove it",
            shown.text, header->version, CKV_FORMAT_VERSION);
    }
    return ckv_fail(error, CKV_E_FORMAT, 0,
        "\"%s\" was written with pages of %u bytes, expected %u; give another path, or "
        "remove it",
        shown.text, header->page_bytes, CKV_PAGE_BYTES);
}

struct judgement {
    const struct ckv_file_header *good;  /* the newest */
    const struct ckv_file_header *other; /* not NULL: the file is not for us */
    bool damaged;                        /* some copy is */
};

static struct judgement
judge(const struct header_copies *copies)
{
    struct judgement judgement = {0};
    bool other_sealed = false;
    for (size_t i = 0; i < CKV_ARRAY_LENGTH(copies->headers); i++) {
        const struct ckv_file_header *header = &copies->headers[i];
        const struct ckv_file_header *good = judgement.good;
        switch (judge_copy(header)) {
        case COPY_FOREIGN:
            break;
        case COPY_OTHER:
            judgement.other = header;
            other_sealed = other_sealed || header_sealed(header);
            break;
        case COPY_DAMAGED:
            judgement.damaged = true;
            break;
        case COPY_GOOD:
            if (good == NULL || is_newer(header->generation, good->generation)) {
                judgement.good = header;
            }
            break;
        }
    }
    if (judgement.good != NULL && !other_sealed) {
        judgement.other = NULL; /* unsealed and beside a good one: damage */
    }
    return judgement;
}

bool
ckv_file_was_used(const void *pages)
{
    struct header_copies copies;
    memcpy(&copies, pages, sizeof(copies));
    const struct judgement judgement = judge(&copies);
    return judgement.other != NULL ||
           (judgement.good != NULL && judgement.good->region_nonce != 0);
}

bool
ckv_file_is_ours(const struct ckv_file *file)
{
    struct header_copies copies;
    if (ckv_os_read_all(file->data_fd, &copies, sizeof(copies), 0) < 0) {
        return false;
    }
    const struct judgement judgement = judge(&copies);
    return judgement.good != NULL && judgement.other == NULL;
}

bool
ckv_file_names_region(const struct ckv_file *file, uint64_t nonce)
{
    const struct ckv_file_header *mapped = file->head;
    const bool second = is_newer(mapped[1].generation, mapped[0].generation);
    if (mapped[second].region_nonce == nonce) {
        return true; /* nearly always, and without a checksum */
    }
    struct header_copies copies; /* one may be damaged, or just be being written */
    memcpy(&copies, file->head, sizeof(copies));
    const struct judgement judgement = judge(&copies);
    return judgement.good == NULL || judgement.good->region_nonce == nonce;
}

/* Picks the copy that counts, or says what is wrong with both. */
static enum ckv_status
choose_copy(struct ckv_file *file, const struct header_copies *copies,
    const struct ckv_file_header **chosen, struct ckv_error *error)
{
    const struct judgement judgement = judge(copies);
    if (judgement.other != NULL) {
        return fail_other(file, judgement.other, error);
    }
    if (judgement.good != NULL) {
        *chosen = judgement.good;
        return CKV_OK;
    }
    if (!judgement.damaged) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "\"%s\" is not a volume: it begins with %#018llx, expected %#018llx; move "
            "it "
            "away or give another path",
            ckv_file_shown(file->path).text,
            (unsigned long long)copies->headers[0].magic,
            (unsigned long long)CKV_FORMAT_MAGIC);
    }
    file->header.magic = CKV_FORMAT_MAGIC;
    return ckv_fail(error, CKV_E_FORMAT, 0,
        "both copies of the header of \"%s\" are damaged; recreate the volume "
        "(on_mismatch=\"recreate\")",
        ckv_file_shown(file->path).text);
}

/* What the seal does not prove: that the numbers make sense together and in this file. */
static enum ckv_status
check_header(const struct ckv_file *file, const struct ckv_file_header *header,
    uint64_t size_bytes, struct ckv_error *error)
{
    const struct ckv_shown_path shown = ckv_file_shown(file->path);
    const bool members_valid = header->member_count >= 1 &&
                               header->member_count <= CKV_PATHS_MAX &&
                               header->member_index < header->member_count &&
                               memcmp(header->members[header->member_index].file_id,
                                   header->file_id, sizeof(header->file_id)) == 0;
    const uint32_t events = header->event_capacity;
    if (!members_valid || events == 0 || (events & (events - 1)) != 0 ||
        events > CKV_EVENT_CAPACITY_MAX ||
        memchr(header->shm_directory, '\0', sizeof(header->shm_directory)) == NULL) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "the header of \"%s\" makes no sense (member %u of %u, %u events); "
            "recreate "
            "the volume (on_mismatch=\"recreate\")",
            shown.text, header->member_index, header->member_count, events);
    }
    if (size_bytes < header->file_bytes) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "\"%s\" was truncated: it has %llu bytes, expected %llu; recreate the "
            "volume "
            "(on_mismatch=\"recreate\")",
            shown.text, (unsigned long long)size_bytes,
            (unsigned long long)header->file_bytes);
    }
    return CKV_OK;
}

enum ckv_status
ckv_file_read_header(struct ckv_file *file, struct ckv_error *error)
{
    file->header.magic = 0;
    struct stat info;
    int result = ckv_os.stat_file(file->data_fd, &info);
    if (result < 0) {
        return ckv_file_fail_os(error, result, "look at", file->path);
    }
    struct header_copies copies;
    memset(&copies, 0, sizeof(copies));
    const size_t length = (size_t)ckv_min_u64((uint64_t)info.st_size, sizeof(copies));
    result = ckv_os_read_all(file->data_fd, &copies, length, 0);
    if (result < 0) {
        return ckv_file_fail_os(error, result, "read the header of", file->path);
    }
    const struct ckv_file_header *chosen = NULL;
    CKV_TRY(choose_copy(file, &copies, &chosen, error));
    CKV_CHECK(chosen != NULL);

    file->header.magic = CKV_FORMAT_MAGIC; /* ours, whatever else is wrong with it */
    CKV_TRY(check_header(file, chosen, (uint64_t)info.st_size, error));
    struct ckv_geometry geometry;
    CKV_TRY(ckv_geometry_read(chosen, &geometry, error));
    file->header = *chosen;
    file->geometry = geometry;
    ckv_store_release_u64(&file->header_generation, chosen->generation);
    return CKV_OK;
}

/* Makes a header that was read durable unless it is known to be: who wrote it may have
 * been another process, or have died before it synced.  0 or -errno. */
static int
settle_header(struct ckv_file *file, const struct ckv_file_header *header)
{
    const uint64_t name = ckv_file_header_name(header);
    if (name == ckv_load_acquire_u64(&file->durable_header)) {
        return 0;
    }
    union { /* msync takes no const */
        const void *mapped;
        void *synced;
    } head = {.mapped = file->head};
    int result = -EINTR;
    while (result == -EINTR) {
        result = head.mapped == NULL ? ckv_os_sync(file->data_fd)
                                     : ckv_os.sync_range(file->data_fd, head.synced, 0,
                                           sizeof(struct header_copies));
    }
    if (result == 0) {
        ckv_store_release_u64(&file->durable_header, name);
    }
    return result;
}

int
ckv_file_sync(struct ckv_file *file)
{
    const struct ckv_file_header *mapped = file->head;
    const bool second = is_newer(mapped[1].generation, mapped[0].generation);
    const uint64_t name = ckv_file_header_name(&mapped[second]); /* before the sync */
    const int result = ckv_os_sync(file->data_fd);
    if (result == 0) {
        ckv_store_release_u64(&file->durable_header, name);
    }
    return result;
}

/* 0 or -errno.  Requires: header_lock. */
static int
update_header(struct ckv_file *file)
{
    struct header_copies copies;
    const int result = ckv_os_read_all(file->data_fd, &copies, sizeof(copies), 0);
    if (result < 0) {
        return result;
    }
    /* Another process may have written since: the older of the copies as they are now is
     * the one to replace. */
    uint64_t generation = ckv_load_relaxed_u64(&file->header_generation);
    uint64_t synced = file->header.synced_sequence;
    unsigned int target = 0;
    const struct ckv_file_header *newest = NULL;
    for (unsigned int i = 0; i < CKV_ARRAY_LENGTH(copies.headers); i++) {
        const struct ckv_file_header *header = &copies.headers[i];
        if (judge_copy(header) == COPY_GOOD &&
            (newest == NULL || !is_newer(newest->generation, header->generation))) {
            newest = header;
            target = 1 - i;
            synced = ckv_max_u64(synced, header->synced_sequence);
        }
    }
    if (newest != NULL) {
        const int settled = settle_header(file, newest);
        if (settled < 0) {
            return settled;
        }
    }
    if (newest != NULL && is_newer(newest->generation, generation)) {
        generation = newest->generation;
    }
    generation++;
    file->header.generation = generation;
    file->header.synced_sequence = synced;
    struct ckv_file_header next = file->header;
    CKV_POINT("file.header");
    const int written = ckv_file_put_header(file->data_fd, &next, target);
    if (written == 0) {
        file->header.seal = next.seal;
        ckv_raise_u64(&file->header_generation, generation);
    }
    return written;
}

enum ckv_status
ckv_file_write_header(struct ckv_file *file, struct ckv_error *error)
{
    CKV_CHECK(file->header.magic == CKV_FORMAT_MAGIC);
    (void)pthread_mutex_lock(&file->header_lock); /* cannot fail: never taken twice */
    const int result = update_header(file);
    (void)pthread_mutex_unlock(&file->header_lock);
    return result == 0
               ? CKV_OK
               : ckv_file_fail_os(error, result, "write the header of", file->path);
}

/* ---- records -------------------------------------------------------------------- */

static uint64_t
record_offset(const struct ckv_file *file, uint32_t local_entry)
{
    CKV_CHECK(local_entry < file->geometry.entry_count);
    return file->geometry.table_offset +
           (uint64_t)local_entry * sizeof(struct ckv_record);
}

int
ckv_file_write_record(const struct ckv_file *file, uint32_t local_entry,
    const struct ckv_record *record)
{
    return ckv_os_write_all(file->data_fd, record, sizeof(*record),
        record_offset(file, local_entry));
}

int
ckv_file_strike_record(const struct ckv_file *file, uint32_t local_entry)
{
    static const uint32_t no_seal = 0;
    return ckv_os_write_all(file->data_fd, &no_seal, sizeof(no_seal),
        record_offset(file, local_entry) + offsetof(struct ckv_record, seal));
}

int
ckv_file_pending_error(const struct ckv_file *file)
{
    int result = -EINTR;
    while (result == -EINTR) {
        result = ckv_os.pending_error(file->data_fd, CKV_GATE_OFFSET, CKV_PAGE_BYTES);
    }
    /* Sandboxes may not know the call; then only a sync tells. */
    return result == -ENOSYS || result == -EOPNOTSUPP ? 0 : result;
}

/* ---- closing -------------------------------------------------------------------- */

void
ckv_file_close(struct ckv_file *file)
{
    for (uint32_t i = 0; i < file->window_count; i++) {
        const uint64_t address = ckv_load_acquire_u64(&file->windows[i].address);
        if (address != 0) {
            close_window(file, i, (const void *)(uintptr_t)address);
        }
    }
    ckv_file_close_direct(file);
    if (file->table != NULL) {
        unmap_guarded(file->table, file->geometry.table_bytes);
    }
    if (file->head != NULL) {
        unmap_guarded(file->head, CKV_HEAD_BYTES);
    }
    if (file->present) {
        (void)pthread_mutex_destroy(&file->header_lock); /* nobody holds it */
        /* Buffered errors were asked for by sync; close adds nothing. */
        (void)ckv_os.close_file(file->data_fd);
    }
    free(file->windows);
    free(file->path);
    memset(file, 0, sizeof(*file));
    file->data_fd = -1;
}
