// Objects that live in this process, found without a moment in which somebody else could meet them held.
//
// gc.get_objects() refers to every object that there is, and a tuple that another thread is just filling
// (tuple() of an iterator) must have one reference alone as it is resized: else that thread gets a
// SystemError. So what the collector knows is let go again before anything else may run.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace jitckpt::seen {

// The living objects whose type is one of a frozenset's, in a list. Not for tuple: of these see below. A
// Python function: nullptr with an exception set where memory is exhausted or the argument is another.
PyObject* living(PyObject*, PyObject* kinds);

// Of the living tuples of two elements or more whose first is of one of a frozenset's types: what id() says
// of each, how many elements it has, and the first, in a list of tuples. Those that are still being filled
// are left out. A Python function.
PyObject* living_tuples(PyObject*, PyObject* firsts);

}  // namespace jitckpt::seen
