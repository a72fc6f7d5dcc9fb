// Writes of a ring of rank-local states (jitckpt/ring/format.py): once a step, when all is cold in the
// caches.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace jitckpt::seen {

// Of the memory of a ring, a place in it, a bytearray, a sequence number and a step: fills in the head of the
// bytearray, as format.seal does, and copies all of it there. A Python function.
PyObject* write_sealed(PyObject*, PyObject* args);

}  // namespace jitckpt::seen
