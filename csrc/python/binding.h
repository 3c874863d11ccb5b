/* SPDX-License-Identifier: Apache-2.0 */
/* binding.h: what the files of the CPython binding share.
 *
 * The binding knows cyclone_kv.h and Python.h, nothing else of the engine.  Every
 * method is parse -> release the GIL -> one call of the engine -> wrap.
 *
 * Who holds what:
 *
 *     Cache ----> ckvpy_handle ----> ckv_cache
 *                   ^      ^
 *     Lease --------+      +-------- Reservation
 *       |                              |
 *     ckv_lease                      ckv_reservation
 *
 * A Hold has its own reference to the volume and needs no handle.
 *
 * Invariants, cited by number where they are relied on:
 *
 *   B1  handle->calls counts engine calls in flight.  It grows with the GIL held, after
 * a look at handle->closing; it shrinks without the GIL, as soon as the engine is left.
 * So close() never waits for a thread that waits for the GIL, and a daemon thread that
 * the interpreter ends while it asks for the GIL leaves no call behind.
 *   B2  ckv_close() runs once, after `closing` is set and `calls` is 0; it is counted
 * itself, so that a second close() returns when the first is done.
 *   B3  A lease is given back only while it has no exported buffer; a reservation ends
 * only while it has none.  So no memoryview outlives its memory.
 *   B4  No Python code runs between ckvpy_begin() and ckvpy_leave(), finalizers of the
 * garbage collector included, except the progress callbacks of verify, whose threads
 * are written down so that close() can refuse.
 *
 * All Python objects are in the module state; nothing static refers to one.
 */
#ifndef CKVPY_BINDING_H
#define CKVPY_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "cyclone_kv.h"

/* A function in a slot table of Python, which has room for data pointers only. */
#define CKVPY_SLOT(function) (__extension__(void *)(function))

struct ckvpy_state {
    PyTypeObject *cache_type;
    PyTypeObject *lease_type;
    PyTypeObject *reservation_type;
    PyTypeObject *hold_type;
    PyObject *from_status; /* cyclone_kv.errors.from_status, at the first open */
    PyObject *log; /* logging.getLogger("cyclone_kv").log, at the first message */
};

/* A thread inside verify, on the heap: the interpreter may end that thread. */
struct ckvpy_walk {
    struct ckvpy_walk *next;
    unsigned long thread;
};

/* One open handle of the engine, shared by the Python objects that depend on it. */
struct ckvpy_handle {
    struct ckv_cache *cache;  /* NULL once closed */
    atomic_uint calls;        /* B1 */
    atomic_bool closing;      /* set with the GIL held, read from anywhere */
    size_t references;        /* guarded by the GIL */
    struct ckvpy_walk *walks; /* guarded by the GIL (B4) */
    pid_t owner_pid;          /* who opened it */
};

struct ckvpy_cache {
    PyObject_HEAD
    struct ckvpy_state *state;   /* NULL until opened */
    struct ckvpy_handle *handle; /* NULL until opened */
};

/* ---- module.c ------------------------------------------------------------------- */

extern PyType_Spec ckvpy_cache_spec;
extern PyType_Spec ckvpy_lease_spec;
extern PyType_Spec ckvpy_reservation_spec;
extern PyType_Spec ckvpy_hold_spec;

/* ---- log.c ---------------------------------------------------------------------- */

/* Sends the engine's messages into the queue.  Called once by each module object. */
void ckvpy_log_start(void);
/* True while messages wait.  Any thread; no lock. */
bool ckvpy_log_waiting(void);
/* Hands the queued messages to Python's logging.  Requires: the GIL.  Keeps the current
 * exception; one raised by a handler of logging is reported as unraisable. */
void ckvpy_log_drain(struct ckvpy_state *state);

static inline void
ckvpy_log_flush(struct ckvpy_state *state)
{
    if (ckvpy_log_waiting()) {
        ckvpy_log_drain(state);
    }
}

/* ---- convert.c ------------------------------------------------------------------ */

/* Imports what ckvpy_raise() needs: before it is too late, at the end of the
 * interpreter.  -1 on error. */
int ckvpy_find_errors(struct ckvpy_state *state);
/* Raises the exception that errors.py has for `status`; returns NULL. */
PyObject *ckvpy_raise(struct ckvpy_state *state, enum ckv_status status,
    const struct ckv_error *error);

/* Names of parameters, for ckvpy_parse(). */
struct ckvpy_signature {
    const char *function;
    Py_ssize_t required;   /* the first so many must be given */
    Py_ssize_t positional; /* the first so many may be given by position */
    Py_ssize_t total;
    const char *names[8];
};
/* Sorts the arguments of a METH_FASTCALL | METH_KEYWORDS method into `values`
 * (borrowed; NULL where not given).  Returns -1 with TypeError set when they do not
 * fit. */
int ckvpy_parse(const struct ckvpy_signature *signature, PyObject *const *args,
    Py_ssize_t nargs, PyObject *kwnames, PyObject **values);
/* *flag = bool(value); unchanged when value is NULL.  -1 on error. */
int ckvpy_bool(PyObject *value, bool *flag);
/* *number = int(value), which must fit.  -1 on error. */
int ckvpy_uint64(PyObject *value, const char *name, uint64_t *number);

/* Buffers held for the length of a call.  Entries never move: exporters may keep
 * pointers to them. */
struct ckvpy_hold_chunk;
struct ckvpy_holds {
    size_t local_count;
    Py_buffer local[4]; /* enough for most single calls, without an allocation */
    struct ckvpy_hold_chunk *chunks;
};
void ckvpy_holds_init(struct ckvpy_holds *holds);
/* NULL with an exception set when `object` has no contiguous buffer of that kind. */
const Py_buffer *ckvpy_hold(struct ckvpy_holds *holds, PyObject *object, int flags);
void ckvpy_holds_release(struct ckvpy_holds *holds);

/* One key.  Bytes objects are used as they are, others through `holds`. */
int ckvpy_key(struct ckvpy_holds *holds, PyObject *object, struct ckv_key *key);

/* Many keys: a sequence of bytes-like objects, or one contiguous buffer of n * 32
 * bytes. */
struct ckvpy_keys {
    struct ckv_key *items;
    size_t count;
    PyObject *owner; /* tuple that keeps bytes objects alive */
    struct ckvpy_holds holds;
};
int ckvpy_keys_init(struct ckvpy_keys *keys, PyObject *object);
void ckvpy_keys_release(struct ckvpy_keys *keys);

/* Pieces of payloads or of destinations; one growing array for a whole batch. */
union ckvpy_piece {
    struct ckv_segment segment;
    struct ckv_target target;
};
struct ckvpy_pieces {
    union ckvpy_piece *items;
    size_t count;
    size_t capacity;
};
/* Appends the pieces of `object` (a buffer, or a list or tuple of buffers).
 * *count says how many; the array may move with the next call. */
int ckvpy_pieces_add(struct ckvpy_pieces *pieces, struct ckvpy_holds *holds,
    PyObject *object, bool writable, size_t *count);
void ckvpy_pieces_release(struct ckvpy_pieces *pieces);

/* Options of open(), from a dict with the names of struct ckv_options. */
struct ckvpy_options {
    struct ckv_options options;
    struct ckv_path paths[CKV_PATHS_MAX];
    PyObject *owner; /* tuple that keeps the paths alive */
};
int ckvpy_options_init(struct ckvpy_options *options, PyObject *paths, PyObject *dict);
void ckvpy_options_release(struct ckvpy_options *options);

/* New references, or NULL with an exception set. */
PyObject *ckvpy_from_stats(const struct ckv_stats *stats);
PyObject *ckvpy_from_info(const struct ckv_info *info);
PyObject *ckvpy_from_entry(const struct ckv_entry_info *entry);
PyObject *ckvpy_from_event(const struct ckv_event *event);
PyObject *ckvpy_from_report(const struct ckv_verify_report *report);
PyObject *ckvpy_statistics(void); /* ((kind, name, unit, sentence), ...) */
PyObject *ckvpy_statuses(void);   /* {name: (value, text)} */

/* ---- cache_type.c --------------------------------------------------------------- */

/* Enters the engine: NULL with ClosedError set when the handle is closed (B1). */
struct ckv_cache *ckvpy_begin(struct ckvpy_state *state, struct ckvpy_handle *handle);

/* Leaves the engine.  With or without the GIL (B1). */
static inline void
ckvpy_leave(struct ckvpy_handle *handle)
{
    /* Release: what the call wrote is visible to the thread that closes. */
    atomic_fetch_sub_explicit(&handle->calls, 1, memory_order_release);
}

/* Requires: the GIL. */
void ckvpy_handle_release(struct ckvpy_handle *handle);

/* ---- lease_type.c, reservation_type.c, hold_type.c ------------------------------ */

/* Takes over `lease` (clears it), also on failure. */
PyObject *ckvpy_lease_new(struct ckvpy_state *state, struct ckvpy_handle *handle,
    struct ckv_lease **lease);
/* Takes over `reservation`, also on failure. */
PyObject *ckvpy_reservation_new(struct ckvpy_state *state, struct ckvpy_handle *handle,
    struct ckv_reservation **reservation);

/* Takes over `hold`, also on failure. */
PyObject *ckvpy_hold_new(struct ckvpy_state *state, struct ckv_hold **hold);
/* NULL with an exception set when it is none, or was released. */
struct ckv_hold *ckvpy_hold_of(struct ckvpy_state *state, PyObject *object);

#endif /* CKVPY_BINDING_H */
