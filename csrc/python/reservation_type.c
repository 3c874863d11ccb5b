/* SPDX-License-Identifier: Apache-2.0 */
/* reservation_type.c: cyclone_kv._core.Reservation, a block being produced in place.
 *
 *             commit(), no buffer out              abort(), no buffer out
 *     done <------------------------- producing -------------------------> done
 *                                         |                                 ^
 *                 commit() or abort()     v       last buffer released      |
 *                 with a buffer out    doomed ------------------------------+
 *
 * Whoever still holds a buffer could change bytes that were already checked, so
 * commit() with a buffer out is a BufferError and stores nothing.  The memory stays
 * until that buffer is gone (B3).
 */
#include "binding.h"

struct reservation {
    PyObject_HEAD
    struct ckvpy_state *state;
    struct ckvpy_handle *handle;
    struct ckv_reservation *reservation; /* NULL when done */
    Py_ssize_t exports;                  /* buffers that are out */
    bool doomed;                         /* ends with the last buffer */
};

PyObject *
ckvpy_reservation_new(struct ckvpy_state *state, struct ckvpy_handle *handle,
    struct ckv_reservation **reservation)
{
    struct reservation *self =
        PyObject_New(struct reservation, state->reservation_type);
    if (self == NULL) {
        ckv_abort(reservation);
        return NULL;
    }
    self->state = state;
    self->handle = handle;
    handle->references++;
    self->reservation = *reservation;
    self->exports = 0;
    self->doomed = false;
    *reservation = NULL;
    return (PyObject *)self;
}

/* Drops the block, or leaves that to the last buffer. */
static void
drop(struct reservation *self)
{
    self->doomed = true;
    if (self->exports == 0 && self->reservation != NULL) {
        struct ckv_reservation *reservation = self->reservation;
        self->reservation = NULL;
        Py_BEGIN_ALLOW_THREADS
        ckv_abort(&reservation);
        Py_END_ALLOW_THREADS
    }
}

static void
reservation_dealloc(PyObject *object)
{
    struct reservation *self = (struct reservation *)object;
    PyTypeObject *type = Py_TYPE(object);
    drop(self);
    ckvpy_handle_release(self->handle);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int
reservation_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    struct reservation *self = (struct reservation *)object;
    if (self->reservation == NULL || self->doomed) {
        PyErr_SetString(PyExc_BufferError, "the reservation has ended");
        view->obj = NULL;
        return -1;
    }
    static char nothing; /* the address of an empty block; never written */
    size_t length;
    void *data = ckv_reservation_data(self->reservation, &length);
    if (PyBuffer_FillInfo(view, object, data != NULL ? data : &nothing,
            (Py_ssize_t)length, 0, flags) < 0) {
        return -1;
    }
    self->exports++;
    return 0;
}

static void
reservation_releasebuffer(PyObject *object, Py_buffer *view)
{
    struct reservation *self = (struct reservation *)object;
    (void)view; /* all buffers are alike */
    self->exports--;
    if (self->doomed) {
        drop(self);
    }
}

/* commit(overwrite) -> bool */
static PyObject *
reservation_commit(PyObject *object, PyObject *overwrite)
{
    struct reservation *self = (struct reservation *)object;
    bool replace = false;
    if (ckvpy_bool(overwrite, &replace) < 0) {
        return NULL;
    }
    if (self->reservation == NULL || self->doomed) {
        PyErr_SetString(PyExc_ValueError, "the reservation has ended");
        return NULL;
    }
    if (self->exports != 0) {
        PyErr_Format(PyExc_BufferError,
            "the block was not stored: %zd buffers of the reservation are in use "
            "(delete the memoryviews and arrays made from its view before it commits)",
            self->exports);
        drop(self);
        return NULL;
    }
    if (ckvpy_begin(self->state, self->handle) == NULL) {
        drop(self);
        return NULL;
    }
    struct ckv_reservation *reservation = self->reservation;
    self->reservation = NULL;
    struct ckvpy_handle *handle = self->handle;
    struct ckv_error error;
    enum ckv_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ckv_commit(&reservation, replace ? CKV_PUT_OVERWRITE : 0, &error);
    if (reservation != NULL) { /* whatever a failed commit left */
        ckv_abort(&reservation);
    }
    ckvpy_leave(handle);
    Py_END_ALLOW_THREADS
    ckvpy_log_flush(self->state);
    if (status < 0) {
        return ckvpy_raise(self->state, status, &error);
    }
    return PyBool_FromLong(status == CKV_OK || status == CKV_PRESENT);
}

static PyObject *
reservation_abort(PyObject *object, PyObject *unused)
{
    (void)unused;
    drop((struct reservation *)object);
    Py_RETURN_NONE;
}

static PyMethodDef reservation_methods[] = {
    {"abort", reservation_abort, METH_NOARGS, NULL},
    {"commit", reservation_commit, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reservation_slots[] = {
    {Py_tp_dealloc, CKVPY_SLOT(reservation_dealloc)},
    {Py_tp_methods, reservation_methods},
    {Py_bf_getbuffer, CKVPY_SLOT(reservation_getbuffer)},
    {Py_bf_releasebuffer, CKVPY_SLOT(reservation_releasebuffer)},
    {0, NULL},
};

PyType_Spec ckvpy_reservation_spec = {
    .name = "cyclone_kv._core.Reservation",
    .basicsize = sizeof(struct reservation),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = reservation_slots,
};
