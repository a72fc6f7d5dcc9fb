#include "seen/plain.h"

namespace jitckpt::seen {

namespace {

// A new reference; nullptr without an exception where the value is not plain.
PyObject* copy(PyObject* value);

PyObject* copy_dict(PyObject* value) {
  PyObject* made = PyDict_New();
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *item = nullptr;
  while (made != nullptr && PyDict_Next(value, &position, &key, &item) != 0) {
    PyObject* copied = PyUnicode_CheckExact(key) || PyLong_CheckExact(key) ? copy(item) : nullptr;
    if (copied == nullptr || PyDict_SetItem(made, key, copied) != 0) Py_CLEAR(made);
    Py_XDECREF(copied);
  }
  return made;
}

PyObject* copy(PyObject* value) {
  if (value == Py_None || PyFloat_CheckExact(value) || PyLong_CheckExact(value) ||
      PyUnicode_CheckExact(value) || PyBool_Check(value))
    return Py_NewRef(value);
  if (Py_EnterRecursiveCall(" in a value that is copied") != 0) return nullptr;
  PyObject* made = nullptr;
  if (PyDict_CheckExact(value))
    made = copy_dict(value);
  else if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
    const bool is_list = PyList_CheckExact(value);
    const Py_ssize_t size = Py_SIZE(value);
    made = is_list ? PyList_New(size) : PyTuple_New(size);
    for (Py_ssize_t index = 0; made != nullptr && index < size; ++index) {
      PyObject* item = copy(is_list ? PyList_GET_ITEM(value, index) : PyTuple_GET_ITEM(value, index));
      if (item == nullptr)
        Py_CLEAR(made);
      else if (is_list)
        PyList_SET_ITEM(made, index, item);
      else
        PyTuple_SET_ITEM(made, index, item);
    }
  }
  Py_LeaveRecursiveCall();
  return made;
}

}  // namespace

PyObject* plain_copy(PyObject*, PyObject* value) {
  PyObject* made = copy(value);
  return made != nullptr || PyErr_Occurred() != nullptr ? made : Py_NewRef(Py_None);
}

}  // namespace jitckpt::seen
