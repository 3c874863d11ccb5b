/* SPDX-License-Identifier: Apache-2.0 */
/* status.c: texts of statuses, error sentences, the log sink, the end of the process.
 *
 * The sink and its context change together: they lie in one record that never changes
 * once it is published, and a single word points at the current one.  A reader takes no
 * lock, so that a sink may log, a fork may happen at any moment, and ckv_set_log() never
 * waits for a sink that itself waits for the caller (an interpreter lock).  The price:
 * records are kept for ever, one per ckv_set_log(), and a message that was under way
 * may still reach the sink before.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "atomics.h"
#include "base.h"

struct log_target {
    void (*sink)(void *context, enum ckv_log_level level, const char *text);
    void *context;
    struct log_target *previous; /* keeps the old ones reachable for leak checkers */
};

static ckv_atomic_u64 current_target; /* struct log_target *, or 0 for none */

const char *
ckv_status_text(enum ckv_status status)
{
    switch (status) {
#define X(name, value, text)                                                           \
    case name:                                                                         \
        return text;
        CKV_STATUSES(X)
#undef X
    }
    return "unknown status";
}

/* vsnprintf that ends on a whole UTF-8 character when it has to cut. */
static void CKV_PRINTF(3, 0)
    format_text(char *text, size_t size, const char *format, va_list arguments)
{
    const int length = vsnprintf(text, size, format, arguments);
    if (length < 0) {
        text[0] = '\0';
        return;
    }
    if ((size_t)length < size) {
        return;
    }
    size_t end = size - 1;
    size_t lead = end;
    while (lead > 0 && end - lead < 3 &&
           ((unsigned char)text[lead - 1] & 0xc0u) == 0x80u) {
        lead--;
    }
    if (lead > 0 && (unsigned char)text[lead - 1] >= 0xc0u) {
        const unsigned char first = (unsigned char)text[lead - 1];
        const size_t wanted = first >= 0xf0u ? 4u : first >= 0xe0u ? 3u : 2u;
        if (end - (lead - 1) < wanted) {
            end = lead - 1;
        }
    }
    text[end] = '\0';
}

enum ckv_status
ckv_fail(struct ckv_error *error, enum ckv_status status, int os_errno,
    const char *format, ...)
{
    if (error == NULL) {
        return status;
    }
    error->status = status;
    error->os_errno = os_errno;
    va_list arguments;
    va_start(arguments, format);
    format_text(error->text, sizeof(error->text), format, arguments);
    va_end(arguments);
    return status;
}

void
ckv_set_log(void (*sink)(void *context, enum ckv_log_level level, const char *text),
    void *context)
{
    static ckv_atomic_u64 newest_record;

    struct log_target *target = NULL;
    if (sink != NULL) {
        target = malloc(sizeof(*target));
        if (target != NULL) { /* without memory messages are dropped */
            target->sink = sink;
            target->context = context;
            const uint64_t record = (uint64_t)(uintptr_t)target;
            const uint64_t before = ckv_exchange_ordered_u64(&newest_record, record);
            target->previous = (struct log_target *)(uintptr_t)before;
        }
    }
    ckv_store_ordered_u64(&current_target, (uint64_t)(uintptr_t)target);
}

void
ckv_log(enum ckv_log_level level, const char *format, ...)
{
    const uint64_t word = ckv_load_ordered_u64(&current_target);
    const struct log_target *target = (const struct log_target *)(uintptr_t)word;
    if (target == NULL) {
        return;
    }
    char text[512];
    const int saved_errno = errno;
    va_list arguments;
    va_start(arguments, format);
    format_text(text, sizeof(text), format, arguments);
    va_end(arguments);
    target->sink(target->context, level, text);
    errno = saved_errno;
}

_Noreturn void
ckv_invariant_failed(const char *condition, const char *file, int line)
{
    char text[512];
    const int length = snprintf(text, sizeof(text),
        "cyclone_kv: broken invariant at %s:%d: %s\n", file, line, condition);
    if (length > 0) {
        const size_t size = ckv_min_u64((uint64_t)length, sizeof(text) - 1);
        /* The process ends here: nobody is left to act on a failure. */
        const ssize_t written = write(STDERR_FILENO, text, size);
        (void)written;
    }
    abort();
}
