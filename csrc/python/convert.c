/* SPDX-License-Identifier: Apache-2.0 */
/* convert.c: Python values to arguments of the engine, results to Python values.
 *
 * Nothing here calls the engine or releases the GIL.  What an argument points to is
 * kept alive by a buffer or a reference that the caller gives back after the call.
 */
#include "binding.h"

#include <limits.h>
#include <string.h>

enum { HOLD_CHUNK = 32, KEY_BYTES = 32 };

struct ckvpy_hold_chunk {
    struct ckvpy_hold_chunk *next;
    size_t count;
    Py_buffer buffers[HOLD_CHUNK];
};

/* ---- errors --------------------------------------------------------------------- */

int
ckvpy_find_errors(struct ckvpy_state *state)
{
    if (state->from_status != NULL) {
        return 0;
    }
    PyObject *errors = PyImport_ImportModule("cyclone_kv.errors");
    if (errors == NULL) {
        return -1;
    }
    state->from_status = PyObject_GetAttrString(errors, "from_status");
    Py_DECREF(errors);
    return state->from_status != NULL ? 0 : -1;
}

PyObject *
ckvpy_raise(struct ckvpy_state *state, enum ckv_status status,
    const struct ckv_error *error)
{
    if (ckvpy_find_errors(state) < 0) {
        return NULL;
    }
    const bool told = error != NULL && error->status == status;
    const char *text =
        told && error->text[0] != '\0' ? error->text : ckv_status_text(status);
    PyObject *string = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (string == NULL) {
        return NULL;
    }
    PyObject *exception = PyObject_CallFunction(state->from_status, "iiN", (int)status,
        told ? error->os_errno : 0, string);
    if (exception != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
        Py_DECREF(exception);
    }
    return NULL;
}

/* ---- arguments ------------------------------------------------------------------ */

static Py_ssize_t
find_name(const struct ckvpy_signature *signature, PyObject *name)
{
    for (Py_ssize_t i = 0; i < signature->total; i++) {
        if (PyUnicode_CompareWithASCIIString(name, signature->names[i]) == 0) {
            return i;
        }
    }
    return -1;
}

static int
parse_keywords(const struct ckvpy_signature *signature, PyObject *const *args,
    PyObject *kwnames, PyObject **values)
{
    const Py_ssize_t count = kwnames != NULL ? PyTuple_Size(kwnames) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PyTuple_GetItem(kwnames, i);
        const Py_ssize_t index = find_name(signature, name);
        if (index < 0) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R",
                signature->function, name);
            return -1;
        }
        if (values[index] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument %R",
                signature->function, name);
            return -1;
        }
        values[index] = args[i];
    }
    return 0;
}

int
ckvpy_parse(const struct ckvpy_signature *signature, PyObject *const *args,
    Py_ssize_t nargs, PyObject *kwnames, PyObject **values)
{
    if (nargs > signature->positional) {
        PyErr_Format(PyExc_TypeError,
            "%s() takes at most %zd positional arguments (%zd given)",
            signature->function, signature->positional, nargs);
        return -1;
    }
    for (Py_ssize_t i = 0; i < signature->total; i++) {
        values[i] = i < nargs ? args[i] : NULL;
    }
    if (parse_keywords(signature, args + nargs, kwnames, values) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < signature->required; i++) {
        if (values[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing argument '%s'",
                signature->function, signature->names[i]);
            return -1;
        }
    }
    return 0;
}

int
ckvpy_bool(PyObject *value, bool *flag)
{
    if (value != NULL) {
        const int truth = PyObject_IsTrue(value);
        if (truth < 0) {
            return -1;
        }
        *flag = truth != 0;
    }
    return 0;
}

int
ckvpy_uint64(PyObject *value, const char *name, uint64_t *number)
{
    PyObject *integer = PyNumber_Index(value);
    if (integer == NULL) {
        return -1;
    }
    const unsigned long long wide = PyLong_AsUnsignedLongLong(integer);
    Py_DECREF(integer);
    if (wide == ULLONG_MAX && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError,
                "%s is %R; it must be between 0 and 2**64 - 1", name, value);
        }
        return -1;
    }
    *number = wide;
    return 0;
}

/* ---- buffers -------------------------------------------------------------------- */

void
ckvpy_holds_init(struct ckvpy_holds *holds)
{
    holds->local_count = 0;
    holds->chunks = NULL;
}

/* Where the next buffer goes; NULL without memory. */
static Py_buffer *
next_buffer(struct ckvpy_holds *holds)
{
    const size_t local_size = sizeof(holds->local) / sizeof(holds->local[0]);
    if (holds->local_count < local_size) {
        return &holds->local[holds->local_count];
    }
    if (holds->chunks == NULL || holds->chunks->count == HOLD_CHUNK) {
        struct ckvpy_hold_chunk *chunk = PyMem_Malloc(sizeof(*chunk));
        if (chunk == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        chunk->next = holds->chunks;
        chunk->count = 0;
        holds->chunks = chunk;
    }
    return &holds->chunks->buffers[holds->chunks->count];
}

const Py_buffer *
ckvpy_hold(struct ckvpy_holds *holds, PyObject *object, int flags)
{
    Py_buffer *buffer = next_buffer(holds);
    if (buffer == NULL || PyObject_GetBuffer(object, buffer, flags) < 0) {
        return NULL;
    }
    if (holds->chunks == NULL) {
        holds->local_count++;
    } else {
        holds->chunks->count++;
    }
    return buffer;
}

void
ckvpy_holds_release(struct ckvpy_holds *holds)
{
    for (size_t i = 0; i < holds->local_count; i++) {
        PyBuffer_Release(&holds->local[i]);
    }
    holds->local_count = 0;
    while (holds->chunks != NULL) {
        struct ckvpy_hold_chunk *chunk = holds->chunks;
        holds->chunks = chunk->next;
        for (size_t i = 0; i < chunk->count; i++) {
            PyBuffer_Release(&chunk->buffers[i]);
        }
        PyMem_Free(chunk);
    }
}

/* ---- keys ----------------------------------------------------------------------- */

int
ckvpy_key(struct ckvpy_holds *holds, PyObject *object, struct ckv_key *key)
{
    if (PyBytes_Check(object)) { /* immutable: the reference is enough */
        char *data;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(object, &data, &length) < 0) {
            return -1;
        }
        key->data = data;
        key->length = (size_t)length;
        return 0;
    }
    const Py_buffer *buffer = ckvpy_hold(holds, object, PyBUF_SIMPLE);
    if (buffer == NULL) {
        return -1;
    }
    key->data = buffer->buf;
    key->length = (size_t)buffer->len;
    return 0;
}

static struct ckv_key *
allocate_keys(size_t count)
{
    struct ckv_key *items = PyMem_Calloc(count != 0 ? count : 1, sizeof(*items));
    if (items == NULL) {
        PyErr_NoMemory();
    }
    return items;
}

/* Splits one buffer into keys of 32 bytes. */
static int
split_buffer(struct ckvpy_keys *keys, PyObject *object)
{
    const Py_buffer *buffer = ckvpy_hold(&keys->holds, object, PyBUF_ND);
    if (buffer == NULL) {
        return -1;
    }
    bool fits = buffer->len % KEY_BYTES == 0;
    if (buffer->ndim >= 2) {
        fits = buffer->ndim == 2 && buffer->shape[1] * buffer->itemsize == KEY_BYTES;
    }
    if (!fits) {
        PyErr_Format(PyExc_ValueError,
            "a buffer of keys must hold rows of 32 bytes, not %zd bytes in %d "
            "dimensions "
            "(pass keys of other lengths as a list)",
            buffer->len, buffer->ndim);
        return -1;
    }
    keys->count = (size_t)buffer->len / KEY_BYTES;
    keys->items = allocate_keys(keys->count);
    if (keys->items == NULL) {
        return -1;
    }
    const char *data = buffer->buf;
    for (size_t i = 0; i < keys->count; i++) {
        keys->items[i].data = data + i * KEY_BYTES;
        keys->items[i].length = KEY_BYTES;
    }
    return 0;
}

static int
split_sequence(struct ckvpy_keys *keys, PyObject *object)
{
    if (PyUnicode_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "keys are bytes-like objects, not str");
        return -1;
    }
    /* A tuple of our own: another thread may change a list while the GIL is released.
     */
    keys->owner = PySequence_Tuple(object);
    if (keys->owner == NULL) {
        return -1;
    }
    const Py_ssize_t count = PyTuple_Size(keys->owner);
    keys->items = allocate_keys((size_t)count);
    if (keys->items == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(keys->owner, i);
        if (ckvpy_key(&keys->holds, item, &keys->items[i]) < 0) {
            return -1;
        }
    }
    keys->count = (size_t)count;
    return 0;
}

int
ckvpy_keys_init(struct ckvpy_keys *keys, PyObject *object)
{
    keys->items = NULL;
    keys->count = 0;
    keys->owner = NULL;
    ckvpy_holds_init(&keys->holds);
    const bool listed = PyList_Check(object) || PyTuple_Check(object);
    const int result = !listed && PyObject_CheckBuffer(object)
                           ? split_buffer(keys, object)
                           : split_sequence(keys, object);
    if (result < 0) {
        ckvpy_keys_release(keys);
    }
    return result;
}

void
ckvpy_keys_release(struct ckvpy_keys *keys)
{
    PyMem_Free(keys->items);
    keys->items = NULL;
    keys->count = 0;
    ckvpy_holds_release(&keys->holds);
    Py_CLEAR(keys->owner);
}

/* ---- pieces --------------------------------------------------------------------- */

static int
reserve_pieces(struct ckvpy_pieces *pieces, size_t more)
{
    if (pieces->capacity - pieces->count >= more) {
        return 0;
    }
    size_t capacity = pieces->capacity != 0 ? pieces->capacity : 8;
    while (capacity - pieces->count < more) {
        if (capacity > SIZE_MAX / 2 / sizeof(*pieces->items)) {
            PyErr_NoMemory();
            return -1;
        }
        capacity *= 2;
    }
    union ckvpy_piece *items =
        PyMem_Realloc(pieces->items, capacity * sizeof(*pieces->items));
    if (items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    pieces->items = items;
    pieces->capacity = capacity;
    return 0;
}

static int
add_piece(struct ckvpy_pieces *pieces, struct ckvpy_holds *holds, PyObject *object,
    bool writable)
{
    const Py_buffer *buffer =
        ckvpy_hold(holds, object, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    if (buffer == NULL || reserve_pieces(pieces, 1) < 0) {
        return -1;
    }
    union ckvpy_piece *piece = &pieces->items[pieces->count++];
    if (writable) {
        piece->target.data = buffer->buf;
        piece->target.length = (size_t)buffer->len;
    } else {
        piece->segment.data = buffer->buf;
        piece->segment.length = (size_t)buffer->len;
    }
    return 0;
}

int
ckvpy_pieces_add(struct ckvpy_pieces *pieces, struct ckvpy_holds *holds,
    PyObject *object, bool writable, size_t *count)
{
    const size_t before = pieces->count;
    if (!PyList_Check(object) && !PyTuple_Check(object)) {
        if (add_piece(pieces, holds, object, writable) < 0) {
            return -1;
        }
        *count = pieces->count - before;
        return 0;
    }
    PyObject *tuple = PySequence_Tuple(object); /* a list may change under us */
    if (tuple == NULL) {
        return -1;
    }
    const Py_ssize_t size = PyTuple_Size(tuple);
    for (Py_ssize_t i = 0; i < size; i++) {
        if (add_piece(pieces, holds, PyTuple_GetItem(tuple, i), writable) < 0) {
            Py_DECREF(tuple);
            return -1;
        }
    }
    Py_DECREF(tuple);
    *count = pieces->count - before;
    return 0;
}

void
ckvpy_pieces_release(struct ckvpy_pieces *pieces)
{
    PyMem_Free(pieces->items);
    pieces->items = NULL;
    pieces->count = 0;
    pieces->capacity = 0;
}

/* ---- options -------------------------------------------------------------------- */

/* X(kind, field): everything in struct ckv_options that is a number or a flag. */
#define NUMERIC_OPTIONS(X)                                                             \
    X(uint64, expected_object_bytes)                                                   \
    X(uint64, page_table_budget_bytes)                                                 \
    X(uint32, stripe_count)                                                            \
    X(uint32, file_mode)                                                               \
    X(uint32, open_timeout_ms)                                                         \
    X(uint32, sync_interval_ms)                                                        \
    X(uint32, io_threads)                                                              \
    X(uint32, event_capacity)                                                          \
    X(enum_mode, mode)                                                                 \
    X(enum_verify, verify)                                                             \
    X(enum_on_mismatch, on_mismatch)                                                   \
    X(enum_admission, admission)                                                       \
    X(enum_eviction, eviction)                                                         \
    X(flag, create)                                                                    \
    X(flag, degraded)                                                                  \
    X(flag, allow_shared_directory)                                                    \
    X(flag, allow_network_fs)                                                          \
    X(flag, allow_sparse)                                                              \
    X(flag, sigbus_guard)                                                              \
    X(flag, write_behind)

static int
set_uint64(PyObject *value, const char *name, uint64_t *field)
{
    return ckvpy_uint64(value, name, field);
}

static int
set_uint32(PyObject *value, const char *name, uint32_t *field)
{
    uint64_t number;
    if (ckvpy_uint64(value, name, &number) < 0) {
        return -1;
    }
    if (number > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s is %R; it must be below 2**32", name, value);
        return -1;
    }
    *field = (uint32_t)number;
    return 0;
}

static int
set_flag(PyObject *value, const char *name, bool *field)
{
    (void)name;
    return ckvpy_bool(value, field);
}

#define DEFINE_SET_ENUM(type)                                                          \
    static int set_enum_##type(PyObject *value, const char *name,                      \
        enum ckv_##type *field)                                                        \
    {                                                                                  \
        uint32_t number;                                                               \
        if (set_uint32(value, name, &number) < 0) {                                    \
            return -1;                                                                 \
        }                                                                              \
        *field = (enum ckv_##type)number;                                              \
        return 0;                                                                      \
    }
DEFINE_SET_ENUM(mode)
DEFINE_SET_ENUM(verify)
DEFINE_SET_ENUM(on_mismatch)
DEFINE_SET_ENUM(admission)
DEFINE_SET_ENUM(eviction)

static int
set_bytes(PyObject *value, const char **data, size_t *length)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(value, &bytes, &size) < 0) {
        return -1;
    }
    *data = bytes;
    *length = (size_t)size;
    return 0;
}

static int
set_path(PyObject *value, const char **path)
{
    char *bytes;
    if (PyBytes_AsStringAndSize(value, &bytes, NULL) < 0) { /* refuses NUL */
        return -1;
    }
    *path = bytes;
    return 0;
}

/* Sets one option; the dict of the caller keeps the bytes of it alive. */
static int
set_option(struct ckv_options *options, PyObject *name, PyObject *value)
{
    if (!PyUnicode_Check(name)) {
        PyErr_Format(PyExc_TypeError, "options have names, not %R", name);
        return -1;
    }
#define X(kind, field)                                                                 \
    if (PyUnicode_CompareWithASCIIString(name, #field) == 0) {                         \
        return set_##kind(value, #field, &options->field);                             \
    }
    NUMERIC_OPTIONS(X)
#undef X
    const char *data;
    size_t length;
    if (PyUnicode_CompareWithASCIIString(name, "shm_directory") == 0) {
        return set_path(value, &options->shm_directory);
    }
    if (PyUnicode_CompareWithASCIIString(name, "namespace") == 0) {
        if (set_bytes(value, &data, &length) < 0) {
            return -1;
        }
        options->namespace_data = data;
        options->namespace_length = length;
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "unknown option %R", name);
    return -1;
}

/* paths: a tuple of (bytes, capacity). */
static int
set_paths(struct ckvpy_options *options, PyObject *paths)
{
    const Py_ssize_t count = PyTuple_Size(paths);
    if (count < 1 || count > CKV_PATHS_MAX) {
        PyErr_Format(PyExc_ValueError, "%zd paths were given; a cache has 1 to %d",
            count, (int)CKV_PATHS_MAX);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = PyTuple_GetItem(paths, i);
        if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
            PyErr_Format(PyExc_TypeError, "%R is not (path, capacity)", pair);
            return -1;
        }
        struct ckv_path *path = &options->paths[i];
        if (set_path(PyTuple_GetItem(pair, 0), &path->path) < 0 ||
            ckvpy_uint64(PyTuple_GetItem(pair, 1), "capacity", &path->capacity_bytes) <
                0) {
            return -1;
        }
    }
    options->options.paths = options->paths;
    options->options.path_count = (size_t)count;
    return 0;
}

int
ckvpy_options_init(struct ckvpy_options *options, PyObject *paths, PyObject *dict)
{
    if (!PyTuple_Check(paths) || !PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "paths are a tuple, and options a dict");
        return -1;
    }
    ckv_options_init(&options->options);
    options->owner = Py_BuildValue("(OO)", paths, dict);
    if (options->owner == NULL) {
        return -1;
    }
    Py_ssize_t position = 0;
    PyObject *name, *value;
    while (PyDict_Next(dict, &position, &name, &value)) {
        if (set_option(&options->options, name, value) < 0) {
            ckvpy_options_release(options);
            return -1;
        }
    }
    if (set_paths(options, paths) < 0) {
        ckvpy_options_release(options);
        return -1;
    }
    return 0;
}

void
ckvpy_options_release(struct ckvpy_options *options)
{
    Py_CLEAR(options->owner);
}

/* ---- results -------------------------------------------------------------------- */

/* dict[name] = value; takes over `value`.  -1 on error, also when value is NULL. */
static int
set_item(PyObject *dict, const char *name, PyObject *value)
{
    if (value == NULL) {
        return -1;
    }
    const int result = PyDict_SetItemString(dict, name, value);
    Py_DECREF(value);
    return result;
}

PyObject *
ckvpy_from_stats(const struct ckv_stats *stats)
{
    PyObject *dict = PyDict_New();
    if (dict == NULL) {
        return NULL;
    }
#define X(kind, name, unit, sentence)                                                  \
    if (set_item(dict, #name, PyLong_FromLongLong(stats->name)) < 0) {                 \
        Py_DECREF(dict);                                                               \
        return NULL;                                                                   \
    }
    CKV_STATISTICS(X)
#undef X
    return dict;
}

PyObject *
ckvpy_statistics(void)
{
#define X(kind, name, unit, sentence) {#kind, #name, unit, sentence},
    static const char *const rows[][4] = {CKV_STATISTICS(X)};
#undef X
    const Py_ssize_t count = (Py_ssize_t)(sizeof(rows) / sizeof(rows[0]));
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple != NULL && i < count; i++) {
        /* Interned, so that ckvpy_from_stats() finds its keys instead of making them. */
        PyObject *row = Py_BuildValue("(sNss)", rows[i][0],
            PyUnicode_InternFromString(rows[i][1]), rows[i][2], rows[i][3]);
        if (row == NULL || PyTuple_SetItem(tuple, i, row) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

PyObject *
ckvpy_statuses(void)
{
    PyObject *dict = PyDict_New();
    if (dict == NULL) {
        return NULL;
    }
#define X(name, value, text)                                                           \
    if (set_item(dict, #name, Py_BuildValue("(is)", value, text)) < 0) {               \
        Py_DECREF(dict);                                                               \
        return NULL;                                                                   \
    }
    CKV_STATUSES(X)
#undef X
    return dict;
}

/* A path as Python spells it; None for NULL. */
static PyObject *
from_path(const char *path)
{
    if (path == NULL) {
        Py_RETURN_NONE;
    }
    return PyUnicode_DecodeFSDefault(path);
}

static PyObject *
from_path_info(const struct ckv_path_info *path)
{
    return Py_BuildValue("{sNsssKsKsKsIsIsKsNsNsN}", "path", from_path(path->path),
        "file_system", path->file_system, "file_bytes",
        (unsigned long long)path->file_bytes, "data_bytes",
        (unsigned long long)path->data_bytes, "data_offset",
        (unsigned long long)path->data_offset_bytes, "stripes",
        (unsigned int)path->stripe_count, "entries_max",
        (unsigned int)path->entry_count, "free_bytes",
        (unsigned long long)path->free_bytes, "failed", PyBool_FromLong(path->failed),
        "detached", PyBool_FromLong(path->detached), "present",
        PyBool_FromLong(path->present));
}

PyObject *
ckvpy_from_info(const struct ckv_info *info)
{
    PyObject *paths = PyList_New(0);
    for (uint32_t i = 0; paths != NULL && i < info->path_count && i < CKV_PATHS_MAX;
        i++) {
        PyObject *path = from_path_info(&info->paths[i]);
        if (path == NULL || PyList_Append(paths, path) < 0) {
            Py_CLEAR(paths);
        }
        Py_XDECREF(path);
    }
    if (paths == NULL) {
        return NULL;
    }
    return Py_BuildValue("{sy#sIsKsKsKsNszsN}", "set_id", (const char *)info->set_id,
        (Py_ssize_t)sizeof(info->set_id), "format_version",
        (unsigned int)info->format_version, "payload_max_bytes",
        (unsigned long long)info->payload_max_bytes, "overhead_bytes",
        (unsigned long long)info->overhead_bytes, "shm_bytes",
        (unsigned long long)info->shm_bytes, "shm_path", from_path(info->shm_path),
        "crc32c_kernel", info->crc32c_kernel, "paths", paths);
}

PyObject *
ckvpy_from_entry(const struct ckv_entry_info *entry)
{
    return Py_BuildValue("(y#y#NNIIIKKK)", (const char *)entry->key,
        (Py_ssize_t)sizeof(entry->key), (const char *)entry->namespace_tag,
        (Py_ssize_t)sizeof(entry->namespace_tag), PyBool_FromLong(entry->digested),
        PyBool_FromLong(entry->verified), (unsigned int)entry->heat,
        (unsigned int)entry->path_index, (unsigned int)entry->header_length,
        (unsigned long long)entry->offset_bytes,
        (unsigned long long)entry->payload_length, (unsigned long long)entry->sequence);
}

PyObject *
ckvpy_from_event(const struct ckv_event *event)
{
    return Py_BuildValue("(KIy#Ny#)", (unsigned long long)event->number,
        (unsigned int)event->kind, (const char *)event->key,
        (Py_ssize_t)sizeof(event->key), PyBool_FromLong(event->digested),
        (const char *)event->namespace_tag, (Py_ssize_t)sizeof(event->namespace_tag));
}

PyObject *
ckvpy_from_report(const struct ckv_verify_report *report)
{
    const size_t length = strnlen(report->first_fault, sizeof(report->first_fault));
    PyObject *fault =
        PyUnicode_DecodeUTF8(report->first_fault, (Py_ssize_t)length, "replace");
    if (fault == NULL) {
        return NULL;
    }
    return Py_BuildValue("(KKKKKKN)", (unsigned long long)report->entries_checked,
        (unsigned long long)report->bytes_checked,
        (unsigned long long)report->damaged_payloads,
        (unsigned long long)report->unreadable,
        (unsigned long long)report->structure_faults,
        (unsigned long long)report->repaired, fault);
}
