/* SPDX-License-Identifier: Apache-2.0 */
#include "world.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CAPACITY_BYTES (UINT64_C(16) << 20)

void
need(bool condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "sweep: %s: %s\n", what, strerror(errno));
        _exit(2);
    }
}

/* ---- blocks ---------------------------------------------------------------------- */

static const struct {
    size_t length;
    size_t header_length;
} shapes[] = {
    {0, 0},
    {1, 0},
    {4095, 0},
    {4096, 1},
    {5000, 100},
    {65536, 0},
    {70000, 3000},
    {200000, 0},
    {300000, 10},
    {32, 0},
    {100000, 0},
    {9000, 0},
    {9000, 0},
    {9000, 0},
    {131072, 0},
    {2500000, 77}, /* several pieces */
};
enum { SHAPES = CKV_ARRAY_LENGTH(shapes), VERSIONS = 3 };

static void
fill(uint8_t *bytes, size_t length, uint64_t seed)
{
    uint64_t word = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    for (size_t i = 0; i < length; i++) {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        bytes[i] = (uint8_t)word;
    }
}

const struct block *
block_of(unsigned number, unsigned version)
{
    static struct block made[BLOCKS][VERSIONS];
    struct block *block = &made[number][version];
    if (block->payload == NULL) {
        block->length = shapes[number % SHAPES].length;
        block->header_length = shapes[number % SHAPES].header_length;
        /* Mapped, so that the books of the engine's allocations are its own. */
        uint8_t *bytes = mmap(NULL, block->length + block->header_length + 1,
            PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        need(bytes != MAP_FAILED, "map a block");
        fill(bytes, block->length + block->header_length, number * 8u + version);
        block->payload = bytes;
        block->header = bytes + block->length;
    }
    return block;
}

struct ckv_key
key_of(unsigned number)
{
    static char keys[BLOCKS][40];
    char *key = keys[number];
    (void)snprintf(key, sizeof keys[0], "block %03u of the fault sweep....", number);
    return (struct ckv_key){.data = key, .length = number % 5 == 4 ? 20 : 32};
}

/* ---- outcomes -------------------------------------------------------------------- */

const uint64_t MAY_OPEN =
    MAY(CKV_OK) | MAY(CKV_E_OS) | MAY(CKV_E_NO_MEMORY) | MAY(CKV_E_FORMAT) |
    MAY(CKV_E_UNSAFE_PATH) | MAY(CKV_E_TIMEOUT) | MAY(CKV_E_NO_SLOT) |
    MAY(CKV_E_NO_SPACE) | MAY(CKV_E_UNSUPPORTED) | MAY(CKV_E_MISSING_PATH);
const uint64_t MAY_PUT = MAY(CKV_OK) | MAY(CKV_PRESENT) | MAY(CKV_BUSY) |
                         MAY(CKV_NO_RUN) | MAY(CKV_FAILED_PATH) | MAY(CKV_IO_FAILED);
const uint64_t MAY_GET = MAY(CKV_OK) | MAY(CKV_MISS) | MAY(CKV_E_NO_MEMORY);
const uint64_t MAY_COPY = MAY(CKV_OK) | MAY(CKV_MISS);

void
problem(struct run *run, const char *format, ...)
{
    char text[900];
    if (run->quiet) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("FAULT %s | %s | %s %lu | %s\n", run->scenario->name,
        run->fault != NULL ? fault_text(run->fault) : "none",
        run->persistent ? "from" : "at", run->nth, text);
    (void)fflush(stdout);
    run->problems++;
}

bool
outcome(struct run *run, const char *what, enum ckv_status status,
    enum ckv_status ideal, uint64_t allowed, const struct ckv_error *error)
{
    if ((allowed & MAY(status)) == 0) {
        problem(run, "%s answers %d (%s), which is not documented: %s", what, status,
            ckv_status_text(status), status < 0 ? error->text : "");
    }
    if (status < 0 && (error->status != status || strlen(error->text) < 16)) {
        problem(run, "%s answers %d and says \"%s\" for %d", what, status, error->text,
            error->status);
    }
    if (status == CKV_E_OS && error->os_errno == 0) {
        problem(run, "%s failed by a system call without an errno: %s", what,
            error->text);
    }
    if (status != ideal && run->ideal) {
        run->ideal = false;
        (void)snprintf(run->deviation, sizeof run->deviation, "%s answers %d (%s) %s",
            what, status, ckv_status_text(status), status < 0 ? error->text : "");
    }
    return status == CKV_OK;
}

/* ---- calls ----------------------------------------------------------------------- */

static void
wait_for_calls(enum call call, unsigned long count)
{
    for (int i = 0; i < 2000 && inject_calls(call) < count; i++) {
        const struct timespec pause = {.tv_nsec = 20000};
        (void)nanosleep(&pause, NULL);
    }
}

enum ckv_status
open_cache(struct run *run, struct ckv_error *error)
{
    const unsigned long before = inject_calls(CALL_lock_memory);
    *error = (struct ckv_error){0};
    const enum ckv_status status = ckv_open(&run->options, &run->cache, error);
    if (status == CKV_OK && run->options.mode == CKV_MODE_READ_WRITE) {
        /* Its thread keeps region and tables in memory. */
        wait_for_calls(CALL_lock_memory, before + 1 + run->options.path_count);
    }
    return status;
}

void
open_or_end(struct run *run)
{
    struct ckv_error error;
    if (open_cache(run, &error) != CKV_OK) {
        fprintf(stderr, "%s: %s\n", run->scenario->name, error.text);
        need(false, "open without faults");
    }
}

void
do_open(struct run *run)
{
    struct ckv_error error;
    const enum ckv_status status = open_cache(run, &error);
    (void)outcome(run, "open", status, CKV_OK, MAY_OPEN, &error);
}

/* A refused block is absent, or still the older one. */
void
note_put(struct run *run, unsigned number, unsigned version, enum ckv_status status)
{
    struct expectation *expected = &run->blocks[number];
    if (status == CKV_OK || status == CKV_PRESENT) {
        *expected = (struct expectation){WANT_PRESENT, version, version};
    } else if (status == CKV_FAILED_PATH) {
        /* Perhaps stored before the path failed: it shows after recovery. */
        *expected = (struct expectation){WANT_EITHER, version,
            expected->want == WANT_ABSENT ? version : expected->version};
    }
}

void
do_put(struct run *run, unsigned number, unsigned version, uint32_t flags)
{
    const struct block *block = block_of(number, version);
    const size_t first = block->length / 3;
    const struct ckv_segment segments[] = {
        {.data = block->payload, .length = first},
        {.data = NULL, .length = 0},
        {.data = block->payload + first, .length = block->length - first},
    };
    struct ckv_item item = {
        .key = key_of(number),
        .segments = segments,
        .segment_count = 3,
        .header = block->header,
        .header_length = block->header_length,
    };
    struct ckv_error error = {0};
    const struct expectation before = run->blocks[number];
    const enum ckv_status status = ckv_put(run->cache, &item, flags, &error);
    const bool present = before.want == WANT_PRESENT && before.version == version &&
                         (flags & CKV_PUT_OVERWRITE) == 0;
    (void)outcome(run, "put", status, present ? CKV_PRESENT : CKV_OK, MAY_PUT, &error);
    note_put(run, number, version, status);
}

static bool
is_version(unsigned number, unsigned version, const void *payload, size_t length)
{
    const struct block *block = block_of(number, version);
    return length == block->length && memcmp(payload, block->payload, length) == 0;
}

/* Whether these bytes may be served for the block, and what that makes of it. */
static bool
may_be(const struct expectation *expected, unsigned number, const void *payload,
    size_t length)
{
    return expected->want != WANT_ABSENT &&
           (is_version(number, expected->version, payload, length) ||
               (expected->want == WANT_EITHER &&
                   is_version(number, expected->other, payload, length)));
}

static enum ckv_status
ideal_read(const struct run *run, unsigned number)
{
    return run->blocks[number].want == WANT_PRESENT ? CKV_OK : CKV_MISS;
}

void
do_get(struct run *run, unsigned number)
{
    const struct ckv_key key = key_of(number);
    struct ckv_lease *lease = NULL;
    struct ckv_error error = {0};
    const uint64_t allowed =
        run->options.mode == CKV_MODE_READ ? MAY_GET | MAY_OPEN : MAY_GET;
    const enum ckv_status status = ckv_get(run->cache, &key, &lease, &error);
    if (!outcome(run, "get", status, ideal_read(run, number), allowed, &error)) {
        return;
    }
    size_t length = 0;
    const void *payload = ckv_lease_data(lease, &length);
    if (!may_be(&run->blocks[number], number, payload, length)) {
        problem(run, "get of block %u has wrong bytes", number);
    }
    const size_t wanted = block_of(number, run->blocks[number].version)->header_length;
    size_t header_length = 0;
    const void *header = ckv_lease_header(lease, &header_length);
    if (header != NULL &&
        (header_length != wanted ||
            memcmp(header, block_of(number, run->blocks[number].version)->header,
                wanted) != 0)) {
        problem(run, "the header of block %u has wrong bytes", number);
    }
    if (header == NULL && run->ideal) {
        run->ideal = false;
        (void)snprintf(run->deviation, sizeof run->deviation, "no header");
    }
    if (!ckv_lease_ok(lease)) {
        problem(run, "the lease of block %u is not ok", number);
    }
    ckv_lease_release(&lease);
}

static uint8_t *
target_bytes(void)
{
    static uint8_t *bytes;
    if (bytes == NULL) {
        bytes = mmap(NULL, 32u << 20, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        need(bytes != MAP_FAILED, "map the targets");
    }
    return bytes;
}

void
do_get_into(struct run *run, unsigned number)
{
    const size_t length = shapes[number % SHAPES].length;
    uint8_t *bytes = target_bytes();
    const struct ckv_target targets[] = {
        {.data = bytes, .length = length / 2},
        {.data = bytes + length / 2, .length = length - length / 2 + 5},
    };
    struct ckv_read read = {.key = key_of(number),
        .targets = targets,
        .target_count = 2};
    struct ckv_error error = {0};
    const uint64_t allowed =
        run->options.mode == CKV_MODE_READ ? MAY_COPY | MAY_OPEN : MAY_COPY;
    const enum ckv_status status = ckv_get_into(run->cache, &read, &error);
    if (outcome(run, "get_into", status, ideal_read(run, number), allowed, &error) &&
        !may_be(&run->blocks[number], number, bytes, read.payload_length)) {
        problem(run, "get_into of block %u has wrong bytes", number);
    }
}

void
do_get_many_into(struct run *run, unsigned first, unsigned count)
{
    enum { SPACE = 1 << 19 };
    struct ckv_target targets[BLOCKS];
    struct ckv_read reads[BLOCKS];
    uint8_t *bytes = target_bytes();
    for (unsigned i = 0; i < count; i++) {
        targets[i] = (struct ckv_target){.data = bytes + (size_t)i * SPACE + i,
            .length = SPACE - 4096};
        reads[i] = (struct ckv_read){.key = key_of(first + i),
            .targets = &targets[i],
            .target_count = 1};
    }
    struct ckv_error error = {0};
    const enum ckv_status status = ckv_get_many_into(run->cache, reads, count, &error);
    if (!outcome(run, "get_many_into", status, CKV_OK, MAY(CKV_OK), &error)) {
        return;
    }
    for (unsigned i = 0; i < count; i++) {
        const unsigned number = first + i;
        if (outcome(run, "get_many_into (block)", reads[i].status,
                ideal_read(run, number), MAY_COPY, &error) &&
            !may_be(&run->blocks[number], number, targets[i].data,
                reads[i].payload_length)) {
            problem(run, "get_many_into of block %u has wrong bytes", number);
        }
    }
}

void
do_remove(struct run *run, unsigned number)
{
    const struct ckv_key key = key_of(number);
    struct ckv_error error = {0};
    const enum ckv_status status = ckv_remove(run->cache, &key, &error);
    (void)outcome(run, "remove", status, ideal_read(run, number),
        MAY(CKV_OK) | MAY(CKV_MISS) | MAY(CKV_E_OS), &error);
    /* Answered: gone.  Not answered: gone for now, perhaps back after a restart. */
    run->blocks[number].want = WANT_ABSENT;
}

/* ---- templates ------------------------------------------------------------------- */

static char folder[200];
static const struct scenario *current;
static struct { /* a copy of each file of the template, all zeros left out */
    uint8_t *bytes;
    size_t length;
} images[FILES];
static struct expectation *initial; /* after the template was made; shared */

static unsigned
files_of(enum template template)
{
    return template == TEMPLATE_TWO ? 2 : 1;
}

static void
set_options(struct run *run)
{
    ckv_options_init(&run->options);
    run->options.paths = run->paths;
    run->options.path_count = files_of(run->scenario->template);
    for (unsigned i = 0; i < FILES; i++) {
        (void)snprintf(run->names[i], sizeof run->names[i], "%s/v%u.cyc", folder, i);
        run->paths[i] =
            (struct ckv_path){.path = run->names[i], .capacity_bytes = CAPACITY_BYTES};
    }
    run->options.io_threads = 2;
    run->options.event_capacity = 64;
    run->options.sync_interval_ms = UINT32_MAX;
    run->options.open_timeout_ms = 300;
    run->options.write_behind = false;
    if (run->scenario->options != NULL) {
        run->scenario->options(&run->options);
    }
}

static struct ckv_cache *
open_namespace(const struct run *run, const char *name)
{
    struct ckv_options options = run->options;
    struct ckv_error error = {0};
    struct ckv_cache *cache = NULL;
    options.mode = CKV_MODE_READ_WRITE;
    options.namespace_data = name;
    options.namespace_length = strlen(name);
    if (ckv_open(&options, &cache, &error) != CKV_OK) {
        fprintf(stderr, "%s\n", error.text);
        need(false, "open another namespace");
    }
    return cache;
}

static void
fill_namespace(struct run *run, const char *name, unsigned blocks, bool clear)
{
    struct run other = *run;
    struct expectation expected[BLOCKS] = {0};
    other.blocks = expected;
    other.cache = open_namespace(run, name);
    for (unsigned i = 0; i < blocks; i++) {
        do_put(&other, i, 0, 0);
    }
    struct ckv_error error = {0};
    need(!clear || ckv_clear(other.cache, NULL, &error) == CKV_OK, "clear");
    ckv_close(&other.cache);
}

/* Fills the volume until something is evicted. */
static void
fill_volume(struct run *run)
{
    static uint8_t payload[200000];
    struct ckv_stats stats = {0};
    for (unsigned i = 0; stats.evictions < 5; i++) {
        char key[33];
        (void)snprintf(key, sizeof key, "filler %025u", i);
        const struct ckv_segment segment = {.data = payload, .length = sizeof payload};
        struct ckv_item item = {.key = {.data = key, .length = 32},
            .segments = &segment,
            .segment_count = 1};
        need(ckv_put(run->cache, &item, 0, NULL) == CKV_OK, "fill");
        need(ckv_get_stats(run->cache, &stats, NULL, NULL) == CKV_OK, "statistics");
    }
    for (unsigned i = 0; i < NEW_BLOCKS; i++) { /* the oldest went, in part */
        struct expectation *expected = &run->blocks[i];
        expected->want = expected->want == WANT_PRESENT ? WANT_EITHER : expected->want;
        expected->other = expected->version;
    }
}

static void
make_template(struct run *run)
{
    open_or_end(run);
    for (unsigned i = 0; i < NEW_BLOCKS - 2; i++) {
        do_put(run, i, 1, 0);
    }
    do_put(run, 12, 2, CKV_PUT_OVERWRITE);
    do_remove(run, 13);
    fill_namespace(run, "cleared", 6, true);
    fill_namespace(run, "third", 4, false);
    if (run->scenario->template == TEMPLATE_FULL) {
        fill_volume(run);
    }
    need(run->ideal, run->deviation);
    ckv_close(&run->cache);
}

static void
load_image(unsigned index, const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    need(fd >= 0 && fstat(fd, &info) == 0, "open the template");
    images[index].length = (size_t)info.st_size;
    images[index].bytes = mmap(NULL, images[index].length, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(images[index].bytes != MAP_FAILED &&
             pread(fd, images[index].bytes, images[index].length, 0) == info.st_size,
        "read the template");
    (void)close(fd);
}

void
world_begin(const char *where, const struct scenario *scenario)
{
    need(strlen(where) < sizeof folder, "the name of the folder is too long");
    (void)snprintf(folder, sizeof folder, "%s", where);
    current = scenario;
    initial = mmap(NULL, sizeof *initial * BLOCKS, PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(initial != MAP_FAILED, "map the expectations");
    if (scenario->template == TEMPLATE_NONE) {
        return;
    }
    (void)fflush(NULL);
    const pid_t child = fork(); /* whoever runs the cases may have to be untouched */
    need(child >= 0, "fork");
    if (child == 0) {
        struct run run = {.scenario = scenario, .blocks = initial, .ideal = true};
        set_options(&run);
        for (unsigned i = 0; i < FILES; i++) {
            (void)unlink(run.names[i]);
        }
        run.options.mode = CKV_MODE_READ_WRITE;
        run.options.degraded = false;
        run.options.path_count = files_of(scenario->template);
        run.options.shm_directory = NULL;
        make_template(&run);
        (void)fflush(NULL);
        _exit(run.problems != 0);
    }
    int status = 0;
    need(waitpid(child, &status, 0) == child && status == 0, "make a template");
    struct run run = {.scenario = scenario};
    set_options(&run);
    for (unsigned i = 0; i < files_of(scenario->template); i++) {
        load_image(i, run.names[i]);
    }
}

static void
write_whole(unsigned index, const char *path)
{
    (void)unlink(path);
    const int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    need(fd >= 0 && fallocate(fd, 0, 0, (off_t)images[index].length) == 0,
        "restore a volume");
    for (size_t at = 0; at < images[index].length; at += CKV_PAGE_BYTES) {
        static const uint8_t zeros[CKV_PAGE_BYTES];
        const uint8_t *page = images[index].bytes + at;
        if (memcmp(page, zeros, CKV_PAGE_BYTES) != 0) {
            need(pwrite(fd, page, CKV_PAGE_BYTES, (off_t)at) == CKV_PAGE_BYTES,
                "restore a page");
        }
    }
    (void)close(fd);
}

static void
write_dirty(unsigned index, const char *path)
{
    int fd = -1;
    for (size_t page = 0; page < WATCHED_PAGES; page++) {
        if (watched[index].dirty[page] == 0) {
            continue;
        }
        fd = fd < 0 ? open(path, O_RDWR | O_CLOEXEC) : fd;
        need(fd >= 0 &&
                 pwrite(fd, images[index].bytes + page * CKV_PAGE_BYTES, CKV_PAGE_BYTES,
                     (off_t)(page * CKV_PAGE_BYTES)) == CKV_PAGE_BYTES,
            "restore a page");
    }
    if (fd >= 0) {
        (void)close(fd);
    }
}

/* The files as the template has them, and what must be in them. */
void
world_restore(struct run *run)
{
    set_options(run);
    for (unsigned i = 0; i < FILES; i++) {
        struct watched *file = &watched[i];
        const bool known = file->path[0] != '\0';
        (void)snprintf(file->path, sizeof file->path, "%s", run->names[i]);
        if (images[i].bytes == NULL) {
            char region[320];
            (void)snprintf(region, sizeof region, "%s-shm", run->names[i]);
            (void)unlink(region);
            (void)unlink(run->names[i]);
        } else if (!known || file->replaced) {
            write_whole(i, run->names[i]);
        } else {
            write_dirty(i, run->names[i]);
        }
        memset(file->dirty, 0, sizeof file->dirty);
        file->replaced = false;
    }
    memcpy(run->blocks, initial, sizeof *initial * BLOCKS);
}

void
world_end(void)
{
    peer_stop();
}

/* ---- what must be there ---------------------------------------------------------- */

static void
check_block(struct run *run, const char *when, unsigned number, bool loose)
{
    const struct expectation *expected = &run->blocks[number];
    uint8_t *bytes = target_bytes();
    const struct ckv_target target = {.data = bytes, .length = 32u << 20};
    struct ckv_read read = {.key = key_of(number),
        .targets = &target,
        .target_count = 1};
    struct ckv_error error = {0};
    const enum ckv_status status = ckv_get_into(run->cache, &read, &error);
    if (status == CKV_MISS) {
        if (expected->want == WANT_PRESENT) {
            problem(run, "%s: block %u was acknowledged and is gone", when, number);
        }
    } else if (status != CKV_OK) {
        problem(run, "%s: block %u: %s", when, number, error.text);
    } else if (expected->want == WANT_ABSENT && !loose) {
        problem(run, "%s: block %u is there and must not be", when, number);
    } else if (expected->want == WANT_ABSENT
                   ? !is_version(number, 0, bytes, read.payload_length) &&
                         !is_version(number, 1, bytes, read.payload_length) &&
                         !is_version(number, 2, bytes, read.payload_length)
                   : !may_be(expected, number, bytes, read.payload_length)) {
        problem(run, "%s: block %u has wrong bytes", when, number);
    }
}

/* What was cleared stays away, what nobody touched is there. */
static void
check_others(struct run *run, const char *when)
{
    struct run other = *run;
    struct expectation expected[BLOCKS] = {0};
    other.blocks = expected;
    other.cache = open_namespace(run, "cleared");
    for (unsigned i = 0; i < 6; i++) {
        check_block(&other, when, i, false);
    }
    ckv_close(&other.cache);
    const bool partly = run->scenario->template == TEMPLATE_FULL || run->others_may_go;
    const enum want want = partly ? WANT_EITHER : WANT_PRESENT;
    for (unsigned i = 0; i < 4; i++) {
        expected[i] = (struct expectation){want, 0, 0};
    }
    other.cache = open_namespace(run, "third");
    for (unsigned i = 0; i < 4; i++) {
        check_block(&other, when, i, false);
    }
    ckv_close(&other.cache);
    run->problems = other.problems;
}

void
world_check(struct run *run, const char *when, bool loose)
{
    uint64_t present = 0;
    bool known = !loose && run->scenario->template != TEMPLATE_FULL;
    for (unsigned i = 0; i < BLOCKS; i++) {
        check_block(run, when, i, loose);
        present += run->blocks[i].want == WANT_PRESENT;
        known = known && run->blocks[i].want != WANT_EITHER;
    }
    uint64_t counted = 0;
    struct ckv_error error = {0};
    if (ckv_count(run->cache, &counted, &error) != CKV_OK ||
        (known && counted != present)) {
        problem(run, "%s: %llu blocks are counted, %llu are there", when,
            (unsigned long long)counted, (unsigned long long)present);
    }
    if (run->scenario->template != TEMPLATE_NONE &&
        run->options.mode == CKV_MODE_READ_WRITE) {
        check_others(run, when);
    }
}

/* ---- the peer -------------------------------------------------------------------- */

static pid_t peer_pid;
static int peer_ask[2];
static int peer_answer[2];

static char
peer_command(char command)
{
    char answer = 'x';
    need(write(peer_ask[1], &command, 1) == 1, "ask the peer");
    const ssize_t got = read(peer_answer[0], &answer, 1);
    need(got == 1 && answer != 'x', "the peer has died");
    return answer;
}

/* Nobody but the peer has the volume open, and it sees what must be there. */
static bool
peer_content(struct run *run)
{
    struct ckv_verify_report report = {0};
    struct ckv_error error = {0};
    struct ckv_stats stats = {0};
    if (ckv_get_stats(run->cache, &stats, NULL, &error) != CKV_OK ||
        stats.processes != 1 || stats.pinned_entries != 0) {
        problem(run, "the peer sees %lld processes, %lld pinned blocks",
            (long long)stats.processes, (long long)stats.pinned_entries);
    }
    if (stats.failed_paths > 0) {
        uint64_t recovered = 0;
        if (ckv_recover(run->cache, &recovered, &error) != CKV_OK || recovered == 0) {
            problem(run, "the peer cannot recover");
        }
    }
    world_check(run, "peer", false);
    if (ckv_verify(run->cache, false, NULL, NULL, &report, &error) != CKV_OK ||
        report.structure_faults + report.damaged_payloads + report.unreadable > 0) {
        problem(run, "the peer's verify: %s", report.first_fault);
    }
    return run->problems == 0;
}

static _Noreturn void
peer_serve(struct run *run)
{
    for (;;) {
        char command = 0;
        char answer = '.';
        if (read(peer_ask[0], &command, 1) != 1) {
            _exit(0);
        }
        (void)alarm(120);
        if (command == 'o') {
            open_or_end(run);
        } else if (command == 'c') {
            ckv_close(&run->cache);
        } else if (command == 'j') {
            run->problems = 0;
            answer = peer_content(run) ? '.' : '!';
        }
        (void)alarm(0);
        need(write(peer_answer[1], &answer, 1) == 1, "answer");
    }
}

/* Before this process uses the engine. */
void
peer_start(struct run *run)
{
    need(pipe(peer_ask) == 0 && pipe(peer_answer) == 0, "make pipes");
    (void)fflush(NULL);
    peer_pid = fork();
    need(peer_pid >= 0, "fork");
    if (peer_pid == 0) {
        (void)close(peer_ask[1]);
        (void)close(peer_answer[0]);
        struct run mine = *run;
        inject_begin(); /* for what it writes; nothing fails here */
        set_options(&mine);
        mine.options.mode = CKV_MODE_READ_WRITE;
        peer_serve(&mine);
    }
    (void)close(peer_ask[0]);
    (void)close(peer_answer[1]);
}

void
peer_open(void)
{
    (void)peer_command('o');
}

void
peer_close(void)
{
    (void)peer_command('c');
}

void
peer_judge(struct run *run)
{
    if (peer_command('j') != '.') {
        problem(run, "the peer has found the above");
    }
}

void
peer_stop(void)
{
    if (peer_pid > 0) {
        (void)close(peer_ask[1]);
        (void)waitpid(peer_pid, NULL, 0);
    }
}
