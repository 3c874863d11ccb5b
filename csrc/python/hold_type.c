/* SPDX-License-Identifier: Apache-2.0 */
/* hold_type.c: cyclone_kv._core.Hold, a hold on the mapping of the data area.
 *
 * For the package's own code that talks to device drivers.  The object is the hold: it
 * ends with release(), or with the object, unless keep() made it last until the process
 * ends.  One thread at a time may use a Hold, but for select() and the calls that
 * take it as an argument.
 */
#include "binding.h"

struct hold {
    PyObject_HEAD
    struct ckvpy_state *state;
    struct ckv_hold *hold; /* NULL once released */
};

static void
release(struct hold *self)
{
    struct ckv_hold *hold = self->hold;
    self->hold = NULL;
    if (hold != NULL) {
        Py_BEGIN_ALLOW_THREADS /* it may be the last of a volume, which then ends */
        ckv_hold_release(&hold);
        Py_END_ALLOW_THREADS
    }
}

PyObject *
ckvpy_hold_new(struct ckvpy_state *state, struct ckv_hold **hold)
{
    struct hold *self = PyObject_New(struct hold, state->hold_type);
    if (self == NULL) {
        ckv_hold_release(hold);
        return NULL;
    }
    self->state = state;
    self->hold = *hold;
    *hold = NULL;
    return (PyObject *)self;
}

static struct ckv_hold *
opened(PyObject *object)
{
    struct ckv_hold *hold = ((struct hold *)object)->hold;
    if (hold == NULL) {
        PyErr_SetString(PyExc_ValueError, "the hold was released");
    }
    return hold;
}

struct ckv_hold *
ckvpy_hold_of(struct ckvpy_state *state, PyObject *object)
{
    if (!PyObject_TypeCheck(object, state->hold_type)) {
        PyErr_SetString(PyExc_TypeError, "hold must be a Hold or None");
        return NULL;
    }
    return opened(object);
}

static void
hold_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    release((struct hold *)object);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* chunk(index) -> (address, nbytes) */
static PyObject *
hold_chunk(PyObject *object, PyObject *argument)
{
    uint64_t index = 0;
    struct ckv_hold *hold = opened(object);
    if (hold == NULL || ckvpy_uint64(argument, "index", &index) < 0) {
        return NULL;
    }
    struct ckv_chunk chunk;
    struct ckv_error error = {.status = CKV_OK};
    const enum ckv_status status = ckv_hold_chunk(hold, (size_t)index, &chunk, &error);
    if (status < 0) {
        return ckvpy_raise(((struct hold *)object)->state, status, &error);
    }
    return Py_BuildValue("(KK)", (unsigned long long)(uintptr_t)chunk.address,
        (unsigned long long)chunk.length);
}

/* populate(index, offset, nbytes) */
static PyObject *
hold_populate(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    static const struct ckvpy_signature signature = {"populate", 3, 3, 3,
        {"index", "offset", "nbytes"}};
    PyObject *values[3];
    uint64_t numbers[3];
    struct ckv_hold *hold = opened(object);
    if (hold == NULL || ckvpy_parse(&signature, args, nargs, NULL, values) < 0) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        if (ckvpy_uint64(values[i], signature.names[i], &numbers[i]) < 0) {
            return NULL;
        }
    }
    struct ckv_error error = {.status = CKV_OK};
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status =
        ckv_hold_populate(hold, (size_t)numbers[0], numbers[1], numbers[2], &error);
    Py_END_ALLOW_THREADS
    if (status < 0) {
        return ckvpy_raise(((struct hold *)object)->state, status, &error);
    }
    Py_RETURN_NONE;
}

/* select(index, selected) */
static PyObject *
hold_select(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    static const struct ckvpy_signature signature = {"select", 2, 2, 2,
        {"index", "selected"}};
    PyObject *values[2];
    uint64_t index = 0;
    bool selected = false;
    struct ckv_hold *hold = opened(object);
    if (hold == NULL || ckvpy_parse(&signature, args, nargs, NULL, values) < 0 ||
        ckvpy_uint64(values[0], "index", &index) < 0 ||
        ckvpy_bool(values[1], &selected) < 0) {
        return NULL;
    }
    if (index >= ckv_hold_chunks(hold)) {
        PyErr_Format(PyExc_IndexError, "chunk %llu of %zu", (unsigned long long)index,
            ckv_hold_chunks(hold));
        return NULL;
    }
    ckv_hold_select(hold, (size_t)index, selected);
    Py_RETURN_NONE;
}

static PyObject *
hold_release(PyObject *object, PyObject *unused)
{
    (void)unused;
    release((struct hold *)object);
    Py_RETURN_NONE;
}

/* Never gives the mapping back: a driver may still use it. */
static PyObject *
hold_keep(PyObject *object, PyObject *unused)
{
    (void)unused;
    ((struct hold *)object)->hold = NULL;
    Py_RETURN_NONE;
}

static PyObject *
hold_chunks(PyObject *object, void *closure)
{
    (void)closure;
    const struct ckv_hold *hold = opened(object);
    return hold == NULL ? NULL : PyLong_FromSize_t(ckv_hold_chunks(hold));
}

static PyObject *
hold_volume(PyObject *object, void *closure)
{
    (void)closure;
    const struct ckv_hold *hold = opened(object);
    return hold == NULL ? NULL
                        : PyLong_FromSize_t((size_t)(uintptr_t)ckv_hold_volume(hold));
}

#define FASTCALL(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef hold_methods[] = {
    {"chunk", hold_chunk, METH_O, NULL},
    {"keep", hold_keep, METH_NOARGS, NULL},
    {"populate", FASTCALL(hold_populate), METH_FASTCALL, NULL},
    {"release", hold_release, METH_NOARGS, NULL},
    {"select", FASTCALL(hold_select), METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef hold_properties[] = {
    {"chunks", hold_chunks, NULL, NULL, NULL},
    {"volume", hold_volume, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot hold_slots[] = {
    {Py_tp_dealloc, CKVPY_SLOT(hold_dealloc)},
    {Py_tp_methods, hold_methods},
    {Py_tp_getset, hold_properties},
    {0, NULL},
};

PyType_Spec ckvpy_hold_spec = {
    .name = "cyclone_kv._core.Hold",
    .basicsize = sizeof(struct hold),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = hold_slots,
};
