#include "seen/exits.h"

namespace jitckpt::seen {

namespace {

struct Exit {
  PyObject_HEAD PyObject* told;
  PyObject* inner;
};

Exit* exit_of(PyObject* self) { return reinterpret_cast<Exit*>(self); }

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* told = nullptr;
  PyObject* inner = nullptr;
  if (PyArg_ParseTuple(args, "O|O", &told, &inner) == 0) return nullptr;
  if (inner != nullptr && PyIter_Check(inner) == 0)
    return PyErr_Format(PyExc_TypeError, "Exit() takes an iterator");
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  exit_of(self)->told = Py_NewRef(told);
  exit_of(self)->inner = Py_XNewRef(inner);
  return self;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(exit_of(self)->told);
  Py_VISIT(exit_of(self)->inner);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(exit_of(self)->told);
  Py_CLEAR(exit_of(self)->inner);
  return 0;
}

// Calls `told` with the exception that is on its way, or None. It is on its way afterwards, too.
void tell(PyObject* told) {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  if (type != nullptr) PyErr_NormalizeException(&type, &value, &traceback);
  PyObject* result = PyObject_CallOneArg(told, value == nullptr ? Py_None : value);
  if (result == nullptr) PyErr_WriteUnraisable(told);
  Py_XDECREF(result);
  PyErr_Restore(type, value, traceback);
}

void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* type = Py_TYPE(self);
  // Who is told may let others go, and these be told in turn: what is told stays until then.
  if (PyObject* told = exit_of(self)->told) {
    exit_of(self)->told = nullptr;
    tell(told);
    Py_DECREF(told);
  }
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* itself(PyObject* self) { return Py_NewRef(self); }

PyObject* next(PyObject* self) {
  PyObject* inner = exit_of(self)->inner;
  return inner == nullptr ? nullptr : Py_TYPE(inner)->tp_iternext(inner);
}

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                       {Py_tp_iter, reinterpret_cast<void*>(itself)},
                       {Py_tp_iternext, reinterpret_cast<void*>(next)},
                       {0, nullptr}};
PyType_Spec spec = {"jitckpt._seen.Exit", sizeof(Exit), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

PyObject* exit_type() { return PyType_FromSpec(&spec); }

}  // namespace jitckpt::seen
