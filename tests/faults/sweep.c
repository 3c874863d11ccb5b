/* SPDX-License-Identifier: Apache-2.0 */
/* sweep.c: for each fault: the n-th call of its kind fails, for n = 1, 2, ... until the
 * scenario runs to its end without it; once, and from then on.  After each case:
 *
 *   1. while the volume is open, without faults: every call had a documented outcome,
 *      and the usual one if the fault is to be absorbed or did not happen; no pin,
 *      lock, reservation or hint is left; verify finds nothing; acknowledged blocks are
 *      there, refused ones are not.  A path that failed comes back by recover().
 *   2. closed: descriptors, mappings, allocations and threads are as many as before.
 *   3. opened again without faults: as in 1; and a block can be stored.
 *
 *     sweep FOLDER SCENARIO [--cases N] [--seed N] [--from N] [--plant WHAT]
 *     sweep --list | --faults
 *
 * The name of the case that runs is in FOLDER/doing: whoever started the program names
 * the case that ended it.  --cases takes about so many of all, chosen by the seed;
 * --from goes on with the fault of that number; --plant breaks something on purpose,
 * which has to be found.  A line FAULT for each finding, a line RESULT at the end; exit
 * status 1 when there were findings.
 */
#include "world.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pin.h"

enum {
    HANG_SECONDS = 20,
    NTH_MAX = 20000, /* a scenario with more calls of one kind never ends */
    PROBLEMS_MAX = 40
};

static char folder[200];

struct tally {               /* shared with children */
    unsigned long transient; /* cases in which the fault happened */
    unsigned long persistent;
    unsigned long absorbed; /* of both: with the outcome of a run without a fault */
    unsigned long idle;     /* cases in which it did not happen any more */
    unsigned long problems;
    unsigned long by_call[CALLS];
    unsigned long baseline[CALLS]; /* calls of a run without faults, the most of some */
};
static struct tally *tally;
static char *doing; /* mapped from FOLDER/doing */
enum { DOING_BYTES = 4096 };

/* ---- what may be left: nothing --------------------------------------------------- */

static int
threads_now(void)
{
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    need(tasks != NULL, "look at the threads");
    while (readdir(tasks) != NULL) {
        count++;
    }
    (void)closedir(tasks);
    return count - 2;
}

static int
open_files_now(void)
{
    int count = 0;
    DIR *files = opendir("/proc/self/fd");
    need(files != NULL, "look at the descriptors");
    while (readdir(files) != NULL) {
        count++;
    }
    (void)closedir(files);
    return count - 3;
}

static int
mappings_now(void)
{
    int count = 0;
    char line[700];
    FILE *maps = fopen("/proc/self/maps", "r");
    need(maps != NULL, "look at the mappings");
    while (fgets(line, sizeof line, maps) != NULL) {
        count += strstr(line, ".cyc") != NULL;
    }
    (void)fclose(maps);
    return count;
}

static int files_before;
static struct books books_before;
static unsigned long serial_before;

static void
remember_books(void)
{
    files_before = open_files_now();
    books_before = inject_books();
    serial_before = inject_serial();
}

static void
judge_books(struct run *run, const char *when)
{
    struct books now = inject_books();
    if (run->scenario->fresh) { /* the canary of slot.c, the buffer of a thread */
        now.mapped_bytes -=
            now.mapped_bytes == books_before.mapped_bytes + 4096 ? 4096 : 0;
        now.allocations -= now.allocations == books_before.allocations + 1;
    }
    if (now.descriptors != books_before.descriptors) {
        problem(run, "%s: %ld descriptors are left open", when,
            now.descriptors - books_before.descriptors);
    }
    if (now.mapped_bytes != books_before.mapped_bytes) {
        problem(run, "%s: %ld bytes are left mapped", when,
            now.mapped_bytes - books_before.mapped_bytes);
    }
    if (now.allocations != books_before.allocations) {
        const char *caller = inject_leaked(serial_before);
        extern const char __executable_start;
        problem(run, "%s: %ld allocations are left, one made at +%#tx", when,
            now.allocations - books_before.allocations,
            caller != NULL ? caller - &__executable_start : 0);
    }
    int threads = threads_now();
    for (int i = 0; i < 100 && threads != 1; i++) { /* one that was joined is leaving */
        const struct timespec pause = {.tv_nsec = 100000};
        (void)nanosleep(&pause, NULL);
        threads = threads_now();
    }
    if (threads != 1) {
        problem(run, "%s: %d threads are left", when, threads - 1);
    }
    /* The books are kept at the door; what goes past it shows here. */
    if (open_files_now() != files_before || mappings_now() != 0) {
        problem(run, "%s: %d descriptors, %d mappings of the volume", when,
            open_files_now() - files_before, mappings_now());
    }
    remember_books();
}

/* ---- 1. while it is open --------------------------------------------------------- */

static void
judge_region(struct run *run, const char *when)
{
    struct ckv_volume *volume = run->cache->volume;
    const struct ckv_region *region = &volume->region;
    const uint64_t own = UINT64_C(1) << volume->slot;
    for (uint32_t i = 0; i < region->layout.entry_count; i++) {
        const uint64_t state = ckv_load_ordered_u64(&region->states[i]);
        const enum ckv_state_kind kind = ckv_state_kind(state);
        if ((kind == CKV_STATE_RESERVED || kind == CKV_STATE_DYING) &&
            ckv_state_slot(state) == volume->slot) {
            problem(run, "%s: entry %u is left reserved or dying", when, i);
        }
        if ((ckv_load_ordered_u64(&region->masks[i]) & own) != 0 ||
            (ckv_load_ordered_u64(&volume->pins[i]) & UINT32_MAX) != 0) {
            problem(run, "%s: entry %u is left pinned", when, i);
        }
    }
    for (uint32_t i = 0; i < CKV_HINTS; i++) {
        const uint64_t word = ckv_load_ordered_u64(&region->hints[i].word);
        if (word != 0 && (word >> 32 & 63u) == volume->slot) {
            problem(run, "%s: hint %u is left claimed", when, i);
        }
    }
    for (uint32_t i = 0; i < volume->files[0].geometry.stripe_count; i++) {
        if (ckv_load_ordered_u64(&region->stripes[i].lock) != 0) {
            problem(run, "%s: stripe %u is left locked", when, i);
        }
    }
    if (ckv_load_ordered_u64(&region->slots[volume->slot].pinned_entries) != 0 ||
        volume->oldest_lease != NULL || volume->newest_lease != NULL) {
        problem(run, "%s: leases are left", when);
    }
    for (uint32_t f = 0; f < volume->file_count; f++) {
        const struct ckv_file *file = &volume->files[f];
        for (uint32_t w = 0; w < file->window_count; w++) {
            if (ckv_load_ordered_u64(&file->windows[w].pins) != 0) {
                problem(run, "%s: window %u is left pinned", when, w);
            }
        }
    }
}

static void
judge_verify(struct run *run, const char *when)
{
    struct ckv_verify_report report = {0};
    struct ckv_error error = {0};
    if (ckv_verify(run->cache, false, NULL, NULL, &report, &error) != CKV_OK) {
        problem(run, "%s: verify fails: %s", when, error.text);
    } else if (report.structure_faults + report.unreadable > 0 ||
               (report.damaged_payloads > 0 && !run->damaged)) {
        problem(run, "%s: verify: %" PRIu64 " structure, %" PRIu64 " damaged: %s", when,
            report.structure_faults, report.damaged_payloads, report.first_fault);
    }
}

/* Whether paths were out of use when the volume was closed. */
static bool
judge_open(struct run *run, const char *when, bool recover, bool loose)
{
    struct ckv_error error = {0};
    struct ckv_stats stats = {0};
    if (ckv_get_stats(run->cache, &stats, NULL, &error) != CKV_OK) {
        problem(run, "%s: statistics: %s", when, error.text);
    }
    int64_t missing = run->options.degraded ? 1 : 0;
    for (uint32_t f = 0; f < run->cache->volume->file_count; f++) {
        missing += ckv_load_relaxed_u32(&run->cache->volume->region.paths[f].unread);
    }
    const bool writes = run->options.mode == CKV_MODE_READ_WRITE;
    if (stats.failed_paths > missing && writes && recover) {
        uint64_t recovered = 0;
        if (ckv_recover(run->cache, &recovered, &error) != CKV_OK ||
            (int64_t)recovered != stats.failed_paths - missing) {
            problem(run, "%s: %" PRId64 " paths have failed, %" PRIu64 " came back",
                when, stats.failed_paths, recovered);
        }
        stats.failed_paths = missing;
    }
    if (stats.failed_paths > (run->options.degraded ? 1 : 0)) {
        return true; /* its blocks are misses */
    }
    if (writes) {
        judge_verify(run, when);
    }
    world_check(run, when, loose);
    if (writes) {
        judge_region(run, when);
    }
    return false;
}

/* ---- 3. opened again ------------------------------------------------------------- */

static void
judge_again(struct run *run, bool loose)
{
    run->options.mode = CKV_MODE_READ_WRITE;
    struct ckv_error error;
    if (open_cache(run, &error) != CKV_OK) {
        problem(run, "cannot be opened again: %s", error.text);
        return;
    }
    const bool was_damaged = run->damaged;
    run->damaged = was_damaged || loose;
    if (judge_open(run, "opened again", false, loose)) {
        problem(run, "a path is out of use when it is opened again");
    }
    run->damaged = was_damaged;
    const unsigned number = BLOCKS - 1;
    do_put(run, number, 1, 0);
    do_get(run, number);
    ckv_close(&run->cache);
    judge_books(run, "closed again");
}

/* ---- a case ---------------------------------------------------------------------- */

static const char *planted = "";

/* Breaks something on purpose: proof that the judge sees it. */
static void
plant(struct run *run)
{
    if (strcmp(planted, "descriptor") == 0) {
        (void)!open("/dev/null", O_RDONLY);
    } else if (strcmp(planted, "allocation") == 0) {
        void *volatile lost = malloc(100);
        (void)lost;
    } else if (strcmp(planted, "mapping") == 0) {
        void *lost = NULL;
        (void)ckv_os.map(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0,
            &lost);
    } else if (strcmp(planted, "pin") == 0 && run->cache != NULL) {
        struct ckv_volume *volume = run->cache->volume;
        (void)ckv_pin(volume, 3, ckv_load_ordered_u64(&volume->region.states[3]));
    } else if (strcmp(planted, "block") == 0 && run->cache != NULL) {
        const struct ckv_key key = key_of(4);
        (void)!ckv_remove(run->cache, &key, NULL);
    } else if (strcmp(planted, "bytes") == 0 && run->cache != NULL) {
        run->blocks[4].version = 2;
    } else if (strcmp(planted, "signal") == 0) {
        (void)raise(SIGSEGV);
    }
}

static bool
is_strict(const struct run *run, unsigned long fired)
{
    return fired == 0 || run->fault->duty == DUTY_ABSORB ||
           (run->fault->duty == DUTY_ABSORB_ONCE && !run->persistent);
}

/* After a creation that failed nothing of it is left, and no name is taken. */
static void
judge_leftovers(struct run *run)
{
    struct stat info;
    const enum call call = run->fault->call;
    const bool may_stay = call == CALL_unlink_path || call == CALL_lstat_path ||
                          call == CALL_stat_file || call == CALL_lock_byte;
    for (unsigned i = 0; i < run->options.path_count && !may_stay; i++) {
        char region[320];
        (void)snprintf(region, sizeof region, "%s-shm", run->names[i]);
        if (lstat(run->names[i], &info) == 0 || lstat(region, &info) == 0) {
            problem(run, "the creation failed (%s) and %s is left, or its region",
                run->deviation, run->names[i]);
        }
    }
}

static void
count_case(const struct run *run, unsigned long fired)
{
    if (fired == 0) {
        tally->idle++;
        return;
    }
    tally->by_call[run->fault->call]++;
    tally->absorbed += run->ideal;
    if (run->persistent) {
        tally->persistent++;
    } else {
        tally->transient++;
    }
}

/* True when the fault happened. */
static bool
run_case(struct run *run)
{
    (void)alarm(HANG_SECONDS);
    const struct scenario *scenario = run->scenario;
    const unsigned long problems_before = run->problems;
    (void)snprintf(doing, DOING_BYTES, "%td | %s | %s | %s %lu", run->fault - faults,
        scenario->name, fault_text(run->fault), run->persistent ? "from" : "at",
        run->nth);
    run->ideal = true;
    run->deviation[0] = '\0';
    run->damaged = run->others_may_go = false;
    run->cache = NULL;
    pretend = scenario->pretence;
    world_restore(run);
    if (scenario->peer) {
        peer_open();
    }
    if (scenario->prepare != NULL) {
        scenario->prepare(run);
        need(run->ideal && run->problems == problems_before, "prepare without faults");
    }
    inject_arm(run->fault, run->nth, run->persistent);
    scenario->act(run);
    const unsigned long fired = inject_disarm();
    ckv_store_relaxed_u64(&pretend.realtime_shift_ns, 0);
    for (int i = 0; i < CALLS && run->fault->call == CALLS; i++) {
        const unsigned long calls = inject_calls((enum call)i);
        if (calls > tally->baseline[i]) {
            tally->baseline[i] = calls;
        }
    }
    if (is_strict(run, fired) && !run->ideal) {
        problem(run, "%s: %s", fired == 0 ? "nothing failed" : "not absorbed",
            run->deviation);
    }
    plant(run);
    const bool opened = run->cache != NULL;
    bool failed = false;
    if (opened) {
        failed = judge_open(run, "open", run->nth % 2 == 0, false);
        ckv_close(&run->cache);
    } else if (scenario->template == TEMPLATE_NONE) {
        judge_leftovers(run);
    }
    judge_books(run, "closed");
    if (scenario->peer) {
        peer_judge(run);
        peer_close();
    }
    const bool open_failed = !opened && !run->ideal;
    pretend = (struct pretence){0};
    judge_again(run, failed || open_failed || (!opened && fired != 0));
    count_case(run, fired);
    (void)alarm(0);
    return fired != 0;
}

/* In a process that has not used the engine. */
static bool
run_fresh(struct run *run)
{
    (void)fflush(NULL);
    const pid_t child = fork();
    need(child >= 0, "fork");
    if (child == 0) {
        remember_books();
        /* One canary for each process stays mapped. */
        run->problems = 0;
        const bool fired = run_case(run);
        tally->problems += run->problems;
        (void)fflush(NULL);
        _exit(fired ? 10 : 11);
    }
    int status = 0;
    need(waitpid(child, &status, 0) == child, "wait");
    if (!WIFEXITED(status) || WEXITSTATUS(status) < 10) {
        problem(run, "the process ended with %d", status);
        return false;
    }
    return WEXITSTATUS(status) == 10;
}

/* ---- the sweep ------------------------------------------------------------------- */

static bool
run_one(struct run *run)
{
    return run->scenario->fresh ? run_fresh(run) : run_case(run);
}

static void
measure_baseline(struct run *run)
{
    static const struct fault none = {CALLS, EFFECT_ERROR, 0, 0, DUTY_NONE, ""};
    run->fault = &none;
    for (int turn = 0; turn < 3; turn++) { /* the first one warms up */
        run->nth = 1;
        if (run->scenario->fresh) {
            (void)run_fresh(run);
        } else {
            run->quiet = turn == 0; /* some things are made once per process */
            remember_books();
            (void)run_case(run);
        }
    }
    tally->idle = 0;
}

struct choice {          /* of a part of all cases */
    unsigned long cases; /* 0: all */
    unsigned long total; /* as far as the baseline tells */
    uint64_t state;      /* from the seed */
};

static bool
chosen(struct choice *choice)
{
    choice->state =
        choice->state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (choice->state >> 33) % choice->total < choice->cases;
}

static unsigned long
total_cases(void)
{
    unsigned long total = 1;
    for (size_t i = 0; i < fault_count; i++) {
        total += 2 * tally->baseline[faults[i].call];
    }
    return total;
}

static void
sweep_fault(struct run *run, struct choice *choice)
{
    for (unsigned long n = 1; n < NTH_MAX && run->problems < PROBLEMS_MAX; n++) {
        run->nth = n;
        if (choice->cases > 0) {
            if (n > tally->baseline[run->fault->call]) {
                return;
            }
            if (chosen(choice)) {
                (void)run_one(run);
            }
        } else if (!run_one(run) && n > tally->baseline[run->fault->call]) {
            return;
        }
    }
}

static void
print_result(const struct run *run)
{
    printf("RESULT {\"scenario\": \"%s\", \"transient\": %lu, \"persistent\": %lu, "
           "\"absorbed\": %lu, \"idle\": %lu, \"problems\": %lu, \"calls\": {",
        run->scenario->name, tally->transient, tally->persistent, tally->absorbed,
        tally->idle, run->problems + tally->problems);
    const char *separator = "";
    for (int i = 0; i < CALLS; i++) {
        if (tally->by_call[i] != 0) {
            printf("%s\"%s\": %lu", separator, call_name((enum call)i),
                tally->by_call[i]);
            separator = ", ";
        }
    }
    printf("}}\n");
}

static void
map_doing(void)
{
    char path[220];
    (void)snprintf(path, sizeof path, "%s/doing", folder);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    need(fd >= 0 && ftruncate(fd, DOING_BYTES) == 0, "make the file that says what");
    doing = mmap(NULL, DOING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    tally = mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(doing != MAP_FAILED && tally != MAP_FAILED, "map what is being done");
    (void)close(fd);
}

static int
sweep(const struct scenario *scenario, struct choice choice, unsigned long from)
{
    const struct rlimit no_core = {0, 0};
    (void)setrlimit(RLIMIT_CORE, &no_core);
    map_doing();
    inject_watch();
    world_begin(folder, scenario);
    struct run run = {.scenario = scenario};
    run.blocks = mmap(NULL, sizeof *run.blocks * BLOCKS, PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(run.blocks != MAP_FAILED, "map the expectations");
    if (scenario->peer) {
        peer_start(&run);
    }
    inject_begin();
    inject_is_driver();
    measure_baseline(&run);
    choice.total = total_cases();
    for (size_t i = from; i < fault_count; i++) {
        run.fault = &faults[i];
        if (tally->baseline[run.fault->call] == 0) {
            continue;
        }
        for (int persistent = 0; persistent < 2; persistent++) {
            run.persistent = persistent != 0;
            sweep_fault(&run, &choice);
        }
    }
    world_end();
    print_result(&run);
    return run.problems + tally->problems == 0 ? 0 : 1;
}

static int
usage(const char *name)
{
    fprintf(stderr,
        "usage: %s FOLDER SCENARIO [--cases N] [--seed N] [--from N] [--plant WHAT]\n"
        "       %s --list | --faults\n",
        name, name);
    return 2;
}

int
main(int count, char **arguments)
{
    if (count == 2 && strcmp(arguments[1], "--list") == 0) {
        for (size_t i = 0; i < scenario_count; i++) {
            printf("%s\n", scenarios[i].name);
        }
        return 0;
    }
    if (count == 2 && strcmp(arguments[1], "--faults") == 0) {
        for (size_t i = 0; i < fault_count; i++) {
            printf("%s: %s\n", fault_text(&faults[i]), faults[i].reason);
        }
        return 0;
    }
    if (count < 3 || count % 2 == 0 || strlen(arguments[1]) >= sizeof folder) {
        return usage(arguments[0]);
    }
    (void)snprintf(folder, sizeof folder, "%s", arguments[1]);
    struct choice choice = {0};
    unsigned long from = 0;
    for (int i = 3; i < count; i += 2) {
        const unsigned long value = strtoul(arguments[i + 1], NULL, 0);
        if (strcmp(arguments[i], "--cases") == 0) {
            choice.cases = value;
        } else if (strcmp(arguments[i], "--seed") == 0) {
            choice.state = value;
        } else if (strcmp(arguments[i], "--from") == 0) {
            from = value;
        } else if (strcmp(arguments[i], "--plant") == 0) {
            planted = arguments[i + 1];
        } else {
            return usage(arguments[0]);
        }
    }
    for (size_t i = 0; i < scenario_count; i++) {
        if (strcmp(scenarios[i].name, arguments[2]) == 0) {
            return sweep(&scenarios[i], choice, from);
        }
    }
    fprintf(stderr, "there is no scenario \"%s\"\n", arguments[2]);
    return 2;
}
