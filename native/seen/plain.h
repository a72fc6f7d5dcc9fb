// A copy of a Python value that nobody else can change, where the value is plain.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace jitckpt::seen {

// A copy, at all depths, of a value made of dicts, lists, tuples, numbers, texts and None alone; None for any
// other. A Python function: nullptr with an exception set where memory or the stack is exhausted.
PyObject* plain_copy(PyObject*, PyObject* value);

}  // namespace jitckpt::seen
