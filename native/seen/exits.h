// Tells by what exception an iterator goes, which Python code can't see: a __del__ is called without it.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace jitckpt::seen {

// The type Exit, as a new reference; nullptr with an exception set.
PyObject* exit_type();

}  // namespace jitckpt::seen
