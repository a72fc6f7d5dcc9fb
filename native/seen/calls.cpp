#include "seen/calls.h"

#include <array>
#include <cstdint>

namespace jitckpt::seen {

namespace {

using Number = uint64_t;
constexpr Py_ssize_t kMostNumbers = 6;

int call_with(Number address, const std::array<Number, kMostNumbers>& n, Py_ssize_t count) {
  switch (count) {
    case 1:
      return reinterpret_cast<int (*)(Number)>(address)(n[0]);
    case 2:
      return reinterpret_cast<int (*)(Number, Number)>(address)(n[0], n[1]);
    case 3:
      return reinterpret_cast<int (*)(Number, Number, Number)>(address)(n[0], n[1], n[2]);
    case 4:
      return reinterpret_cast<int (*)(Number, Number, Number, Number)>(address)(n[0], n[1], n[2], n[3]);
    case 5:
      return reinterpret_cast<int (*)(Number, Number, Number, Number, Number)>(address)(n[0], n[1], n[2],
                                                                                        n[3], n[4]);
    case 6:
      return reinterpret_cast<int (*)(Number, Number, Number, Number, Number, Number)>(address)(
          n[0], n[1], n[2], n[3], n[4], n[5]);
    default:
      return reinterpret_cast<int (*)()>(address)();
  }
}

}  // namespace

PyObject* call_if_none(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  constexpr Py_ssize_t functions = 3;
  if (count < functions) return PyErr_Format(PyExc_TypeError, "call_if_none() takes three functions");
  PyObject* const answer = PyObject_CallNoArgs(args[0]);
  if (answer == nullptr) return nullptr;
  PyObject* const called = args[answer == Py_None ? 1 : 2];
  Py_DECREF(answer);
  return PyObject_Vectorcall(called, args + functions, static_cast<size_t>(count - functions), names);
}

PyObject* call_native(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count < 1 || count > 1 + kMostNumbers)
    return PyErr_Format(PyExc_TypeError, "call_native() takes an address and up to six numbers");
  const Number address = PyLong_AsUnsignedLongLong(args[0]);
  std::array<Number, kMostNumbers> numbers{};
  for (Py_ssize_t index = 1; index < count; ++index)
    numbers[static_cast<size_t>(index - 1)] = PyLong_AsUnsignedLongLong(args[index]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  int result = 0;
  Py_BEGIN_ALLOW_THREADS;
  result = call_with(address, numbers, count - 1);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLong(result);
}

}  // namespace jitckpt::seen
