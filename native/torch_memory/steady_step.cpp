// Optimizer steps of a program whose parameters and optimizer state are the tensors that they were in the
// step before, with nothing in them written since: whether a step is such a one, and what the proxy is told
// of it. In Python that takes some twenty calls, each of which costs microseconds where all is cold in the
// caches; jitckpt/worker/in_place/state_on_device.py has the rules, and does the same for all other steps.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pythoncapi_compat.h>  // PyWeakref_GetRef before Python 3.13

#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "proxy/client/jitckpt_proxy.h"
#include "torch_memory/buckets.h"

namespace {

using jitckpt::torch_memory::append_buckets;

constexpr long changed = -1;  // no error of CUDA

// How often torch has written to a parameter, and where it lies: as jitckpt._seen.versions has it.
struct Version {
  uint64_t writes, address;
};

struct SteadyStep {
  PyObject_HEAD PyObject* seen;  // jitckpt._seen.Seen: tells if the state has got other tensors
  PyObject* parameters;          // a tuple
  PyObject* modules;             // a list of weak references
  PyObject* versions;            // a bytearray of them, after the newest step
  std::vector<jitckpt_proxy_place>* state;
  std::vector<jitckpt_proxy_place>* left_out;  // of the newest image
  uint64_t digest;
  bool needs_gradients;
};

SteadyStep& of(PyObject* self) { return *reinterpret_cast<SteadyStep*>(self); }

// Of a parameter that was of torch's own class. It is looked up each time, since torch may swap tensors.
const at::Tensor& tensor_of(PyObject* parameter) { return THPVariable_Unpack(parameter); }

bool is_readable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && tensor.layout() == at::kStrided &&
         !tensor.key_set().has(c10::DispatchKey::Python) && !tensor.is_inference();
}

// Calls `visit` with each parameter and its number while it returns true; returns whether all have.
template <class Visit>
bool all_parameters(const SteadyStep& step, const Visit& visit) {
  const Py_ssize_t count = PyTuple_GET_SIZE(step.parameters);
  for (Py_ssize_t number = 0; number < count; ++number) {
    const at::Tensor& parameter = tensor_of(PyTuple_GET_ITEM(step.parameters, number));
    if (!is_readable(parameter) || !visit(static_cast<std::size_t>(number), parameter)) return false;
  }
  return true;
}

Version version_of(const at::Tensor& parameter) {
  return {parameter.unsafeGetTensorImpl()->version_counter().current_version(),
          reinterpret_cast<uint64_t>(parameter.const_data_ptr())};
}

char* version_at(const SteadyStep& step, std::size_t number) {
  return PyByteArray_AS_STRING(step.versions) + number * sizeof(Version);
}

bool read_versions(const SteadyStep& step) {
  return all_parameters(step, [&](std::size_t number, const at::Tensor& parameter) {
    const Version now = version_of(parameter);
    std::memcpy(version_at(step, number), &now, sizeof now);
    return true;
  });
}

// 1: all tensors of the state are those that they were; 0: not; -1: a Python exception is set.
int has_same_tensors(const SteadyStep& step) {
  static PyObject* name = nullptr;
  if (name == nullptr && (name = PyUnicode_InternFromString("is_same")) == nullptr) return -1;
  PyObject* const answer = PyObject_CallMethodNoArgs(step.seen, name);
  const int same = answer == nullptr ? -1 : answer == Py_True;
  Py_XDECREF(answer);
  return same;
}

bool is_unwritten(const SteadyStep& step) {
  return all_parameters(step, [&](std::size_t number, const at::Tensor& parameter) {
    const Version now = version_of(parameter);
    return std::memcmp(version_at(step, number), &now, sizeof now) == 0;
  });
}

// Those that lie in one piece on a device. False if one can't be read here.
bool append_gradients(SteadyStep& step) {
  return all_parameters(step, [&](std::size_t, const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || gradient.layout() != at::kStrided) return true;
    if (gradient.key_set().has(c10::DispatchKey::Python)) return false;
    if (gradient.is_cuda() && gradient.is_contiguous() && gradient.nbytes() != 0)
      step.left_out->push_back({reinterpret_cast<uint64_t>(gradient.const_data_ptr()), gradient.nbytes()});
    return true;
  });
}

// False with a Python exception set.
bool append_buckets_of_modules(SteadyStep& step) {
  static PyObject* name = nullptr;
  if (name == nullptr && (name = PyUnicode_InternFromString("reducer")) == nullptr) return false;
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(step.modules); ++index) {
    PyObject* module = nullptr;
    if (PyWeakref_GetRef(PyList_GET_ITEM(step.modules, index), &module) < 0) return false;
    if (module == nullptr) continue;
    PyObject* const reducer = PyObject_GetAttr(module, name);
    Py_DECREF(module);
    if (reducer == nullptr) return false;
    append_buckets(reducer, *step.left_out);
    Py_DECREF(reducer);
  }
  return true;
}

// Calls something that may wait for the device, without Python's lock.
template <class Call>
long unlocked(const Call& call) {
  PyThreadState* const state = PyEval_SaveThread();
  const long error = call();
  PyEval_RestoreThread(state);
  return error;
}

// What `answer` returns, which may throw torch's exceptions, as Python has it.
template <class Answer>
PyObject* answered(const Answer& answer) {
  try {
    const long found = answer();
    return PyErr_Occurred() != nullptr ? nullptr : PyLong_FromLong(found);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* begins(PyObject* self, PyObject*) {
  return answered([&] {
    SteadyStep& step = of(self);
    if (jitckpt_proxy_state_stays() != 1 || has_same_tensors(step) != 1 || !is_unwritten(step) ||
        jitckpt_proxy_state_was_written() != 0)
      return changed;
    *step.left_out = *step.state;
    if (!step.needs_gradients && !(append_gradients(step) && append_buckets_of_modules(step))) return changed;
    return unlocked(
        [&]() -> long { return jitckpt_proxy_step_begins(step.left_out->data(), step.left_out->size()); });
  });
}

PyObject* ended(PyObject* self, PyObject*) {
  return answered([&] {
    SteadyStep& step = of(self);
    if (has_same_tensors(step) != 1 || !read_versions(step)) return changed;
    return unlocked([&]() -> long {
      return jitckpt_proxy_step_ended(step.state->data(), step.state->size(), step.digest);
    });
  });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(of(self).seen);
  Py_VISIT(of(self).parameters);
  Py_VISIT(of(self).modules);
  Py_VISIT(of(self).versions);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(of(self).seen);
  Py_CLEAR(of(self).parameters);
  Py_CLEAR(of(self).modules);
  Py_CLEAR(of(self).versions);
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  delete of(self).state;
  delete of(self).left_out;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"begins", begins, METH_NOARGS,
     "A step begins: tell the proxy, and return 0 or CUDA's error; or return -1, if anything has changed."},
    {"ended", ended, METH_NOARGS,
     "It has ended: tell the proxy, and return 0 or CUDA's error; or return -1, if there are other tensors."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};
PyType_Spec spec = {"jitckpt.SteadyStep", sizeof(SteadyStep), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

// A new object for steps as the one that has just ended; None if the parameters are not plain tensors on a
// device. parameters: a tuple. versions: a bytearray of theirs, where those after each step are put. modules:
// weak references to all DistributedDataParallel. places: of the state, count in number. needs_gradients: an
// image has gradients and buckets, too. Null with an exception.
extern "C" __attribute__((visibility("default"))) PyObject* jitckpt_torch_steady_step(
    PyObject* seen, PyObject* parameters, PyObject* versions, PyObject* modules,
    const jitckpt_proxy_place* places, uint64_t count, uint64_t digest, int needs_gradients) {
  static PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) return nullptr;
  const Py_ssize_t parameter_count = PyTuple_GET_SIZE(parameters);
  for (Py_ssize_t number = 0; number < parameter_count; ++number)
    if (!THPVariable_CheckExact(PyTuple_GET_ITEM(parameters, number))) Py_RETURN_NONE;
  if (PyByteArray_GET_SIZE(versions) != parameter_count * static_cast<Py_ssize_t>(sizeof(Version))) {
    PyErr_SetString(PyExc_ValueError, "a steady step needs a version of each parameter");
    return nullptr;
  }
  auto* const object = reinterpret_cast<PyTypeObject*>(type);
  PyObject* const self = object->tp_alloc(object, 0);
  if (self == nullptr) return nullptr;
  SteadyStep& step = of(self);
  step.seen = Py_NewRef(seen);
  step.parameters = Py_NewRef(parameters);
  step.versions = Py_NewRef(versions);
  step.modules = Py_NewRef(modules);
  step.digest = digest;
  step.needs_gradients = needs_gradients != 0;
  try {
    step.state = new std::vector<jitckpt_proxy_place>(places, places + count);
    step.left_out = new std::vector<jitckpt_proxy_place>;
    if (is_unwritten(step)) return self;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    Py_DECREF(self);
    return nullptr;
  }
  Py_DECREF(self);
  Py_RETURN_NONE;
}
