/* SPDX-License-Identifier: Apache-2.0 */
/* threads.c: pthread for the engine: tasks of the scheduler in place of threads.
 *
 * The engine is compiled with a macro for each of these names.  A mutex, a
 * condition and the like keep their few words in the memory of the pthread object, whose
 * static initialisers are zeros.
 */
#include "simulation.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

struct lock { /* in a pthread_mutex_t or a pthread_rwlock_t */
    uint32_t readers;
    uint32_t held;
};

_Static_assert(sizeof(struct lock) <= sizeof(pthread_mutex_t), "mutex");
_Static_assert(sizeof(struct lock) <= sizeof(pthread_rwlock_t), "rwlock");
_Static_assert(sizeof(pthread_t) == sizeof(void *), "thread");

static void
take(struct lock *lock, bool reads)
{
    yield_at_access();
    while (lock->held != 0 || (!reads && lock->readers != 0)) {
        (void)wait_for(lock, NEVER, true);
    }
    if (reads) {
        lock->readers++;
    } else {
        lock->held = 1 + current->number;
    }
}

static int
give(struct lock *lock)
{
    if (lock->held != 0) {
        if (lock->held != 1 + current->number) {
            finding("a mutex is unlocked by a thread that has not locked it");
        }
        lock->held = 0;
    } else if (lock->readers > 0) {
        lock->readers--;
    } else {
        finding("a free mutex is unlocked");
    }
    wake(lock, true);
    yield_at_access();
    return 0;
}

int simulated_pthread_mutex_init(pthread_mutex_t *mutex, const void *attributes);
int simulated_pthread_mutex_destroy(pthread_mutex_t *mutex);
int simulated_pthread_mutex_lock(pthread_mutex_t *mutex);
int simulated_pthread_mutex_unlock(pthread_mutex_t *mutex);
int simulated_pthread_rwlock_init(pthread_rwlock_t *lock, const void *attributes);
int simulated_pthread_rwlock_destroy(pthread_rwlock_t *lock);
int simulated_pthread_rwlock_rdlock(pthread_rwlock_t *lock);
int simulated_pthread_rwlock_wrlock(pthread_rwlock_t *lock);
int simulated_pthread_rwlock_unlock(pthread_rwlock_t *lock);
int simulated_pthread_cond_init(pthread_cond_t *condition, const void *attributes);
int simulated_pthread_cond_destroy(pthread_cond_t *condition);
int simulated_pthread_cond_signal(pthread_cond_t *condition);
int simulated_pthread_cond_broadcast(pthread_cond_t *condition);
int simulated_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex);
int simulated_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
    const struct timespec *deadline);
int simulated_pthread_once(pthread_once_t *once, void (*run)(void));
int simulated_pthread_key_create(pthread_key_t *key, void (*end)(void *value));
void *simulated_pthread_getspecific(pthread_key_t key);
int simulated_pthread_setspecific(pthread_key_t key, const void *value);
int simulated_pthread_create(pthread_t *thread, const void *attributes,
    void *(*run)(void *argument), void *argument);
int simulated_pthread_join(pthread_t thread, void **result);
int simulated_pthread_atfork(void (*before)(void), void (*parent)(void),
    void (*child)(void));

int
simulated_pthread_mutex_init(pthread_mutex_t *mutex, const void *attributes)
{
    (void)attributes;
    memset(mutex, 0, sizeof *mutex);
    return 0;
}

int
simulated_pthread_mutex_destroy(pthread_mutex_t *mutex)
{
    if (((struct lock *)mutex)->held != 0) {
        finding("a mutex is destroyed while it is held");
    }
    return 0;
}

int
simulated_pthread_mutex_lock(pthread_mutex_t *mutex)
{
    take((struct lock *)mutex, false);
    return 0;
}

int
simulated_pthread_mutex_unlock(pthread_mutex_t *mutex)
{
    return give((struct lock *)mutex);
}

int
simulated_pthread_rwlock_init(pthread_rwlock_t *lock, const void *attributes)
{
    (void)attributes;
    memset(lock, 0, sizeof *lock);
    return 0;
}

int
simulated_pthread_rwlock_destroy(pthread_rwlock_t *lock)
{
    const struct lock *mine = (struct lock *)lock;
    if (mine->held != 0 || mine->readers != 0) {
        finding("a lock is destroyed while it is held");
    }
    return 0;
}

int
simulated_pthread_rwlock_rdlock(pthread_rwlock_t *lock)
{
    take((struct lock *)lock, true);
    return 0;
}

int
simulated_pthread_rwlock_wrlock(pthread_rwlock_t *lock)
{
    take((struct lock *)lock, false);
    return 0;
}

int
simulated_pthread_rwlock_unlock(pthread_rwlock_t *lock)
{
    return give((struct lock *)lock);
}

int
simulated_pthread_cond_init(pthread_cond_t *condition, const void *attributes)
{
    (void)attributes;
    memset(condition, 0, sizeof *condition);
    return 0;
}

int
simulated_pthread_cond_destroy(pthread_cond_t *condition)
{
    (void)condition;
    return 0;
}

int
simulated_pthread_cond_signal(pthread_cond_t *condition)
{
    wake(condition, false);
    return 0;
}

int
simulated_pthread_cond_broadcast(pthread_cond_t *condition)
{
    wake(condition, true);
    return 0;
}

/* Nothing happens between the unlocking and the waiting. */
static int
wait_until(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t deadline_ns)
{
    struct lock *lock = (struct lock *)mutex;
    if (chance(1, 50)) {
        deadline_ns = now_ns; /* a wake-up that nobody sent */
    }
    lock->held = 0;
    wake(lock, true);
    const bool woken = wait_for(condition, deadline_ns, true);
    take(lock, false);
    return woken ? 0 : ETIMEDOUT;
}

int
simulated_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)
{
    (void)wait_until(condition, mutex, NEVER);
    return 0;
}

int
simulated_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
    const struct timespec *deadline)
{
    const uint64_t deadline_ns =
        (uint64_t)deadline->tv_sec * NS_PER_SECOND + (uint64_t)deadline->tv_nsec;
    const int result = wait_until(condition, mutex, deadline_ns);
    return now_ns < deadline_ns ? 0 : result;
}

int
simulated_pthread_once(pthread_once_t *once, void (*run)(void))
{
    enum { FRESH, RUNNING, DONE };
    if (*once == FRESH) {
        *once = RUNNING;
        run();
        *once = DONE;
        wake(once, true);
    }
    while (*once == RUNNING) {
        (void)wait_for(once, NEVER, true);
    }
    return 0;
}

/* The slots are those of the process; values of ended tasks are not freed. */
int
simulated_pthread_key_create(pthread_key_t *key, void (*end)(void *value))
{
    (void)end;
    if (current->process->locals_used == LOCALS_MAX) {
        return EAGAIN;
    }
    *key = current->process->locals_used++;
    return 0;
}

void *
simulated_pthread_getspecific(pthread_key_t key)
{
    return current->locals[key];
}

int
simulated_pthread_setspecific(pthread_key_t key, const void *value)
{
    union {
        const void *in;
        void *out;
    } pointer = {.in = value};
    current->locals[key] = pointer.out;
    return 0;
}

struct start {
    void *(*run)(void *argument);
    void *argument;
};

static struct start started[TASKS_MAX];
static uint32_t started_count;

static void
run_thread(void *argument)
{
    const struct start *start = argument;
    task_end(start->run(start->argument));
}

int
simulated_pthread_create(pthread_t *thread, const void *attributes,
    void *(*run)(void *argument), void *argument)
{
    (void)attributes;
    struct start *start = &started[started_count++];
    *start = (struct start){.run = run, .argument = argument};
    struct task *task = task_start(current->process, run_thread, start);
    memcpy(thread, &task, sizeof task);
    yield_at_access();
    return 0;
}

int
simulated_pthread_join(pthread_t thread, void **result)
{
    struct task *task;
    memcpy(&task, &thread, sizeof task);
    yield_at_access();
    while (task->state != TASK_DONE) {
        (void)wait_for(task, NEVER, true);
    }
    if (result != NULL) {
        *result = task->result;
    }
    return 0;
}

/* Nothing forks here. */
int
simulated_pthread_atfork(void (*before)(void), void (*parent)(void),
    void (*child)(void))
{
    (void)before;
    (void)parent;
    (void)child;
    return 0;
}

void
threads_forget(struct process *process)
{
    (void)process; /* its mutexes are its own memory, which nobody looks at again */
}
