/* SPDX-License-Identifier: Apache-2.0 */
/* log.c: carries the engine's messages to Python's logging.
 *
 * The engine logs from any thread, the maintenance thread among them, which must never
 * run Python.  So the sink only copies the text into a ring of fixed size, and the next
 * call that returns to Python hands it on.  A full ring drops the newest message and
 * counts it; the count is logged with the next drain.
 *
 * The ring belongs to the process and holds no Python object.  A fork takes its lock
 * first, so that the child never inherits it taken.
 */
#include "binding.h"

#include <pthread.h>
#include <string.h>

enum { RING_SIZE = 64, TEXT_SIZE = 512 };

struct message {
    enum ckv_log_level level;
    char text[TEXT_SIZE];
};

static struct {
    pthread_mutex_t lock;
    size_t first;
    size_t count;
    unsigned long dropped;
    struct message messages[RING_SIZE];
} ring = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* How many messages wait; a hint that is read without the lock. */
static atomic_uint waiting;
static atomic_bool started;
static bool draining; /* guarded by the GIL: a log handler may call us again */

static void
sink(void *context, enum ckv_log_level level, const char *text)
{
    (void)context;                        /* the ring is the only receiver */
    (void)pthread_mutex_lock(&ring.lock); /* cannot fail: never taken twice */
    if (ring.count == RING_SIZE) {
        ring.dropped++;
    } else {
        struct message *slot = &ring.messages[(ring.first + ring.count) % RING_SIZE];
        const size_t length = strnlen(text, TEXT_SIZE - 1);
        slot->level = level;
        memcpy(slot->text, text, length);
        slot->text[length] = '\0';
        ring.count++;
        atomic_store_explicit(&waiting, (unsigned int)ring.count, memory_order_relaxed);
    }
    (void)pthread_mutex_unlock(&ring.lock);
}

static bool
take(struct message *message, unsigned long *dropped)
{
    (void)pthread_mutex_lock(&ring.lock);
    const bool found = ring.count != 0;
    if (found) {
        *message = ring.messages[ring.first];
        ring.first = (ring.first + 1) % RING_SIZE;
        ring.count--;
    }
    *dropped = found ? 0 : ring.dropped;
    if (!found) {
        ring.dropped = 0;
    }
    atomic_store_explicit(&waiting, (unsigned int)ring.count, memory_order_relaxed);
    (void)pthread_mutex_unlock(&ring.lock);
    return found;
}

static void
before_fork(void)
{
    (void)pthread_mutex_lock(&ring.lock);
}

static void
after_fork(void)
{
    (void)pthread_mutex_unlock(&ring.lock);
}

void
ckvpy_log_start(void)
{
    if (!atomic_exchange(&started, true)) {
        /* Without the handlers only a fork during a message could go wrong. */
        (void)pthread_atfork(before_fork, after_fork, after_fork);
        ckv_set_log(sink, NULL);
    }
}

bool
ckvpy_log_waiting(void)
{
    return atomic_load_explicit(&waiting, memory_order_relaxed) != 0;
}

/* logging.getLogger("cyclone_kv").log, imported when the first message comes. */
static PyObject *
log_function(struct ckvpy_state *state)
{
    if (state->log == NULL) {
        PyObject *logging = PyImport_ImportModule("logging");
        if (logging == NULL) {
            return NULL;
        }
        PyObject *logger = PyObject_CallMethod(logging, "getLogger", "s", "cyclone_kv");
        Py_DECREF(logging);
        if (logger == NULL) {
            return NULL;
        }
        state->log = PyObject_GetAttrString(logger, "log");
        Py_DECREF(logger);
    }
    return state->log;
}

/* False when a signal asks to stop. */
static bool
emit(struct ckvpy_state *state, enum ckv_log_level level, const char *text)
{
    enum { LEVEL_INFO = 20, LEVEL_WARNING = 30 }; /* of the logging module */
    PyObject *log = log_function(state);
    PyObject *result = NULL;
    if (log != NULL) {
        PyObject *string =
            PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
        if (string != NULL) {
            result = PyObject_CallFunction(log, "isO",
                level == CKV_LOG_WARNING ? LEVEL_WARNING : LEVEL_INFO, "%s", string);
            Py_DECREF(string);
        }
    }
    if (result != NULL) {
        Py_DECREF(result);
        return true;
    }
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        /* Meant for the program: it gets it when the call of the engine returns. */
        PyErr_Clear();
        PyErr_SetInterrupt();
        return false;
    }
    PyErr_WriteUnraisable(log);
    return true;
}

void
ckvpy_log_drain(struct ckvpy_state *state)
{
    if (draining) {
        return;
    }
    draining = true;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);

    struct message message;
    unsigned long dropped;
    bool more = true;
    while (more && take(&message, &dropped)) {
        more = emit(state, message.level, message.text);
    }
    if (dropped != 0) {
        (void)emit(state, CKV_LOG_WARNING,
            "messages were lost: too many came at once"); /* the last one anyway */
    }

    PyErr_Restore(type, value, traceback);
    draining = false;
}
