// Python values that are plain: a copy that nobody else can change, and whether two are the same for good.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace jitckpt::seen {

// A copy, at all depths, of a value made of dicts, lists, tuples, numbers, texts and None alone; None for any
// other. A Python function: nullptr with an exception set where memory or the stack is exhausted.
PyObject* plain_copy(PyObject*, PyObject* value);

// Whether the dicts in two lists of lists have the same keys, and of each that is not in a set the same
// value: a number, a text, None or a tuple of such. Of any other, a list, say, which may have changed in its
// place: no. A Python function of three arguments.
PyObject* same_settings(PyObject*, PyObject* args);

// Of an optimizer's parameter groups what they say beside their parameters, in new dicts, and how many of
// these there are; None if they are no plain dicts with lists. A Python function.
PyObject* settings_of(PyObject*, PyObject* groups);

}  // namespace jitckpt::seen
