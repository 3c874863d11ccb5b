/* SPDX-License-Identifier: Apache-2.0 */
/* cache_type.c: cyclone_kv._core.Cache, the base of cyclone_kv.Cache.
 *
 * The methods that matter for speed (get, contains, the batches) are the ones users
 * call; those with a leading underscore return raw tuples and dicts that cache.py
 * wraps.
 *
 *               _open()                   close()             last call left
 *     created ----------> open ----------------------> closing --------------> closed
 *
 * begin_call() refuses everything but `open`.  contains() keeps the GIL: it takes less
 * time than giving it away, reads memory only, and close() cannot start meanwhile.
 */
#include "binding.h"
#include "docstrings.h"

#include <time.h>
#include <unistd.h>

/* ---- the handle ----------------------------------------------------------------- */

struct ckv_cache *
ckvpy_begin(struct ckvpy_state *state, struct ckvpy_handle *handle)
{
    if (handle == NULL) {
        PyErr_SetString(PyExc_ValueError, "the cache is not open (use Cache.open)");
        return NULL;
    }
    if (atomic_load_explicit(&handle->closing, memory_order_relaxed)) {
        ckvpy_raise(state, CKV_E_CLOSED, NULL);
        return NULL;
    }
    atomic_fetch_add_explicit(&handle->calls, 1, memory_order_relaxed); /* B1 */
    return handle->cache;
}

void
ckvpy_handle_release(struct ckvpy_handle *handle)
{
    if (--handle->references == 0) {
        PyMem_Free(handle);
    }
}

static void
sleep_us(long duration_us)
{
    const struct timespec duration = {.tv_nsec = duration_us * 1000};
    (void)nanosleep(&duration, NULL); /* woken early: the caller looks again */
}

/* Waits until no call is in flight, for at most `limit_us`; 0 is for ever.
 * Returns -1 with an exception set when a signal handler raised. */
static int
wait_for_calls(struct ckvpy_handle *handle, long limit_us)
{
    enum { SLEEP_FIRST_US = 20, SLEEP_LONGEST_US = 2000 };
    long sleep = SLEEP_FIRST_US;
    long waited = 0;
    while (atomic_load_explicit(&handle->calls, memory_order_acquire) != 0) {
        if (limit_us != 0 && waited >= limit_us) {
            return 0;
        }
        Py_BEGIN_ALLOW_THREADS
        sleep_us(sleep);
        Py_END_ALLOW_THREADS
        waited += sleep;
        sleep = sleep * 2 < SLEEP_LONGEST_US ? sleep * 2 : SLEEP_LONGEST_US;
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
    return 0;
}

/* True in a progress callback of verify: its own call would never end. */
static bool
called_by_walk(const struct ckvpy_handle *handle)
{
    const unsigned long thread = PyThread_get_thread_ident();
    for (const struct ckvpy_walk *walk = handle->walks; walk != NULL;
        walk = walk->next) {
        if (walk->thread == thread) {
            return true;
        }
    }
    return false;
}

/* Refuses new calls, waits for those in flight, ends the handle (B2).  Idempotent. */
static int
close_handle(struct ckvpy_handle *handle, long limit_us)
{
    if (called_by_walk(handle)) {
        PyErr_SetString(PyExc_RuntimeError, "close() was called by the progress "
                                            "callback of verify() (raise an exception "
                                            "there to stop the walk)");
        return -1;
    }
    atomic_store_explicit(&handle->closing, true, memory_order_relaxed);
    /* The threads of a parent do not exist in a forked child; their calls never end. */
    const bool inherited = getpid() != handle->owner_pid;
    if (!inherited) {
        if (wait_for_calls(handle, limit_us) < 0) {
            return -1;
        }
        if (atomic_load_explicit(&handle->calls, memory_order_acquire) != 0) {
            return 0; /* the interpreter ends; the kernel cleans up after us */
        }
    }
    struct ckv_cache *cache = handle->cache;
    handle->cache = NULL;
    if (cache != NULL) {
        atomic_fetch_add_explicit(&handle->calls, 1, memory_order_relaxed); /* B2 */
        Py_BEGIN_ALLOW_THREADS
        ckv_close(&cache);
        ckvpy_leave(handle);
        Py_END_ALLOW_THREADS
    }
    return 0;
}

static bool
is_open(const struct ckvpy_cache *self)
{
    return self->handle != NULL && !atomic_load(&self->handle->closing);
}

/* ---- life ----------------------------------------------------------------------- */

/* _open(paths, options): paths are (bytes, capacity); options as in ckv_options. */
static PyObject *
cache_open(PyObject *object, PyTypeObject *defining_class, PyObject *const *args,
    Py_ssize_t nargs, PyObject *kwnames)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    static const struct ckvpy_signature signature = {"_open", 2, 2, 2,
        {"paths", "options"}};
    PyObject *values[2];
    if (ckvpy_parse(&signature, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    if (self->handle != NULL) {
        PyErr_SetString(PyExc_ValueError, "the cache was opened before");
        return NULL;
    }
    struct ckvpy_state *state = PyType_GetModuleState(defining_class);
    if (ckvpy_find_errors(state) < 0) {
        return NULL;
    }
    struct ckvpy_options options;
    struct ckvpy_handle *handle = PyMem_Calloc(1, sizeof(*handle));
    if (handle == NULL) {
        return PyErr_NoMemory();
    }
    if (ckvpy_options_init(&options, values[0], values[1]) < 0) {
        PyMem_Free(handle);
        return NULL;
    }
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_open(&options.options, &handle->cache, &error);
    Py_END_ALLOW_THREADS
    ckvpy_options_release(&options);
    if (status != CKV_OK) {
        PyMem_Free(handle);
        ckvpy_log_flush(state);
        return ckvpy_raise(state, status, &error);
    }
    handle->references = 1;
    handle->owner_pid = getpid();
    self->state = state;
    self->handle = handle;
    ckvpy_log_flush(state);
    Py_RETURN_NONE;
}

static PyObject *
cache_close(PyObject *object, PyObject *unused)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    (void)unused;
    if (self->handle != NULL) {
        if (close_handle(self->handle, 0) < 0) {
            return NULL;
        }
        ckvpy_log_flush(self->state);
    }
    Py_RETURN_NONE;
}

static PyObject *
cache_closed(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(!is_open((struct ckvpy_cache *)object));
}

/* Closes what was forgotten, and says so. */
static void
cache_finalize(PyObject *object)
{
    enum { LIMIT_US = 1000000 }; /* a call that does not end must not hang an exit */
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    if (self->handle == NULL || self->handle->cache == NULL) {
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    /* Not open: a close() that a signal interrupted, which is no reason to warn. */
    if (is_open(self) && getpid() == self->handle->owner_pid &&
        PyErr_ResourceWarning(object, 1, "unclosed cache %R", object) < 0) {
        PyErr_WriteUnraisable(object);
    }
    if (close_handle(self->handle, LIMIT_US) < 0) {
        PyErr_WriteUnraisable(object);
    }
    ckvpy_log_flush(self->state);
    PyErr_Restore(type, value, traceback);
}

static void
cache_dealloc(PyObject *object)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    PyTypeObject *type = Py_TYPE(object);
    struct ckvpy_handle *handle = self->handle;
    if (handle != NULL) {
        /* cache_finalize() was here, except for direct users of this type.  A warning
           would need a reference to an object that has none left. */
        if (handle->cache != NULL && atomic_load(&handle->calls) == 0) {
            (void)close_handle(handle, 0); /* cannot fail: nothing to wait for */
        }
        ckvpy_handle_release(handle);
    }
    freefunc release = __extension__(freefunc) PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* ---- one block ------------------------------------------------------------------ */

/* A new Lease, None for a miss, NULL with an exception set. */
static PyObject *
pin(struct ckvpy_cache *self, PyObject *key_object)
{
    struct ckv_key key;
    struct ckvpy_holds holds;
    ckvpy_holds_init(&holds);
    if (ckvpy_key(&holds, key_object, &key) < 0) {
        return NULL;
    }
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        ckvpy_holds_release(&holds);
        return NULL;
    }
    struct ckv_lease *lease = NULL;
    struct ckv_error error;
    error.status = CKV_OK;
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_get(cache, &key, &lease, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_holds_release(&holds);
    ckvpy_log_flush(self->state);
    if (status < 0) {
        return ckvpy_raise(self->state, status, &error);
    }
    if (status != CKV_OK) {
        Py_RETURN_NONE;
    }
    return ckvpy_lease_new(self->state, handle, &lease);
}

/* get(key) -> memoryview | None */
static PyObject *
cache_get(PyObject *object, PyObject *key)
{
    PyObject *lease = pin((struct ckvpy_cache *)object, key);
    if (lease == NULL || lease == Py_None) {
        return lease;
    }
    PyObject *view = PyMemoryView_FromObject(lease);
    Py_DECREF(lease);
    return view;
}

/* _lease(key) -> Lease | None */
static PyObject *
cache_lease(PyObject *object, PyObject *key)
{
    return pin((struct ckvpy_cache *)object, key);
}

/* _locate(key) -> (Lease, fd, offset) | None */
static PyObject *
cache_locate(PyObject *object, PyObject *key_object)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    struct ckv_key key;
    struct ckvpy_holds holds;
    ckvpy_holds_init(&holds);
    if (ckvpy_key(&holds, key_object, &key) < 0) {
        return NULL;
    }
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        ckvpy_holds_release(&holds);
        return NULL;
    }
    struct ckv_lease *lease = NULL;
    int fd = -1;
    uint64_t offset_bytes = 0;
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_locate(cache, &key, &lease, &fd, &offset_bytes, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_holds_release(&holds);
    ckvpy_log_flush(self->state);
    if (status < 0) {
        return ckvpy_raise(self->state, status, &error);
    }
    if (status != CKV_OK) {
        Py_RETURN_NONE;
    }
    PyObject *wrapped = ckvpy_lease_new(self->state, handle, &lease);
    if (wrapped == NULL) {
        return NULL;
    }
    return Py_BuildValue("(NiK)", wrapped, fd, (unsigned long long)offset_bytes);
}

/* 1 present, 0 absent, -1 with an exception set.  Keeps the GIL. */
static int
contains(PyObject *object, PyObject *key_object)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    struct ckv_key key;
    struct ckvpy_holds holds;
    ckvpy_holds_init(&holds);
    if (ckvpy_key(&holds, key_object, &key) < 0) {
        return -1;
    }
    struct ckv_cache *cache = ckvpy_begin(self->state, self->handle);
    if (cache == NULL) {
        ckvpy_holds_release(&holds);
        return -1;
    }
    bool present = false;
    struct ckv_error error;
    error.status = CKV_OK;
    const enum ckv_status status = ckv_contains_many(cache, &key, 1, &present, &error);
    ckvpy_leave(self->handle);
    ckvpy_holds_release(&holds);
    if (status < 0) {
        ckvpy_raise(self->state, status, &error);
        return -1;
    }
    return present;
}

/* contains(key) -> bool */
static PyObject *
cache_contains(PyObject *object, PyObject *key)
{
    const int present = contains(object, key);
    return present < 0 ? NULL : PyBool_FromLong(present);
}

/* What put, put_many and reserve say about one block. */
static int
parse_header(struct ckvpy_holds *holds, PyObject *header, struct ckv_item *item)
{
    item->header = NULL;
    item->header_length = 0;
    if (header == NULL || header == Py_None) {
        return 0;
    }
    const Py_buffer *buffer = ckvpy_hold(holds, header, PyBUF_SIMPLE);
    if (buffer == NULL) {
        return -1;
    }
    if (buffer->len != 0) {
        item->header = buffer->buf;
        item->header_length = (size_t)buffer->len;
    }
    return 0;
}

/* put(key, data, *, header=None, overwrite=False) -> bool */
static PyObject *
cache_put(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    static const struct ckvpy_signature signature = {"put", 2, 2, 4,
        {"key", "data", "header", "overwrite"}};
    PyObject *values[4];
    struct ckv_item item = {.status = CKV_OK};
    bool overwrite = false;
    struct ckvpy_holds holds;
    struct ckvpy_pieces pieces = {.items = NULL};
    PyObject *result = NULL;
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache;

    ckvpy_holds_init(&holds);
    if (ckvpy_parse(&signature, args, nargs, kwnames, values) < 0 ||
        ckvpy_bool(values[3], &overwrite) < 0 ||
        ckvpy_key(&holds, values[0], &item.key) < 0 ||
        ckvpy_pieces_add(&pieces, &holds, values[1], false, &item.segment_count) < 0 ||
        parse_header(&holds, values[2], &item) < 0) {
        goto out;
    }
    item.segments = pieces.items != NULL ? &pieces.items->segment : NULL;
    cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        goto out;
    }
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_put(cache, &item, overwrite ? CKV_PUT_OVERWRITE : 0, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    if (status < 0) {
        ckvpy_raise(self->state, status, &error);
    } else {
        result = PyBool_FromLong(status == CKV_OK || status == CKV_PRESENT);
    }
out:
    ckvpy_holds_release(&holds);
    ckvpy_pieces_release(&pieces);
    return result;
}

/* get_into(key, target) -> int | None */
static PyObject *
cache_get_into(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
    PyObject *kwnames)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    static const struct ckvpy_signature signature = {"get_into", 2, 2, 2,
        {"key", "target"}};
    PyObject *values[2];
    struct ckv_read read = {.status = CKV_OK};
    struct ckvpy_holds holds;
    struct ckvpy_pieces pieces = {.items = NULL};
    PyObject *result = NULL;
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache;

    ckvpy_holds_init(&holds);
    if (ckvpy_parse(&signature, args, nargs, kwnames, values) < 0 ||
        ckvpy_key(&holds, values[0], &read.key) < 0 ||
        ckvpy_pieces_add(&pieces, &holds, values[1], true, &read.target_count) < 0) {
        goto out;
    }
    read.targets = pieces.items != NULL ? &pieces.items->target : NULL;
    cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        goto out;
    }
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_get_into(cache, &read, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    if (status < 0) {
        ckvpy_raise(self->state, status, &error);
    } else if (status == CKV_OK) {
        result = PyLong_FromUnsignedLongLong(read.payload_length);
    } else {
        result = Py_NewRef(Py_None);
    }
out:
    ckvpy_holds_release(&holds);
    ckvpy_pieces_release(&pieces);
    return result;
}

/* _reserve(key, nbytes, header) -> Reservation, or the status of a refusal */
static PyObject *
cache_reserve(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
    PyObject *kwnames)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    static const struct ckvpy_signature signature = {"_reserve", 3, 3, 3,
        {"key", "nbytes", "header"}};
    PyObject *values[3];
    struct ckv_item item = {.status = CKV_OK};
    uint64_t nbytes = 0;
    struct ckvpy_holds holds;
    PyObject *result = NULL;
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache;

    ckvpy_holds_init(&holds);
    if (ckvpy_parse(&signature, args, nargs, kwnames, values) < 0 ||
        ckvpy_uint64(values[1], "nbytes", &nbytes) < 0 ||
        ckvpy_key(&holds, values[0], &item.key) < 0 ||
        parse_header(&holds, values[2], &item) < 0) {
        goto out;
    }
    cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        goto out;
    }
    struct ckv_reservation *reservation = NULL;
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_reserve(cache, &item, (size_t)nbytes, &reservation, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    if (status < 0) {
        ckvpy_raise(self->state, status, &error);
    } else if (status == CKV_OK) {
        result = ckvpy_reservation_new(self->state, handle, &reservation);
    } else {
        result = PyLong_FromLong(status);
    }
out:
    ckvpy_holds_release(&holds);
    return result;
}

/* remove(key) -> bool */
static PyObject *
cache_remove(PyObject *object, PyObject *key_object)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    struct ckv_key key;
    struct ckvpy_holds holds;
    ckvpy_holds_init(&holds);
    if (ckvpy_key(&holds, key_object, &key) < 0) {
        return NULL;
    }
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        ckvpy_holds_release(&holds);
        return NULL;
    }
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_remove(cache, &key, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_holds_release(&holds);
    ckvpy_log_flush(self->state);
    if (status < 0) {
        return ckvpy_raise(self->state, status, &error);
    }
    return PyBool_FromLong(status == CKV_OK);
}

/* ---- many blocks ---------------------------------------------------------------- */

struct put_batch {
    PyObject *owner; /* the items, as a tuple of our own */
    struct ckv_item *items;
    size_t count;
    struct ckvpy_holds holds;
    struct ckvpy_pieces pieces;
};

static void
put_batch_release(struct put_batch *batch)
{
    ckvpy_holds_release(&batch->holds);
    ckvpy_pieces_release(&batch->pieces);
    PyMem_Free(batch->items);
    Py_CLEAR(batch->owner);
}

/* (key, data) or (key, data, header). */
static int
put_batch_add(struct put_batch *batch, PyObject *row)
{
    PyObject *fields =
        PyTuple_Check(row) || PyList_Check(row) ? PySequence_Tuple(row) : NULL;
    const Py_ssize_t size = fields != NULL ? PyTuple_Size(fields) : 0;
    if (size != 2 && size != 3) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError,
                "item %zu of put_many() is not (key, data) or (key, data, header)",
                batch->count);
        }
        Py_XDECREF(fields);
        return -1;
    }
    struct ckv_item *item = &batch->items[batch->count];
    /* Held as a buffer even when it is bytes: `row` may be a list that changes. */
    const Py_buffer *key =
        ckvpy_hold(&batch->holds, PyTuple_GetItem(fields, 0), PyBUF_SIMPLE);
    int result = -1;
    if (key != NULL &&
        ckvpy_pieces_add(&batch->pieces, &batch->holds, PyTuple_GetItem(fields, 1),
            false, &item->segment_count) == 0 &&
        parse_header(&batch->holds, size == 3 ? PyTuple_GetItem(fields, 2) : NULL,
            item) == 0) {
        item->key.data = key->buf;
        item->key.length = (size_t)key->len;
        batch->count++;
        result = 0;
    }
    Py_DECREF(fields);
    return result;
}

static int
put_batch_init(struct put_batch *batch, PyObject *rows)
{
    batch->items = NULL;
    batch->count = 0;
    batch->pieces = (struct ckvpy_pieces){.items = NULL};
    ckvpy_holds_init(&batch->holds);
    batch->owner = PySequence_Tuple(rows);
    if (batch->owner == NULL) {
        return -1;
    }
    const Py_ssize_t size = PyTuple_Size(batch->owner);
    batch->items = PyMem_Calloc(size != 0 ? (size_t)size : 1, sizeof(*batch->items));
    if (batch->items == NULL) {
        PyErr_NoMemory();
        put_batch_release(batch);
        return -1;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        if (put_batch_add(batch, PyTuple_GetItem(batch->owner, i)) < 0) {
            put_batch_release(batch);
            return -1;
        }
    }
    /* The array of pieces has stopped moving. */
    size_t first = 0;
    for (size_t i = 0; i < batch->count; i++) {
        if (batch->items[i].segment_count != 0) {
            batch->items[i].segments = &batch->pieces.items[first].segment;
            first += batch->items[i].segment_count;
        }
    }
    return 0;
}

static PyObject *
list_of_stored(const struct ckv_item *items, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        const bool stored = items[i].status == CKV_OK || items[i].status == CKV_PRESENT;
        (void)PyList_SetItem(list, (Py_ssize_t)i,
            PyBool_FromLong(stored)); /* in range */
    }
    return list;
}

/* put_many(items, *, chain=False, parent=None, overwrite=False) -> list[bool] */
static PyObject *
cache_put_many(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
    PyObject *kwnames)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    static const struct ckvpy_signature signature = {"put_many", 1, 1, 4,
        {"items", "chain", "parent", "overwrite"}};
    PyObject *values[4];
    bool chain = false;
    bool overwrite = false;
    if (ckvpy_parse(&signature, args, nargs, kwnames, values) < 0 ||
        ckvpy_bool(values[1], &chain) < 0 || ckvpy_bool(values[3], &overwrite) < 0) {
        return NULL;
    }
    const bool has_parent = values[2] != NULL && values[2] != Py_None;
    if (has_parent && !chain) {
        PyErr_SetString(PyExc_ValueError, "parent= needs chain=True");
        return NULL;
    }
    struct put_batch batch;
    if (put_batch_init(&batch, values[0]) < 0) {
        return NULL;
    }
    struct ckv_key parent;
    PyObject *result = NULL;
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache;
    if ((has_parent && ckvpy_key(&batch.holds, values[2], &parent) < 0) ||
        (cache = ckvpy_begin(self->state, handle)) == NULL) {
        put_batch_release(&batch);
        return NULL;
    }
    const uint32_t flags = (chain ? (uint32_t)CKV_PUT_CHAIN : 0) |
                           (overwrite ? (uint32_t)CKV_PUT_OVERWRITE : 0);
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_put_many(cache, batch.items, batch.count, flags,
        has_parent ? &parent : NULL, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    if (status < 0) {
        ckvpy_raise(self->state, status, &error);
    } else {
        result = list_of_stored(batch.items, batch.count);
    }
    put_batch_release(&batch);
    return result;
}

struct read_batch {
    struct ckvpy_keys keys;
    struct ckv_read *reads;
    struct ckvpy_pieces pieces;
};

static void
read_batch_release(struct read_batch *batch)
{
    ckvpy_pieces_release(&batch->pieces);
    PyMem_Free(batch->reads);
    ckvpy_keys_release(&batch->keys);
}

static int
read_batch_fill(struct read_batch *batch, PyObject *targets)
{
    const size_t count = (size_t)PyTuple_Size(targets);
    if (count != batch->keys.count) {
        PyErr_Format(PyExc_ValueError,
            "get_many_into() was given %zu keys and %zu targets", batch->keys.count,
            count);
        return -1;
    }
    batch->reads = PyMem_Calloc(count != 0 ? count : 1, sizeof(*batch->reads));
    if (batch->reads == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        batch->reads[i].key = batch->keys.items[i];
        if (ckvpy_pieces_add(&batch->pieces, &batch->keys.holds,
                PyTuple_GetItem(targets, (Py_ssize_t)i), true,
                &batch->reads[i].target_count) < 0) {
            return -1;
        }
    }
    /* The array of pieces has stopped moving. */
    size_t first = 0;
    for (size_t i = 0; i < count; i++) {
        if (batch->reads[i].target_count != 0) {
            batch->reads[i].targets = &batch->pieces.items[first].target;
            first += batch->reads[i].target_count;
        }
    }
    return 0;
}

static int
read_batch_init(struct read_batch *batch, PyObject *keys, PyObject *targets)
{
    batch->reads = NULL;
    batch->pieces = (struct ckvpy_pieces){.items = NULL};
    if (ckvpy_keys_init(&batch->keys, keys) < 0) {
        return -1;
    }
    PyObject *tuple = PySequence_Tuple(targets);
    const int result = tuple != NULL ? read_batch_fill(batch, tuple) : -1;
    Py_XDECREF(tuple); /* the buffers are held one by one */
    if (result < 0) {
        read_batch_release(batch);
    }
    return result;
}

/* Bytes of the block, or -1 for what was not copied. */
static PyObject *
from_length(const struct ckv_read *read)
{
    return PyLong_FromLongLong(read->status == CKV_OK ? (long long)read->payload_length
                                                      : -1);
}

static PyObject *
from_copied(const struct ckv_read *read)
{
    return PyBool_FromLong(read->status == CKV_OK);
}

static PyObject *
copy_many(struct ckvpy_cache *self, struct read_batch *batch,
    PyObject *(*wrap)(const struct ckv_read *read))
{
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        return NULL;
    }
    const size_t count = batch->keys.count;
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_get_many_into(cache, batch->reads, count, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    if (status < 0) {
        return ckvpy_raise(self->state, status, &error);
    }
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = wrap(&batch->reads[i]);
        if (item == NULL) {
            Py_CLEAR(list);
        } else {
            (void)PyList_SetItem(list, (Py_ssize_t)i, item); /* in range */
        }
    }
    return list;
}

/* get_many_into(keys, targets, *, exact=False) -> list[bool] */
static PyObject *
cache_get_many_into(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
    PyObject *kwnames)
{
    static const struct ckvpy_signature signature = {"get_many_into", 2, 2, 3,
        {"keys", "targets", "exact"}};
    PyObject *values[3];
    bool exact = false;
    struct read_batch batch;
    if (ckvpy_parse(&signature, args, nargs, kwnames, values) < 0 ||
        ckvpy_bool(values[2], &exact) < 0 ||
        read_batch_init(&batch, values[0], values[1]) < 0) {
        return NULL;
    }
    for (size_t i = 0; i < batch.keys.count; i++) {
        batch.reads[i].exact = exact;
    }
    PyObject *list = copy_many((struct ckvpy_cache *)object, &batch, from_copied);
    read_batch_release(&batch);
    return list;
}

/* _copy_many(keys, targets) -> list[int] */
static PyObject *
cache_copy_many(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    static const struct ckvpy_signature signature = {"_copy_many", 2, 2, 2,
        {"keys", "targets"}};
    PyObject *values[2];
    struct read_batch batch;
    if (ckvpy_parse(&signature, args, nargs, NULL, values) < 0 ||
        read_batch_init(&batch, values[0], values[1]) < 0) {
        return NULL;
    }
    PyObject *list = copy_many((struct ckvpy_cache *)object, &batch, from_length);
    read_batch_release(&batch);
    return list;
}

/* ---- devices -------------------------------------------------------------------- */

/* _hold() -> Hold */
static PyObject *
cache_hold(PyObject *object, PyObject *unused)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    (void)unused;
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        return NULL;
    }
    struct ckv_hold *hold = NULL;
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_hold_open(cache, &hold, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    if (status < 0) {
        return ckvpy_raise(self->state, status, &error);
    }
    return ckvpy_hold_new(self->state, &hold);
}

/* A Lease, the length of a block that lies elsewhere, or None for a miss.  Takes the
 * lease of the pin over, also on failure. */
static PyObject *
from_pin(struct ckvpy_cache *self, struct ckv_pin *pin)
{
    if (pin->status != CKV_OK) {
        Py_RETURN_NONE;
    }
    if (pin->lease != NULL) {
        return ckvpy_lease_new(self->state, self->handle, &pin->lease);
    }
    return PyLong_FromUnsignedLongLong(pin->payload_length);
}

static PyObject *
list_of_pins(struct ckvpy_cache *self, struct ckv_pin *pins, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; i < count; i++) {
        PyObject *item = list != NULL ? from_pin(self, &pins[i]) : NULL;
        if (item == NULL) {
            Py_CLEAR(list);
            ckv_lease_release(&pins[i].lease);
        } else {
            (void)PyList_SetItem(list, (Py_ssize_t)i, item); /* in range */
        }
    }
    return list;
}

/* _pin_many(keys, hold) -> list[Lease | int | None] */
static PyObject *
cache_pin_many(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    static const struct ckvpy_signature signature = {"_pin_many", 2, 2, 2,
        {"keys", "hold"}};
    PyObject *values[2];
    if (ckvpy_parse(&signature, args, nargs, NULL, values) < 0) {
        return NULL;
    }
    struct ckv_hold *hold = NULL;
    struct ckvpy_keys keys;
    if ((values[1] != Py_None &&
            (hold = ckvpy_hold_of(self->state, values[1])) == NULL) ||
        ckvpy_keys_init(&keys, values[0]) < 0) {
        return NULL;
    }
    const size_t count = keys.count;
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = NULL;
    struct ckv_pin *pins = PyMem_Calloc(count != 0 ? count : 1, sizeof(*pins));
    if (pins == NULL) {
        PyErr_NoMemory();
    } else {
        cache = ckvpy_begin(self->state, handle);
    }
    if (cache == NULL) {
        PyMem_Free(pins);
        ckvpy_keys_release(&keys);
        return NULL;
    }
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status = CKV_OK;
    for (size_t i = 0; i < count; i++) {
        pins[i].key = keys.items[i];
    }
    Py_BEGIN_ALLOW_THREADS
    status = ckv_get_selected(cache, hold, pins, count, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    PyObject *list = status < 0 ? ckvpy_raise(self->state, status, &error)
                                : list_of_pins(self, pins, count);
    ckvpy_keys_release(&keys);
    PyMem_Free(pins);
    return list;
}

/* contains_many(keys) -> list[bool] */
static PyObject *
cache_contains_many(PyObject *object, PyObject *keys_object)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    struct ckvpy_keys keys;
    if (ckvpy_keys_init(&keys, keys_object) < 0) {
        return NULL;
    }
    bool *present = PyMem_Calloc(keys.count != 0 ? keys.count : 1, sizeof(*present));
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = NULL;
    if (present == NULL) {
        PyErr_NoMemory();
    } else {
        cache = ckvpy_begin(self->state, handle);
    }
    if (cache == NULL) {
        PyMem_Free(present);
        ckvpy_keys_release(&keys);
        return NULL;
    }
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_contains_many(cache, keys.items, keys.count, present, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    PyObject *list = NULL;
    if (status < 0) {
        ckvpy_raise(self->state, status, &error);
    } else {
        list = PyList_New((Py_ssize_t)keys.count);
    }
    for (size_t i = 0; list != NULL && i < keys.count; i++) {
        (void)PyList_SetItem(list, (Py_ssize_t)i,
            PyBool_FromLong(present[i])); /* in range */
    }
    PyMem_Free(present);
    ckvpy_keys_release(&keys);
    return list;
}

typedef enum ckv_status (*count_function)(struct ckv_cache *cache,
    const struct ckv_key *keys, size_t count, size_t *found, struct ckv_error *error);

/* keys -> int, for the calls that answer with a number. */
static PyObject *
count_keys(struct ckvpy_cache *self, PyObject *keys_object, count_function function)
{
    struct ckvpy_keys keys;
    if (ckvpy_keys_init(&keys, keys_object) < 0) {
        return NULL;
    }
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        ckvpy_keys_release(&keys);
        return NULL;
    }
    size_t found = 0;
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = function(cache, keys.items, keys.count, &found, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_keys_release(&keys);
    ckvpy_log_flush(self->state);
    if (status < 0) {
        return ckvpy_raise(self->state, status, &error);
    }
    return PyLong_FromSize_t(found);
}

static enum ckv_status
prefix_alone(struct ckv_cache *cache, const struct ckv_key *keys, size_t count,
    size_t *found, struct ckv_error *error)
{
    return ckv_longest_prefix(cache, keys, count, false, found, error);
}

static enum ckv_status
prefix_and_touch(struct ckv_cache *cache, const struct ckv_key *keys, size_t count,
    size_t *found, struct ckv_error *error)
{
    return ckv_longest_prefix(cache, keys, count, true, found, error);
}

/* longest_prefix(keys, *, touch=False) -> int */
static PyObject *
cache_longest_prefix(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
    PyObject *kwnames)
{
    static const struct ckvpy_signature signature = {"longest_prefix", 1, 1, 2,
        {"keys", "touch"}};
    PyObject *values[2];
    bool touch = false;
    if (ckvpy_parse(&signature, args, nargs, kwnames, values) < 0 ||
        ckvpy_bool(values[1], &touch) < 0) {
        return NULL;
    }
    return count_keys((struct ckvpy_cache *)object, values[0],
        touch ? prefix_and_touch : prefix_alone);
}

/* prefetch(keys) -> int */
static PyObject *
cache_prefetch(PyObject *object, PyObject *keys)
{
    return count_keys((struct ckvpy_cache *)object, keys, ckv_prefetch);
}

/* touch(keys) -> int */
static PyObject *
cache_touch(PyObject *object, PyObject *keys)
{
    return count_keys((struct ckvpy_cache *)object, keys, ckv_touch);
}

/* ---- care ----------------------------------------------------------------------- */

typedef enum ckv_status (*number_function)(struct ckv_cache *cache, uint64_t *number,
    struct ckv_error *error);

/* Calls a function that answers with a number; -1 with an exception set. */
static int
call_for_number(struct ckvpy_cache *self, number_function function, uint64_t *number)
{
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        return -1;
    }
    *number = 0;
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = function(cache, number, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    if (status < 0) {
        ckvpy_raise(self->state, status, &error);
        return -1;
    }
    return 0;
}

static PyObject *
number_or_null(PyObject *object, number_function function)
{
    uint64_t number;
    if (call_for_number((struct ckvpy_cache *)object, function, &number) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(number);
}

/* clear() -> int */
static PyObject *
cache_clear(PyObject *object, PyObject *unused)
{
    (void)unused;
    return number_or_null(object, ckv_clear);
}

/* recover() -> int */
static PyObject *
cache_recover(PyObject *object, PyObject *unused)
{
    (void)unused;
    return number_or_null(object, ckv_recover);
}

static enum ckv_status
sync_number(struct ckv_cache *cache, uint64_t *number, struct ckv_error *error)
{
    (void)number; /* sync has no result but success */
    return ckv_sync(cache, error);
}

/* sync() -> None */
static PyObject *
cache_sync(PyObject *object, PyObject *unused)
{
    (void)unused;
    uint64_t number;
    if (call_for_number((struct ckvpy_cache *)object, sync_number, &number) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static Py_ssize_t
cache_length(PyObject *object)
{
    uint64_t entries;
    if (call_for_number((struct ckvpy_cache *)object, ckv_count, &entries) < 0) {
        return -1;
    }
    return (Py_ssize_t)entries;
}

/* An open or closed cache is true; an empty one too. */
static int
cache_bool(PyObject *object)
{
    (void)object;
    return 1;
}

struct progress {
    struct ckvpy_handle *handle;
    PyObject *callback;
    PyThreadState *thread; /* of the caller, while it is without the GIL */
    uint64_t last_call_ms;
    bool failed; /* an exception is set in this thread */
};

static uint64_t
now_ms(void)
{
    struct timespec now = {0};
    (void)clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail */
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Runs without the GIL, in the thread that called verify. */
static int
on_progress(void *context, uint64_t done, uint64_t total)
{
    enum { INTERVAL_MS = 50 }; /* a bar needs no more, and signals are seen in time */
    struct progress *progress = context;
    if (progress->failed ||
        atomic_load_explicit(&progress->handle->closing, memory_order_relaxed)) {
        return 1;
    }
    const uint64_t now = now_ms();
    if (done != total && now - progress->last_call_ms < INTERVAL_MS) {
        return 0;
    }
    progress->last_call_ms = now;
    PyEval_RestoreThread(progress->thread); /* PyGILState_Ensure() knows only one
                                               interpreter */
    progress->failed = PyErr_CheckSignals() < 0;
    if (!progress->failed && progress->callback != Py_None) {
        PyObject *result = PyObject_CallFunction(progress->callback, "KK",
            (unsigned long long)done, (unsigned long long)total);
        progress->failed = result == NULL;
        Py_XDECREF(result);
    }
    progress->thread = PyEval_SaveThread();
    return progress->failed ? 1 : 0;
}

static void
forget_walk(struct ckvpy_handle *handle, struct ckvpy_walk *walk)
{
    struct ckvpy_walk **place = &handle->walks;
    while (*place != walk) {
        place = &(*place)->next;
    }
    *place = walk->next;
    PyMem_Free(walk);
}

/* _verify(progress, repair) -> tuple */
static PyObject *
cache_verify(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
    PyObject *kwnames)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    static const struct ckvpy_signature signature = {"_verify", 2, 2, 2,
        {"progress", "repair"}};
    PyObject *values[2];
    bool repair = false;
    if (ckvpy_parse(&signature, args, nargs, kwnames, values) < 0 ||
        ckvpy_bool(values[1], &repair) < 0) {
        return NULL;
    }
    struct ckvpy_walk *walk = PyMem_Malloc(sizeof(*walk));
    if (walk == NULL) {
        return PyErr_NoMemory();
    }
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        PyMem_Free(walk);
        return NULL;
    }
    walk->thread = PyThread_get_thread_ident(); /* B4 */
    walk->next = handle->walks;
    handle->walks = walk;
    struct progress progress = {.handle = handle, .callback = values[0]};
    struct ckv_verify_report report = {0};
    struct ckv_error error = {.status = CKV_OK};
    progress.thread = PyEval_SaveThread();
    enum ckv_status status =
        ckv_verify(cache, repair, on_progress, &progress, &report, &error);
    ckvpy_leave(handle);
    PyEval_RestoreThread(progress.thread);
    forget_walk(handle, walk);
    if (progress.failed) {
        return NULL;
    }
    ckvpy_log_flush(self->state);
    if (status >= 0 && atomic_load(&handle->closing)) {
        status = CKV_E_CLOSED; /* the walk was cut short */
    }
    if (status < 0) {
        return ckvpy_raise(self->state, status, &error);
    }
    return ckvpy_from_report(&report);
}

enum { ROWS_MAX = 65536 };

/* Checks the `limit` of _events and _list. */
static int
parse_limit(PyObject *value, size_t *limit)
{
    uint64_t number;
    if (ckvpy_uint64(value, "limit", &number) < 0) {
        return -1;
    }
    if (number < 1) {
        PyErr_SetString(PyExc_ValueError, "limit is 0; it must be at least 1");
        return -1;
    }
    *limit = number < ROWS_MAX ? (size_t)number : ROWS_MAX;
    return 0;
}

/* _events(since, limit) -> (list of tuples, lost, last) */
static PyObject *
cache_events(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
    PyObject *kwnames)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    static const struct ckvpy_signature signature = {"_events", 2, 2, 2,
        {"since", "limit"}};
    PyObject *values[2];
    uint64_t since;
    size_t limit;
    if (ckvpy_parse(&signature, args, nargs, kwnames, values) < 0 ||
        ckvpy_uint64(values[0], "since", &since) < 0 ||
        parse_limit(values[1], &limit) < 0) {
        return NULL;
    }
    struct ckv_event *events = PyMem_Calloc(limit, sizeof(*events));
    if (events == NULL) {
        return PyErr_NoMemory();
    }
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        PyMem_Free(events);
        return NULL;
    }
    size_t count = 0;
    uint64_t lost = 0;
    uint64_t last = since;
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_events(cache, since, events, limit, &count, &lost, &last, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    PyObject *list = NULL;
    if (status < 0) {
        ckvpy_raise(self->state, status, &error);
    } else {
        list = PyList_New(0);
    }
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *row = ckvpy_from_event(&events[i]);
        if (row == NULL || PyList_Append(list, row) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(row);
    }
    PyMem_Free(events);
    return list == NULL ? NULL
                        : Py_BuildValue("(NKK)", list, (unsigned long long)lost,
                              (unsigned long long)last);
}

/* _list(cursor, limit) -> (list of tuples, cursor) */
static PyObject *
cache_list(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    static const struct ckvpy_signature signature = {"_list", 2, 2, 2,
        {"cursor", "limit"}};
    PyObject *values[2];
    uint64_t cursor;
    size_t limit;
    if (ckvpy_parse(&signature, args, nargs, kwnames, values) < 0 ||
        ckvpy_uint64(values[0], "cursor", &cursor) < 0 ||
        parse_limit(values[1], &limit) < 0) {
        return NULL;
    }
    struct ckv_entry_info *entries = PyMem_Calloc(limit, sizeof(*entries));
    if (entries == NULL) {
        return PyErr_NoMemory();
    }
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        PyMem_Free(entries);
        return NULL;
    }
    size_t count = 0;
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_list(cache, &cursor, entries, limit, &count, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    PyObject *list = NULL;
    if (status < 0) {
        ckvpy_raise(self->state, status, &error);
    } else {
        list = PyList_New(0);
    }
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *row = ckvpy_from_entry(&entries[i]);
        if (row == NULL || PyList_Append(list, row) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(row);
    }
    PyMem_Free(entries);
    return list == NULL ? NULL
                        : Py_BuildValue("(NK)", list, (unsigned long long)cursor);
}

/* _stats() -> (volume, process) */
static PyObject *
cache_stats(PyObject *object, PyObject *unused)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    (void)unused;
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        return NULL;
    }
    struct ckv_stats volume = {0};
    struct ckv_stats process = {0};
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_get_stats(cache, &volume, &process, &error);
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    if (status < 0) {
        return ckvpy_raise(self->state, status, &error);
    }
    PyObject *volume_dict = ckvpy_from_stats(&volume);
    PyObject *process_dict = volume_dict != NULL ? ckvpy_from_stats(&process) : NULL;
    if (process_dict == NULL) {
        Py_XDECREF(volume_dict);
        return NULL;
    }
    return Py_BuildValue("(NN)", volume_dict, process_dict);
}

/* _info() -> dict */
static PyObject *
cache_info(PyObject *object, PyObject *unused)
{
    struct ckvpy_cache *self = (struct ckvpy_cache *)object;
    (void)unused;
    struct ckvpy_handle *handle = self->handle;
    struct ckv_cache *cache = ckvpy_begin(self->state, handle);
    if (cache == NULL) {
        return NULL;
    }
    struct ckv_info info = {0};
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_get_info(cache, &info, &error);
    Py_END_ALLOW_THREADS
    /* Its strings live as long as the handle: leave after they were copied, and keep
       the finalizers that a collection could run away from that (B4). */
    const int collecting = PyGC_Disable();
    PyObject *result = status >= 0 ? ckvpy_from_info(&info) : NULL;
    ckvpy_leave(handle);
    if (collecting) {
        PyGC_Enable();
    }
    ckvpy_log_flush(self->state);
    return status < 0 ? ckvpy_raise(self->state, status, &error) : result;
}

/* ---- type ----------------------------------------------------------------------- */

#define FASTCALL(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef cache_methods[] = {
    {"_copy_many", FASTCALL(cache_copy_many), METH_FASTCALL, NULL},
    {"_events", FASTCALL(cache_events), METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_hold", cache_hold, METH_NOARGS, NULL},
    {"_info", cache_info, METH_NOARGS, NULL},
    {"_lease", cache_lease, METH_O, NULL},
    {"_list", FASTCALL(cache_list), METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_locate", cache_locate, METH_O, NULL},
    {"_open", FASTCALL(cache_open), METH_METHOD | METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_pin_many", FASTCALL(cache_pin_many), METH_FASTCALL, NULL},
    {"_reserve", FASTCALL(cache_reserve), METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_stats", cache_stats, METH_NOARGS, NULL},
    {"_verify", FASTCALL(cache_verify), METH_FASTCALL | METH_KEYWORDS, NULL},
    {"clear", cache_clear, METH_NOARGS, CKVPY_DOC_Cache_clear},
    {"close", cache_close, METH_NOARGS, CKVPY_DOC_Cache_close},
    {"contains", cache_contains, METH_O, CKVPY_DOC_Cache_contains},
    {"contains_many", cache_contains_many, METH_O, CKVPY_DOC_Cache_contains_many},
    {"get", cache_get, METH_O, CKVPY_DOC_Cache_get},
    {"get_into", FASTCALL(cache_get_into), METH_FASTCALL | METH_KEYWORDS,
        CKVPY_DOC_Cache_get_into},
    {"get_many_into", FASTCALL(cache_get_many_into), METH_FASTCALL | METH_KEYWORDS,
        CKVPY_DOC_Cache_get_many_into},
    {"longest_prefix", FASTCALL(cache_longest_prefix), METH_FASTCALL | METH_KEYWORDS,
        CKVPY_DOC_Cache_longest_prefix},
    {"prefetch", cache_prefetch, METH_O, CKVPY_DOC_Cache_prefetch},
    {"put", FASTCALL(cache_put), METH_FASTCALL | METH_KEYWORDS, CKVPY_DOC_Cache_put},
    {"put_many", FASTCALL(cache_put_many), METH_FASTCALL | METH_KEYWORDS,
        CKVPY_DOC_Cache_put_many},
    {"recover", cache_recover, METH_NOARGS, CKVPY_DOC_Cache_recover},
    {"remove", cache_remove, METH_O, CKVPY_DOC_Cache_remove},
    {"sync", cache_sync, METH_NOARGS, CKVPY_DOC_Cache_sync},
    {"touch", cache_touch, METH_O, CKVPY_DOC_Cache_touch},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef cache_properties[] = {
    {"closed", cache_closed, NULL, CKVPY_DOC_Cache_closed, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot cache_slots[] = {
    {Py_tp_dealloc, CKVPY_SLOT(cache_dealloc)},
    {Py_tp_finalize, CKVPY_SLOT(cache_finalize)},
    {Py_tp_methods, cache_methods},
    {Py_tp_getset, cache_properties},
    {Py_sq_contains, CKVPY_SLOT(contains)},
    {Py_sq_length, CKVPY_SLOT(cache_length)},
    {Py_nb_bool, CKVPY_SLOT(cache_bool)},
    {0, NULL},
};

PyType_Spec ckvpy_cache_spec = {
    .name = "cyclone_kv._core.Cache",
    .basicsize = sizeof(struct ckvpy_cache),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = cache_slots,
};
