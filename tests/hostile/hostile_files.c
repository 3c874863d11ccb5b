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
#include "file_changes.h"

enum { CASES = ACTIONS * PLACES * OBJECTS * 2 };

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
        /* Zeros that a file got by being cut and grown again are no bus error: the view
         * shows what the file has. */
        (void)load_view(data, length);
        begin_call("lease_ok");
        (void)ckv_lease_ok(handle->held[i]);
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
    catch_raw_loads();
    return run_cases(count, arguments, run_input);
}
