/* SPDX-License-Identifier: Apache-2.0 */
/* hostile_files.c: volume and region files that are cut, grown, punched, replaced, removed
 * or exchanged while a volume is open and views of it are held.
 *
 * With sigbus_guard no load may end the process, views included: what a view then shows
 * is either the payload or not ok.  Without it a load from a view may raise SIGBUS, which
 * the program catches there and nowhere else: in a call of ours it is a fault.
 *
 * A case is: what is done x to which file x where it begins x guard x template.
 */
#include "hostile.h"

#include <setjmp.h>

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

enum { PLACES = 8, OBJECTS = 3, CASES = ACTIONS * PLACES * OBJECTS * 2 };

static sigjmp_buf raw_load;
static sig_atomic_t in_raw_load;

static void
on_bus_error(int number)
{
    (void)number;
    if (in_raw_load) {
        siglongjmp(raw_load, 1);
    }
    (void)signal(SIGBUS, SIG_DFL);
    (void)raise(SIGBUS);
}

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

/* Loads every byte of the views that are held. */
static void
look_at_views(struct handle *handle, const unsigned numbers[HELD_MAX])
{
    for (unsigned i = 0; i < HELD_MAX; i++) {
        if (handle->held[i] == NULL) {
            continue;
        }
        size_t length = 0;
        begin_call("load from a view");
        const uint8_t *data = ckv_lease_data(handle->held[i], &length);
        in_raw_load = !setting.guard;
        if (sigsetjmp(raw_load, 1) == 0) {
            const bool same = length == payload_length(numbers[i]) &&
                              is_filled(handle->space, numbers[i], 0, data, length);
            in_raw_load = 0;
            begin_call("lease_ok");
            /* Zeros that a file got by being cut and grown again are no bus error: the
             * view shows what the file has. */
            (void)same;
            (void)ckv_lease_ok(handle->held[i]);
        }
        in_raw_load = 0;
        begin_call("lease_header");
        const uint8_t *header = ckv_lease_header(handle->held[i], &length);
        if (header != NULL && length != 0 &&
            !is_filled(handle->space, numbers[i], 1, header, length)) {
            fault("wrong header for key %u", numbers[i]);
        }
        end_call();
    }
}

static void
hold_views(struct handle *handle, const unsigned numbers[HELD_MAX])
{
    for (unsigned i = 0; i < HELD_MAX; i++) {
        do_get(handle, numbers[i], i);
    }
}

/* Calls that copy; views are looked at by look_at_views(). */
static void
call_all(struct handle *handle, struct input *input)
{
    for (unsigned i = 0; i < KEYS && seconds() < setting.until; i++) {
        do_get_into(handle, i, sizeof scratch);
    }
    for (unsigned i = 0; i < 30 && seconds() < setting.until; i++) {
        switch (take8(input) % 12) {
        case 0:
            do_put(handle, take8(input) % (KEYS + BIG_KEYS), CKV_PUT_OVERWRITE);
            break;
        case 1:
            do_many(handle, take8(input));
            break;
        case 2:
            do_list(handle);
            break;
        case 3:
            do_events(handle, 0, 100);
            break;
        case 4:
            do_verify(handle, take8(input) % 2 == 0);
            break;
        case 5:
            do_statistics(handle);
            break;
        case 6:
            do_care(handle, take8(input) % 2 == 0);
            break;
        case 7:
            do_remove(handle, take8(input) % KEYS);
            break;
        case 8:
            do_commit(handle, take8(input) % KEYS, false);
            break;
        case 9:
            do_get_many(handle);
            break;
        case 10:
            if (take8(input) % 8 == 0) {
                do_clear(handle);
            }
            break;
        default:
            do_put(handle, take8(input) % KEYS, 0);
            break;
        }
    }
}

static void
get_some_views(struct handle *handle)
{
    /* Without the guard do_get() would load from what may not be there. */
    for (unsigned i = 0; setting.guard && i < KEYS && seconds() < setting.until;
        i += 3) {
        do_get(handle, i, i % HELD_MAX);
    }
}

static void
run_input(struct input *input)
{
    static const unsigned numbers[HELD_MAX] = {2, 6, 7, 9};
    uint64_t number = case_number % CASES;
    const enum action action = (enum action)(number % ACTIONS);
    number /= ACTIONS;
    const unsigned where = number % PLACES;
    number /= PLACES;
    const unsigned object = number % OBJECTS; /* 2: a reader, whose region is its own */
    number /= OBJECTS;
    const unsigned template_number = take8(input) % 2;
    setting = (struct setting){
        .verify = CKV_VERIFY_ALWAYS,
        .guard = number % 2 == 1,
        .compare = true,
    };
    struct handle other;
    char other_name[300];
    restore(1 - template_number, "o");
    setting.until = seconds() + 10;
    need(open_handle(&other, 0, CKV_MODE_READ_WRITE), "open the other volume");
    name_of(object % 2, setting.paths[0], other_name);

    struct handle handle;
    char name[300];
    restore(template_number, "f");
    const struct ckv_file_header *header =
        (const void *)templates[template_number].files[0].content;
    struct ckv_geometry geometry;
    need(ckv_geometry_read(header, &geometry, NULL) == CKV_OK, "geometry");
    need(open_handle(&handle, 0, object == 2 ? CKV_MODE_READ : CKV_MODE_READ_WRITE),
        "open the volume");
    name_of(object % 2, setting.paths[0], name);
    hold_views(&handle, numbers);

    struct stat info;
    need(stat(name, &info) == 0, "look at the file");
    doing("changing the file");
    act(action, name, other_name,
        place(where, &geometry, (uint64_t)info.st_size, object % 2 == 1));

    setting.until = seconds() + 1.5;
    look_at_views(&handle, numbers);
    call_all(&handle, input);
    look_at_views(&handle, numbers);
    get_some_views(&handle);
    (void)usleep(take8(input) % 4 == 0 ? 1100000 : 0); /* lets maintenance look, too */
    call_all(&handle, input);

    struct handle again; /* shares the volume, or meets what lies at the path now */
    if (open_handle(&again, 1, CKV_MODE_READ)) {
        call_all(&again, input);
        close_handle(&again);
    }
    close_handle(&handle);
    call_all(&other, input);
    close_handle(&other);
    setting.until = seconds() + 1.5;
    for (int i = 0; i < 2; i++) {
        if (open_handle(&handle, 0, i == 0 ? CKV_MODE_READ_WRITE : CKV_MODE_READ)) {
            call_all(&handle, input);
            get_some_views(&handle);
            close_handle(&handle);
        }
    }
}

int
main(int count, char **arguments)
{
    /* Before the first open, so that the guard calls it for what is not its own. */
    (void)signal(SIGBUS, on_bus_error);
    return run_cases(count, arguments, run_input);
}
