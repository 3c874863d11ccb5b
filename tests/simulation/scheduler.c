/* SPDX-License-Identifier: Apache-2.0 */
/* scheduler.c: coroutines, virtual time, and who goes on.
 *
 *   C1  Exactly one task runs; it gives up its turn in yield_...(), wait_for() and
 *       task_end() alone.  A task of a killed process is never chosen again.
 *   C2  All choices come from one stream of random numbers, in the order of the steps.
 *   C3  What a task waits is charged to its operation; that others ran, or that its own
 *       process was stopped, is not.  No operation may be charged more than its limit.
 *
 * Strategies, one for each seed:
 *   uniform   a switch with a probability of 1 in q at each step, q from 1 to 256
 *   points    the same, at named points alone
 *   priority  the runnable task of the highest priority; at some random steps, and where
 *             it spins, its priority falls below all others (PCT)
 *   starve    uniform, but one task at a time is left out for up to 20 000 steps
 */
#include "simulation.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum {
    STACK_BYTES = 512 << 10,
    STEPS_MAX = 30 * 1000 * 1000,
    OPERATION_STEPS_MAX = 8 * 1000 * 1000
};

#define WAIT_MAX_NS (UINT64_C(2100) * NS_PER_MS)  /* N5, and a slice of sleep */
#define OPEN_MAX_NS (UINT64_C(10500) * NS_PER_MS) /* open: its timeout */
/* verify waits for what others have begun, at most for 16 of their blocks. */
#define VERIFY_MAX_NS (60 * NS_PER_SECOND)

enum strategy { UNIFORM, POINTS, PRIORITY, STARVE, STRATEGIES };

struct task *current;
struct process processes[ENGINES + 1];
uint64_t now_ns;
uint64_t steps, switches, kills, stops;
uint64_t stamp;
bool quiet;
bool tracing;

struct task tasks[TASKS_MAX];
uint32_t task_count;
static uint32_t process_count;
static uint64_t random_state;
static uint64_t hash = UINT64_C(0xcbf29ce484222325);
static enum strategy strategy;
static uint64_t quantum; /* q of uniform and the like */
static uint64_t budget;  /* steps to the next decision */
static uint64_t step_ns;
static uint64_t lowest; /* priority given away last */
static struct task *starved;
static uint64_t starved_until;
static uint64_t jumped_ns; /* time that went by while tasks could have run */
static jmp_buf unused;
static ucontext_t outside;
static struct task *harness_task;

/* ---- random numbers --------------------------------------------------------------- */

static uint64_t
draw_word(void)
{
    uint64_t word = random_state += UINT64_C(0x9e3779b97f4a7c15);
    word = (word ^ word >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    word = (word ^ word >> 27) * UINT64_C(0x94d049bb133111eb);
    return word ^ word >> 31;
}

uint64_t
draw(uint64_t limit)
{
    return draw_word() % limit;
}

uint64_t
draw_scale(uint64_t limit)
{
    uint64_t bits = 1;
    while (bits < 63 && limit >> bits != 0) {
        bits++;
    }
    const uint64_t value = 1 + draw(UINT64_C(1) << draw(bits + 1));
    return value > limit ? limit : value;
}

bool
chance(uint32_t in, uint32_t of)
{
    return draw(of) < in;
}

void
mix(uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x100000001b3);
    hash ^= hash >> 29;
}

uint64_t
trace_hash(void)
{
    return hash;
}

/* ---- choosing --------------------------------------------------------------------- */

static bool
can_run(const struct task *task)
{
    return task->state == TASK_RUNNABLE && task->process->alive &&
           (task->process->stopped_until_ns <= now_ns || task->system_calls > 0);
}

static void
wake_sleepers(void)
{
    for (uint32_t i = 0; i < task_count; i++) {
        struct task *task = &tasks[i];
        if (task->state == TASK_WAITING && task->deadline_ns <= now_ns) {
            task->state = TASK_RUNNABLE;
            task->timed_out = true;
        }
    }
}

/* The next moment at which somebody can run who cannot now. */
static uint64_t
next_moment(void)
{
    uint64_t next = NEVER;
    for (uint32_t i = 0; i < task_count; i++) {
        const struct task *task = &tasks[i];
        if (!task->process->alive || task->state == TASK_DONE) {
            continue;
        }
        uint64_t at = task->state == TASK_WAITING ? task->deadline_ns : now_ns;
        if (task->process->stopped_until_ns > at && task->system_calls == 0) {
            at = task->process->stopped_until_ns;
        }
        next = at > now_ns && at < next ? at : next;
    }
    return next;
}

static void
new_budget(void)
{
    switch (strategy) {
    case PRIORITY:
        budget = draw_scale(UINT64_C(1) << 14);
        break;
    case POINTS:
        budget = UINT64_C(1) << 40;
        break;
    default:
        budget = 1 + draw(2 * quantum);
        break;
    }
}

static struct task *
choose(void)
{
    struct task *runnable[TASKS_MAX];
    uint32_t count = 0;
    if (starved != NULL && steps >= starved_until) {
        starved = NULL;
    }
    if (strategy == STARVE && starved == NULL && chance(1, 16)) {
        starved = &tasks[draw(task_count)];
        starved_until = steps + draw_scale(20000);
    }
    for (;;) {
        wake_sleepers();
        for (uint32_t i = 0; i < task_count; i++) {
            if (can_run(&tasks[i])) {
                runnable[count++] = &tasks[i];
            }
        }
        if (count > 0) {
            break;
        }
        const uint64_t next = next_moment();
        if (next == NEVER) {
            finding("deadlock: nobody can ever run again");
        }
        now_ns = next;
    }
    if (strategy == PRIORITY) {
        struct task *best = runnable[0];
        for (uint32_t i = 1; i < count; i++) {
            best = runnable[i]->priority > best->priority ? runnable[i] : best;
        }
        return best;
    }
    struct task *chosen = runnable[draw(count)];
    if (chosen == starved && count > 1) {
        chosen = runnable[draw(count)];
    }
    for (uint32_t i = 0; chosen == starved && count > 1 && i < count; i++) {
        chosen = runnable[i];
    }
    return chosen;
}

static void
switch_to(struct task *next)
{
    struct task *before = current;
    if (next == before) {
        return;
    }
    switches++;
    trace("switch to t%u of p%u", next->number, next->process->number);
    mix(next->number ^ steps << 8);
    current = next;
    (void)swapcontext(before->context, next->context);
}

/* Gives the turn to somebody, who may be the current task itself. */
static void
reschedule(void)
{
    new_budget();
    if (chance(1, 4000)) { /* nobody ran for a while: the machine was busy */
        const uint64_t jump = draw_scale(3 * NS_PER_SECOND);
        now_ns += jump;
        jumped_ns += jump;
    }
    switch_to(choose());
}

/* ---- fate ------------------------------------------------------------------------- */

static void
stop_now(struct process *process, uint64_t duration_ns)
{
    stops++;
    trace("process %u is stopped for %llu ms", process->number,
        (unsigned long long)(duration_ns / NS_PER_MS));
    const uint64_t until = now_ns + duration_ns;
    process->stopped_total_ns += duration_ns;
    process->stopped_until_ns = until;
}

static void
kill_or_wait(struct process *process)
{
    for (uint32_t i = 0; i < task_count; i++) {
        if (tasks[i].process == process && tasks[i].in_page) {
            process->kill_pending = true;
            return;
        }
    }
    process_kill(process);
}

static void
meet_fate(bool at_point)
{
    struct process *process = current->process;
    if (quiet || process->number == 0) {
        return;
    }
    if (process->kill_pending && !current->in_page) {
        kill_or_wait(process);
    }
    if (process->kill_in_steps != 0 && --process->kill_in_steps == 0) {
        kill_or_wait(process);
    }
    if (at_point && process->kill_in_points != 0 && --process->kill_in_points == 0) {
        kill_or_wait(process);
    }
    if (at_point && process->stop_in_points != 0 && --process->stop_in_points == 0) {
        stop_now(process, process->stop_ns);
        if (current->system_calls == 0) {
            reschedule();
        }
    }
}

void
process_kill(struct process *process)
{
    if (!process->alive) {
        return;
    }
    kills++;
    stamp++;
    trace("process %u is killed", process->number);
    mix(UINT64_C(0xdead) << 32 | process->number);
    process->alive = false;
    process->kill_pending = false;
    oracle_died(process);
    system_take_away(process);
    threads_forget(process);
    if (current->process == process) {
        reschedule(); /* and never again */
        abort();
    }
}

/* ---- steps ------------------------------------------------------------------------ */

static void
step(void)
{
    steps++;
    now_ns += step_ns;
    if (steps > STEPS_MAX) {
        finding("no end after %llu steps", (unsigned long long)steps);
    }
    if (current->operation != NULL &&
        ++current->operation_steps > OPERATION_STEPS_MAX) {
        finding("%s goes on for ever", current->operation);
    }
}

void
yield_at_access(void)
{
    if (current == NULL) {
        return;
    }
    step();
    if (current->process->kill_in_steps != 0 || current->process->kill_pending) {
        meet_fate(false);
    }
    if (--budget == 0) {
        if (strategy == PRIORITY) {
            current->priority = --lowest;
        }
        reschedule();
    }
}

void
yield_at_point(const char *name)
{
    if (current == NULL) {
        return;
    }
    step();
    if (tracing) {
        trace("at %s", name);
    }
    oracle_at_point(name);
    meet_fate(true);
    const bool change = strategy == PRIORITY ? chance(1, 64) : chance(1, 4);
    if (change) {
        if (strategy == PRIORITY) {
            current->priority = --lowest;
        }
        reschedule();
    }
}

void
yield_at_relax(void)
{
    if (current == NULL) {
        return;
    }
    step();
    current->priority = --lowest;
    reschedule();
}

/* ---- waiting ---------------------------------------------------------------------- */

static uint64_t
waiting_limit(const struct task *task)
{
    if (strcmp(task->operation, "verify") == 0) {
        return VERIFY_MAX_NS;
    }
    return strncmp(task->operation, "open", 4) == 0 ? OPEN_MAX_NS : WAIT_MAX_NS;
}

static void
charge(uint64_t began_ns, uint64_t jumped_before, uint64_t stopped_before)
{
    const uint64_t passed = now_ns - began_ns;
    const uint64_t excused =
        jumped_ns - jumped_before + current->process->stopped_total_ns - stopped_before;
    if (current->operation == NULL || passed <= excused) {
        return;
    }
    current->waited_ns += passed - excused;
    if (current->waited_ns > waiting_limit(current)) {
        finding("N5: %s has waited %llu ms", current->operation,
            (unsigned long long)(current->waited_ns / NS_PER_MS));
    }
}

/* Waits that never end show up here, not at their end. */
static void
look_at_others(void)
{
    for (uint32_t i = 0; i < task_count; i++) {
        const struct task *task = &tasks[i];
        if (task->state == TASK_WAITING && task->operation != NULL &&
            task->process->alive && task->deadline_ns == NEVER &&
            task->operation_steps > OPERATION_STEPS_MAX) {
            finding("%s waits for ever", task->operation);
        }
    }
}

bool
wait_for(const void *object, uint64_t deadline_ns, bool charged)
{
    const uint64_t began_ns = now_ns;
    const uint64_t jumped_before = jumped_ns;
    const uint64_t stopped_before = current->process->stopped_total_ns;
    step();
    meet_fate(false);
    current->state = TASK_WAITING;
    current->object = object;
    current->deadline_ns = deadline_ns;
    current->timed_out = false;
    reschedule();
    current->object = NULL;
    if (charged && object != NULL) {
        charge(began_ns, jumped_before, stopped_before);
    } else if (charged && current->operation != NULL) {
        current->waited_ns += deadline_ns - began_ns; /* asked for */
        charge(now_ns, jumped_ns, current->process->stopped_total_ns);
        if (current->waited_ns > waiting_limit(current)) {
            finding("N5: %s has slept %llu ms", current->operation,
                (unsigned long long)(current->waited_ns / NS_PER_MS));
        }
    }
    look_at_others();
    return !current->timed_out;
}

void
wake(const void *object, bool all)
{
    struct task *waiting[TASKS_MAX];
    uint32_t count = 0;
    for (uint32_t i = 0; i < task_count; i++) {
        struct task *task = &tasks[i];
        if (task->state == TASK_WAITING && task->object == object &&
            task->process->alive) {
            waiting[count++] = task;
        }
    }
    if (count == 0) {
        return;
    }
    const uint64_t one = all ? 0 : draw(count);
    for (uint32_t i = 0; i < count; i++) {
        if (all || i == one) {
            waiting[i]->state = TASK_RUNNABLE;
            waiting[i]->deadline_ns = NEVER;
        }
    }
}

void
sleep_for(uint64_t duration_ns)
{
    (void)wait_for(NULL, now_ns + duration_ns, true);
}

/* ---- tasks ------------------------------------------------------------------------ */

static void
enter(void)
{
    current->run(current->argument);
    task_end(NULL);
}

struct task *
task_start(struct process *process, void (*run)(void *argument), void *argument)
{
    if (task_count == TASKS_MAX) {
        finding("too many tasks for the simulation");
    }
    struct task *task = &tasks[task_count];
    ucontext_t *context = calloc(1, sizeof *context);
    void *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (context == NULL || stack == MAP_FAILED || getcontext(context) != 0) {
        finding("no memory for a task");
    }
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = STACK_BYTES;
    makecontext(context, enter, 0);
    *task = (struct task){.number = task_count,
        .process = process,
        .run = run,
        .argument = argument,
        .context = context,
        .deadline_ns = NEVER,
        .priority = UINT64_C(1) << 62 | draw(UINT64_C(1) << 32)};
    task_count++;
    return task;
}

void
task_end(void *result)
{
    current->result = result;
    current->state = TASK_DONE;
    wake(current, true);
    if (current == harness_task) {
        (void)swapcontext(current->context, &outside);
    }
    reschedule();
    abort();
}

struct process *
process_start(const struct engine *engine)
{
    if (process_count > ENGINES) {
        finding("too many processes for the simulation");
    }
    struct process *process = &processes[process_count];
    *process = (struct process){.number = process_count,
        .alive = true,
        .process_id = 1000 + process_count,
        .engine = engine};
    process_count++;
    return process;
}

void
scheduler_begin(uint64_t seed)
{
    (void)unused;
    random_state = seed * UINT64_C(0xd1342543de82ef95) + 1;
    (void)draw_word();
    strategy = (enum strategy)draw(STRATEGIES);
    quantum = UINT64_C(1) << draw(9);
    step_ns = UINT64_C(1) << draw(12);
    lowest = UINT64_C(1) << 60;
    now_ns = 1000 * NS_PER_SECOND;
    new_budget();
    trace("strategy %d, quantum %llu, %llu ns a step", (int)strategy,
        (unsigned long long)quantum, (unsigned long long)step_ns);
}

void
scheduler_run(void (*harness)(void *argument))
{
    harness_task = task_start(process_start(NULL), harness, NULL);
    current = harness_task;
    (void)swapcontext(&outside, harness_task->context);
    current = NULL;
}

void
trace(const char *format, ...)
{
    if (!tracing) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    printf("%9llu %12.6f p%u t%u ", (unsigned long long)steps,
        (double)(now_ns - 1000 * NS_PER_SECOND) / 1e9,
        current != NULL ? current->process->number : 0,
        current != NULL ? current->number : 0);
    (void)vprintf(format, arguments);
    putchar('\n');
    va_end(arguments);
}
