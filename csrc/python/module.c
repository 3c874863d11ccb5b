/* SPDX-License-Identifier: Apache-2.0 */
/* module.c: the module cyclone_kv._core.
 *
 * Private: users import cyclone_kv.  Multi-phase initialisation, all state in the
 * module, so that several interpreters of one process may import it.
 */
#include "binding.h"

/* crc32c(data, crc=0, /) -> int */
static PyObject *
core_crc32c(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    uint64_t crc = 0;
    if (nargs < 1 || nargs > 2) {
        PyErr_SetString(PyExc_TypeError, "crc32c() takes data and an optional crc");
        return NULL;
    }
    if (nargs == 2 && ckvpy_uint64(args[1], "crc", &crc) < 0) {
        return NULL;
    }
    Py_buffer data;
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    uint32_t result;
    Py_BEGIN_ALLOW_THREADS
    result = ckv_crc32c((uint32_t)(crc & UINT32_MAX), data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(result);
}

static PyMethodDef core_methods[] = {
    {"crc32c", (PyCFunction)(void (*)(void))core_crc32c, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static int
add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type == NULL ? -1 : PyModule_AddType(module, *type);
}

/* Adds `value` and takes it over; it may be NULL. */
static int
add_value(PyObject *module, const char *name, PyObject *value)
{
    const int result = value == NULL ? -1 : PyModule_AddObjectRef(module, name, value);
    Py_XDECREF(value);
    return result;
}

static int
core_exec(PyObject *module)
{
    struct ckvpy_state *state = PyModule_GetState(module);
    if (add_type(module, &ckvpy_cache_spec, &state->cache_type) < 0 ||
        add_type(module, &ckvpy_lease_spec, &state->lease_type) < 0 ||
        add_type(module, &ckvpy_reservation_spec, &state->reservation_type) < 0 ||
        add_type(module, &ckvpy_hold_spec, &state->hold_type) < 0 ||
        add_value(module, "STATISTICS", ckvpy_statistics()) < 0 ||
        add_value(module, "STATUSES", ckvpy_statuses()) < 0 ||
        add_value(module, "EVENTS_FROM_NOW",
            PyLong_FromUnsignedLongLong(CKV_EVENTS_FROM_NOW)) < 0 ||
        PyModule_AddIntConstant(module, "PATHS_MAX", CKV_PATHS_MAX) < 0) {
        return -1;
    }
    ckvpy_log_start();
    return 0;
}

static int
core_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct ckvpy_state *state = PyModule_GetState(module);
    Py_VISIT(state->cache_type);
    Py_VISIT(state->lease_type);
    Py_VISIT(state->reservation_type);
    Py_VISIT(state->hold_type);
    Py_VISIT(state->from_status);
    Py_VISIT(state->log);
    return 0;
}

static int
core_clear(PyObject *module)
{
    struct ckvpy_state *state = PyModule_GetState(module);
    Py_CLEAR(state->cache_type);
    Py_CLEAR(state->lease_type);
    Py_CLEAR(state->reservation_type);
    Py_CLEAR(state->hold_type);
    Py_CLEAR(state->from_status);
    Py_CLEAR(state->log);
    return 0;
}

static void
core_free(void *module)
{
    (void)core_clear(module); /* always 0 */
}

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, CKVPY_SLOT(core_exec)},
#ifdef Py_GIL_DISABLED
    /* Handles and leases rely on the GIL for their counts: Python turns it on and
       warns. */
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cyclone_kv._core",
    .m_size = sizeof(struct ckvpy_state),
    .m_methods = core_methods,
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&core_module);
}
