/* SPDX-License-Identifier: Apache-2.0 */
/* simulation.h: several processes of the engine in one, every step chosen by a seed.
 *
 *   scheduler.c  coroutines, virtual time, who goes on, who is killed or stopped
 *   threads.c    what the engine takes for pthread: mutexes, conditions, threads
 *   system.c     what the engine takes for the kernel: the table ckv_os
 *   oracle.c     what was stored, what may be read, what may be overwritten
 *   workload.c   what the processes do
 *   main.c       seeds, one forked child for each
 *
 * Each simulated process has a copy of the engine's shared object of its own, and with it
 * globals of its own; its mappings, descriptors and locks are real ones of the kernel,
 * noted by owner, and taken away when it is killed.  One coroutine runs at any time.  It
 * may lose its turn before every access to an atomic word (CKV_YIELD), at every named
 * point, in every system call (before each page of a write or read), and wherever it
 * waits.  Time is a number that grows a little with each step and jumps when all wait.
 *
 * The same seed and the same program make the same choices, whatever the machine does:
 * no address, descriptor or time of the machine has any influence.
 */
#ifndef SIMULATION_H
#define SIMULATION_H

#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "cache.h"
#include "reader.h"
#include "sha256.h"
#include "slot.h"
#include "volume.h"

#define NS_PER_MS     UINT64_C(1000000)
#define NS_PER_SECOND UINT64_C(1000000000)
#define NEVER         UINT64_MAX

enum {
    ENGINES = 24, /* processes that one seed may start */
    TASKS_MAX = 256,
    LOCALS_MAX = 8, /* thread-specific keys of one engine */
    SPACES_MAX = 2, /* namespaces, a handle for each */
    KEYS_MAX = 16,  /* over all namespaces */
    PATHS_MAX = 2
};

/* ---- engines --------------------------------------------------------------------- */

#define ENGINE_CALLS(X)                                                                \
    X(options_init)                                                                    \
    X(open)                                                                            \
    X(close)                                                                           \
    X(put)                                                                             \
    X(put_many)                                                                        \
    X(reserve)                                                                         \
    X(reservation_data)                                                                \
    X(commit)                                                                          \
    X(abort)                                                                           \
    X(get)                                                                             \
    X(lease_data)                                                                      \
    X(lease_header)                                                                    \
    X(lease_ok)                                                                        \
    X(lease_release)                                                                   \
    X(get_into)                                                                        \
    X(get_many_into)                                                                   \
    X(contains_many)                                                                   \
    X(longest_prefix)                                                                  \
    X(touch)                                                                           \
    X(prefetch)                                                                        \
    X(remove)                                                                          \
    X(clear)                                                                           \
    X(count)                                                                           \
    X(sync)                                                                            \
    X(verify)                                                                          \
    X(events)                                                                          \
    X(get_stats)                                                                       \
    X(slot_sweep)                                                                      \
    X(slot_alive)                                                                      \
    X(sha256)

struct engine { /* one copy of the shared object */
    void *library;
    struct ckv_os *os;
#define X(name) __typeof__(&ckv_##name) name;
    ENGINE_CALLS(X)
#undef X
};

/* ---- processes and tasks ---------------------------------------------------------- */

struct task;

struct process {
    uint32_t number; /* 0: the harness itself, which is never killed */
    bool alive;
    int64_t process_id;
    const struct engine *engine;
    struct ckv_cache *caches[SPACES_MAX];
    bool reader;
    uint32_t locals_used;
    uint32_t workers; /* that still work */
    uint64_t stopped_until_ns;
    uint64_t stopped_total_ns;
    /* what fate has for it: counted down, 0 for never */
    uint64_t kill_in_steps, kill_in_points, stop_in_points, stop_ns;
    bool kill_pending; /* until the page that is being written is whole */
    uint64_t events_seen;
    uint32_t slot, incarnation; /* of the volume, once it is dead */
    uint64_t nonce;             /* of the region that it had */
    uint64_t died;              /* stamp */
};

enum task_state { TASK_RUNNABLE, TASK_WAITING, TASK_DONE };

struct task {
    uint32_t number;
    struct process *process;
    enum task_state state;
    const void *object;    /* waited for, or NULL */
    uint64_t deadline_ns;  /* of the wait */
    bool timed_out;        /* how the last wait ended */
    uint64_t priority;     /* of PCT */
    uint32_t system_calls; /* > 0 inside one: a stop has to wait */
    bool in_page;          /* inside a page of a write: a kill has to wait */
    void *locals[LOCALS_MAX];
    /* of the operation under way */
    const char *operation;
    uint64_t began; /* stamp */
    uint64_t waited_ns, operation_steps;
    bool chooses;  /* pages, under the lock of a stripe */
    bool crowds;   /* a block out of the index */
    bool condemns; /* a block that nothing will replace */
    void (*run)(void *argument);
    void *argument;
    void *result;
    void *context;
};

extern struct task *current;
extern struct process processes[ENGINES + 1];
extern struct task tasks[TASKS_MAX];
extern uint32_t task_count;
extern uint64_t now_ns;
extern uint64_t steps, switches, kills, stops;
extern uint64_t stamp; /* order of events that the oracle compares; only grows */
extern bool quiet;     /* no kills and no stops any more */

/* Random numbers of this seed. */
uint64_t draw(uint64_t limit);         /* below `limit` */
uint64_t draw_scale(uint64_t limit);   /* 1 to `limit`, small ones as likely as large */
bool chance(uint32_t in, uint32_t of); /* in / of */
void mix(uint64_t value);              /* into the hash of the trace */
uint64_t trace_hash(void);

void scheduler_begin(uint64_t seed);
/* Runs until the harness task ends. */
void scheduler_run(void (*harness)(void *argument));
struct process *process_start(const struct engine *engine);
void process_kill(struct process *process);
struct task *task_start(struct process *process, void (*run)(void *argument),
    void *argument);
_Noreturn void task_end(void *result);

void yield_at_access(void);
void yield_at_point(const char *name);
void yield_at_relax(void);
/* Waits until wake() names the object, or until the deadline; true when woken. */
bool wait_for(const void *object, uint64_t deadline_ns, bool charged);
void wake(const void *object, bool all);
void sleep_for(uint64_t duration_ns);

/* Ends this seed as a finding. */
_Noreturn void finding(const char *format, ...) __attribute__((format(printf, 1, 2)));
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
extern bool tracing;

/* ---- threads ---------------------------------------------------------------------- */

void threads_forget(struct process *process);

/* ---- system ----------------------------------------------------------------------- */

void system_begin(void);
void system_equip(const struct engine *engine);
/* What the kernel does when a process ends: mappings and descriptors, and their locks. */
void system_take_away(struct process *process);

/* ---- oracle ----------------------------------------------------------------------- */

struct held { /* a view that a process holds */
    struct process *process;
    struct ckv_lease *lease;
    uint32_t version;
    const uint8_t *data;
    size_t length;
    uint32_t path;
    uint64_t first_page, pages;
    bool busy; /* a thread is in a call with it */
};

struct look { /* what a lookup of a key must find if it is still there afterwards */
    uint32_t key;
    uint64_t start;
    uint64_t gone;     /* versions that ended before it must not be seen */
    bool steady;       /* nobody was about to remove a block for good */
    uint64_t removals; /* for good, before it */
    uint32_t count;
    uint32_t entries[8];
    uint64_t states[8];
};

extern uint32_t key_count, space_count;

void oracle_begin(void);
struct ckv_key oracle_key(uint32_t key); /* key < key_count; its namespace: key_space */
uint32_t key_space(uint32_t key);

/* A put begins; the payload of the version is for oracle_fill(). */
uint32_t version_begin(uint32_t key, uint32_t length, uint32_t header_length);
void version_fill(uint32_t version, uint8_t *data);
uint32_t version_header(uint32_t version, uint8_t *data);
void version_end(uint32_t version, enum ckv_status status);

/* remove and clear: `start` is the stamp at their begin. */
void key_gone(uint32_t key, uint64_t start);
void space_gone(uint32_t space, uint64_t start);

void look_begin(struct look *look, struct ckv_volume *volume, uint32_t key);
void look_hit(const struct look *look, const uint8_t *data, size_t length,
    uint32_t *version);
void look_header(uint32_t version, const uint8_t *header, size_t length);
void look_miss(const struct look *look, struct ckv_volume *volume, const char *what);
/* A positive answer without bytes. */
void look_present(const struct look *look, const char *what);

struct held *held_add(struct process *process, struct ckv_lease *lease,
    uint32_t version, const uint8_t *data, size_t length);
struct held *held_any(struct process *process); /* at random, or NULL */
void held_check(const struct held *held);
void held_drop(struct held *held);

/* Pages that the current process is about to overwrite. */
void oracle_writes(uint32_t path, uint64_t offset, uint64_t length);
void oracle_died(struct process *process);
/* At a named point of the current task. */
void oracle_at_point(const char *name);
/* A put was told to come back later, which a dead process is no reason for. */
void oracle_busy(struct ckv_volume *volume);

/* What lies in the volume now, to be found again after the death of everybody. */
void truth_take(struct ckv_volume *volume);
void truth_check(struct process *process, bool strict);
/* Recounts everything while nobody works. */
void oracle_accounts(struct ckv_volume *volume, bool deaths);

/* ---- workload --------------------------------------------------------------------- */

struct plan { /* of one seed */
    uint64_t seed;
    uint32_t processes; /* 0: as the seed has it */
    const char *folder;
    struct engine *engines;
};
extern const struct plan *plan;
extern uint64_t operations;
extern uint64_t hits, misses, stored;
void workload_run(const struct plan *chosen);
const char *path_name(uint32_t path);
uint32_t path_count(void);

#endif /* SIMULATION_H */
