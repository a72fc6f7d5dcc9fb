// Calls that Python code makes of jitckpt's hooks, at the price of C.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace jitckpt::seen {

// Of three functions and arguments: calls the second with the arguments if the first, which gets none,
// returns None; else the third. A Python function.
PyObject* call_if_none(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names);

// Of an address and up to six numbers: calls the C function there with the numbers, 64 bits each, while other
// threads may run Python; returns the int that it returns. A Python function.
PyObject* call_native(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace jitckpt::seen
