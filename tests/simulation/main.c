/* SPDX-License-Identifier: Apache-2.0 */
/* main.c: runs seeds, each in a child of its own, and says what they found.
 *
 *     simulate ENGINE.so FOLDER --seed 1 [--seeds 100] [--seconds 60] [--processes 3]
 *                               [--first] [--trace]
 *
 * Prints a line for each finding and a summary.  Ends with 1 if there was a finding.
 */
#include "simulation.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SECONDS_MAX = 300, EXIT_FINDING = 3 };

struct result { /* of a seed; shared with its child */
    bool ended;
    uint64_t hash, steps, switches, kills, stops, operations, hits, misses, stored;
    char text[512];
};

static struct result *result;
static struct engine engines[ENGINES];

static void
note_counts(void)
{
    result->hash = trace_hash();
    result->steps = steps;
    result->switches = switches;
    result->kills = kills;
    result->stops = stops;
    result->operations = operations;
    result->hits = hits;
    result->misses = misses;
    result->stored = stored;
}

void
finding(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(result->text, sizeof result->text, format, arguments);
    va_end(arguments);
    if (current != NULL && length >= 0 && (size_t)length < sizeof result->text) {
        (void)snprintf(result->text + length, sizeof result->text - (size_t)length,
            " [step %llu, %s %u, %s]", (unsigned long long)steps,
            current->process->reader ? "reader" : "process", current->process->number,
            current->operation != NULL ? current->operation : "between operations");
    }
    note_counts();
    trace("%s", result->text);
    (void)fflush(stdout);
    _exit(EXIT_FINDING);
}

static void
fail(const char *what)
{
    (void)fprintf(stderr, "simulate: %s\n", what);
    exit(2);
}

/* A copy of the shared object under an inode of its own, so that the loader takes it for
 * another library with globals of its own. */
static void
load(struct engine *engine, const char *path)
{
    char name[64];
    char bytes[1 << 16];
    const int from = open(path, O_RDONLY | O_CLOEXEC);
    const int to = memfd_create("engine", MFD_CLOEXEC);
    if (from < 0 || to < 0) {
        fail("cannot read the engine");
    }
    for (ssize_t length; (length = read(from, bytes, sizeof bytes)) > 0;) {
        if (write(to, bytes, (size_t)length) != length) {
            fail("no memory for a copy of the engine");
        }
    }
    (void)close(from);
    (void)snprintf(name, sizeof name, "/proc/self/fd/%d", to);
    engine->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (engine->library == NULL) {
        fail(dlerror());
    }
    void (**point)(const char *) = dlsym(engine->library, "ckv_point_hook");
    void (**yield)(void) = dlsym(engine->library, "ckv_yield_hook");
    void (**relax)(void) = dlsym(engine->library, "ckv_relax_hook");
    engine->os = dlsym(engine->library, "ckv_os");
    if (point == NULL || yield == NULL || relax == NULL || engine->os == NULL) {
        fail("the engine was built without CKV_POINTS");
    }
    *point = yield_at_point;
    *yield = yield_at_access;
    *relax = yield_at_relax;
#define X(name)                                                                        \
    *(void **)&engine->name = dlsym(engine->library, "ckv_" #name);                    \
    if (engine->name == NULL) {                                                        \
        fail("no ckv_" #name " in the engine");                                        \
    }
    ENGINE_CALLS(X)
#undef X
    system_equip(engine);
}

/* Where it was, by the names of functions; on a stack of its own. */
static void
on_fault(int number, siginfo_t *info, void *context)
{
    void *frames[24];
    const int count = backtrace(frames, 24);
    size_t used = (size_t)snprintf(result->text, sizeof result->text,
        "%s at %p:", strsignal(number), info->si_addr);
    (void)context;
    for (int i = 2; i < count; i++) {
        Dl_info place;
        if (dladdr(frames[i], &place) != 0 && used < sizeof result->text) {
            used += (size_t)snprintf(result->text + used, sizeof result->text - used,
                " %s+%zx", place.dli_sname != NULL ? place.dli_sname : "?",
                (size_t)((char *)frames[i] - (char *)place.dli_fbase));
        }
    }
    note_counts();
    _exit(EXIT_FINDING);
}

static void
catch_faults(void)
{
    static char stack[1 << 16];
    const stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_sigaction = on_fault,
        .sa_flags = SA_ONSTACK | SA_SIGINFO | (int)SA_RESETHAND};
    void *frames[1];
    (void)backtrace(frames, 1); /* loads what it needs */
    (void)sigaltstack(&alternate, NULL);
    (void)sigaction(SIGSEGV, &action, NULL);
    (void)sigaction(SIGABRT, &action, NULL);
    (void)sigaction(SIGALRM, &action, NULL); /* no end in real time */
}

static void
remove_files(const char *folder)
{
    char name[512];
    static const char *const files[] = {"kv0.cyc", "kv1.cyc", "kv0.cyc-shm",
        "kv1.cyc-shm"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        (void)snprintf(name, sizeof name, "%s/%s", folder, files[i]);
        (void)unlink(name);
    }
}

static void
run_seed(uint64_t seed, uint32_t process_count, const char *folder)
{
    memset(result, 0, sizeof *result);
    (void)fflush(stdout);
    const pid_t child = fork();
    if (child < 0) {
        fail("cannot fork");
    }
    if (child == 0) {
        const struct plan chosen = {.seed = seed,
            .processes = process_count,
            .folder = folder,
            .engines = engines};
        catch_faults();
        (void)alarm(SECONDS_MAX);
        workload_run(&chosen);
        note_counts();
        result->ended = true;
        (void)fflush(stdout);
        _exit(0);
    }
    int status = 0;
    (void)waitpid(child, &status, 0);
    remove_files(folder);
    if (WIFSIGNALED(status)) {
        (void)snprintf(result->text, sizeof result->text, "ended by signal %d (%s)",
            WTERMSIG(status), strsignal(WTERMSIG(status)));
    } else if (!result->ended && result->text[0] == '\0') {
        (void)snprintf(result->text, sizeof result->text, "ended with %d",
            WEXITSTATUS(status));
    }
}

static double
seconds_now(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int
main(int argc, char **argv)
{
    uint64_t seed = 1;
    uint64_t count = 0;
    uint64_t most = 1;
    double limit = 0;
    uint32_t process_count = 0;
    bool first = false;
    bool verbose = false;
    /* Each engine has a thread-local word of the kind that libraries which come late get
     * little room for, unless asked for at the start of the program. */
    if (getenv("GLIBC_TUNABLES") == NULL &&
        setenv("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=65536", 1) == 0) {
        (void)execv("/proc/self/exe", argv);
    }
    if (argc < 3) {
        fail("usage: simulate ENGINE.so FOLDER [--seed N] ...");
    }
    for (int i = 3; i < argc; i++) {
        const uint64_t value = i + 1 < argc ? strtoull(argv[i + 1], NULL, 10) : 0;
        if (strcmp(argv[i], "--seed") == 0) {
            seed = value;
        } else if (strcmp(argv[i], "--seeds") == 0) {
            most = value;
        } else if (strcmp(argv[i], "--seconds") == 0) {
            limit = (double)value;
        } else if (strcmp(argv[i], "--processes") == 0) {
            process_count = (uint32_t)value;
        } else if (strcmp(argv[i], "--first") == 0) {
            first = true;
            continue;
        } else if (strcmp(argv[i], "--hashes") == 0) {
            verbose = true;
            continue;
        } else if (strcmp(argv[i], "--trace") == 0) {
            tracing = true;
            continue;
        } else {
            fail("an option that it does not know");
        }
        i++;
    }
    result = mmap(NULL, sizeof *result, PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (result == MAP_FAILED) {
        fail("no memory");
    }
    for (uint32_t i = 0; i < ENGINES; i++) {
        load(&engines[i], argv[1]);
    }
    struct result sum = {0};
    uint64_t findings = 0;
    const double began = seconds_now();
    for (; count < most && (limit <= 0 || seconds_now() - began < limit); count++) {
        run_seed(seed + count, process_count, argv[2]);
        sum.steps += result->steps;
        sum.switches += result->switches;
        sum.kills += result->kills;
        sum.stops += result->stops;
        sum.operations += result->operations;
        sum.hits += result->hits;
        sum.misses += result->misses;
        sum.stored += result->stored;
        if (verbose) {
            printf("seed %llu: %016llx\n", (unsigned long long)(seed + count),
                (unsigned long long)result->hash);
        }
        if (result->text[0] != '\0') {
            findings++;
            printf("seed %llu: %s\n", (unsigned long long)(seed + count), result->text);
            if (first) {
                count++;
                break;
            }
        }
    }
    printf("%llu seeds from %llu, %llu steps, %llu switches, %llu operations, %llu "
           "kills, "
           "%llu stops, %llu blocks stored, %llu hits, %llu misses, %llu findings, "
           "%.1f s\n",
        (unsigned long long)count, (unsigned long long)seed,
        (unsigned long long)sum.steps, (unsigned long long)sum.switches,
        (unsigned long long)sum.operations, (unsigned long long)sum.kills,
        (unsigned long long)sum.stops, (unsigned long long)sum.stored,
        (unsigned long long)sum.hits, (unsigned long long)sum.misses,
        (unsigned long long)findings, seconds_now() - began);
    return findings > 0;
}
