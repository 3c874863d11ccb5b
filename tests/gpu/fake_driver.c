/* SPDX-License-Identifier: Apache-2.0 */
/* fake_driver.c: a CUDA driver without a device, for the tests.
 *
 * Device memory is memory of the host that was allocated here.  Copies are entries of a
 * queue for each stream; when they are done is up to the mode:
 *
 *   EAGER   at once
 *   LAZY    as late as an event, a stream or a context is waited for; a query of an event
 *           does one copy.  The latest moment is the hardest for who let go too early.
 *   MANUAL  when fake_advance() says so; waiting blocks until then
 *
 * A copy reads its source when it is done, not when it is enqueued, as DMA does.
 *
 * Rules.  What a real driver refuses is refused with its code: a range that is not mapped
 * as a whole, a mapping for reading only without the flag, overlapping registrations,
 * caps, a copy that runs past the end of a registration or of device memory, a call
 * without a context, anything in a forked child.  What a real driver would not notice,
 * and what ends in wrong bytes there, is a violation, kept as a sentence: unregistering
 * or freeing what a queued copy uses, a range that was unmapped while registered, an
 * event that is destroyed twice, a context released too often.
 *
 * Every call is logged in order.  fake_fail() makes a call fail.
 */
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    HOST_ALREADY = 712,
    HOST_NOT = 713,
    NOT_SUPPORTED = 801
};

enum mode { EAGER, LAZY, MANUAL };
enum { DEVICES_MAX = 8, RANGES_MAX = 4096, EVENTS_MAX = 65536, OPS_MAX = 65536 };
enum { STREAMS_MAX = RANGES_MAX, LOG_MAX = 200000, DEPTH_MAX = 32 };

struct range {
    uintptr_t address;
    size_t length;
    int device; /* of device memory */
    bool used;
};

struct op { /* in one queue, in order; each stream looks only at its own */
    bool done, used;
    uintptr_t stream;
    uintptr_t target, source;
    size_t length;
    int event; /* recorded here, or -1 */
};

struct event {
    bool used, recorded, done;
    size_t op; /* the record that counts */
};

struct record {
    const char *name;
    uint64_t a, b, c;
    int result;
    const char *kind;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t advanced = PTHREAD_COND_INITIALIZER;

static int device_count = 1;
static pid_t started; /* who called cuInit */
static enum mode mode;
static bool read_only_supported = true, register_supported = true;
static size_t cap_per_call, cap_total, registered_total;
static int retains[DEVICES_MAX];
static struct range registered[RANGES_MAX], pinned[RANGES_MAX], device_memory[RANGES_MAX];
static struct event events[EVENTS_MAX];
static struct op ops[OPS_MAX];
static size_t op_count;
static struct range streams[STREAMS_MAX];
static struct record records[LOG_MAX];
static size_t record_count, calls;
static char violation[512];
static size_t allowance; /* of MANUAL: copies and events that may still be done */

static char fail_name[64];
static long fail_at, fail_seen, fail_every;
static int fail_code;

static _Thread_local uintptr_t contexts[DEPTH_MAX];
static _Thread_local int depth;

/* ---- bookkeeping ------------------------------------------------------------------ */

static void
violated(const char *format, ...)
{
    if (violation[0] == 0) {
        va_list arguments;
        va_start(arguments, format);
        (void)vsnprintf(violation, sizeof violation, format, arguments);
        va_end(arguments);
    }
}

static int
note(const char *name, uint64_t a, uint64_t b, uint64_t c, int result, const char *kind)
{
    if (record_count < LOG_MAX) {
        records[record_count++] = (struct record){name, a, b, c, result, kind};
    }
    return result;
}

/* Begins a call: counts it, and says whether it is to fail.  Locks in any case. */
static int
begin(const char *name, bool needs_context)
{
    pthread_mutex_lock(&lock);
    calls++;
    if (started != 0 && started != getpid()) {
        violated("%s in a forked child", name);
        return NOT_INITIALIZED;
    }
    if (started == 0) {
        return NOT_INITIALIZED;
    }
    if (fail_name[0] != 0 &&
        (strcmp(fail_name, "*") == 0 || strcmp(fail_name, name) == 0)) {
        fail_seen++;
        if (fail_seen == fail_at || (fail_every != 0 && fail_seen >= fail_at)) {
            return fail_code;
        }
    }
    if (needs_context && depth == 0) {
        return INVALID_CONTEXT;
    }
    return OK;
}

static int
end(const char *name, uint64_t a, uint64_t b, uint64_t c, int result)
{
    (void)note(name, a, b, c, result, "");
    pthread_mutex_unlock(&lock);
    return result;
}

#define TRY(name, needs_context, a, b, c)                                              \
    do {                                                                               \
        const int begun = begin(name, needs_context);                                  \
        if (begun != OK) {                                                             \
            return end(name, (uint64_t)(a), (uint64_t)(b), (uint64_t)(c), begun);      \
        }                                                                              \
    } while (0)

/* The range of a table that has this address, or NULL. */
static struct range *
find(struct range *table, uintptr_t address)
{
    for (int i = 0; i < RANGES_MAX; i++) {
        if (table[i].used && address - table[i].address < table[i].length) {
            return &table[i];
        }
    }
    return NULL;
}

static struct range *
add(struct range *table, uintptr_t address, size_t length, int device)
{
    for (int i = 0; i < RANGES_MAX; i++) {
        if (!table[i].used) {
            table[i] = (struct range){address, length, device, true};
            return &table[i];
        }
    }
    violated("a table of the fake is full");
    return NULL;
}

static bool
overlaps(const struct range *table, uintptr_t address, size_t length)
{
    for (int i = 0; i < RANGES_MAX; i++) {
        if (table[i].used && table[i].address < address + length &&
            address < table[i].address + table[i].length) {
            return true;
        }
    }
    return false;
}

/* Whether the whole range is mapped, and by mappings that may be written to. */
static void
look_at_maps(uintptr_t address, size_t length, bool *mapped, bool *writable)
{
    *mapped = *writable = true;
    FILE *file = fopen("/proc/self/maps", "r");
    char line[1024];
    uintptr_t at = address;
    while (file != NULL && at < address + length &&
           fgets(line, sizeof line, file) != NULL) {
        unsigned long first, last;
        char rights[8];
        if (sscanf(line, "%lx-%lx %7s", &first, &last, rights) == 3 && first <= at &&
            at < last) {
            *writable = *writable && rights[1] == 'w';
            at = last;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    *mapped = at >= address + length;
}

/* ---- the queue -------------------------------------------------------------------- */

static void
perform(struct op *op)
{
    if (op->done) {
        return;
    }
    if (op->event >= 0) {
        if (events[op->event].used && events[op->event].op == (size_t)(op - ops)) {
            events[op->event].done = true;
        }
    } else {
        memcpy((void *)op->target, (const void *)op->source, op->length);
    }
    op->done = true;
}

/* Does what a stream has up to `limit`; in MANUAL mode only what is allowed. */
static void
run_stream(uintptr_t stream, size_t limit, size_t most)
{
    for (size_t i = 0; i < limit && most > 0; i++) {
        if (ops[i].stream == stream && !ops[i].done) {
            if (mode == MANUAL) {
                if (allowance == 0) {
                    return;
                }
                allowance--;
            }
            perform(&ops[i]);
            most--;
        }
    }
}

static bool
stream_done(uintptr_t stream, size_t limit)
{
    for (size_t i = 0; i < limit; i++) {
        if (ops[i].stream == stream && !ops[i].done) {
            return false;
        }
    }
    return true;
}

static void
forget_done(void)
{
    while (op_count > 0 && ops[op_count - 1].done && ops[op_count - 1].event < 0) {
        op_count--;
    }
    bool any = false;
    for (size_t i = 0; i < op_count; i++) {
        any = any || !ops[i].done;
    }
    if (!any) {
        for (size_t i = 0; i < op_count; i++) {
            if (ops[i].event >= 0 && events[ops[i].event].op == i) {
                events[ops[i].event].op = SIZE_MAX;
            }
        }
        op_count = 0;
    }
}

static void
enqueue(uintptr_t stream, uintptr_t target, uintptr_t source, size_t length, int event)
{
    if (op_count == OPS_MAX) {
        forget_done();
    }
    if (op_count == OPS_MAX) {
        violated("the queue of the fake is full");
        return;
    }
    stream = stream == 1 ? 0 : stream;
    ops[op_count] = (struct op){false, true, stream, target, source, length, event};
    if (event >= 0) {
        events[event] = (struct event){true, true, false, op_count};
    }
    op_count++;
    if (mode == EAGER) {
        run_stream(stream, op_count, SIZE_MAX);
        forget_done();
    }
}

static bool
in_use(uintptr_t address, size_t length)
{
    for (size_t i = 0; i < op_count; i++) {
        const struct op *op = &ops[i];
        if (!op->done && op->event < 0 &&
            ((op->source < address + length && address < op->source + op->length) ||
                (op->target < address + length && address < op->target + op->length))) {
            return true;
        }
    }
    return false;
}

/* Waits until a stream has done everything up to `limit`. */
static void
wait_for(uintptr_t stream, size_t limit)
{
    if (mode != MANUAL) {
        run_stream(stream, limit, SIZE_MAX);
    }
    while (!stream_done(stream, limit)) {
        run_stream(stream, limit, SIZE_MAX);
        if (!stream_done(stream, limit)) {
            pthread_cond_wait(&advanced, &lock);
        }
    }
}

/* ---- for the tests ---------------------------------------------------------------- */

API void
fake_reset(int devices)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < RANGES_MAX; i++) {
        if (device_memory[i].used) {
            free((void *)device_memory[i].address);
        }
        if (pinned[i].used) {
            free((void *)pinned[i].address);
        }
    }
    memset(registered, 0, sizeof registered);
    memset(pinned, 0, sizeof pinned);
    memset(device_memory, 0, sizeof device_memory);
    memset(streams, 0, sizeof streams);
    memset(events, 0, sizeof events);
    memset(retains, 0, sizeof retains);
    device_count = devices;
    started = 0;
    mode = EAGER;
    read_only_supported = register_supported = true;
    cap_per_call = cap_total = registered_total = 0;
    op_count = record_count = calls = allowance = 0;
    violation[0] = fail_name[0] = 0;
    fail_at = fail_seen = fail_every = 0;
    depth = 0;
    pthread_mutex_unlock(&lock);
}

API void
fake_mode(int wanted)
{
    pthread_mutex_lock(&lock);
    mode = (enum mode)wanted;
    pthread_mutex_unlock(&lock);
}

/* Lets so many more copies and events be done, in order over all streams. */
API void
fake_advance(size_t count)
{
    pthread_mutex_lock(&lock);
    allowance += count;
    for (size_t i = 0; i < op_count && allowance > 0; i++) {
        if (!ops[i].done) {
            allowance--;
            perform(&ops[i]);
        }
    }
    pthread_cond_broadcast(&advanced);
    pthread_mutex_unlock(&lock);
}

API void
fake_support(bool registers, bool read_only)
{
    register_supported = registers;
    read_only_supported = read_only;
}

API void
fake_caps(size_t per_call, size_t total)
{
    cap_per_call = per_call;
    cap_total = total;
}

/* The nth call of this name ("*": of any) fails; with `every` all later ones too. */
API void
fake_fail(const char *name, long nth, int code, bool every)
{
    pthread_mutex_lock(&lock);
    (void)snprintf(fail_name, sizeof fail_name, "%s", name);
    fail_at = nth;
    fail_seen = 0;
    fail_code = code;
    fail_every = every;
    pthread_mutex_unlock(&lock);
}

API size_t
fake_calls(void)
{
    return calls;
}

API size_t
fake_records(void)
{
    return record_count;
}

API const char *
fake_record(size_t i, uint64_t *a, uint64_t *b, uint64_t *c, int *result,
    const char **kind)
{
    *a = records[i].a;
    *b = records[i].b;
    *c = records[i].c;
    *result = records[i].result;
    *kind = records[i].kind;
    return records[i].name;
}

API const char *
fake_violation(void)
{
    return violation;
}

API size_t
fake_registered_bytes(void)
{
    return registered_total;
}

API size_t
fake_pinned_bytes(void)
{
    size_t total = 0;
    for (int i = 0; i < RANGES_MAX; i++) {
        total += pinned[i].used ? pinned[i].length : 0;
    }
    return total;
}

API size_t
fake_pending(void)
{
    size_t count = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < op_count; i++) {
        count += !ops[i].done && ops[i].event < 0;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

API size_t
fake_live_events(void)
{
    size_t count = 0;
    for (int i = 0; i < EVENTS_MAX; i++) {
        count += events[i].used;
    }
    return count;
}

/* Registered ranges that are no longer mapped. */
API size_t
fake_unmapped(void)
{
    size_t count = 0;
    for (int i = 0; i < RANGES_MAX; i++) {
        bool mapped = true, writable;
        if (registered[i].used) {
            look_at_maps(registered[i].address, registered[i].length, &mapped,
                &writable);
        }
        count += !mapped;
    }
    return count;
}

API int
fake_retains(int device)
{
    return retains[device];
}

API int
fake_depth(void)
{
    return depth;
}

/* Memory of a device, as another library would have it. */
API uintptr_t
fake_allocate(int device, size_t length)
{
    pthread_mutex_lock(&lock);
    void *memory = malloc(length == 0 ? 1 : length);
    (void)add(device_memory, (uintptr_t)memory, length, device);
    if (retains[device] == 0) {
        retains[device] = 1; /* it has the primary context, and keeps it */
    }
    pthread_mutex_unlock(&lock);
    return (uintptr_t)memory;
}

API uintptr_t
fake_stream(int device)
{
    pthread_mutex_lock(&lock);
    const struct range *stream = add(streams, 0, 0, device);
    const uintptr_t handle = 0x5000 + (uintptr_t)(stream - streams);
    pthread_mutex_unlock(&lock);
    return handle;
}

/* ---- the driver ------------------------------------------------------------------- */

static uintptr_t
context_of(int device)
{
    return 0xc000 + (uintptr_t)device;
}

API int
cuInit(unsigned int flags)
{
    pthread_mutex_lock(&lock);
    calls++;
    int result = OK;
    if (flags != 0) {
        result = INVALID_VALUE;
    } else if (started != 0 && started != getpid()) {
        result = NOT_INITIALIZED; /* after a fork: as the real one */
    } else if (strcmp(fail_name, "cuInit") == 0 || strcmp(fail_name, "*") == 0) {
        fail_seen++;
        if (fail_seen == fail_at || (fail_every && fail_seen >= fail_at)) {
            result = fail_code;
        }
    }
    if (result == OK && device_count == 0) {
        result = NO_DEVICE;
    }
    if (result == OK) {
        started = getpid();
    }
    return end("cuInit", flags, 0, 0, result);
}

API int
cuDriverGetVersion(int *version)
{
    *version = 13000;
    return OK;
}

API int
cuGetErrorName(int code, const char **name)
{
    static const struct {
        int code;
        const char *name;
    } names[] = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {HOST_ALREADY, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {HOST_NOT, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
        {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (names[i].code == code) {
            *name = names[i].name;
            return OK;
        }
    }
    *name = NULL;
    return INVALID_VALUE;
}

API int
cuGetErrorString(int code, const char **text)
{
    *text = "said by the fake";
    return code == OK ? INVALID_VALUE : OK;
}

API int
cuDeviceGetCount(int *count)
{
    TRY("cuDeviceGetCount", false, 0, 0, 0);
    *count = device_count;
    return end("cuDeviceGetCount", 0, 0, 0, OK);
}

API int
cuDeviceGet(int *device, int ordinal)
{
    TRY("cuDeviceGet", false, ordinal, 0, 0);
    *device = ordinal;
    return end("cuDeviceGet", (uint64_t)ordinal, 0, 0,
        ordinal >= 0 && ordinal < device_count ? OK : INVALID_DEVICE);
}

API int
cuDeviceGetAttribute(int *value, int attribute, int device)
{
    TRY("cuDeviceGetAttribute", false, attribute, device, 0);
    *value = attribute == 99 ? register_supported : attribute == 113 && read_only_supported;
    return end("cuDeviceGetAttribute", (uint64_t)attribute, (uint64_t)device, 0, OK);
}

API int
cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *active)
{
    TRY("cuDevicePrimaryCtxGetState", false, device, 0, 0);
    *flags = 0;
    *active = retains[device] > 0;
    return end("cuDevicePrimaryCtxGetState", (uint64_t)device, 0, 0, OK);
}

API int
cuDevicePrimaryCtxRetain(uintptr_t *context, int device)
{
    TRY("cuDevicePrimaryCtxRetain", false, device, 0, 0);
    retains[device]++;
    *context = context_of(device);
    return end("cuDevicePrimaryCtxRetain", (uint64_t)device, 0, 0, OK);
}

API int
cuDevicePrimaryCtxRelease_v2(int device)
{
    TRY("cuDevicePrimaryCtxRelease", false, device, 0, 0);
    if (retains[device] == 0) {
        violated("the primary context of device %d is released once too often", device);
    } else {
        retains[device]--;
    }
    return end("cuDevicePrimaryCtxRelease", (uint64_t)device, 0, 0, OK);
}

API int
cuCtxGetCurrent(uintptr_t *context)
{
    TRY("cuCtxGetCurrent", false, 0, 0, 0);
    *context = depth > 0 ? contexts[depth - 1] : 0;
    return end("cuCtxGetCurrent", 0, 0, 0, OK);
}

API int
cuCtxGetDevice(int *device)
{
    TRY("cuCtxGetDevice", true, 0, 0, 0);
    *device = (int)(contexts[depth - 1] - context_of(0));
    return end("cuCtxGetDevice", 0, 0, 0, OK);
}

API int
cuCtxPushCurrent_v2(uintptr_t context)
{
    TRY("cuCtxPushCurrent", false, context, 0, 0);
    const int device = (int)(context - context_of(0));
    if (device < 0 || device >= device_count || depth == DEPTH_MAX) {
        return end("cuCtxPushCurrent", context, 0, 0, INVALID_CONTEXT);
    }
    if (retains[device] == 0) {
        violated("the context of device %d is used after its release", device);
    }
    contexts[depth++] = context;
    return end("cuCtxPushCurrent", context, 0, 0, OK);
}

/* Pops also when it was told to fail: a test of something else would end here. */
API int
cuCtxPopCurrent_v2(uintptr_t *context)
{
    const int begun = begin("cuCtxPopCurrent", true);
    if (depth > 0) {
        *context = contexts[--depth];
    }
    return end("cuCtxPopCurrent", 0, 0, 0, begun);
}

API int
cuCtxSynchronize(void)
{
    TRY("cuCtxSynchronize", true, 0, 0, 0);
    const size_t limit = op_count;
    for (size_t i = 0; i < limit; i++) {
        if (ops[i].used && !ops[i].done) {
            wait_for(ops[i].stream, limit);
        }
    }
    return end("cuCtxSynchronize", 0, 0, 0, OK);
}

static int
refuse_registration(uintptr_t address, size_t length, unsigned int flags)
{
    bool mapped, writable;
    if (address == 0 || length == 0) {
        return INVALID_VALUE;
    }
    if (overlaps(registered, address, length) || overlaps(pinned, address, length)) {
        return HOST_ALREADY;
    }
    look_at_maps(address, length, &mapped, &writable);
    if (!mapped || (!writable && (flags & 8) == 0)) {
        return INVALID_VALUE;
    }
    if ((flags & 8) != 0 && !read_only_supported) {
        return NOT_SUPPORTED;
    }
    if (!register_supported) {
        return NOT_SUPPORTED;
    }
    if (cap_per_call != 0 && length > cap_per_call) {
        return INVALID_VALUE;
    }
    if (cap_total != 0 && registered_total + length > cap_total) {
        return OUT_OF_MEMORY;
    }
    return OK;
}

API int
cuMemHostRegister_v2(uintptr_t address, size_t length, unsigned int flags)
{
    TRY("cuMemHostRegister", true, address, length, flags);
    const int refused = refuse_registration(address, length, flags);
    if (refused == OK) {
        (void)add(registered, address, length, 0);
        registered_total += length;
    }
    return end("cuMemHostRegister", address, length, flags, refused);
}

API int
cuMemHostUnregister(uintptr_t address)
{
    TRY("cuMemHostUnregister", true, address, 0, 0);
    struct range *range = find(registered, address);
    if (range == NULL || range->address != address) {
        return end("cuMemHostUnregister", address, 0, 0, HOST_NOT);
    }
    bool mapped, writable;
    look_at_maps(range->address, range->length, &mapped, &writable);
    if (!mapped) {
        violated("a range was unmapped while it was registered");
    }
    if (in_use(range->address, range->length)) {
        violated("a range is unregistered while a copy from it is queued");
    }
    range->used = false;
    registered_total -= range->length;
    return end("cuMemHostUnregister", address, range->length, 0, OK);
}

API int
cuMemHostAlloc(uintptr_t *address, size_t length, unsigned int flags)
{
    TRY("cuMemHostAlloc", true, length, flags, 0);
    void *memory = NULL;
    if (length == 0 || posix_memalign(&memory, 4096, length) != 0) {
        return end("cuMemHostAlloc", length, flags, 0, OUT_OF_MEMORY);
    }
    *address = (uintptr_t)memory;
    (void)add(pinned, *address, length, 0);
    return end("cuMemHostAlloc", length, flags, *address, OK);
}

API int
cuMemFreeHost(uintptr_t address)
{
    TRY("cuMemFreeHost", true, address, 0, 0);
    struct range *range = find(pinned, address);
    if (range == NULL || range->address != address) {
        return end("cuMemFreeHost", address, 0, 0, INVALID_VALUE);
    }
    if (in_use(range->address, range->length)) {
        violated("pinned memory is freed while a copy uses it");
    }
    range->used = false;
    memset((void *)address, 0xdd, range->length);
    free((void *)address);
    return end("cuMemFreeHost", address, 0, 0, OK);
}

/* How host memory takes part in a copy; NULL: the driver refuses. */
static const char *
kind_of(uintptr_t address, size_t length)
{
    struct range *range = find(registered, address);
    const char *kind = "registered";
    if (range == NULL) {
        range = find(pinned, address);
        kind = "pinned";
    }
    if (range == NULL) {
        return overlaps(registered, address, length) ? NULL : "pageable";
    }
    return address - range->address + length <= range->length ? kind : NULL;
}

static bool
is_stream(uintptr_t stream)
{
    return stream <= 2 ||
           (stream - 0x5000 < STREAMS_MAX && streams[stream - 0x5000].used);
}

static int
copy(const char *name, uintptr_t device_address, uintptr_t host, size_t length,
    uintptr_t stream, bool to_device)
{
    const struct range *memory = find(device_memory, device_address);
    const char *kind = kind_of(host, length);
    int result = OK;
    if (memory == NULL || kind == NULL || !is_stream(stream) ||
        device_address - memory->address + length > memory->length) {
        result = INVALID_VALUE;
    } else if (memory->device != (int)(contexts[depth - 1] - context_of(0))) {
        violated("%s: memory of device %d in a context of another", name,
            memory->device);
    }
    (void)note(name, device_address, host, length, result, kind != NULL ? kind : "");
    if (result == OK) {
        const uintptr_t target = to_device ? device_address : host;
        const uintptr_t source = to_device ? host : device_address;
        enqueue(stream, target, source, length, -1);
        if (strcmp(kind, "pageable") == 0 && mode != MANUAL) {
            /* the driver has taken the bytes when the call returns */
            run_stream(stream == 1 ? 0 : stream, op_count, SIZE_MAX);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

API int
cuMemcpyHtoDAsync_v2(unsigned long long target, uintptr_t source, size_t length,
    uintptr_t stream)
{
    TRY("cuMemcpyHtoDAsync", true, target, source, length);
    return copy("cuMemcpyHtoDAsync", (uintptr_t)target, source, length, stream, true);
}

API int
cuMemcpyDtoHAsync_v2(uintptr_t target, unsigned long long source, size_t length,
    uintptr_t stream)
{
    TRY("cuMemcpyDtoHAsync", true, source, target, length);
    return copy("cuMemcpyDtoHAsync", (uintptr_t)source, target, length, stream, false);
}

API int
cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer)
{
    TRY("cuPointerGetAttribute", false, attribute, pointer, 0);
    const struct range *memory = find(device_memory, (uintptr_t)pointer);
    const struct range *host = find(registered, (uintptr_t)pointer);
    if (host == NULL) {
        host = find(pinned, (uintptr_t)pointer);
    }
    int result = memory == NULL && host == NULL ? INVALID_VALUE : OK;
    if (result == OK && attribute == 9) {
        *(int *)value = memory != NULL ? memory->device : 0;
    } else if (result == OK && attribute == 2) {
        *(int *)value = memory != NULL ? 2 : 1;
    } else {
        result = INVALID_VALUE;
    }
    return end("cuPointerGetAttribute", (uint64_t)attribute, pointer, 0, result);
}

API int
cuEventCreate(uintptr_t *event, unsigned int flags)
{
    TRY("cuEventCreate", true, flags, 0, 0);
    for (int i = 0; i < EVENTS_MAX; i++) {
        if (!events[i].used) {
            events[i] = (struct event){true, false, true, SIZE_MAX};
            *event = 0xe0000 + (uintptr_t)i;
            return end("cuEventCreate", *event, 0, 0, OK);
        }
    }
    return end("cuEventCreate", 0, 0, 0, OUT_OF_MEMORY);
}

static struct event *
event_of(uintptr_t handle)
{
    const uintptr_t i = handle - 0xe0000;
    if (i >= EVENTS_MAX || !events[i].used) {
        violated("an event is used that does not exist");
        return NULL;
    }
    return &events[i];
}

API int
cuEventRecord(uintptr_t handle, uintptr_t stream)
{
    TRY("cuEventRecord", true, handle, stream, 0);
    struct event *event = event_of(handle);
    if (event == NULL || !is_stream(stream)) {
        return end("cuEventRecord", handle, stream, 0, INVALID_HANDLE);
    }
    (void)note("cuEventRecord", handle, stream, 0, OK, "");
    enqueue(stream, 0, 0, 0, (int)(event - events));
    pthread_mutex_unlock(&lock);
    return OK;
}

API int
cuEventQuery(uintptr_t handle)
{
    TRY("cuEventQuery", true, handle, 0, 0);
    struct event *event = event_of(handle);
    int result = event == NULL ? INVALID_HANDLE : OK;
    if (event != NULL && event->recorded && !event->done) {
        if (mode == LAZY) {
            run_stream(ops[event->op].stream, event->op + 1, 1);
        }
        result = event->done ? OK : NOT_READY;
    }
    return end("cuEventQuery", handle, 0, 0, result);
}

API int
cuEventSynchronize(uintptr_t handle)
{
    TRY("cuEventSynchronize", true, handle, 0, 0);
    struct event *event = event_of(handle);
    if (event == NULL) {
        return end("cuEventSynchronize", handle, 0, 0, INVALID_HANDLE);
    }
    if (event->recorded && !event->done) {
        wait_for(ops[event->op].stream, event->op + 1);
    }
    return end("cuEventSynchronize", handle, 0, 0, OK);
}

API int
cuEventDestroy_v2(uintptr_t handle)
{
    TRY("cuEventDestroy", true, handle, 0, 0);
    struct event *event = event_of(handle);
    if (event == NULL) {
        return end("cuEventDestroy", handle, 0, 0, INVALID_HANDLE);
    }
    event->used = false;
    return end("cuEventDestroy", handle, 0, 0, OK);
}

API int
cuStreamWaitEvent(uintptr_t stream, uintptr_t handle, unsigned int flags)
{
    TRY("cuStreamWaitEvent", true, stream, handle, flags);
    struct event *event = event_of(handle);
    if (event == NULL || !is_stream(stream)) {
        return end("cuStreamWaitEvent", stream, handle, flags, INVALID_HANDLE);
    }
    return end("cuStreamWaitEvent", stream, handle, flags, OK);
}

API int
cuStreamGetCtx(uintptr_t stream, uintptr_t *context)
{
    TRY("cuStreamGetCtx", true, stream, 0, 0);
    if (!is_stream(stream)) {
        return end("cuStreamGetCtx", stream, 0, 0, INVALID_HANDLE);
    }
    *context = stream <= 2 ? contexts[depth - 1]
                           : context_of(streams[stream - 0x5000].device);
    return end("cuStreamGetCtx", stream, 0, 0, OK);
}

API int
cuStreamSynchronize(uintptr_t stream)
{
    TRY("cuStreamSynchronize", true, stream, 0, 0);
    if (!is_stream(stream)) {
        return end("cuStreamSynchronize", stream, 0, 0, INVALID_HANDLE);
    }
    wait_for(stream == 1 ? 0 : stream, op_count);
    return end("cuStreamSynchronize", stream, 0, 0, OK);
}

/* ---- what the bench needs besides -------------------------------------------------- */

API int
cuDeviceGetName(char *name, int length, int device)
{
    TRY("cuDeviceGetName", false, device, 0, 0);
    (void)snprintf(name, (size_t)length, "a fake");
    return end("cuDeviceGetName", (uint64_t)device, 0, 0, OK);
}

API int
cuDeviceGetPCIBusId(char *name, int length, int device)
{
    TRY("cuDeviceGetPCIBusId", false, device, 0, 0);
    (void)snprintf(name, (size_t)length, "0000:FA:KE.0");
    return end("cuDeviceGetPCIBusId", (uint64_t)device, 0, 0, OK);
}

API int
cuMemAlloc_v2(unsigned long long *pointer, size_t length)
{
    TRY("cuMemAlloc", true, length, 0, 0);
    const int device = (int)(contexts[depth - 1] - context_of(0));
    void *memory = malloc(length == 0 ? 1 : length);
    (void)add(device_memory, (uintptr_t)memory, length, device);
    *pointer = (uintptr_t)memory;
    return end("cuMemAlloc", length, 0, 0, OK);
}

API int
cuMemFree_v2(unsigned long long pointer)
{
    TRY("cuMemFree", true, pointer, 0, 0);
    struct range *range = find(device_memory, (uintptr_t)pointer);
    if (range == NULL || range->address != (uintptr_t)pointer) {
        return end("cuMemFree", pointer, 0, 0, INVALID_VALUE);
    }
    if (in_use(range->address, range->length)) {
        violated("device memory is freed while a copy uses it");
    }
    range->used = false;
    free((void *)range->address);
    return end("cuMemFree", pointer, 0, 0, OK);
}

API int
cuMemsetD8_v2(unsigned long long pointer, unsigned char value, size_t length)
{
    TRY("cuMemsetD8", true, pointer, value, length);
    memset((void *)(uintptr_t)pointer, value, length);
    return end("cuMemsetD8", pointer, value, length, OK);
}

API int
cuMemcpyDtoH_v2(void *target, unsigned long long source, size_t length)
{
    TRY("cuMemcpyDtoH", true, (uintptr_t)target, source, length);
    memcpy(target, (const void *)(uintptr_t)source, length);
    return end("cuMemcpyDtoH", (uintptr_t)target, source, length, OK);
}

API int
cuStreamCreate(uintptr_t *stream, unsigned int flags)
{
    TRY("cuStreamCreate", true, flags, 0, 0);
    const int device = (int)(contexts[depth - 1] - context_of(0));
    const struct range *made = add(streams, 0, 0, device);
    const ptrdiff_t number = made - streams;
    *stream = 0x5000 + (uintptr_t)number;
    return end("cuStreamCreate", *stream, flags, 0,
        number < STREAMS_MAX ? OK : OUT_OF_MEMORY);
}

API int
cuStreamDestroy_v2(uintptr_t stream)
{
    TRY("cuStreamDestroy", true, stream, 0, 0);
    if (!is_stream(stream) || stream <= 2) {
        return end("cuStreamDestroy", stream, 0, 0, INVALID_HANDLE);
    }
    streams[stream - 0x5000].used = false;
    return end("cuStreamDestroy", stream, 0, 0, OK);
}
