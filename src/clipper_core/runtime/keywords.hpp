// How a compiled function refuses a keyword that it does not have: tools/build_core.py lets
// Cython's code for the arguments of all functions call this where it would raise a TypeError.
//
// Threads: any, under the GIL.
#pragma once
#include <Python.h>

namespace clipper {

// Raise what clipper_core.runtime.status.refuse_keyword raises. names: of the function's
// arguments, up to NULL.
inline void refuse_keyword(const char* function, PyObject* keyword, PyObject** const* names) {
    PyObject* known = PyList_New(0);
    PyObject* status = nullptr;
    for (; known != nullptr && *names != nullptr; ++names)
        if (PyList_Append(known, **names) < 0) Py_CLEAR(known);
    if (known != nullptr) status = PyImport_ImportModule("clipper_core.runtime.status");
    if (status != nullptr)
        Py_XDECREF(PyObject_CallMethod(status, "refuse_keyword", "sOO", function, keyword, known));
    Py_XDECREF(status);
    Py_XDECREF(known);
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "%s() has no keyword '%U'", function, keyword);
}

}  // namespace clipper
