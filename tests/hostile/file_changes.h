/* SPDX-License-Identifier: Apache-2.0 */
/* file_changes.h: volume and region files that are cut, grown, punched, replaced, removed
 * or exchanged as files, whatever is in them.
 */
#ifndef CKV_TESTS_FILE_CHANGES_H
#define CKV_TESTS_FILE_CHANGES_H

#include "hostile.h"

enum action {
    ACTION_TRUNCATE,
    ACTION_TRUNCATE_AND_GROW, /* zeros where content was */
    ACTION_PUNCH,
    ACTION_GROW,
    ACTION_REMOVE,
    ACTION_RENAME_OVER,   /* an empty file */
    ACTION_REPLACE,       /* a good file of another volume */
    ACTION_EXCHANGE,      /* with a volume that is open as well */
    ACTION_OVERWRITE,     /* zeros, through write() */
    ACTION_OTHER_CONTENT, /* of the same file of another volume */
    ACTIONS
};

enum { PLACES = 8, OBJECTS = 3 };

static void
name_of(unsigned object, const char *path, char name[300])
{
    (void)snprintf(name, 300, "%s%s", path, object == 0 ? "" : "-shm");
}

static uint64_t
place(unsigned where, const struct ckv_geometry *geometry, uint64_t size,
    bool is_region)
{
    const uint64_t in_volume[PLACES] = {0, 2 * CKV_PAGE_BYTES, geometry->table_offset,
        geometry->table_offset + CKV_PAGE_BYTES, geometry->data_offset,
        geometry->data_offset + 5 * CKV_PAGE_BYTES,
        geometry->data_offset + geometry->data_bytes / 2, size - CKV_PAGE_BYTES};
    const uint64_t in_region[PLACES] = {0, CKV_PAGE_BYTES, size / 8, size / 4, size / 2,
        size / 4 * 3, size - 2 * CKV_PAGE_BYTES, size - CKV_PAGE_BYTES};
    return is_region ? in_region[where] : in_volume[where];
}

static void
fill_zeros(int fd, uint64_t from, uint64_t to)
{
    static const uint8_t zeros[65536];
    for (uint64_t at = from; at < to; at += sizeof zeros) {
        const uint64_t length = to - at < sizeof zeros ? to - at : sizeof zeros;
        if (pwrite(fd, zeros, length, (off_t)at) < 0) {
            return;
        }
    }
}

static void
copy_over(const char *from, const char *to)
{
    static uint8_t piece[65536];
    const int source = open(from, O_RDONLY | O_CLOEXEC);
    const int target = open(to, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    need(source >= 0 && target >= 0, "open files to copy");
    ssize_t length;
    for (off_t at = 0; (length = pread(source, piece, sizeof piece, at)) > 0;
        at += length) {
        need(pwrite(target, piece, (size_t)length, at) == length, "copy");
    }
    (void)close(source);
    (void)close(target);
}

static void
act(enum action action, const char *name, const char *other, uint64_t at)
{
    char third[400];
    (void)snprintf(third, sizeof third, "%s.third", name);
    const int fd = open(name, O_RDWR | O_CLOEXEC);
    struct stat info;
    need(fd >= 0 && fstat(fd, &info) == 0, "open the file to change it");
    const uint64_t size = (uint64_t)info.st_size;
    int result = 0;
    switch (action) {
    case ACTION_TRUNCATE:
        result = ftruncate(fd, (off_t)at);
        break;
    case ACTION_TRUNCATE_AND_GROW:
        result = ftruncate(fd, (off_t)at) | ftruncate(fd, (off_t)size);
        break;
    case ACTION_PUNCH:
        result = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at,
            (off_t)(size - at));
        break;
    case ACTION_GROW:
        result = ftruncate(fd, (off_t)(size + at + 1));
        break;
    case ACTION_REMOVE:
        result = unlink(name);
        break;
    case ACTION_RENAME_OVER:
        result = close(open(third, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)) |
                 rename(third, name);
        break;
    case ACTION_REPLACE:
        copy_over(other, third);
        result = rename(third, name);
        break;
    case ACTION_EXCHANGE:
        result = rename(name, third) | rename(other, name) | rename(third, other);
        break;
    case ACTION_OVERWRITE:
        fill_zeros(fd, at, size);
        break;
    case ACTION_OTHER_CONTENT:
        copy_over(other, name);
        break;
    case ACTIONS:
    default:
        break;
    }
    need(result == 0, "change the file");
    (void)close(fd);
}

#endif /* CKV_TESTS_FILE_CHANGES_H */
