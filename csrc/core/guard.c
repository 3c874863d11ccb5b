/* SPDX-License-Identifier: Apache-2.0 */
/* guard.c: the SIGBUS handler (guard.h).
 *
 * The table of ranges is an array that the handler walks without a lock; SIGBUS is rare
 * and the array short, so there is nothing to search faster.
 *
 *   U1  A slot is filled in before its address is stored (U1), and the handler reads
 *       the address first: what it sees of a slot belongs together.
 *   U2  A slot is emptied, its note freed and its range unmapped by others only after
 *       every handler that may have seen it is done: removal clears the address, then
 *       waits until no handler runs.  The store of the address must be seen before the
 *       count of handlers is read, and the handler counts itself before it reads
 *       addresses: both pairs are ordered.
 *   U3  What is not ours goes to the handler that was there before, the way the kernel
 *       would have called it (mask, flags, default, ignore).
 *   U4  A copy that is being made (ckv_guard_copy) comes before any range: the handler
 *       jumps out of it, so that the page is not replaced under the views of others.  A
 *       thread makes one copy at a time and the copy holds nothing, so nothing is left
 *       undone; the signal mask of before is put back where the jump lands.  Who cannot
 *       count on the handler (ckv_guard_ready) makes no such copy: a read call does the
 *       same without a signal.
 *   U5  The note of a range grows before a page of it is replaced, so that who loads
 *       zeros and then looks at the note sees that it grew.
 *
 * Handlers of others that come later replace ours and hand down to it by raising the
 * signal again, as Python's faulthandler does after it has written its report.  Such a
 * raise tells no address.  When it provably comes from a handler - it was raised on the
 * signal stack, or ours had been replaced - it is dropped once: the load that failed
 * runs again and brings the real signal.
 */
#include "guard.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ucontext.h>
#include <unistd.h>

#include "os.h"

/* 64 TiB in windows of 1 GiB, for two sets; memory is touched only when used. */
enum { RANGES_MAX = 131072 };

struct range {
    ckv_atomic_u64 address; /* 0: free; U1 */
    ckv_atomic_u64 length;
    ckv_atomic_u64 note; /* ckv_atomic_u64 * */
};

static struct range ranges[RANGES_MAX];
static ckv_atomic_u32
    ranges_used; /* slots from here on were never filled, or are free */
static ckv_atomic_u32 handlers_running;

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER; /* writers of ranges */
static bool installed;                                         /* under table_lock */
static uint32_t free_hint; /* under table_lock: no free slot is below it */

static size_t page_bytes;             /* fixed before the handler is installed */
static struct sigaction previous;     /* likewise */
static ckv_atomic_u32 previous_spent; /* it is gone: what is left is the default */
static ckv_atomic_u32 was_replaced;   /* somebody else's handler was seen on top */
static ckv_atomic_u32 handed_down;    /* a raise was dropped; the real one follows */

/* ---- copies ---------------------------------------------------------------------- */

struct copying {
    uint64_t target;
    uint64_t source;
    uint64_t length; /* of both */
    sigset_t mask;   /* of the interrupted code; set by the handler */
    sigjmp_buf landing;
};

#ifdef __linux__
/* The handler reads this, so its first use must not allocate: glibc would, for a library
 * that was loaded late, unless told to use the memory that each thread begins with.  musl
 * never does, and does not know the other way. */
#ifdef __GLIBC__
#define CKV_FIRST_USE_ALLOCATES_NOTHING __attribute__((tls_model("initial-exec")))
#else
#define CKV_FIRST_USE_ALLOCATES_NOTHING
#endif
static _Thread_local struct copying *copying_now CKV_FIRST_USE_ALLOCATES_NOTHING;

int
ckv_guard_copy(void *target, const void *source, size_t length)
{
    struct copying copying = {.target = (uint64_t)(uintptr_t)target,
        .source = (uint64_t)(uintptr_t)source,
        .length = length};
    /* Without the mask, which would cost a system call for each copy. */
    if (sigsetjmp(copying.landing, 0) != 0) {
        (void)pthread_sigmask(SIG_SETMASK, &copying.mask, NULL); /* was in force */
        return -EFAULT;
    }
    copying_now = &copying;
    ckv_fence_signal(); /* between the pointer and the accesses it covers */
    memcpy(target, source, length);
    ckv_fence_signal();
    copying_now = NULL;
    return 0;
}

/* Ends the copy that this thread is making, if the address lies in it (U4). */
static void
leave_copy(uint64_t address, const ucontext_t *context, int saved_errno)
{
    struct copying *copying = copying_now;
    if (copying != NULL && (address - copying->source < copying->length ||
                               address - copying->target < copying->length)) {
        copying_now = NULL;
        copying->mask = context->uc_sigmask;
        errno = saved_errno;
        siglongjmp(copying->landing, 1);
    }
}
#else
int
ckv_guard_copy(void *target, const void *source, size_t length)
{
    (void)target;
    (void)source;
    (void)length;
    return -ENOSYS; /* thread-local memory is allocated at its first use */
}

static void
leave_copy(uint64_t address, const ucontext_t *context, int saved_errno)
{
    (void)address;
    (void)context;
    (void)saved_errno;
}
#endif

/* ---- in the handler: only what is async-signal-safe ------------------------------ */

/* Maps zeros over the page of `address` if it lies in a range of ours. */
static bool
replace_page(uint64_t address)
{
    const uint64_t page = address - address % page_bytes;
    const uint32_t used = ckv_load_acquire_u32(&ranges_used);
    for (uint32_t i = 0; i < used; i++) {
        const uint64_t start = ckv_load_ordered_u64(&ranges[i].address); /* U1, U2 */
        const uint64_t length = ckv_load_relaxed_u64(&ranges[i].length);
        if (start == 0 || address - start >= length) {
            continue;
        }
        const uint64_t note = ckv_load_relaxed_u64(&ranges[i].note);
        ckv_add_ordered_u64((ckv_atomic_u64 *)(uintptr_t)note, 1); /* U5 */
        /* Writable, for the shared region; private: nobody else sees a write. */
        void *mapped = NULL;
        return ckv_os.map((void *)(uintptr_t)page, page_bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0, &mapped) == 0;
    }
    return false;
}

/* Whether the interrupted code ran on the alternate signal stack: in a handler. */
static bool
came_from_handler(const ucontext_t *context)
{
#if defined(__linux__) && defined(__x86_64__)
    const uint64_t stack = (uint64_t)context->uc_mcontext.gregs[REG_RSP];
#elif defined(__linux__) && defined(__aarch64__)
    const uint64_t stack = (uint64_t)context->uc_mcontext.sp;
#else
    const uint64_t stack = 0; /* not known: then only was_replaced tells */
#endif
    const uint64_t bottom = (uint64_t)(uintptr_t)context->uc_stack.ss_sp;
    return stack != 0 && bottom != 0 && stack >= bottom &&
           stack - bottom <= context->uc_stack.ss_size;
}

static void
become_default(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = SIG_DFL;
    (void)sigemptyset(&action.sa_mask);     /* cannot fail */
    (void)sigaction(SIGBUS, &action, NULL); /* cannot fail for this signal */
}

/* A load that failed fails again when we return, which gives a true core dump; anything
 * else has to be sent again. */
static void
die_by_default(bool fault)
{
    become_default();
    if (!fault) {
        (void)raise(SIGBUS);
    }
}

/* The mask that the kernel would have set for the previous handler. */
static void
set_mask_of_previous(const ucontext_t *context)
{
    sigset_t mask = context->uc_sigmask;
    for (int number = 1; number < NSIG; number++) {
        if (sigismember(&previous.sa_mask, number) == 1) {
            (void)sigaddset(&mask, number); /* a valid number */
        }
    }
    if ((previous.sa_flags & SA_NODEFER) == 0) {
        (void)sigaddset(&mask, SIGBUS);
    }
    (void)pthread_sigmask(SIG_SETMASK, &mask, NULL); /* cannot fail: valid arguments */
}

static void
chain(int number, siginfo_t *info, void *context_pointer, bool fault)
{
    const bool with_info = (previous.sa_flags & SA_SIGINFO) != 0;
    const bool once =
        ((unsigned int)previous.sa_flags & (unsigned int)SA_RESETHAND) != 0;
    const bool spent = once ? ckv_exchange_ordered_u32(&previous_spent, 1) != 0
                            : ckv_load_ordered_u32(&previous_spent) != 0;
    if (spent || (!with_info && previous.sa_handler == SIG_DFL)) {
        die_by_default(fault);
    } else if (!with_info && previous.sa_handler == SIG_IGN) {
        if (fault) { /* the kernel does not let a fault be ignored */
            die_by_default(fault);
        }
    } else {
        set_mask_of_previous(context_pointer);
        if (with_info) {
            previous.sa_sigaction(number, info, context_pointer);
        } else {
            previous.sa_handler(number);
        }
    }
}

static void
on_sigbus(int number, siginfo_t *info, void *context_pointer)
{
    const int saved_errno = errno;
    const bool fault = info->si_code > 0; /* by the kernel, with an address */
    bool done = false;
    if (fault) {
        ckv_store_relaxed_u32(&handed_down, 0);
        leave_copy((uint64_t)(uintptr_t)info->si_addr, context_pointer, saved_errno);
        ckv_add_ordered_u32(&handlers_running, 1); /* U2: before any address is read */
        done = replace_page((uint64_t)(uintptr_t)info->si_addr);
        ckv_add_ordered_u32(&handlers_running, UINT32_MAX); /* one less */
    } else if (info->si_pid == getpid() && (ckv_load_relaxed_u32(&was_replaced) != 0 ||
                                               came_from_handler(context_pointer))) {
        done = ckv_exchange_ordered_u32(&handed_down, 1) == 0;
    }
    if (!done) {
        chain(number, info, context_pointer, fault);
    }
    errno = saved_errno;
}

/* ---- installing ------------------------------------------------------------------ */

static void
before_fork(void)
{
    (void)pthread_mutex_lock(&table_lock); /* cannot fail: never taken twice */
}

static void
after_fork_in_parent(void)
{
    (void)pthread_mutex_unlock(&table_lock);
}

static void
after_fork_in_child(void)
{
    ckv_store_ordered_u32(&handlers_running, 0); /* other threads did not come along */
    (void)pthread_mutex_unlock(&table_lock);
}

static bool
is_ours(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) != 0 && action->sa_sigaction == on_sigbus;
}

bool
ckv_guard_ready(void)
{
    struct sigaction current;
    sigset_t mask;
    return sigaction(SIGBUS, NULL, &current) == 0 && is_ours(&current) &&
           pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0 &&
           sigismember(&mask, SIGBUS) == 0;
}

static enum ckv_status
fail_install(struct ckv_error *error, int os_errno)
{
    return ckv_fail(error, CKV_E_OS, os_errno,
        "the SIGBUS handler cannot be installed: %s", strerror(os_errno));
}

static bool
is_default(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) == 0 && action->sa_handler == SIG_DFL;
}

/* Installs the handler, or looks whether it still is.  Whoever had the signal before us
 * and lets go of it takes us along: then we come back, with the default below.  Above a
 * later handler we stay away, since two that hand down to each other would never end.
 * Requires: table_lock. */
static enum ckv_status
install(struct ckv_error *error)
{
    struct sigaction current;
    if (sigaction(SIGBUS, NULL, &current) < 0) {
        return fail_install(error, errno);
    }
    if (installed && is_ours(&current)) {
        return CKV_OK;
    }
    if (installed && !is_default(&current)) {
        ckv_store_relaxed_u32(&was_replaced, 1);
        return CKV_OK;
    }
    if (installed) {
        ckv_store_ordered_u32(&previous_spent, 1);
    } else {
        const long page = sysconf(_SC_PAGESIZE);
        page_bytes = page > 0 ? (size_t)page : CKV_PAGE_BYTES;
        previous = current;
    }
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    (void)sigfillset(&action
            .sa_mask); /* U2: a handler that counts itself is not held up */
    installed = true;
    if (sigaction(SIGBUS, &action, NULL) < 0) {
        return fail_install(error, errno);
    }
    return CKV_OK;
}

/* ---- ranges ---------------------------------------------------------------------- */

/* Index of a free slot, RANGES_MAX without one.  Requires: table_lock. */
static uint32_t
find_free(void)
{
    uint32_t i = free_hint;
    while (i < RANGES_MAX && ckv_load_relaxed_u64(&ranges[i].address) != 0) {
        i++;
    }
    free_hint = i;
    return i;
}

static void
on_sigxfsz(int number)
{
    (void)number;
}

/* A write beyond the limit of a file's size is an error that we report (N4), and by
 * default also a signal that ends the process.  A handler that does nothing, unlike
 * "ignore", is not handed on to programs that this one becomes.  Whoever wants the signal
 * has a handler. */
static void
survive_file_size_limit(void)
{
    struct sigaction action;
    if (sigaction(SIGXFSZ, NULL, &action) == 0 && is_default(&action)) {
        memset(&action, 0, sizeof(action));
        action.sa_handler = on_sigxfsz;
        action.sa_flags = SA_RESTART;
        (void)sigemptyset(&action.sa_mask);      /* cannot fail */
        (void)sigaction(SIGXFSZ, &action, NULL); /* cannot fail for this signal */
    }
}

enum ckv_status
ckv_guard_prepare(struct ckv_error *error)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static bool registered;
    (void)pthread_mutex_lock(&once); /* cannot fail: a plain, static mutex */
    int result = 0;
    if (!registered) {
        result = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
        registered = result == 0;
    }
    survive_file_size_limit();
    (void)pthread_mutex_unlock(&once);
    return result == 0 ? CKV_OK : fail_install(error, result);
}

enum ckv_status
ckv_guard_add(const void *address, uint64_t length, ckv_atomic_u64 *note,
    struct ckv_error *error)
{
    CKV_CHECK(address != NULL && length != 0 && note != NULL);
    (void)pthread_mutex_lock(&table_lock); /* cannot fail: never taken twice */
    enum ckv_status status = install(error);
    const uint32_t i = find_free();
    if (status == CKV_OK && i == RANGES_MAX) {
        status = ckv_fail(error, CKV_E_NO_MEMORY, 0,
            "this process has %d mappings of volumes, the most that can be guarded; "
            "close "
            "some, or open without sigbus_guard",
            RANGES_MAX);
    }
    if (status == CKV_OK) {
        struct range *range = &ranges[i];
        ckv_store_relaxed_u64(&range->length, length);
        ckv_store_relaxed_u64(&range->note, (uint64_t)(uintptr_t)note);
        ckv_store_ordered_u64(&range->address, (uint64_t)(uintptr_t)address); /* U1 */
        if (i >= ckv_load_relaxed_u32(&ranges_used)) {
            ckv_store_release_u32(&ranges_used, i + 1);
        }
        free_hint = i + 1;
    }
    (void)pthread_mutex_unlock(&table_lock);
    return status;
}

/* Requires: table_lock. */
static void
lower_used(void)
{
    uint32_t used = ckv_load_relaxed_u32(&ranges_used);
    while (used > 0 && ckv_load_relaxed_u64(&ranges[used - 1].address) == 0) {
        used--;
    }
    ckv_store_release_u32(&ranges_used, used);
}

void
ckv_guard_remove(const void *address)
{
    const uint64_t wanted = (uint64_t)(uintptr_t)address;
    (void)pthread_mutex_lock(&table_lock); /* cannot fail: never taken twice */
    uint32_t i = ckv_load_relaxed_u32(&ranges_used);
    while (i > 0 && ckv_load_relaxed_u64(&ranges[i - 1].address) != wanted) {
        i--;
    }
    if (wanted != 0 && i > 0) {
        ckv_store_ordered_u64(&ranges[i - 1].address, 0);
        /* U2.  A handler makes one system call and is not interrupted. */
        while (ckv_load_ordered_u32(&handlers_running) != 0) {
            (void)sched_yield(); /* cannot fail */
        }
        free_hint = (uint32_t)ckv_min_u64(free_hint, i - 1);
        lower_used();
    }
    (void)pthread_mutex_unlock(&table_lock);
}
