/* SPDX-License-Identifier: Apache-2.0 */
/* guided.c: programs of changes and calls, led by libFuzzer to what they have not reached.
 *
 * An input is a program: steps of 16 bytes, an operation and 15 bytes of arguments, of
 * which the first sets the options.  A step changes a volume file (volume_changes.h: any
 * field, sealed again), words of the shared region (region_changes.h), a file as a whole
 * (file_changes.h), the clock, or calls the engine (hostile.h).  What a step does depends
 * on its own bytes, so that steps can be inserted, dropped and exchanged: the mutator below
 * does that.  Changes come before the first open as well as while the volume is open.
 *
 * Two targets: volume files, and with -DGUIDED_REGION the shared region.
 *
 *   G1  Nothing ends by a signal; no call takes longer than it may.  The clock is one of
 *       ours: a sleep moves it on, so waits cost no time.
 *   G2  No wrong bytes, but of blocks whose record was forged with a right checksum, and of
 *       blocks that were changed behind a mark (verify="once", while open).
 *   G3  What a rebuild or a repair leaves has no structural fault.
 *   G4  Descriptors, mappings and memory are given back, whatever was met.
 *
 * scripts/fuzz.py builds and runs it.  The engine alone is instrumented for coverage.
 */
#include "file_changes.h"
#include "region_changes.h"
#include "volume_changes.h"

enum {
    STEP_BYTES = 16,
    STEPS_MAX = 64,
    HANDLES_MAX = 3,
    CHANGES_MAX = 24, /* of files as a whole, in a program: each may copy 16 MiB */
};

enum operation {
    CHANGE_A, /* six of them: as likely as all but calls together */
    CHANGE_F = 5,
    CHANGE_FILE,
    CHANGE_OTHER, /* region words in the target of volumes, and the reverse */
    ADVANCE_CLOCK,
    OPEN_ONE,
    CLOSE_ONE,
    CLOSE_ALL,
    READ_ALL,
    CHANGE_PART, /* of a word of the region */
    CALL,        /* this one and all above */
    OPERATIONS = 32
};

/* ---- an operating system that does not wait ------------------------------------------ */

/* Far beyond the clock of the machine, on which maintenance threads wait: they sleep. */
#define CLOCK_BEGIN_NS UINT64_C(1000000000000000000)

static uint64_t clock_ns = CLOCK_BEGIN_NS;
static uint64_t random_state = 1;
static int64_t open_files;
static int64_t mapped_bytes;

static uint64_t
clock_now(void)
{
    /* A loop that waits for the clock alone has to end, too. */
    return __atomic_add_fetch(&clock_ns, 100, __ATOMIC_RELAXED);
}

static uint64_t
clock_of_day(void)
{
    return clock_now() + UINT64_C(1700000000) * 1000000000;
}

static void
move_clock(uint64_t duration_ns)
{
    (void)__atomic_add_fetch(&clock_ns, duration_ns, __ATOMIC_RELAXED);
}

static int
repeatable_bytes(void *target, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        ((uint8_t *)target)[i] =
            (uint8_t)mix(__atomic_add_fetch(&random_state, 1, __ATOMIC_RELAXED));
    }
    return 0;
}

static int
counted_open(const char *path, int flags, mode_t mode)
{
    const int fd = ckv_os_native.open_file(path, flags, mode);
    (void)__atomic_add_fetch(&open_files, fd >= 0, __ATOMIC_RELAXED);
    return fd;
}

static int
counted_close(int fd)
{
    (void)__atomic_sub_fetch(&open_files, 1, __ATOMIC_RELAXED);
    return ckv_os_native.close_file(fd);
}

static int
counted_map(void *hint, size_t length, int protection, int flags, int fd,
    uint64_t offset, void **result)
{
    const int status =
        ckv_os_native.map(hint, length, protection, flags, fd, offset, result);
    if (status == 0 && (flags & MAP_FIXED) == 0) {
        (void)__atomic_add_fetch(&mapped_bytes, (int64_t)length, __ATOMIC_RELAXED);
    }
    return status;
}

static int
counted_unmap(void *address, size_t length)
{
    (void)__atomic_sub_fetch(&mapped_bytes, (int64_t)length, __ATOMIC_RELAXED);
    return ckv_os_native.unmap(address, length);
}

static void
replace_system(void)
{
    ckv_os.monotonic_ns = clock_now;
    ckv_os.realtime_ns = clock_of_day;
    ckv_os.sleep_ns = move_clock;
    ckv_os.random_bytes = repeatable_bytes;
    ckv_os.open_file = counted_open;
    ckv_os.close_file = counted_close;
    ckv_os.map = counted_map;
    ckv_os.unmap = counted_unmap;
}

/* ---- a program ------------------------------------------------------------------------ */

struct run {
    struct handle handles[HANDLES_MAX];
    unsigned count;
    unsigned template_number;
    unsigned file_changes;
    struct template_set const *set;
};

static struct run run;

static bool
all_read(void)
{
    for (unsigned i = 0; i < run.count; i++) {
        if (!run.handles[i].reads) {
            return false;
        }
    }
    return true;
}

static void
unmap_region(void)
{
    if (region.base != NULL) {
        (void)munmap(region.base, region.bytes);
        region.base = NULL;
    }
}

static void
close_last(void)
{
    close_handle(&run.handles[--run.count]);
    if (run.count == 0) {
        unmap_region();
    }
}

static void
open_one(struct input *input)
{
    if (run.count == HANDLES_MAX) {
        return;
    }
    if (run.count ==
        0) { /* the region is built anew: marks of earlier lives are gone */
        setting.compare = true;
        setting.sound = true;
        setting.cut = false;
    }
    const unsigned space = take8(input) % SPACES;
    const enum ckv_mode mode =
        take8(input) % 5 == 4 ? CKV_MODE_READ : CKV_MODE_READ_WRITE;
    if (!open_handle(&run.handles[run.count], space, mode)) {
        return;
    }
    run.count++;
    if (setting.sound && run.count == 1 && mode == CKV_MODE_READ_WRITE &&
        one_in(input, 2)) {
        do_prove(&run.handles[0], "the rebuild");
    }
}

/* Somebody changes bytes under those that have them open. */
static void
note_change(void)
{
    if (run.count != 0) {
        setting.sound = false;
        setting.cut = true;
        setting.compare = setting.verify == CKV_VERIFY_ALWAYS;
    }
}

static void
change_one_volume(struct input *input)
{
    const unsigned which = take8(input) % setting.path_count;
    const struct template_file *file = &run.set->files[which];
    struct target target = {
        .fd = open(setting.paths[which], O_RDWR | O_CLOEXEC),
        .which = which,
    };
    if (target.fd < 0) {
        return; /* removed by an earlier step */
    }
    struct ckv_file_header copies[2];
    memcpy(copies, file->content, sizeof copies);
    target.header = copies[copies[1].generation > copies[0].generation];
    need(ckv_geometry_read(&target.header, &target.geometry, NULL) == CKV_OK,
        "geometry");
    doing("changing files");
    note_change();
    change_volume(&target, input);
    (void)close(target.fd);
}

/* The region that the open handles use; none when its file is not what it should be. */
static bool
find_region(void)
{
    char path[300];
    struct stat info;
    (void)snprintf(path, sizeof path, "%s-shm", setting.paths[0]);
    if (stat(path, &info) != 0 || all_read()) {
        return false;
    }
    if (region.base == NULL) {
        map_region(run.template_number);
    }
    return (uint64_t)info.st_size == region.bytes;
}

/* Some bits of a word that is in use, the others as they are: an entry beyond the table
 * under the right tag, a sequence of a live block. */
static void
change_part(struct input *input)
{
    static const uint8_t widths[] = {3, 8, 12, 20, 32, 61};
    const struct area area = some_area(input);
    const uint64_t offset = some_word(&area, input);
    const unsigned width = widths[take8(input) % CKV_ARRAY_LENGTH(widths)];
    const unsigned shift = take8(input) % 2 == 0 ? 0 : take8(input) % 8 * 8;
    const uint64_t mask = ((UINT64_C(1) << width) - 1) << shift;
    const uint64_t present = load(offset, area.width);
    store(offset, area.width, (present & ~mask) | (take_evil(input) << shift & mask));
}

static void
change_one_region(struct input *input, bool part)
{
    if (run.count == 0) {
        open_one(input);
    }
    if (run.count == 0 || !find_region()) {
        return;
    }
    doing("changing the region");
    note_change();
    if (part) {
        change_part(input);
    } else {
        change_region(input);
    }
}

static void
change_one_file(struct input *input)
{
    char name[300];
    char other[300];
    struct stat info;
    const unsigned object = take8(input) % 4 == 0; /* the region */
    (void)snprintf(other, sizeof other, "%s/other.cyc%s", folder,
        object == 0 ? "" : "-shm");
    name_of(object, setting.paths[take8(input) % setting.path_count], name);
    const enum action action = (enum action)(take8(input) % ACTIONS);
    if (stat(name, &info) != 0 || info.st_size < 4 * (off_t)CKV_PAGE_BYTES ||
        ++run.file_changes > CHANGES_MAX) {
        return;
    }
    if (action == ACTION_REPLACE || action == ACTION_EXCHANGE ||
        action == ACTION_OTHER_CONTENT) { /* a volume of another set */
        const struct template_file *file =
            &templates[take8(input) % TEMPLATES].files[0];
        const int fd = open(other, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        need(fd >= 0, "lay another file");
        lay_template(file, fd);
        (void)close(fd);
    }
    struct ckv_file_header header;
    struct ckv_geometry geometry;
    memcpy(&header, run.set->files[0].content, sizeof header);
    need(ckv_geometry_read(&header, &geometry, NULL) == CKV_OK, "geometry");
    doing("changing a file");
    note_change();
    const uint64_t size = (uint64_t)info.st_size; /* cut before, maybe */
    act(action, name, other,
        ckv_min_u64(place(take8(input) % PLACES, &geometry, size, object != 0),
            size - CKV_PAGE_BYTES));
    (void)unlink(other);
}

static void
take_step(const uint8_t step[STEP_BYTES])
{
    struct input input = {.data = step + 1, .size = STEP_BYTES - 1, .beyond = step[0]};
    const unsigned operation = step[0] % OPERATIONS;
#ifdef GUIDED_REGION
    const bool changes_region = operation <= CHANGE_F;
#else
    const bool changes_region = operation == CHANGE_OTHER;
#endif
    if (changes_region || operation == CHANGE_PART) {
        change_one_region(&input, operation == CHANGE_PART);
    } else if (operation <= CHANGE_F || operation == CHANGE_OTHER) {
        change_one_volume(&input);
    } else if (operation == CHANGE_FILE) {
        change_one_file(&input);
    } else if (operation == ADVANCE_CLOCK) {
        move_clock(UINT64_C(1000000) << take8(&input) % 24);
    } else if (operation == OPEN_ONE) {
        open_one(&input);
    } else if (operation == CLOSE_ONE && run.count != 0) {
        close_last();
    } else if (operation == CLOSE_ALL) {
        while (run.count != 0) {
            close_last();
        }
    } else if (run.count == 0) {
        open_one(&input);
    } else if (operation == READ_ALL) {
        get_all(&run.handles[take8(&input) % run.count]);
    } else {
        one_call(&run.handles[take8(&input) % run.count], &input);
    }
}

/* Whatever was done, the next life is sound, if the files can be opened at all. */
static void
next_life(bool reads)
{
    struct handle handle;
    setting.verify = CKV_VERIFY_ONCE;
    setting.compare = true;
    setting.sound = true;
    setting.cut = false;
    if (!open_handle(&handle, 0, reads ? CKV_MODE_READ : CKV_MODE_READ_WRITE)) {
        return;
    }
    if (!reads) {
        do_prove(&handle, "the rebuild");
        do_list(&handle);
    }
    for (unsigned i = 0; i < KEYS; i += 3) {
        do_get(&handle, i, i % HELD_MAX);
    }
    if (!reads) {
        do_verify(&handle, true);
        do_prove(&handle, "the repair");
    }
    close_handle(&handle);
}

static void
run_program(const uint8_t *data, size_t size)
{
    struct input input = {.data = data, .size = size < STEP_BYTES ? size : STEP_BYTES};
    const unsigned first = take8(&input);
    run = (struct run){.template_number = first % TEMPLATES};
    run.set = &templates[run.template_number];
    setting = (struct setting){
        .eviction = first < 128 ? CKV_EVICTION_CLOCK : CKV_EVICTION_PREFIX,
        .verify = (enum ckv_verify)(take8(&input) % 3),
        .admission = (enum ckv_admission)(take8(&input) % 3),
        .guard = take8(&input) % 2 == 0,
        .degraded = take8(&input) % 4 == 3,
        .recreate = take8(&input) % 16 == 15,
        .write_behind = take8(&input) % 4 == 3,
        .until = 1e30,
    };
    restore(run.template_number, "g");
    for (size_t at = STEP_BYTES; at + STEP_BYTES <= size && at < STEPS_MAX * STEP_BYTES;
        at += STEP_BYTES) {
        take_step(data + at);
    }
    while (run.count != 0) {
        close_last();
    }
    unmap_region();
    next_life(false);
    if (input.beyond % 4 == 0) {
        next_life(true);
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool prepared; /* not earlier: the signal handlers of libFuzzer come first */
    if (!prepared) {
        const char *where = getenv("CKV_FUZZ_FOLDER");
        need(where != NULL, "CKV_FUZZ_FOLDER names no folder");
        catch_raw_loads();
        replace_system();
        prepare(where);
        set_limits();
        prepared = true;
        open_files = mapped_bytes = 0;
    }
    /* The same input does the same, whatever came before. */
    clock_ns = CLOCK_BEGIN_NS;
    random_state = 1;
    run_program(data, size);
    doing("counting what is left");
    if (open_files != 0 || mapped_bytes != 0) {
        fault("%" PRId64 " files and %" PRId64 " bytes of mappings are left",
            open_files, mapped_bytes);
    }
    return 0;
}

/* ---- mutations ------------------------------------------------------------------------ */

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

static void
fill_step(uint8_t step[STEP_BYTES], struct input *input)
{
    for (unsigned i = 0; i < STEP_BYTES; i++) {
        step[i] = take8(input);
    }
    if (one_in(input, 2)) {
        step[0] = (uint8_t)take_below(input, CALL + 4);
    }
}

size_t
LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    struct input input = {.beyond = mix(seed)};
    size_t steps = size / STEP_BYTES;
    const size_t limit =
        max_size / STEP_BYTES < STEPS_MAX ? max_size / STEP_BYTES : STEPS_MAX;
    if (limit == 0) {
        return size;
    }
    if (steps == 0) {
        fill_step(data, &input);
        steps = 1;
    }
    for (unsigned i = 1 + (unsigned)take_below(&input, 4); i > 0; i--) {
        const size_t which = take_below(&input, steps);
        uint8_t *step = data + which * STEP_BYTES;
        const unsigned kind = (unsigned)take_below(&input, 12);
        if (kind <= 2 && steps < limit) { /* a new step, or one again */
            memmove(step + STEP_BYTES, step, (steps - which) * STEP_BYTES);
            steps++;
            if (kind != 0 || which == 0) {
                fill_step(step + (which == 0 ? STEP_BYTES : 0), &input);
            }
        } else if (kind == 3 && steps > 2) {
            memmove(step, step + STEP_BYTES, (steps - which - 1) * STEP_BYTES);
            steps--;
        } else if (kind == 4 && steps > 2) { /* two change places */
            uint8_t *other = data + take_below(&input, steps) * STEP_BYTES;
            uint8_t kept[STEP_BYTES];
            memcpy(kept, step, STEP_BYTES);
            memmove(step, other, STEP_BYTES);
            memcpy(other, kept, STEP_BYTES);
        } else if (kind == 5) { /* another operation with the same arguments */
            step[0] = take8(&input);
        } else if (kind <= 7) { /* which of the things: few arguments, small numbers */
            step[1 + take_below(&input, 4)] = (uint8_t)take_below(&input, 32);
        } else {
            (void)LLVMFuzzerMutate(step + 1, STEP_BYTES - 1, STEP_BYTES - 1);
        }
    }
    return steps * STEP_BYTES;
}

size_t
LLVMFuzzerCustomCrossOver(const uint8_t *first, size_t first_size,
    const uint8_t *second, size_t second_size, uint8_t *out, size_t out_size,
    unsigned seed)
{
    struct input input = {.beyond = mix(seed)};
    const size_t first_steps = first_size / STEP_BYTES;
    const size_t second_steps = second_size / STEP_BYTES;
    const size_t limit = out_size / STEP_BYTES;
    size_t begin = first_steps == 0 ? 0 : 1 + take_below(&input, first_steps);
    const size_t from = second_steps == 0 ? 0 : take_below(&input, second_steps);
    begin = begin < first_steps ? begin : first_steps;
    begin = begin < limit ? begin : limit;
    const size_t rest =
        second_steps - from < limit - begin ? second_steps - from : limit - begin;
    memcpy(out, first, begin * STEP_BYTES);
    memcpy(out + begin * STEP_BYTES, second + from * STEP_BYTES, rest * STEP_BYTES);
    return (begin + rest) * STEP_BYTES;
}
