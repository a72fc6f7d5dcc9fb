#include "seen/plain.h"

namespace jitckpt::seen {

namespace {

bool is_one(PyObject* value) {
  return value == Py_None || PyFloat_CheckExact(value) || PyLong_CheckExact(value) ||
         PyUnicode_CheckExact(value) || PyBool_Check(value);
}

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
  if (is_one(value)) return Py_NewRef(value);
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

// 1, or 0; -1 with an exception set.
int are_same(PyObject* before, PyObject* after) {
  if (Py_TYPE(before) != Py_TYPE(after)) return 0;
  if (is_one(before)) return PyObject_RichCompareBool(before, after, Py_EQ);
  if (!PyTuple_CheckExact(before) || Py_SIZE(before) != Py_SIZE(after)) return 0;
  if (Py_EnterRecursiveCall(" in a value that is compared") != 0) return -1;
  int result = 1;
  for (Py_ssize_t index = 0; result == 1 && index < Py_SIZE(before); ++index)
    result = are_same(PyTuple_GET_ITEM(before, index), PyTuple_GET_ITEM(after, index));
  Py_LeaveRecursiveCall();
  return result;
}

// The same of hyperparameters, but for those of some names.
int are_settings_same(PyObject* before, PyObject* after, PyObject* besides) {
  if (!PyDict_Check(before) || !PyDict_Check(after)) return 0;
  int result = PyDict_GET_SIZE(before) == PyDict_GET_SIZE(after);
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (result == 1 && PyDict_Next(before, &position, &key, &value) != 0) {
    if (!PyUnicode_CheckExact(key)) return 0;  // others may run Python as they are looked for
    PyObject* const other = PyDict_GetItemWithError(after, key);
    if (other == nullptr) {
      result = PyErr_Occurred() == nullptr ? 0 : -1;
      continue;
    }
    const int is_beside = PySet_Contains(besides, key);
    result = is_beside == 0 ? are_same(value, other) : is_beside;
  }
  return result;
}

// The same of lists of lists, by what `compare` says of their elements.
template <class Compare>
int all_same(PyObject* before, PyObject* after, const Compare& compare) {
  int result = PyList_GET_SIZE(before) == PyList_GET_SIZE(after);
  for (Py_ssize_t outer = 0; result == 1 && outer < PyList_GET_SIZE(before); ++outer) {
    PyObject *const one = PyList_GET_ITEM(before, outer), *const other = PyList_GET_ITEM(after, outer);
    if (!PyList_Check(one) || !PyList_Check(other) || PyList_GET_SIZE(one) != PyList_GET_SIZE(other))
      return 0;
    for (Py_ssize_t index = 0; result == 1 && index < PyList_GET_SIZE(one); ++index)
      result = compare(PyList_GET_ITEM(one, index), PyList_GET_ITEM(other, index));
  }
  return result;
}

// Adds to a list what a parameter group says beside its parameters. 1, or 0 if it is of another kind; -1 with
// an exception set.
int add_settings(PyObject* to, PyObject* group, PyObject* params, PyObject* count) {
  if (!PyDict_CheckExact(group)) return 0;
  PyObject* const parameters = PyDict_GetItemWithError(group, params);
  if (parameters == nullptr) return PyErr_Occurred() == nullptr ? 0 : -1;
  if (!PyList_CheckExact(parameters)) return 0;
  PyObject* const copy = PyDict_Copy(group);
  PyObject* const size = PyLong_FromSsize_t(PyList_GET_SIZE(parameters));
  const bool is_added = copy != nullptr && size != nullptr && PyDict_SetItem(copy, count, size) == 0 &&
                        PyDict_DelItem(copy, params) == 0 && PyList_Append(to, copy) == 0;
  Py_XDECREF(size);
  Py_XDECREF(copy);
  return is_added ? 1 : -1;
}

}  // namespace

PyObject* same_settings(PyObject*, PyObject* args) {
  PyObject *before, *after, *besides;
  if (PyArg_ParseTuple(args, "O!O!O!:same_settings", &PyList_Type, &before, &PyList_Type, &after,
                       &PyFrozenSet_Type, &besides) == 0)
    return nullptr;
  const int result = all_same(
      before, after, [&](PyObject* one, PyObject* other) { return are_settings_same(one, other, besides); });
  return result < 0 ? nullptr : PyBool_FromLong(result);
}

PyObject* settings_of(PyObject*, PyObject* groups) {
  static PyObject *params = nullptr, *count = nullptr;
  if (params == nullptr) params = PyUnicode_InternFromString("params");
  if (count == nullptr) count = PyUnicode_InternFromString("parameters");
  if (params == nullptr || count == nullptr) return nullptr;
  if (!PyList_CheckExact(groups)) Py_RETURN_NONE;
  PyObject* const made = PyList_New(0);
  for (Py_ssize_t index = 0; made != nullptr && index < PyList_GET_SIZE(groups); ++index) {
    PyObject* const group = Py_NewRef(PyList_GET_ITEM(groups, index));
    const int is_made = add_settings(made, group, params, count);
    Py_DECREF(group);
    if (is_made == 1) continue;
    Py_DECREF(made);
    return is_made < 0 ? nullptr : Py_NewRef(Py_None);
  }
  return made;
}

PyObject* plain_copy(PyObject*, PyObject* value) {
  PyObject* made = copy(value);
  return made != nullptr || PyErr_Occurred() != nullptr ? made : Py_NewRef(Py_None);
}

}  // namespace jitckpt::seen
