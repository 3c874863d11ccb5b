/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_volume.c: opens volumes whose files were changed by somebody who knows the format.
 *
 * The number of a case chooses a template volume, changes of its files, and the calls that
 * follow.  guided.c does the same under the eyes of libFuzzer.
 */
#include "volume_changes.h"

/* ---- a case -------------------------------------------------------------------------- */

static void
check_size(const struct stat before[FILES_MAX])
{
    for (unsigned i = 0; i < setting.path_count; i++) {
        struct stat after;
        if (stat(setting.paths[i], &after) == 0 && after.st_ino == before[i].st_ino &&
            after.st_size > before[i].st_size && !setting.recreate) {
            fault("the file grew from %lld to %lld bytes", (long long)before[i].st_size,
                (long long)after.st_size);
        }
    }
}

static void
session(struct input *input, unsigned template_number, bool live_changes)
{
    struct handle handles[2];
    struct stat before[FILES_MAX] = {{0}};
    const unsigned space = take8(input) % SPACES;
    const bool reads = one_in(input, 5);
    for (unsigned i = 0; i < setting.path_count; i++) {
        (void)stat(setting.paths[i], &before[i]);
    }
    setting.sound = true;
    if (!open_handle(&handles[0], space, reads ? CKV_MODE_READ : CKV_MODE_READ_WRITE)) {
        return;
    }
    unsigned count = 1;
    if (one_in(input, 3) &&
        open_handle(&handles[1], 1 - space,
            one_in(input, 3) ? CKV_MODE_READ : CKV_MODE_READ_WRITE)) {
        count = 2;
    }
    if (one_in(input, 2) && !reads) {
        do_prove(&handles[0], "the rebuild");
    }
    get_all(&handles[0]);
    for (unsigned i = 0; i < 24 && seconds() < setting.until; i++) {
        if (live_changes && i % 6 == 5) {
            setting.sound = false;
            change_some(input, template_number);
        }
        one_call(&handles[i % count], input);
    }
    get_all(&handles[count - 1]);
    if (!reads) {
        do_statistics(&handles[0]);
        do_list(&handles[0]);
        do_verify(&handles[0], true);
        if (setting.sound) {
            do_prove(&handles[0], "the repair");
        }
    }
    while (count > 0) {
        close_handle(&handles[--count]);
    }
    if (!live_changes) {
        check_size(before);
    }
}

static void
run_input(struct input *input)
{
    const unsigned template_number = take8(input) % TEMPLATES;
    setting = (struct setting){
        .verify = (enum ckv_verify)(take8(input) % 3),
        .admission = (enum ckv_admission)(take8(input) % 3),
        .guard = one_in(input, 2),
        .degraded = one_in(input, 4),
        .recreate = one_in(input, 16),
        .compare = true,
        .until = seconds() + 5,
    };
    const bool live_changes = one_in(input, 4);
    if (live_changes) {
        /* Bytes that change behind a mark are not looked at again, by design. */
        setting.verify = CKV_VERIFY_ALWAYS;
        setting.guard = true;
    }
    restore(template_number, "v");
    change_some(input, template_number);
    session(input, template_number, live_changes);
    setting.until = seconds() + 5;
    setting.verify = live_changes ? CKV_VERIFY_ALWAYS : CKV_VERIFY_ONCE;
    session(input, template_number, false);
}

int
main(int count, char **arguments)
{
    return run_cases(count, arguments, run_input);
}
