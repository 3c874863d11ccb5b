/* SPDX-License-Identifier: Apache-2.0 */
/* lease_type.c: cyclone_kv._core.Lease, a pinned block as a read-only buffer.
 *
 * The object is the pin.  Every memoryview, slice or array taken from it holds a buffer
 * of it, each buffer holds a reference, and the block is unpinned when the last of them
 * is gone: by release() while no buffer is out (B3), or with the object.
 */
#include "binding.h"

struct lease {
    PyObject_HEAD
    struct ckvpy_state *state;
    struct ckvpy_handle *handle;
    struct ckv_lease *lease; /* NULL once released */
    Py_ssize_t exports;      /* buffers that are out */
};

/* Gives the pin back.  Usually one atomic operation, for which the GIL is kept; but the
 * last lease of a closed cache tears the volume down. */
static void
unpin(struct lease *self)
{
    if (self->lease == NULL) {
        return;
    }
    struct ckv_lease *lease = self->lease;
    self->lease = NULL;
    if (atomic_load_explicit(&self->handle->closing, memory_order_relaxed)) {
        Py_BEGIN_ALLOW_THREADS
        ckv_lease_release(&lease);
        Py_END_ALLOW_THREADS
        return;
    }
    ckv_lease_release(&lease);
}

PyObject *
ckvpy_lease_new(struct ckvpy_state *state, struct ckvpy_handle *handle,
    struct ckv_lease **lease)
{
    struct lease *self = PyObject_New(struct lease, state->lease_type);
    if (self == NULL) {
        ckv_lease_release(lease);
        return NULL;
    }
    self->state = state;
    self->handle = handle;
    handle->references++;
    self->lease = *lease;
    self->exports = 0;
    *lease = NULL;
    return (PyObject *)self;
}

static void
lease_dealloc(PyObject *object)
{
    struct lease *self = (struct lease *)object;
    PyTypeObject *type = Py_TYPE(object);
    unpin(self);
    ckvpy_handle_release(self->handle);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int
lease_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    struct lease *self = (struct lease *)object;
    if (self->lease == NULL) {
        PyErr_SetString(PyExc_BufferError, "the entry was released");
        view->obj = NULL;
        return -1;
    }
    size_t length;
    const void *data = ckv_lease_data(self->lease, &length);
    union {
        const void *constant;
        void *variable;
    } address = {.constant = data != NULL ? data : ""};
    if (PyBuffer_FillInfo(view, object, address.variable, (Py_ssize_t)length, 1,
            flags) < 0) {
        return -1;
    }
    self->exports++;
    return 0;
}

static void
lease_releasebuffer(PyObject *object, Py_buffer *view)
{
    (void)view; /* all buffers are alike */
    ((struct lease *)object)->exports--;
}

static PyObject *
released_error(void)
{
    PyErr_SetString(PyExc_ValueError, "the entry was released");
    return NULL;
}

static PyObject *
lease_release(PyObject *object, PyObject *unused)
{
    struct lease *self = (struct lease *)object;
    (void)unused;
    if (self->exports != 0) {
        PyErr_Format(PyExc_BufferError,
            "the entry cannot be released: %zd buffers of it are in use "
            "(delete the memoryviews and arrays that were made from its view)",
            self->exports);
        return NULL;
    }
    unpin(self);
    Py_RETURN_NONE;
}

static PyObject *
lease_ok(PyObject *object, PyObject *unused)
{
    struct lease *self = (struct lease *)object;
    (void)unused;
    if (self->lease == NULL) {
        return released_error();
    }
    return PyBool_FromLong(ckv_lease_ok(self->lease));
}

static PyObject *
lease_header(PyObject *object, void *closure)
{
    struct lease *self = (struct lease *)object;
    (void)closure;
    if (self->lease == NULL) {
        return released_error();
    }
    size_t length;
    const void *data = ckv_lease_header(self->lease, &length);
    return PyBytes_FromStringAndSize(data, (Py_ssize_t)length);
}

/* Where the payload lies, for who copies it without the GIL and keeps the lease. */
static PyObject *
lease_address(PyObject *object, void *closure)
{
    struct lease *self = (struct lease *)object;
    (void)closure;
    if (self->lease == NULL) {
        return released_error();
    }
    size_t length;
    return PyLong_FromSize_t((size_t)(uintptr_t)ckv_lease_data(self->lease, &length));
}

static PyObject *
lease_nbytes(PyObject *object, void *closure)
{
    struct lease *self = (struct lease *)object;
    (void)closure;
    if (self->lease == NULL) {
        return released_error();
    }
    size_t length;
    (void)ckv_lease_data(self->lease, &length); /* only the length is wanted */
    return PyLong_FromSize_t(length);
}

static PyObject *
lease_released(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(((struct lease *)object)->lease == NULL);
}

static PyMethodDef lease_methods[] = {
    {"ok", lease_ok, METH_NOARGS, NULL},
    {"release", lease_release, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef lease_properties[] = {
    {"address", lease_address, NULL, NULL, NULL},
    {"header", lease_header, NULL, NULL, NULL},
    {"nbytes", lease_nbytes, NULL, NULL, NULL},
    {"released", lease_released, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot lease_slots[] = {
    {Py_tp_dealloc, CKVPY_SLOT(lease_dealloc)},
    {Py_tp_methods, lease_methods},
    {Py_tp_getset, lease_properties},
    {Py_bf_getbuffer, CKVPY_SLOT(lease_getbuffer)},
    {Py_bf_releasebuffer, CKVPY_SLOT(lease_releasebuffer)},
    {0, NULL},
};

PyType_Spec ckvpy_lease_spec = {
    .name = "cyclone_kv._core.Lease",
    .basicsize = sizeof(struct lease),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = lease_slots,
};
