#include "seen/living.h"

namespace jitckpt::seen {

namespace {

// Calls `take` with each living object; it runs no Python code, and says whether to go on.
template <typename Take>
bool for_each_living(Take take) {
  PyObject* gc = PyImport_ImportModule("gc");
  if (gc == nullptr) return false;
  // A collection would run finalizers, and these anything.
  const bool was_enabled = PyGC_Disable() != 0;
  PyObject* all = PyObject_CallMethod(gc, "get_objects", nullptr);
  Py_DECREF(gc);
  bool is_done = all != nullptr;
  const Py_ssize_t count = is_done ? PyList_GET_SIZE(all) : 0;
  for (Py_ssize_t index = 0; is_done && index < count; ++index) is_done = take(PyList_GET_ITEM(all, index));
  Py_XDECREF(all);
  if (was_enabled) PyGC_Enable();
  return is_done;
}

bool is_set(PyObject* kinds) {
  if (PyFrozenSet_CheckExact(kinds)) return true;
  PyErr_SetString(PyExc_TypeError, "a frozenset of types is needed");
  return false;
}

// Types are told apart by their addresses, unless their own type says otherwise: then that would run code.
int is_one_of(PyObject* kinds, PyObject* one) {
  PyTypeObject* type = Py_TYPE(one);
  if (Py_TYPE(type)->tp_hash != PyType_Type.tp_hash) return 0;
  return PySet_Contains(kinds, reinterpret_cast<PyObject*>(type));
}

bool is_filled(PyObject* tuple) {
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(tuple); ++index)
    if (PyTuple_GET_ITEM(tuple, index) == nullptr) return false;
  return true;
}

}  // namespace

PyObject* living(PyObject*, PyObject* kinds) {
  if (!is_set(kinds)) return nullptr;
  if (PySet_Contains(kinds, reinterpret_cast<PyObject*>(&PyTuple_Type)) != 0)
    return PyErr_Occurred() != nullptr ? nullptr
                                       : PyErr_Format(PyExc_ValueError, "of tuples living_tuples() tells");
  PyObject* found = PyList_New(0);
  if (found == nullptr) return nullptr;
  const bool is_done = for_each_living([&](PyObject* one) {
    if (one == found) return true;
    const int is_wanted = is_one_of(kinds, one);
    return is_wanted == 0 || (is_wanted > 0 && PyList_Append(found, one) == 0);
  });
  if (!is_done) Py_CLEAR(found);
  return found;
}

PyObject* living_tuples(PyObject*, PyObject* firsts) {
  if (!is_set(firsts)) return nullptr;
  PyObject* found = PyList_New(0);
  if (found == nullptr) return nullptr;
  const bool is_done = for_each_living([&](PyObject* one) {
    if (!PyTuple_CheckExact(one) || PyTuple_GET_SIZE(one) < 2) return true;
    PyObject* first = PyTuple_GET_ITEM(one, 0);
    if (first == nullptr) return true;
    const int is_wanted = is_one_of(firsts, first);
    if (is_wanted <= 0 || !is_filled(one)) return is_wanted >= 0;
    PyObject* told = Py_BuildValue("NnO", PyLong_FromVoidPtr(one), PyTuple_GET_SIZE(one), first);
    const bool is_told = told != nullptr && PyList_Append(found, told) == 0;
    Py_XDECREF(told);
    return is_told;
  });
  if (!is_done) Py_CLEAR(found);
  return found;
}

}  // namespace jitckpt::seen
