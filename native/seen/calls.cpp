#include "seen/calls.h"

namespace jitckpt::seen {

PyObject* call_if_none(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  constexpr Py_ssize_t functions = 3;
  if (count < functions) return PyErr_Format(PyExc_TypeError, "call_if_none() takes three functions");
  PyObject* const answer = PyObject_CallNoArgs(args[0]);
  if (answer == nullptr) return nullptr;
  PyObject* const called = args[answer == Py_None ? 1 : 2];
  Py_DECREF(answer);
  return PyObject_Vectorcall(called, args + functions, static_cast<size_t>(count - functions), names);
}

}  // namespace jitckpt::seen
