/* SPDX-License-Identifier: Apache-2.0 */
/* region.c: the file of the shared region, from creation to unmapping.
 *
 * Creation removes what lies at the name and makes a new inode there: processes of an
 * earlier life that are still unmapping theirs are not disturbed, and a file planted by
 * somebody else is never written to (O_EXCL | O_NOFOLLOW).  A new file has the group of
 * its creator, not that of the volume file: it is open to nobody else until it has been
 * given the owner and the group of that file.  A temporary name that is
 * renamed when done was rejected: it would be left behind by every killed creator.
 *
 * A new region is filled in private memory; its content goes into the file in one
 * piece and the file is mapped in its place.  Filling the mapping of the file
 * directly took twice as long: each of its pages costs a fault in the file system at
 * the first store.
 */
#include "region.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "guard.h"

enum { PIECE_BYTES = 1 << 20 };

/* Names what the remedy of every refused region is. */
#define REMEDY "; close every process that has this volume open, then open it again"

enum ckv_status
ckv_region_path(const struct ckv_volume *volume, const char *directory, char **path,
    struct ckv_error *error)
{
    enum { SUFFIX_MAX = 64 };
    const bool beside = directory == NULL || directory[0] == '\0';
    const char *base = beside ? NULL : directory;
    for (uint32_t i = 0; base == NULL && i < volume->file_count; i++) {
        base = volume->files[i].present ? volume->files[i].path : NULL;
    }
    if (base == NULL) {
        return ckv_fail(error, CKV_E_INVALID, 0, "the set of volume files is empty");
    }
    const size_t capacity = strlen(base) + SUFFIX_MAX;
    char *text = malloc(capacity);
    if (text == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM, "no memory for a path");
    }
    if (beside) {
        (void)snprintf(text, capacity, "%s-shm", base); /* fits: SUFFIX_MAX */
    } else {
        char hex[33];
        for (size_t i = 0; i < sizeof volume->set_id; i++) {
            (void)snprintf(hex + 2 * i, 3, "%02x", volume->set_id[i]); /* two digits */
        }
        (void)snprintf(text, capacity, "%s/cyclone-kv-%s-shm", base, hex); /* fits */
    }
    *path = text;
    return CKV_OK;
}

/* Plans the layout and numbers entries, stripes and granules over all files (V3). */
static enum ckv_status
plan(struct ckv_volume *volume, struct ckv_error *error)
{
    struct ckv_geometry geometries[CKV_PATHS_MAX];
    uint32_t event_capacity = 0;
    uint64_t entry = 0;
    uint64_t stripe = 0;
    uint64_t granule = 0;
    CKV_CHECK(volume->file_count <= CKV_PATHS_MAX);
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        const struct ckv_geometry *geometry = &file->geometry;
        geometries[i] = *geometry;
        file->first_entry = (uint32_t)entry;
        file->first_stripe = (uint32_t)stripe;
        file->first_granule = granule;
        entry += geometry->entry_count;
        stripe += geometry->stripe_count;
        granule += geometry->data_bytes / geometry->granule_bytes;
        if (file->present && event_capacity == 0) {
            event_capacity = file->header.event_capacity;
        }
    }
    return ckv_region_layout_plan(geometries, volume->file_count, event_capacity,
        volume->eviction, &volume->region.layout, error);
}

static void
set_pointers(struct ckv_region *region)
{
    const struct ckv_region_layout *layout = &region->layout;
    char *base = region->base;
    region->header = (void *)base;
    region->slots = (void *)(base + layout->slots_offset);
    region->namespaces = (void *)(base + layout->namespaces_offset);
    region->paths = (void *)(base + layout->paths_offset);
    region->stripes = (void *)(base + layout->stripes_offset);
    region->hints = (void *)(base + layout->hints_offset);
    region->events = (void *)(base + layout->events_offset);
    region->buckets = (void *)(base + layout->buckets_offset);
    region->states = (void *)(base + layout->states_offset);
    region->masks = (void *)(base + layout->masks_offset);
    region->places = (void *)(base + layout->places_offset);
    region->marks = (void *)(base + layout->marks_offset);
    region->links = (void *)(base + layout->links_offset);
    region->page_map = (void *)(base + layout->page_map_offset);
    region->heats = (void *)(base + layout->heats_offset);
    region->owners = (void *)(base + layout->owners_offset);
    ckv_admission_attach(&region->admission, base + layout->admission_offset,
        layout->entry_count);
    if (layout->density_offset != 0) {
        region->chains = (void *)(base + layout->chains_offset);
        region->lives = (void *)(base + layout->lives_offset);
        region->leaves = (void *)(base + layout->leaves_offset);
        ckv_density_attach(&region->density, base + layout->density_offset,
            layout->entry_count);
    }
}

void
ckv_region_keep_resident(struct ckv_volume *volume)
{
    /* Best effort: a refusal leaves pages that are populated and merely evictable. */
    if (ckv_os.lock_memory(volume->region.base, volume->region.bytes) < 0) {
        (void)ckv_os.populate_read(volume->region.base, volume->region.bytes);
    }
    for (uint32_t i = 0; i < volume->file_count; i++) {
        const struct ckv_file *file = &volume->files[i];
        if (file->present && file->table != NULL) {
            void *table = (void *)(uintptr_t)file->table;
            (void)ckv_os.lock_memory(table, file->geometry.table_bytes); /* likewise */
        }
    }
}

static enum ckv_status
fail_map(uint64_t bytes, int result, struct ckv_error *error)
{
    return ckv_fail(error, result == -ENOMEM ? CKV_E_NO_MEMORY : CKV_E_OS, -result,
        "the shared region of %llu bytes cannot be mapped; raise the limit of address "
        "space "
        "(ulimit -v)",
        (unsigned long long)bytes);
}

/* Maps private memory of the planned length, full of zeros. */
static enum ckv_status
map_private(struct ckv_volume *volume, struct ckv_error *error)
{
    struct ckv_region *region = &volume->region;
    const uint64_t bytes = region->layout.region_bytes;
    void *base = NULL;
    CKV_POINT("region.map");
    const int result = ckv_os.map(NULL, bytes, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0, &base);
    if (result < 0) {
        return fail_map(bytes, result, error);
    }
    /* The rebuild stores all over it: with large pages it waits for fewer faults, and for
     * fewer walks through page tables. */
    (void)ckv_os.populate_write(base, bytes); /* advice */
    region->base = base;
    region->bytes = bytes;
    set_pointers(region);
    return CKV_OK;
}

/* Maps the file over the planned length; at the present base if there is one. */
static enum ckv_status
map_file(struct ckv_volume *volume, int fd, bool writable, struct ckv_error *error)
{
    struct ckv_region *region = &volume->region;
    const uint64_t bytes = region->layout.region_bytes;
    const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    const bool just_written = region->base != NULL;
    const int flags = just_written ? MAP_SHARED | MAP_FIXED : MAP_SHARED;
    void *base = NULL;
    CKV_POINT("region.map");
    int result = ckv_os.map(region->base, bytes, protection, flags, fd, 0, &base);
    if (result < 0) {
        return fail_map(bytes, result, error);
    }
    region->base = base;
    region->bytes = bytes;
    set_pointers(region);
    result = just_written ? 0 : ckv_os.populate_read(base, bytes);
    if (result == -EFAULT || result == -EIO) {
        return ckv_fail(error, CKV_E_OS, -result,
            "the device does not deliver the shared region %s" REMEDY, region->path);
    } /* else a kernel without the call: pages come at their first use */
    CKV_TRY(ckv_guard_add(base, bytes, &region->lost_pages, error));
    region->guarded = true;
    return CKV_OK;
}

static uint64_t
layout_crc(const struct ckv_region *region)
{
    return ckv_crc32c(0, &region->layout, sizeof region->layout);
}

/* A number that no life of this region had before, 0 excepted. */
static enum ckv_status
fill_header(struct ckv_volume *volume, struct ckv_error *error)
{
    struct ckv_region_header *header = volume->region.header;
    uint64_t nonce = 0;
    while (nonce == 0) {
        const int result = ckv_os.random_bytes(&nonce, sizeof nonce);
        if (result < 0) {
            return ckv_fail(error, CKV_E_OS, -result, "no random numbers");
        }
    }
    header->magic = CKV_REGION_MAGIC;
    header->version = CKV_FORMAT_VERSION;
    header->nonce = nonce;
    memcpy(header->set_id, volume->set_id, sizeof header->set_id);
    header->region_bytes = volume->region.bytes;
    header->layout_crc = layout_crc(&volume->region);
    header->eviction = volume->eviction;
    return CKV_OK;
}

/* ---- creation ------------------------------------------------------------------- */

static enum ckv_status
fail_write(const char *path, uint64_t needed, int fd, int result,
    struct ckv_error *error)
{
    struct ckv_file_system system = {.kind = CKV_FS_UNKNOWN};
    const bool known = ckv_os.file_system(fd, &system) == 0;
    if (result == -EFBIG) {
        return ckv_fail(error, CKV_E_NO_SPACE, EFBIG,
            "the shared region %s needs %llu bytes, more than the file size limit of "
            "this process (ulimit -f) or the file system allows",
            path, (unsigned long long)needed);
    }
    if (result == -ENOSPC || result == -EDQUOT) {
        return ckv_fail(error, CKV_E_NO_SPACE, -result,
            "the shared region %s needs %llu bytes, its file system has %llu free; "
            "make "
            "room or place it elsewhere (shm_dir)",
            path, (unsigned long long)needed,
            (unsigned long long)(known ? system.free_bytes : 0));
    }
    return ckv_fail(error, CKV_E_OS, -result, "the shared region %s cannot be written",
        path);
}

/* Allocates all blocks, so that a full disk is told before the work begins. */
static enum ckv_status
allocate_file(const char *path, int fd, uint64_t bytes, struct ckv_error *error)
{
    CKV_POINT("region.allocate");
    const int result = ckv_os_allocate(fd, bytes);
    if (result < 0 &&
        result != -EOPNOTSUPP) { /* writing allocates as well, only later */
        return fail_write(path, bytes, fd, result, error);
    }
    return CKV_OK;
}

/* Opens a new, empty file at `path`. */
static enum ckv_status
open_new(const char *path, int *fd, struct ckv_error *error)
{
    CKV_POINT("region.unlink");
    int result = ckv_os.unlink_path(path);
    if (result < 0 && result != -ENOENT) {
        return ckv_fail(error, CKV_E_UNSAFE_PATH, -result,
            "the old shared region %s cannot be removed; remove it by hand", path);
    }
    CKV_POINT("region.create");
    result =
        ckv_os_open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (result < 0) {
        const enum ckv_status status =
            result == -ENOSPC || result == -EDQUOT ? CKV_E_NO_SPACE : CKV_E_OS;
        return ckv_fail(error, status, -result,
            "the shared region %s cannot be created (%s%s); check that its directory "
            "exists and is writable, or name another (shm_dir)",
            path, strerror(-result), ckv_file_remedy(-result));
    }
    *fd = result;
    return CKV_OK;
}

/* Who may use the volume may use its region, and nobody else.  The permission of a group
 * that the file cannot be given to is left out: its members are refused, in words, and
 * the creator's own group gets nothing. */
static enum ckv_status
give_access(const struct ckv_region *region, const char *path, const struct stat *like,
    struct ckv_error *error)
{
    struct stat made;
    int result = ckv_os.stat_file(region->fd, &made);
    if (result < 0) {
        return ckv_fail(error, CKV_E_OS, -result,
            "the shared region %s cannot be looked at", path);
    }
    mode_t mode = like->st_mode & 0777;
    if (made.st_uid != like->st_uid || made.st_gid != like->st_gid) {
        const uint32_t user = ckv_os.user_id() == 0 ? like->st_uid : made.st_uid;
        result = ckv_os.change_owner(region->fd, user, like->st_gid);
        if (result < 0 && made.st_gid != like->st_gid) {
            mode &= (mode_t)~070u;
        }
    }
    result = ckv_os.change_mode(region->fd, mode); /* whatever the umask says */
    if (result < 0) {
        return ckv_fail(error, CKV_E_OS, -result,
            "the mode of the shared region %s cannot be set", path);
    }
    return CKV_OK;
}

static enum ckv_status
fill_new(struct ckv_volume *volume, const char *path, const struct stat *like,
    struct ckv_error *error)
{
    struct ckv_region *region = &volume->region;
    CKV_TRY(give_access(region, path, like, error));
    /* Where it means something and fails, the file system refuses volumes already
     * (P3). */
    (void)ckv_os.set_no_cow(region->fd);
    CKV_TRY(allocate_file(path, region->fd, region->layout.region_bytes, error));
    struct stat found;
    const int result = ckv_os.stat_file(region->fd, &found);
    if (result < 0) {
        return ckv_fail(error, CKV_E_OS, -result,
            "the shared region %s cannot be looked at", path);
    }
    region->device = (uint64_t)found.st_dev;
    region->inode = (uint64_t)found.st_ino;
    CKV_TRY(map_private(volume, error));
    return fill_header(volume, error);
}

static enum ckv_status
remember_path(struct ckv_region *region, const char *path, struct ckv_error *error)
{
    char *copy = strdup(path);
    if (copy == NULL) {
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM, "no memory for a path");
    }
    free(region->path);
    region->path = copy;
    return CKV_OK;
}

/* Removes a file that nobody can use. */
static void
discard(struct ckv_volume *volume)
{
    (void)ckv_os.unlink_path(volume->region.path); /* the first failure is reported */
    ckv_region_unmap(volume);
}

enum ckv_status
ckv_region_create(struct ckv_volume *volume, const char *path, const struct stat *like,
    struct ckv_error *error)
{
    struct ckv_region *region = &volume->region;
    region->fd = -1;
    CKV_TRY(plan(volume, error));
    CKV_TRY(remember_path(region, path, error));
    enum ckv_status status = open_new(path, &region->fd, error);
    if (status != CKV_OK) {
        ckv_region_unmap(volume);
        return status;
    }
    status = fill_new(volume, path, like, error);
    if (status != CKV_OK) {
        discard(volume);
        return status;
    }
    CKV_POINT("region.created");
    return CKV_OK;
}

/* Every block is written, not only allocated: a store into a page that never was may
 * still be refused, or has to convert it first. */
static int
write_content(const struct ckv_region *region)
{
    const uint8_t *content = region->base;
    int result = 0;
    for (uint64_t at = 0; result == 0 && at < region->bytes; at += PIECE_BYTES) {
        const size_t piece = (size_t)ckv_min_u64(PIECE_BYTES, region->bytes - at);
        CKV_POINT("region.write");
        result = ckv_os_write_all(region->fd, content + at, piece, at);
    }
    return result;
}

enum ckv_status
ckv_region_publish(struct ckv_volume *volume, struct ckv_error *error)
{
    struct ckv_region *region = &volume->region;
    if (region->fd < 0) {
        return CKV_OK; /* private for good */
    }
    const int result = write_content(region);
    const enum ckv_status status =
        result < 0 ? fail_write(region->path, region->bytes, region->fd, result, error)
                   : map_file(volume, region->fd, true, error);
    if (status != CKV_OK) {
        discard(volume);
        return status;
    }
    /* The mapping is all that is used from here on; nothing is left that a program
     * which closes every descriptor could take away. */
    (void)ckv_os.close_file(region->fd);
    region->fd = -1;
    CKV_POINT("region.published");
    return CKV_OK;
}

enum ckv_status
ckv_region_create_private(struct ckv_volume *volume, struct ckv_error *error)
{
    volume->region.fd = -1;
    CKV_TRY(plan(volume, error));
    enum ckv_status status = map_private(volume, error);
    if (status == CKV_OK) {
        status = fill_header(volume, error);
    }
    if (status != CKV_OK) {
        ckv_region_unmap(volume);
    }
    return status;
}

/* ---- attaching ------------------------------------------------------------------ */

static enum ckv_status
open_existing(struct ckv_volume *volume, bool writable, int *fd,
    struct ckv_error *error)
{
    const char *path = volume->region.path;
    const int access = writable ? O_RDWR : O_RDONLY;
    CKV_POINT("region.attach");
    /* O_NONBLOCK: a FIFO planted at the name must not stop us. */
    const int result =
        ckv_os_open(path, access | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0);
    if (result == -ENOENT) {
        return ckv_fail(error, CKV_E_FORMAT, ENOENT,
            "the shared region %s is missing although other processes have the volume "
            "open; it was removed, or they use another shm_dir" REMEDY,
            path);
    }
    if (result == -ELOOP) {
        return ckv_fail(error, CKV_E_UNSAFE_PATH, ELOOP,
            "the shared region %s is a symbolic link; it was replaced" REMEDY, path);
    }
    if (result < 0) {
        return ckv_fail(error, CKV_E_OS, -result,
            "the shared region %s cannot be opened (%s%s); it has the permissions of "
            "the volume file",
            path, strerror(-result), ckv_file_remedy(-result));
    }
    *fd = result;
    return CKV_OK;
}

/* What lies in the region, and where, hangs on a choice of who made it. */
static enum ckv_status
adopt_eviction(struct ckv_volume *volume, int fd, struct ckv_error *error)
{
    struct ckv_region_header header;
    const enum ckv_eviction wanted = volume->eviction;
    const int result = ckv_os_read_all(fd, &header, sizeof header, 0);
    if (result < 0) {
        return CKV_OK; /* of another size: said by the next check */
    }
    volume->eviction = header.eviction == CKV_EVICTION_PREFIX ? CKV_EVICTION_PREFIX
                                                              : CKV_EVICTION_CLOCK;
    if (volume->eviction != wanted && volume->mode == CKV_MODE_READ_WRITE) {
        ckv_log(CKV_LOG_WARNING,
            "the volume is open elsewhere with eviction=\"%s\", which holds until "
            "every "
            "process has closed it",
            volume->eviction == CKV_EVICTION_PREFIX ? "prefix" : "clock");
    }
    return plan(volume, error);
}

static enum ckv_status
check_file(struct ckv_volume *volume, const struct ckv_options *options, int fd,
    struct ckv_error *error)
{
    struct ckv_region *region = &volume->region;
    struct stat found;
    const int result = ckv_os.stat_file(fd, &found);
    if (result < 0) {
        return ckv_fail(error, CKV_E_OS, -result,
            "the shared region %s cannot be looked at", region->path);
    }
    if (!S_ISREG(found.st_mode)) {
        return ckv_fail(error, CKV_E_UNSAFE_PATH, 0,
            "the shared region %s is not a regular file; it was replaced" REMEDY,
            region->path);
    }
    if (!ckv_file_trusted_owner(options, found.st_uid)) {
        return ckv_fail(error, CKV_E_UNSAFE_PATH, 0,
            "the shared region %s belongs to user %u, who has the volume open or "
            "planted it; set allow_shared_directory to share a volume with other users",
            region->path, (unsigned int)found.st_uid);
    }
    if (found.st_size < 0 || (uint64_t)found.st_size != region->layout.region_bytes) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "the shared region %s has %lld bytes, this volume needs %llu; it belongs "
            "to "
            "another volume or was truncated" REMEDY,
            region->path, (long long)found.st_size,
            (unsigned long long)region->layout.region_bytes);
    }
    region->device = (uint64_t)found.st_dev;
    region->inode = (uint64_t)found.st_ino;
    return CKV_OK;
}

/* Read by a read call, so that nothing is mapped before it is known to be ours. */
static enum ckv_status
check_header(struct ckv_volume *volume, int fd, uint64_t nonce, struct ckv_error *error)
{
    const struct ckv_region *region = &volume->region;
    const char *path = region->path;
    struct ckv_region_header header;
    const int result = ckv_os_read_all(fd, &header, sizeof header, 0);
    if (result < 0) {
        return ckv_fail(error, CKV_E_OS, -result, "the shared region %s cannot be read",
            path);
    }
    if (header.magic != CKV_REGION_MAGIC) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "the file %s is not a shared region of cyclone_kv (magic %016llx, expected "
            "%016llx)" REMEDY,
            path, (unsigned long long)header.magic,
            (unsigned long long)CKV_REGION_MAGIC);
    }
    if (header.version != CKV_FORMAT_VERSION) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "the shared region %s has version %u, this build uses %u; another version "
            "of "
            "cyclone_kv has the volume open" REMEDY,
            path, header.version, CKV_FORMAT_VERSION);
    }
    if (memcmp(header.set_id, volume->set_id, sizeof header.set_id) != 0 ||
        header.nonce != nonce) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "the shared region %s belongs to another volume or to an earlier life of "
            "this "
            "one (number %016llx, expected %016llx)" REMEDY,
            path, (unsigned long long)header.nonce, (unsigned long long)nonce);
    }
    if (header.region_bytes != region->layout.region_bytes ||
        header.layout_crc != layout_crc(region)) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "the shared region %s was laid out for other paths, or by another build of "
            "cyclone_kv (layout %08llx, expected %08llx)" REMEDY,
            path, (unsigned long long)header.layout_crc,
            (unsigned long long)layout_crc(region));
    }
    if (header.ready != 1) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "the shared region %s was never finished (ready is %u, expected 1)" REMEDY,
            path, header.ready);
    }
    return CKV_OK;
}

enum ckv_status
ckv_region_attach(struct ckv_volume *volume, const struct ckv_options *options,
    const char *path, uint64_t nonce, struct ckv_error *error)
{
    struct ckv_region *region = &volume->region;
    const bool writable = options->mode == CKV_MODE_READ_WRITE;
    region->fd = -1;
    CKV_TRY(remember_path(region, path, error));
    int fd = -1;
    enum ckv_status status = open_existing(volume, writable, &fd, error);
    if (status == CKV_OK) {
        status = adopt_eviction(volume, fd, error);
        if (status == CKV_OK) {
            status = check_file(volume, options, fd, error);
        }
        if (status == CKV_OK) {
            status = check_header(volume, fd, nonce, error);
        }
        if (status == CKV_OK) {
            status = map_file(volume, fd, writable, error);
        }
        (void)ckv_os.close_file(fd); /* as in ckv_region_publish() */
    }
    if (status != CKV_OK) {
        ckv_region_unmap(volume);
        return status;
    }
    CKV_POINT("region.attached");
    return CKV_OK;
}

void
ckv_region_set_ready(struct ckv_volume *volume)
{
    CKV_POINT("region.ready");
    /* Attachers look under the open lock, which the caller holds until later. */
    volume->region.header->ready = 1;
}

void
ckv_region_unmap(struct ckv_volume *volume)
{
    struct ckv_region *region = &volume->region;
    if (region->guarded) {
        ckv_guard_remove(region->base);
    }
    if (region->base != NULL) {
        (void)ckv_os.unmap(region->base,
            region->bytes); /* fails for bad arguments only */
    }
    if (region->fd >= 0) {
        (void)ckv_os.close_file(region->fd);
    }
    free(region->path);
    *region = (struct ckv_region){.fd = -1};
}

/* ---- namespaces ----------------------------------------------------------------- */

int
ckv_region_namespace(struct ckv_volume *volume, const uint8_t tag[16], bool add)
{
    int free_index = -1;
    for (int i = 0; i < CKV_NAMESPACES_MAX; i++) {
        const struct ckv_namespace *space = &volume->region.namespaces[i];
        if (ckv_load_acquire_u64(&space->used) == 0) { /* R7: the tag is there */
            free_index = free_index < 0 ? i : free_index;
        } else if (memcmp(space->tag, tag, sizeof space->tag) == 0) {
            return i;
        }
    }
    if (!add || free_index < 0) {
        return -1;
    }
    struct ckv_namespace *space = &volume->region.namespaces[free_index];
    memcpy(space->tag, tag, sizeof space->tag);
    CKV_POINT("region.namespace");
    ckv_store_release_u64(&space->used, 1); /* W7 */
    return free_index;
}
