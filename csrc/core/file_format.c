/* SPDX-License-Identifier: Apache-2.0 */
/* file_format.c: from an empty file to a volume.
 *
 *   blank --begin_creation--> marked --reserve--> allocated --write_zeros--> zeroed
 *         --test_pages--> tested --write_headers--> volume
 *
 * A process may die at any arrow: the note says "creating" until all is there, and
 * ckv_file_is_blank() takes such a file for blank while its header names no region, which
 * is what the first life of a volume begins with.  The same after a power cut: the mark
 * is on the medium before the file gets its length, and what a header promises (the
 * length) may get there later than the header.  All names of a set are there before the
 * first of its files has a header: a file that is missing beside one that is not blank
 * was there once.
 *
 * Everything up to the data area is written as zeros and not merely reserved: a later
 * write into reserved blocks may still need space for the file system's own records.
 */
#include "file_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ZERO_BYTES       (UINT64_C(1) << 20)
#define ZERO_IOVECS      16
#define STAT_BLOCK_BYTES 512u /* the unit of st_blocks everywhere */

/* ---- blank or not --------------------------------------------------------------- */

static bool
all_zero(const char *bytes, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        if (bytes[i] != 0) {
            return false;
        }
    }
    return true;
}

/* As much of the head as there is, zeros behind it: 0 or -errno. */
static int
read_head(const struct ckv_file *file, char head[CKV_HEAD_BYTES], uint64_t *file_bytes)
{
    enum { TRIES = 100 };
    int result = -ENODATA;
    /* Without the open lock another process may empty the file in between. */
    for (int i = 0; result == -ENODATA && i < TRIES; i++) {
        struct stat info;
        result = ckv_os.stat_file(file->data_fd, &info);
        if (result == 0) {
            *file_bytes = (uint64_t)info.st_size;
            memset(head, 0, CKV_HEAD_BYTES);
            result = ckv_os_read_all(file->data_fd, head,
                (size_t)ckv_min_u64(*file_bytes, CKV_HEAD_BYTES), 0);
        }
    }
    return result;
}

enum ckv_status
ckv_file_is_blank(const struct ckv_file *file, bool *blank, struct ckv_error *error)
{
    *blank = false;
    char head[CKV_HEAD_BYTES] = {0};
    uint64_t file_bytes = 0;
    const int result = read_head(file, head, &file_bytes);
    if (result < 0) {
        return ckv_file_fail_os(error, result, "read the head of", file->path);
    }
    if (file_bytes <= CKV_HEAD_BYTES && all_zero(head, CKV_HEAD_BYTES)) {
        *blank = file_bytes % CKV_PAGE_BYTES == 0;
        return CKV_OK;
    }
    const char mark[] = CKV_NOTE_PREFIX CKV_NOTE_CREATING;
    *blank = memcmp(head + CKV_NOTE_OFFSET, mark, sizeof(mark) - 1) == 0 &&
             !ckv_file_was_used(head);
    return CKV_OK;
}

/* ---- space ---------------------------------------------------------------------- */

static enum ckv_status
fail_space(const struct ckv_file *file, uint64_t needed_bytes, int os_errno,
    struct ckv_error *error)
{
    if (os_errno == EFBIG) {
        return ckv_fail(error, CKV_E_NO_SPACE, os_errno,
            "\"%s\" needs %llu bytes, more than the file size limit of this process "
            "(ulimit -f) or the file system (%s) allows; raise the limit or ask for a "
            "smaller capacity",
            ckv_file_shown(file->path).text, (unsigned long long)needed_bytes,
            file->file_system.name);
    }
    return ckv_fail(error, CKV_E_NO_SPACE, os_errno,
        "\"%s\" needs %llu bytes and the file system (%s) has %llu bytes free (%s); "
        "make "
        "room or ask for a smaller capacity",
        ckv_file_shown(file->path).text, (unsigned long long)needed_bytes,
        file->file_system.name, (unsigned long long)file->file_system.free_bytes,
        strerror(os_errno));
}

enum ckv_status
ckv_file_check_limit(const struct ckv_file *file, uint64_t file_bytes,
    struct ckv_error *error)
{
    uint64_t limit_bytes = UINT64_MAX;
    if (ckv_os.file_size_limit(&limit_bytes) == 0 && limit_bytes < file_bytes) {
        return fail_space(file, file_bytes, EFBIG, error);
    }
    return CKV_OK; /* or not known: then a write says so */
}

static bool
means_no_space(int code)
{
    return code == -ENOSPC || code == -EDQUOT || code == -EFBIG;
}

/* Refuses before anything is taken: to fill a disk, even for a moment, hurts others. */
static enum ckv_status
check_free(struct ckv_file *file, uint64_t needed_bytes, struct ckv_error *error)
{
    CKV_TRY(ckv_file_check_limit(file, needed_bytes, error));
    struct stat info;
    int result = ckv_os.stat_file(file->data_fd, &info);
    if (result == 0) {
        result = ckv_os.file_system(file->data_fd, &file->file_system);
    }
    if (result < 0) {
        return ckv_file_fail_os(error, result, "find the free space of", file->path);
    }
    uint64_t available = file->file_system.free_bytes;
    const uint64_t own = (uint64_t)info.st_blocks * STAT_BLOCK_BYTES;
    if (ckv_add_u64(available, own, &available) && available < needed_bytes &&
        file->file_system.kind != CKV_FS_COW) { /* accepted as sparse */
        return fail_space(file, needed_bytes, ENOSPC, error);
    }
    return CKV_OK;
}

/* 0 or -errno. */
static int
write_zeros(const struct ckv_file *file, uint64_t offset, uint64_t end)
{
    void *zeros = calloc(1, ZERO_BYTES);
    if (zeros == NULL) {
        return -ENOMEM;
    }
    int result = 0;
    while (offset < end && result == 0) {
        struct iovec iov[ZERO_IOVECS];
        int count = 0;
        uint64_t bytes = 0;
        while (count < ZERO_IOVECS && offset + bytes < end) {
            const uint64_t piece = ckv_min_u64(ZERO_BYTES, end - offset - bytes);
            iov[count++] = (struct iovec){.iov_base = zeros, .iov_len = (size_t)piece};
            bytes += piece;
        }
        result = ckv_os_writev_all(file->data_fd, iov, count, offset);
        offset += bytes;
    }
    free(zeros);
    return result;
}

/* Whether the file system really took the space (holes and compression show here). */
static enum ckv_status
check_reserved(const struct ckv_file *file, const struct ckv_options *options,
    uint64_t bytes, struct ckv_error *error)
{
    struct stat info;
    const int result = ckv_os.stat_file(file->data_fd, &info);
    if (result < 0) {
        return ckv_file_fail_os(error, result, "look at", file->path);
    }
    const uint64_t taken = (uint64_t)info.st_blocks * STAT_BLOCK_BYTES;
    if (taken >= bytes) {
        return CKV_OK;
    }
    const enum ckv_file_system_kind kind = file->file_system.kind;
    if (!options->allow_sparse && kind != CKV_FS_NETWORK && kind != CKV_FS_FUSE) {
        return ckv_fail(error, CKV_E_UNSUPPORTED, 0,
            "the file system (%s) of \"%s\" reserved %llu of %llu bytes; use one "
            "without "
            "compression, or set allow_sparse",
            file->file_system.name, ckv_file_shown(file->path).text,
            (unsigned long long)taken, (unsigned long long)bytes);
    }
    ckv_log(CKV_LOG_WARNING,
        "\"%s\": %llu of %llu bytes are reserved; puts can fail when the file system "
        "(%s) "
        "is full",
        ckv_file_shown(file->path).text, (unsigned long long)taken,
        (unsigned long long)bytes, file->file_system.name);
    return CKV_OK;
}

static enum ckv_status
reserve(const struct ckv_file *file, const struct ckv_options *options, uint64_t bytes,
    struct ckv_error *error)
{
    int result = ckv_os_allocate(file->data_fd, bytes);
    if (result == -EOPNOTSUPP) {
        if (file->file_system.kind == CKV_FS_COW) {
            /* Zeros would reserve nothing here: the next write goes elsewhere. */
            result = ckv_os_truncate(file->data_fd, bytes);
        } else {
            result = write_zeros(file, CKV_HEAD_BYTES, bytes);
        }
    }
    if (means_no_space(result)) {
        return fail_space(file, bytes, -result, error);
    }
    if (result < 0) {
        return ckv_file_fail_os(error, result, "reserve the space of", file->path);
    }
    return check_reserved(file, options, bytes, error);
}

/* ---- steps ---------------------------------------------------------------------- */

/* Empties the file and marks it as unfinished, durably. */
static enum ckv_status
begin_creation(const struct ckv_file *file, const struct ckv_options *options,
    struct ckv_error *error)
{
    int result = ckv_os_truncate(file->data_fd, 0);
    if (result < 0) {
        return ckv_file_fail_os(error, result, "empty", file->path);
    }
    result = ckv_os.set_no_cow(file->data_fd);
    if (result < 0 && !options->allow_sparse) {
        return ckv_fail(error, CKV_E_UNSUPPORTED, -result,
            "copy-on-write cannot be turned off for \"%s\" (%s: %s), so no space can "
            "be "
            "reserved; use another file system, or set allow_sparse",
            ckv_file_shown(file->path).text, file->file_system.name, strerror(-result));
    }
    /* The note first, with zeros in front: a death inside a write leaves whole pages of
     * it, and pages of zeros without a note might be anybody's. */
    char head[CKV_HEAD_BYTES] = {0};
    ckv_file_compose_note(head + CKV_NOTE_OFFSET, CKV_NOTE_CREATING);
    result = ckv_os_write_all(file->data_fd, head + CKV_NOTE_OFFSET, CKV_PAGE_BYTES,
        CKV_NOTE_OFFSET);
    CKV_POINT("format.noted");
    if (result == 0) {
        result = ckv_os_write_all(file->data_fd, head, CKV_NOTE_OFFSET, 0);
    }
    if (result == 0) {
        result = ckv_os_sync(file->data_fd);
    }
    if (means_no_space(result)) {
        return fail_space(file, sizeof(head), -result, error);
    }
    return result == 0
               ? CKV_OK
               : ckv_file_fail_os(error, result, "write the head of", file->path);
}

/* Compares what a mapping shows with what was written. */
static enum ckv_status
compare_mapped(const struct ckv_file *file, uint64_t offset, const char *expected,
    struct ckv_error *error)
{
    const void *address = NULL;
    int result = ckv_file_map_range(file->data_fd, offset, CKV_PAGE_BYTES, &address);
    if (result == -ENOMEM) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM,
            "\"%s\" cannot be mapped: the address space is limited (ulimit -v)",
            ckv_file_shown(file->path).text);
    }
    if (result < 0) {
        return ckv_fail(error, CKV_E_UNSUPPORTED, -result,
            "the file system (%s) that \"%s\" is mounted on refuses mmap: %s; use "
            "another "
            "one",
            file->file_system.name, ckv_file_shown(file->path).text, strerror(-result));
    }
    bool same = false;
    /* The load below must not raise SIGBUS; older kernels answer -EINVAL. */
    union {
        const void *mapped;
        void *advised;
    } page = {.mapped = address};
    result = ckv_os.populate_read(page.advised, CKV_PAGE_BYTES);
    const bool readable = result == 0 || result == -EINVAL || result == -ENOSYS;
    if (readable) {
        same = memcmp(address, expected, CKV_PAGE_BYTES) == 0;
    }
    ckv_file_unmap_range(address, CKV_PAGE_BYTES);
    if (!readable) {
        return ckv_file_fail_os(error, result, "read a mapping of", file->path);
    }
    if (!same) {
        return ckv_fail(error, CKV_E_UNSUPPORTED, 0,
            "the file system (%s) that \"%s\" is mounted on shows other bytes in a "
            "mapping "
            "than were written; use another one",
            file->file_system.name, ckv_file_shown(file->path).text);
    }
    return CKV_OK;
}

/* Writes a pattern into one page, looks at it through a mapping, writes zeros again. */
static enum ckv_status
test_page(const struct ckv_file *file, uint64_t offset, struct ckv_error *error)
{
    char page[CKV_PAGE_BYTES];
    for (size_t i = 0; i < sizeof(page); i++) {
        page[i] = (char)((offset / CKV_PAGE_BYTES + i) % 127 + 1);
    }
    int result = ckv_os_write_all(file->data_fd, page, sizeof(page), offset);
    if (result < 0) {
        return ckv_file_fail_os(error, result, "write", file->path);
    }
    CKV_TRY(compare_mapped(file, offset, page, error));
    memset(page, 0, sizeof(page));
    result = ckv_os_write_all(file->data_fd, page, sizeof(page), offset);
    return result == 0 ? CKV_OK : ckv_file_fail_os(error, result, "write", file->path);
}

/* The first and last page of each stripe. */
static enum ckv_status
test_pages(const struct ckv_file *file, const struct ckv_geometry *geometry,
    struct ckv_error *error)
{
    for (uint32_t i = 0; i < geometry->stripe_count; i++) {
        const uint64_t first = geometry->data_offset + i * geometry->stripe_bytes;
        CKV_TRY(test_page(file, first, error));
        CKV_TRY(test_page(file, first + geometry->stripe_bytes - CKV_PAGE_BYTES,
            error));
    }
    return CKV_OK;
}

/* Copy 0 makes the file a volume; copy 1 is for the day when copy 0 is damaged. */
static enum ckv_status
write_headers(struct ckv_file *file, const struct ckv_geometry *geometry,
    const struct ckv_file_header *identity, struct ckv_error *error)
{
    struct ckv_file_header header = *identity;
    header.magic = CKV_FORMAT_MAGIC;
    header.version = CKV_FORMAT_VERSION;
    header.endian_mark = CKV_ENDIAN_MARK;
    header.page_bytes = CKV_PAGE_BYTES;
    ckv_geometry_write(geometry, &header);
    for (unsigned int copy = 0; copy < 2; copy++) {
        header.generation = copy + 1;
        const int result = ckv_file_put_header(file->data_fd, &header, copy);
        if (result < 0) {
            return ckv_file_fail_os(error, result, "write the header of", file->path);
        }
    }
    file->header = header;
    file->geometry = *geometry;
    ckv_store_release_u64(&file->header_generation, header.generation);
    return CKV_OK;
}

static enum ckv_status
finish(struct ckv_file *file, struct ckv_error *error)
{
    const int result = ckv_os_sync(file->data_fd);
    if (result < 0) {
        return ckv_file_fail_os(error, result, "sync", file->path);
    }
    ckv_store_release_u64(&file->durable_header, ckv_file_header_name(&file->header));
    ckv_file_write_note(file, "created");
    return CKV_OK;
}

static enum ckv_status
lay_out(struct ckv_file *file, const struct ckv_options *options,
    const struct ckv_geometry *geometry, const struct ckv_file_header *identity,
    struct ckv_error *error)
{
    CKV_POINT("format.begin");
    CKV_TRY(begin_creation(file, options, error));
    CKV_POINT("format.marked");
    CKV_TRY(reserve(file, options, geometry->file_bytes, error));
    CKV_POINT("format.reserved");
    const int result = write_zeros(file, CKV_HEAD_BYTES, geometry->data_offset);
    if (means_no_space(result)) {
        return fail_space(file, geometry->file_bytes, -result, error);
    }
    if (result < 0) {
        return ckv_file_fail_os(error, result, "write the table of", file->path);
    }
    CKV_TRY(test_pages(file, geometry, error));
    CKV_POINT("format.tested");
    CKV_TRY(write_headers(file, geometry, identity, error));
    CKV_POINT("format.written");
    return finish(file, error);
}

static int
sync_directory(const char *path)
{
    const char *slash = strrchr(path, '/');
    CKV_CHECK(slash != NULL);
    char directory[4096];
    const size_t length = slash == path ? 1 : (size_t)(slash - path);
    CKV_CHECK(length < sizeof(directory));
    memcpy(directory, path, length);
    directory[length] = '\0';
    const int fd = ckv_os_open(directory, O_RDONLY | O_DIRECTORY, 0);
    if (fd == -EACCES) {
        return 0; /* may be written but not read: the best that can be had */
    }
    if (fd < 0) {
        return fd;
    }
    const int result = ckv_os_sync(fd);
    (void)ckv_os.close_file(fd); /* it wrote nothing */
    return result == -EINVAL || result == -EOPNOTSUPP ? 0 : result;
}

enum ckv_status
ckv_file_sync_name(const struct ckv_file *file, struct ckv_error *error)
{
    const int result = sync_directory(file->path);
    return result == 0
               ? CKV_OK
               : ckv_file_fail_os(error, result, "sync the folder of", file->path);
}

/* ---- the whole ------------------------------------------------------------------ */

void
ckv_file_discard(struct ckv_file *file)
{
    if (file->created && ckv_file_attached(file)) {
        const int result = ckv_os.unlink_path(file->path);
        if (result < 0) {
            ckv_log(CKV_LOG_WARNING,
                "\"%s\" was not completed and cannot be removed: %s",
                ckv_file_shown(file->path).text, strerror(-result));
        }
    }
    file->created = false;
}

enum ckv_status
ckv_file_format(struct ckv_file *file, const struct ckv_options *options,
    const struct ckv_geometry *geometry, const struct ckv_file_header *identity,
    struct ckv_error *error)
{
    bool blank = false;
    enum ckv_status status = ckv_file_is_blank(file, &blank, error);
    if (status == CKV_OK && !blank && file->header.magic != CKV_FORMAT_MAGIC) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "\"%s\" has content that is not ours, which is never overwritten; move it "
            "away "
            "or give another path",
            ckv_file_shown(file->path).text);
    }
    if (status == CKV_OK) {
        status = check_free(file, geometry->file_bytes, error);
    }
    if (status == CKV_OK) {
        status = lay_out(file, options, geometry, identity, error);
        if (status != CKV_OK) {
            file->header.magic = 0; /* blank now */
        }
        if (status != CKV_OK && !file->created) {
            /* Gives the space back.  It fails only where everything fails, and what is
             * left is then still blank. */
            (void)ckv_os_truncate(file->data_fd, 0);
        }
    }
    if (status != CKV_OK) {
        ckv_file_discard(file);
    }
    return status;
}
