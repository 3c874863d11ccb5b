/* SPDX-License-Identifier: Apache-2.0 */
/* inject.h: fails the n-th call of one kind, and keeps books of what the engine holds.
 *
 * Two doors are watched: the table of system calls (os.h), whose members are replaced,
 * and the allocations of the core, which the linker leads here (--wrap).  Both count
 * whether or not a fault is armed, so what is left behind shows as a difference.
 *
 *   J1  One fault is armed at a time: the n-th call of its kind since then, alone or
 *       with all that follow.
 *   J2  A descriptor is closed and a range unmapped even when that reports an error: so
 *       does Linux, and the books stay right.
 *   J3  Sleeping takes no time: the clock of the engine is that of the machine plus
 *       what was slept.  A timeout of ten seconds costs microseconds.
 */
#ifndef CKV_TESTS_INJECT_H
#define CKV_TESTS_INJECT_H

#include "atomics.h"
#include "os.h"

/* X(name): the members of ckv_os that can fail, then the functions of the C library. */
#define TABLE_CALLS(X)                                                                 \
    X(open_file)                                                                       \
    X(close_file)                                                                      \
    X(stat_file)                                                                       \
    X(stat_path)                                                                       \
    X(lstat_path)                                                                      \
    X(file_system)                                                                     \
    X(set_no_cow)                                                                      \
    X(truncate_file)                                                                   \
    X(allocate)                                                                        \
    X(unlink_path)                                                                     \
    X(rename_path)                                                                     \
    X(change_mode)                                                                     \
    X(change_owner)                                                                    \
    X(read_at)                                                                         \
    X(write_at)                                                                        \
    X(sync_file)                                                                       \
    X(sync_range)                                                                      \
    X(start_write_back)                                                                \
    X(pending_error)                                                                   \
    X(advise_file)                                                                     \
    X(cached)                                                                          \
    X(lock_byte)                                                                       \
    X(unlock_byte)                                                                     \
    X(byte_held)                                                                       \
    X(map)                                                                             \
    X(unmap)                                                                           \
    X(populate_read)                                                                   \
    X(populate_write)                                                                  \
    X(drop_pages)                                                                      \
    X(make_huge)                                                                       \
    X(large_faults)                                                                    \
    X(dont_fork)                                                                       \
    X(wipe_on_fork)                                                                    \
    X(lock_memory)                                                                     \
    X(file_size_limit)                                                                 \
    X(random_bytes)                                                                    \
    X(resolve_path)
#define LIBRARY_CALLS(X)                                                               \
    X(malloc)                                                                          \
    X(calloc)                                                                          \
    X(strdup)                                                                          \
    X(aligned_alloc)                                                                   \
    X(pthread_create)                                                                  \
    X(pthread_key_create)                                                              \
    X(pthread_setspecific)                                                             \
    X(pthread_atfork)

enum call {
#define X(name) CALL_##name,
    TABLE_CALLS(X) LIBRARY_CALLS(X)
#undef X
        CALLS
};

const char *call_name(enum call call);

enum effect {
    EFFECT_ERROR, /* the call does nothing and reports `value`, an errno */
    EFFECT_SHORT, /* it moves at most `value` bytes; below 0: that many fewer */
    EFFECT_END,   /* it moves nothing and says 0: the end of the file, a full pipe */
};

/* What the engine owes its caller. */
enum duty {
    DUTY_NONE,       /* an error, a miss, a refusal: whatever is documented */
    DUTY_ABSORB,     /* nothing that a caller sees: it tries again, or it was advice */
    DUTY_ABSORB_ONCE /* likewise, unless it goes on */
};

struct fault {
    enum call call;
    enum effect effect;
    int value;
    int burst; /* of the persistent form: how many calls in a row; 0 for all */
    enum duty duty;
    const char *reason;
};

extern const struct fault faults[];
extern const size_t fault_count;

const char *fault_text(const struct fault *fault); /* "read_at EIO", "write_at -1" */

/* ---- arming ---------------------------------------------------------------------- */

void inject_watch(void); /* before anything else, and before a fork */
void inject_begin(void); /* replaces the table; once per process */
void inject_arm(const struct fault *fault, unsigned long nth, bool persistent);
unsigned long inject_disarm(void); /* how often it fired */
unsigned long inject_fired(void);
unsigned long inject_calls(enum call call); /* since the last inject_arm() */

/* What the wrappers pretend beside the fault. */
struct pretence {
    bool local_disk; /* the file system is ext4 */
    bool cold;       /* nothing is in the page cache */
    bool hasten;     /* a second of the maintenance thread takes 4 ms */
    ckv_atomic_u64 realtime_shift_ns;
};
extern struct pretence pretend;

/* ---- books ----------------------------------------------------------------------- */

struct books {
    long descriptors;
    long mapped_bytes;
    long allocations;
};
struct books inject_books(void);
/* Where an allocation was made that is in use and was not at `before`; NULL if none. */
void *inject_leaked(unsigned long serial_before);
unsigned long inject_serial(void);

/* Pages of the files that were written to; see restore() in sweep.c. */
enum { WATCHED_FILES = 4, WATCHED_PAGES = 8192 };
struct watched {
    char path[300];
    bool replaced; /* made, emptied, cut or removed */
    uint8_t dirty[WATCHED_PAGES];
};
extern struct watched *watched; /* WATCHED_FILES; shared with children */

/* The thread that calls it is the one whose seconds are real. */
void inject_is_driver(void);

#endif /* CKV_TESTS_INJECT_H */
