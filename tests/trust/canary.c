/* SPDX-License-Identifier: Apache-2.0 */
/* canary.c: nothing of a process's memory reaches a file.
 *
 * Every byte of memory that nobody set is made to stand out: what malloc gives and what
 * free takes back (M_PERTURB), and local variables with their padding (the compiler's
 * -ftrivial-auto-var-init=pattern, with which the engine is built for this test).  What
 * is stored uses none of these bytes.  Then everything is done that writes, in several
 * lives and forms of a volume, and all files are searched: for runs of these bytes, for
 * the secrets that were handed to the engine without being stored, and for addresses.
 *
 *     canary FOLDER         0: nothing was found
 *
 *   C1  A run of RUN bytes of one canary is memory that nobody set.
 *   C2  A word that points into a mapping of this process is an address.
 *   C3  A secret is what a caller gave to be looked up, read into or aborted, not stored.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format.h"
#include "geometry.h"
#include "os.h"

enum {
    FREED = 0x8c,      /* M_PERTURB: freed memory */
    ALLOCATED = 0x73,  /* its complement: fresh memory */
    VARIABLE = 0xfe,   /* what gcc puts into local variables */
    VARIABLE_2 = 0xaa, /* and clang */
    RUN = 4,
    BLOCKS = 60,
    BIG_BYTES = 1 << 20,
    RANGES_MAX = 4096,
};

static const char secret[] = "C4n4rY:only-in-memory"; /* of callers; in no payload */
static char folder[200];

static void __attribute__((format(printf, 2, 3)))
need(bool condition, const char *format, ...)
{
    if (!condition) {
        va_list arguments;
        va_start(arguments, format);
        vfprintf(stderr, format, arguments);
        fputc('\n', stderr);
        va_end(arguments);
        exit(2);
    }
}

/* Repeatable, and without canaries: a run found here is always one. */
static int
plain_random(void *target, size_t length)
{
    static uint8_t next = 1;
    for (size_t i = 0; i < length; i++) {
        ((uint8_t *)target)[i] = next;
        next = (uint8_t)(next % 0x6f + 1);
    }
    return 0;
}

/* ---- what is stored ------------------------------------------------------------------ */

static void
fill(uint8_t *target, size_t length, unsigned number)
{
    for (size_t i = 0; i < length; i++) {
        target[i] = (uint8_t)(1 + (number * 31 + i) % 0x6f);
    }
}

static struct ckv_key
key_of(unsigned number, uint8_t bytes[40])
{
    for (unsigned i = 0; i < 40; i++) {
        bytes[i] = (uint8_t)(1 + (number * 7 + i * 13) % 0x6f);
    }
    return (struct ckv_key){.data = bytes, .length = number % 4 == 3 ? 40 : 32};
}

static size_t
length_of(unsigned number)
{
    static const size_t lengths[] = {0, 1, 15, 4095, 4096, 4097, 70000, 131072, 200001,
        BIG_BYTES - 3};
    return lengths[number % 10];
}

static void
put(struct ckv_cache *cache, unsigned number, uint32_t flags)
{
    uint8_t bytes[40];
    struct ckv_error error;
    const size_t length = length_of(number);
    uint8_t *payload = malloc(length + 1);
    uint8_t *header = malloc(3 + number);
    need(payload != NULL && header != NULL, "memory");
    fill(payload, length, number);
    fill(header, 3 + number, number + 1);
    const size_t cut = length / 3;
    const struct ckv_segment segments[] = {{payload, cut}, {NULL, 0},
        {payload + cut, length - cut}};
    struct ckv_item item = {.key = key_of(number, bytes),
        .segments = segments,
        .segment_count = 3,
        .header = number % 2 == 0 ? header : NULL,
        .header_length = number % 2 == 0 ? 3 + number : 0};
    need(ckv_put(cache, &item, flags, &error) >= 0, "put: %s", error.text);
    free(payload);
    free(header);
}

static int writes_until_failure = -1; /* of this thread's puts; -1: none fails */

static ssize_t
failing_write(int fd, const struct iovec *iov, int count, uint64_t offset)
{
    size_t length = 0;
    for (int i = 0; i < count; i++) {
        length += iov[i].iov_len;
    }
    if (length > BIG_BYTES / 2 && writes_until_failure == 0) { /* a payload */
        return -ENOSPC;
    }
    writes_until_failure -= length > BIG_BYTES / 2 && writes_until_failure > 0;
    return ckv_os_native.write_at(fd, iov, count, offset);
}

/* Ends after some of its pages were written. */
static void
put_that_fails(struct ckv_cache *cache, unsigned number)
{
    uint8_t bytes[40];
    struct ckv_error error;
    uint8_t *payload = malloc(3 * BIG_BYTES);
    need(payload != NULL, "memory");
    fill(payload, 3 * BIG_BYTES, number);
    const struct ckv_segment segment = {payload, 3 * BIG_BYTES - 77};
    struct ckv_item item = {.key = key_of(number, bytes),
        .segments = &segment,
        .segment_count = 1};
    writes_until_failure = (int)(number / 5 % 3);
    need(ckv_put(cache, &item, CKV_PUT_OVERWRITE, &error) > 0, "a put did not fail");
    writes_until_failure = -1;
    free(payload);
}

static void
reserve(struct ckv_cache *cache, unsigned number, bool commits)
{
    uint8_t bytes[40];
    struct ckv_error error;
    struct ckv_item item = {.key = key_of(number, bytes)};
    struct ckv_reservation *reservation = NULL;
    const enum ckv_status status =
        ckv_reserve(cache, &item, 100001, &reservation, &error);
    need(status >= 0, "reserve: %s", error.text);
    if (status != CKV_OK) {
        return;
    }
    size_t length = 0;
    uint8_t *data = ckv_reservation_data(reservation, &length);
    for (size_t i = 0; i < length; i++) {
        need(data[i] == 0, "a reservation begins with %02x", data[i]);
    }
    if (commits) {
        fill(data, 20000, number); /* the rest is not filled */
        need(ckv_commit(&reservation, CKV_PUT_OVERWRITE, &error) >= 0, "commit: %s",
            error.text);
    } else {
        memcpy(data + 5000, secret, sizeof secret);
        ckv_abort(&reservation);
    }
}

static void
read_all(struct ckv_cache *cache)
{
    struct ckv_error error;
    uint8_t *target = malloc(BIG_BYTES);
    need(target != NULL, "memory");
    for (unsigned i = 0; i < BLOCKS; i++) {
        uint8_t bytes[40];
        const struct ckv_target targets[] = {{target, BIG_BYTES}};
        struct ckv_read one = {.key = key_of(i, bytes),
            .targets = targets,
            .target_count = 1};
        struct ckv_lease *lease = NULL;
        memcpy(target, secret, sizeof secret);
        need(ckv_get_into(cache, &one, &error) >= 0, "get_into: %s", error.text);
        need(ckv_get(cache, &one.key, &lease, &error) >= 0, "get: %s", error.text);
        ckv_lease_release(&lease);
    }
    free(target);
}

static void
look_up_secrets(struct ckv_cache *cache)
{
    struct ckv_error error;
    uint8_t bytes[40];
    struct ckv_key keys[2] = {key_of(1, bytes),
        {.data = secret, .length = sizeof secret - 1}};
    bool present[2];
    size_t count = 0;
    struct ckv_lease *lease = NULL;
    need(ckv_contains_many(cache, keys, 2, present, &error) == CKV_OK, "contains");
    need(ckv_longest_prefix(cache, keys, 2, true, &count, &error) == CKV_OK, "prefix");
    need(ckv_touch(cache, keys, 2, &count, &error) == CKV_OK, "touch");
    need(ckv_prefetch(cache, keys, 2, &count, &error) == CKV_OK, "prefetch");
    need(ckv_get(cache, &keys[1], &lease, &error) == CKV_MISS, "get");
    need(ckv_remove(cache, &keys[1], &error) == CKV_MISS, "remove");
}

static void
put_chain(struct ckv_cache *cache, unsigned from)
{
    enum { CHAIN = 8 };
    static uint8_t bytes[CHAIN][40];
    static uint8_t payload[9000];
    struct ckv_item items[CHAIN];
    struct ckv_error error;
    const struct ckv_segment segment = {payload, sizeof payload};
    fill(payload, sizeof payload, from);
    memset(items, 0, sizeof items);
    for (unsigned i = 0; i < CHAIN; i++) {
        items[i].key = key_of(from + i, bytes[i]);
        items[i].segments = &segment;
        items[i].segment_count = 1;
    }
    need(ckv_put_many(cache, items, CHAIN, CKV_PUT_CHAIN, &items[0].key, &error) >= 0,
        "put_many: %s", error.text);
}

/* ---- lives of a volume ---------------------------------------------------------------- */

struct form {
    const char *name;
    unsigned paths;
    bool apart; /* the region in a folder of its own */
    enum ckv_eviction eviction;
    enum ckv_admission admission;
};

static struct ckv_cache *
open_cache(const struct form *form, struct ckv_path paths[2], const char *space,
    enum ckv_mode mode, bool recreate)
{
    static char names[2][300];
    static char shm[300];
    struct ckv_options options;
    struct ckv_cache *cache = NULL;
    struct ckv_error error;
    ckv_options_init(&options);
    for (unsigned i = 0; i < form->paths; i++) {
        (void)snprintf(names[i], sizeof names[i], "%s/%s%u.cyc", folder, form->name, i);
        paths[i] = (struct ckv_path){names[i], CKV_CAPACITY_MIN_BYTES};
    }
    (void)snprintf(shm, sizeof shm, "%s/shm", folder);
    options.paths = paths;
    options.path_count = form->paths;
    options.mode = mode;
    options.eviction = form->eviction;
    options.admission = form->admission;
    options.shm_directory = form->apart ? shm : NULL;
    options.allow_shared_directory = true;
    options.on_mismatch = recreate ? CKV_MISMATCH_RECREATE : CKV_MISMATCH_RAISE;
    options.stripe_count = recreate ? 2 : 1;
    options.namespace_data = space;
    options.namespace_length = strlen(space);
    need(ckv_open(&options, &cache, &error) == CKV_OK, "open: %s", error.text);
    return cache;
}

static void
use(const struct form *form, struct ckv_cache *cache, struct ckv_cache *other)
{
    struct ckv_verify_report report;
    struct ckv_error error;
    struct ckv_event events[50];
    size_t count = 0;
    uint64_t number = 0;
    uint64_t lost = 0;
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < BLOCKS; i++) {
            put(cache, i, i % 3 == 0 ? CKV_PUT_OVERWRITE : 0);
            put(other, i + round, CKV_PUT_OVERWRITE);
            if (i % 5 == 0) {
                uint8_t bytes[40];
                const struct ckv_key key = key_of(i + 1, bytes);
                (void)ckv_remove(cache, &key, &error);
                reserve(cache, i, true);
                reserve(other, i, false);
                put_that_fails(cache, i);
                put_chain(cache, i);
            }
        }
        read_all(cache);
        look_up_secrets(cache);
    }
    need(ckv_verify(cache, true, NULL, NULL, &report, &error) == CKV_OK &&
             report.structure_faults == 0,
        "%s: verify: %s", form->name, report.first_fault);
    need(ckv_events(cache, 0, events, 50, &count, &lost, &number, &error) == CKV_OK,
        "events");
    need(ckv_sync(cache, &error) == CKV_OK, "sync: %s", error.text);
    need(ckv_recover(cache, &number, &error) == CKV_OK, "recover: %s", error.text);
    need(ckv_clear(other, &number, &error) == CKV_OK, "clear: %s", error.text);
}

/* ---- search --------------------------------------------------------------------------- */

struct range {
    uint64_t begin;
    uint64_t end;
};

static struct range ranges[RANGES_MAX];
static unsigned range_count;
static unsigned findings;

/* Mappings of this process, and its stack. */
static void
find_ranges(void)
{
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    need(maps != NULL, "maps");
    range_count = 0;
    while (fgets(line, sizeof line, maps) != NULL && range_count < RANGES_MAX) {
        struct range *range = &ranges[range_count];
        if (sscanf(line, "%" SCNx64 "-%" SCNx64, &range->begin, &range->end) == 2) {
            range_count++;
        }
    }
    (void)fclose(maps);
}

static bool
is_address(uint64_t word)
{
    for (unsigned i = 0; word > 65536 && i < range_count; i++) {
        if (word >= ranges[i].begin && word < ranges[i].end) {
            return true;
        }
    }
    return false;
}

static void
found(const char *name, size_t at, const char *what)
{
    if (findings++ < 20) {
        printf("%s at %zu: %s\n", name, at, what);
    }
}

static void
search(const char *name)
{
    char path[600];
    struct stat info;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    need(fd >= 0 && fstat(fd, &info) == 0, "open %s", path);
    if (!S_ISREG(info.st_mode)) {
        (void)close(fd);
        return;
    }
    const size_t size = (size_t)info.st_size;
    const uint8_t *bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    need(bytes != MAP_FAILED, "map %s", path);
    size_t run = 0;
    for (size_t i = 0; i < size; i++) {
        const uint8_t byte = bytes[i];
        run = i > 0 && bytes[i - 1] == byte ? run + 1 : 1;
        const bool canary = byte == FREED || byte == ALLOCATED || byte == VARIABLE ||
                            byte == VARIABLE_2;
        if (canary && run == RUN) {
            found(name, i, "memory that nobody set");
        }
        if (byte == (uint8_t)secret[0] && i + sizeof secret <= size &&
            memcmp(bytes + i, secret, sizeof secret - 1) == 0) {
            found(name, i, "a secret of the caller");
        }
        uint64_t word = 0;
        if (i % 8 == 0 && i + 8 <= size) {
            memcpy(&word, bytes + i, 8);
            if (is_address(word)) {
                found(name, i, "an address");
            }
        }
    }
    printf("%s: %zu bytes searched\n", name, size);
    (void)munmap((void *)(uintptr_t)bytes, size);
    (void)close(fd);
}

static void
search_folder(const char *below)
{
    char path[600];
    (void)snprintf(path, sizeof path, "%s/%s", folder, below);
    DIR *directory = opendir(path);
    need(directory != NULL, "open %s", path);
    for (struct dirent *entry = readdir(directory); entry != NULL;
        entry = readdir(directory)) {
        if (entry->d_name[0] != '.') {
            (void)snprintf(path, sizeof path, "%s%s", below, entry->d_name);
            search(path);
        }
    }
    (void)closedir(directory);
}

/* What was on the stack lies there again, under what is called next. */
static void __attribute__((noinline))
dirty_stack(void)
{
    volatile uint8_t filler[65536];
    for (size_t i = 0; i < sizeof filler; i++) {
        filler[i] = VARIABLE;
    }
}

static void
live(const struct form *form)
{
    struct ckv_path paths[2];
    for (int recreated = 0; recreated < 2; recreated++) {
        for (int life = 0; life < 2; life++) {
            dirty_stack();
            struct ckv_cache *cache =
                open_cache(form, paths, "", CKV_MODE_READ_WRITE, recreated != 0);
            struct ckv_cache *other =
                open_cache(form, paths, "other", CKV_MODE_READ_WRITE, recreated != 0);
            struct ckv_cache *reader =
                open_cache(form, paths, "", CKV_MODE_READ, recreated != 0);
            use(form, cache, other);
            read_all(reader);
            ckv_close(&reader);
            /* The region as peers see it. */
            find_ranges();
            search_folder("");
            search_folder("shm/");
            ckv_close(&cache);
            ckv_close(&other);
        }
    }
    search_folder("");
    search_folder("shm/");
}

int
main(int count, char **arguments)
{
    static const struct form forms[] = {
        {"clock", 1, false, CKV_EVICTION_CLOCK, CKV_ADMISSION_ADAPTIVE},
        {"prefix", 1, true, CKV_EVICTION_PREFIX, CKV_ADMISSION_ALWAYS},
        {"set", 2, false, CKV_EVICTION_CLOCK, CKV_ADMISSION_SECOND_TOUCH},
    };
    need(count == 2, "usage: canary FOLDER");
    need(mallopt(M_PERTURB, FREED) == 1, "mallopt");
    (void)mallopt(M_MMAP_THRESHOLD, 1 << 30); /* all memory is used again */
    ckv_os.random_bytes = plain_random;
    ckv_os.write_at = failing_write;
    (void)snprintf(folder, sizeof folder, "%s", arguments[1]);
    char shm[300];
    (void)snprintf(shm, sizeof shm, "%s/shm", folder);
    (void)mkdir(shm, 0700);
    for (size_t i = 0; i < CKV_ARRAY_LENGTH(forms); i++) {
        live(&forms[i]);
        for (unsigned file = 0; file < forms[i].paths; file++) {
            char path[300];
            (void)snprintf(path, sizeof path, "%s/%s%u.cyc", folder, forms[i].name,
                file);
            (void)unlink(path);
        }
    }
    printf("%u findings\n", findings);
    return findings == 0 ? 0 : 1;
}
