// jitckpt._tensors: what torch says of thousands of tensors, in one call. Plain tensors are read where torch
// keeps them; what is said of any other is what torch's own interface says. Built with one torch, it knows no
// other: see state/tensors_seen.py.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/impl/COWDeleter.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

// How often torch has written to a tensor, and where it lies: as jitckpt._seen.versions has it.
struct Version {
  uint64_t writes, address;
  bool operator==(const Version&) const = default;
};

const uint64_t kDenseKeys = [] {
  uint64_t keys = 0;
  for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCPU,
                         c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCPU,
                         c10::DispatchKey::AutocastCUDA, c10::DispatchKey::ADInplaceOrView})
    keys |= c10::DispatchKeySet(key).raw_repr();
  return keys;
}();

bool is_number(c10::ScalarType type) {
  return c10::isIntegralType(type, true) || c10::isFloatingType(type) || c10::isComplexType(type);
}

// The tensor of an object whose every answer can be read in memory: of torch's own class, with a memory of
// its own on the host or a GPU, and counted writes. Null for any other.
const c10::TensorImpl* plain(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!tensor.defined()) return nullptr;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if ((impl.key_set().raw_repr() & ~kDenseKeys) != 0 || impl.has_symbolic_sizes_strides() ||
      !impl.version_counter().enabled())
    return nullptr;
  const c10::StorageImpl* const storage = impl.unsafe_storage().unsafeGetStorageImpl();
  // Whoever asks for the memory of a lazy copy gets one of its own.
  if (storage == nullptr || storage->data_ptr().get_deleter() == c10::impl::cow::cow_deleter) return nullptr;
  return is_number(c10::typeMetaToScalarType(impl.dtype())) ? &impl : nullptr;
}

// Of a plain one, as data_ptr() tells it.
uint64_t address_of(const c10::TensorImpl& tensor) {
  if (tensor.numel() == 0) return 0;
  const auto begin = reinterpret_cast<uint64_t>(tensor.unsafe_storage().unsafeGetStorageImpl()->data());
  return begin + tensor.itemsize() * static_cast<uint64_t>(tensor.storage_offset());
}

// A script may free a tensor's storage.
bool has_memory(const c10::TensorImpl& tensor) {
  return tensor.unsafe_storage().unsafeGetStorageImpl()->data() != nullptr;
}

void prefetch(const void* memory) { __builtin_prefetch(memory); }

// After a step all of it is cold in the caches, and what comes first says where the next lies: so it is asked
// for, of some tensors at a time, before it is looked at.
void prefetch(PyObject* const* objects, Py_ssize_t count) {
  for (Py_ssize_t index = 0; index < count; ++index) prefetch(objects[index]);
  for (Py_ssize_t index = 0; index < count; ++index) {
    if (!THPVariable_CheckExact(objects[index])) continue;
    const c10::TensorImpl* const impl = THPVariable_Unpack(objects[index]).unsafeGetTensorImpl();
    prefetch(&impl->unsafe_storage());
    prefetch(reinterpret_cast<const char*>(impl + 1) - 1);
  }
  for (Py_ssize_t index = 0; index < count; ++index) {
    if (!THPVariable_CheckExact(objects[index])) continue;
    const at::Tensor& tensor = THPVariable_Unpack(objects[index]);
    if (!tensor.defined()) continue;
    prefetch(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    const void* counter = nullptr;
    static_assert(sizeof(c10::VariableVersion) == sizeof counter, "it is a pointer to the counter");
    std::memcpy(&counter, &tensor.unsafeGetTensorImpl()->version_counter(), sizeof counter);
    prefetch(counter);
  }
}

// What torch keeps of a tensor's gradient, if it keeps anything.
const torch::autograd::AutogradMeta* gradient_of(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.defined() ? torch::autograd::impl::get_autograd_meta(tensor) : nullptr;
}

// The same for what is asked of their gradients.
void prefetch_gradients(PyObject* const* objects, Py_ssize_t count) {
  for (Py_ssize_t index = 0; index < count; ++index) prefetch(objects[index]);
  for (Py_ssize_t index = 0; index < count; ++index)
    if (THPVariable_CheckExact(objects[index]))
      prefetch(&THPVariable_Unpack(objects[index]).unsafeGetTensorImpl()->unsafe_storage());
  for (Py_ssize_t index = 0; index < count; ++index)
    if (const auto* const meta = gradient_of(objects[index])) {
      prefetch(meta);
      prefetch(&meta->grad_);
    }
  for (Py_ssize_t index = 0; index < count; ++index)
    if (const auto* const meta = gradient_of(objects[index]))
      prefetch(reinterpret_cast<const char*>(meta->grad_.unsafeGetTensorImpl() + 1) - 1);
}

// Calls `visit` with each of a tuple's objects and its number while it returns true; returns whether all
// have. It may run any Python.
template <void (*Prefetch)(PyObject* const*, Py_ssize_t) = prefetch, class Visit>
bool all_of(PyObject* objects, const Visit& visit) {
  constexpr Py_ssize_t at_a_time = 32;
  PyObject* const* const items = PySequence_Fast_ITEMS(objects);
  const Py_ssize_t count = PyTuple_GET_SIZE(objects);
  for (Py_ssize_t begin = 0; begin < count; begin += at_a_time) {
    const Py_ssize_t end = std::min(count, begin + at_a_time);
    Prefetch(items + begin, end - begin);
    for (Py_ssize_t index = begin; index < end; ++index)
      if (!visit(items[index], index)) return false;
  }
  return true;
}

// What torch's exceptions say, as Python has it.
template <class Answer>
PyObject* answered(const Answer& answer) {
  try {
    return answer();
  } catch (const std::exception& error) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

struct Writes {
  PyObject_HEAD PyObject* tensors;  // a tuple
  PyObject* versions_of;            // jitckpt._seen.versions, for tensors that are not plain
  std::vector<Version>*seen, *spare;
};

Writes& of(PyObject* self) { return *reinterpret_cast<Writes*>(self); }

// Nothing with a Python exception set.
std::optional<Version> version_of(const Writes& writes, PyObject* object) {
  if (const c10::TensorImpl* const tensor = plain(object))
    return Version{tensor->version_counter().current_version(), address_of(*tensor)};
  PyObject* const list = PyList_New(1);
  if (list == nullptr) return std::nullopt;
  PyList_SET_ITEM(list, 0, Py_NewRef(object));
  PyObject* const bytes = PyObject_CallOneArg(writes.versions_of, list);
  Py_DECREF(list);
  Version version{};
  const bool is_one = bytes != nullptr && PyBytes_Check(bytes) && PyBytes_GET_SIZE(bytes) == sizeof version;
  if (is_one) std::memcpy(&version, PyBytes_AS_STRING(bytes), sizeof version);
  if (bytes != nullptr && !is_one) PyErr_SetString(PyExc_TypeError, "the version of a tensor has 16 bytes");
  Py_XDECREF(bytes);
  return is_one ? std::optional(version) : std::nullopt;
}

PyObject* look(PyObject* self, PyObject*) {
  return answered([&]() -> PyObject* {
    Writes& writes = of(self);
    // Others may look at them while Python runs here, so they change all at once.
    std::vector<Version> now = std::exchange(*writes.spare, {});
    now.clear();
    now.reserve(static_cast<std::size_t>(PyTuple_GET_SIZE(writes.tensors)));
    const bool has_all = all_of(writes.tensors, [&](PyObject* object, Py_ssize_t) {
      const std::optional<Version> version = version_of(writes, object);
      if (version) now.push_back(*version);
      return version.has_value();
    });
    if (!has_all) return nullptr;
    *writes.spare = std::exchange(*writes.seen, std::move(now));
    Py_RETURN_NONE;
  });
}

PyObject* changed(PyObject* self, PyObject*) {
  return answered([&]() -> PyObject* {
    const Writes& writes = of(self);
    std::vector<Py_ssize_t> found;
    const bool has_all = all_of(writes.tensors, [&](PyObject* object, Py_ssize_t number) {
      const std::optional<Version> version = version_of(writes, object);
      const auto index = static_cast<std::size_t>(number);
      if (version && (index >= writes.seen->size() || (*writes.seen)[index] != *version))
        found.push_back(number);
      return version.has_value();
    });
    if (!has_all) return nullptr;
    PyObject* const list = PyList_New(static_cast<Py_ssize_t>(found.size()));
    for (std::size_t index = 0; list != nullptr && index < found.size(); ++index) {
      PyObject* const number = PyLong_FromSsize_t(found[index]);
      if (number == nullptr) {
        Py_DECREF(list);
        return nullptr;
      }
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(index), number);
    }
    return list;
  });
}

// The bytes that `append` writes for each of a tuple's objects; it returns false with a Python exception set.
template <void (*Prefetch)(PyObject* const*, Py_ssize_t) = prefetch, class Append>
PyObject* bytes_of(PyObject* objects, const Append& append) {
  return answered([&]() -> PyObject* {
    std::string bytes;
    if (!all_of<Prefetch>(objects, [&](PyObject* object, Py_ssize_t) { return append(object, bytes); }))
      return nullptr;
    return PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  });
}

PyObject* addresses(PyObject*, PyObject* args) {
  PyObject *tensors, *address_of_other;
  if (PyArg_ParseTuple(args, "O!O:addresses", &PyTuple_Type, &tensors, &address_of_other) == 0)
    return nullptr;
  return bytes_of(tensors, [&](PyObject* object, std::string& bytes) {
    uint64_t address = 0;
    if (const c10::TensorImpl* const tensor = plain(object)) {
      address = ::address_of(*tensor);
    } else {
      PyObject* const number = PyObject_CallOneArg(address_of_other, object);
      if (number == nullptr) return false;
      address = PyLong_AsUnsignedLongLong(number);
      Py_DECREF(number);
      if (PyErr_Occurred() != nullptr) return false;
    }
    bytes.append(reinterpret_cast<const char*>(&address), sizeof address);
    return true;
  });
}

PyObject* gradients_required(PyObject*, PyObject* tensors) {
  if (PyTuple_Check(tensors) == 0) return PyErr_Format(PyExc_TypeError, "gradients_required() takes a tuple");
  return bytes_of(tensors, [&](PyObject* object, std::string& bytes) {
    if (const c10::TensorImpl* const tensor = plain(object)) {
      bytes.push_back(static_cast<char>(tensor->requires_grad()));
      return true;
    }
    PyObject* const value = PyObject_GetAttrString(object, "requires_grad");
    const int is_required = value == nullptr ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    bytes.push_back(static_cast<char>(is_required));
    return is_required >= 0;
  });
}

PyObject* gradients_there(PyObject*, PyObject* tensors) {
  if (PyTuple_Check(tensors) == 0) return PyErr_Format(PyExc_TypeError, "gradients_there() takes a tuple");
  const auto kind_of = [](const at::Tensor& gradient) -> char {
    if (!gradient.defined()) return 0;
    return gradient.layout() == c10::kSparse ? 2 : 1;
  };
  return bytes_of<prefetch_gradients>(tensors, [&](PyObject* object, std::string& bytes) {
    if (const c10::TensorImpl* const tensor = plain(object)) {
      bytes.push_back(kind_of(tensor->grad()));
      return true;
    }
    PyObject* const gradient = PyObject_GetAttrString(object, "grad");
    if (gradient == nullptr) return false;
    bytes.push_back(THPVariable_Check(gradient) ? kind_of(THPVariable_Unpack(gradient)) : 0);
    Py_DECREF(gradient);
    return true;
  });
}

// Where a GPU's generator keeps how far it has come: whoever asks it by its own functions has the device
// asked, too, whether it is captured. The language lets one name a private member so.
template <auto Member>
struct StateOf {
  friend const at::CUDAGeneratorState& state_of(const at::CUDAGeneratorImpl& generator) {
    return *(generator.*Member);
  }
};
template struct StateOf<&at::CUDAGeneratorImpl::state_>;
const at::CUDAGeneratorState& state_of(const at::CUDAGeneratorImpl& generator);

PyObject* drawn(PyObject*, PyObject* object) {
  if (PyObject_IsInstance(object, THPGeneratorClass) != 1)
    return PyErr_Occurred() != nullptr ? nullptr : PyErr_Format(PyExc_TypeError, "drawn() takes a generator");
  const at::Generator& generator = reinterpret_cast<const THPGenerator*>(object)->cdata;
  if (!generator.defined() || generator.device().type() != c10::DeviceType::CUDA) Py_RETURN_NONE;
  const at::CUDAGeneratorState& state =
      state_of(static_cast<const at::CUDAGeneratorImpl&>(*generator.unsafeGetGeneratorImpl()));
  const uint64_t numbers[] = {state.seed_, state.philox_offset_per_thread_};
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers), sizeof numbers);
}

PyObject* numbers(PyObject*, PyObject* args) {
  PyObject *tensors, *numbers_of;
  if (PyArg_ParseTuple(args, "O!O:numbers", &PyTuple_Type, &tensors, &numbers_of) == 0) return nullptr;
  return bytes_of(tensors, [&](PyObject* object, std::string& bytes) {
    const c10::TensorImpl* const tensor = plain(object);
    if (tensor != nullptr && tensor->dim() == 0 && tensor->device().is_cpu() && has_memory(*tensor)) {
      bytes.append(reinterpret_cast<const char*>(address_of(*tensor)), tensor->itemsize());
      return true;
    }
    PyObject* const list = PyList_New(1);
    if (list == nullptr) return false;
    PyList_SET_ITEM(list, 0, Py_NewRef(object));
    PyObject* const found = PyObject_CallOneArg(numbers_of, list);
    Py_DECREF(list);
    if (found != nullptr && PyBytes_Check(found))
      bytes.append(PyBytes_AS_STRING(found), static_cast<size_t>(PyBytes_GET_SIZE(found)));
    Py_XDECREF(found);
    return found != nullptr;
  });
}

PyObject* fetch(PyObject*, PyObject* tensors) {
  if (PyTuple_Check(tensors) == 0) return PyErr_Format(PyExc_TypeError, "fetch() takes a tuple");
  PyObject* const* const items = PySequence_Fast_ITEMS(tensors);
  const Py_ssize_t count = PyTuple_GET_SIZE(tensors);
  prefetch(items, count);
  for (Py_ssize_t index = 0; index < count; ++index)
    if (const c10::TensorImpl* const tensor = plain(items[index]))
      prefetch(reinterpret_cast<const void*>(address_of(*tensor)));
  Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *tensors, *versions_of;
  if (PyArg_ParseTuple(args, "O!O:Writes", &PyTuple_Type, &tensors, &versions_of) == 0) return nullptr;
  PyObject* const self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  of(self).tensors = Py_NewRef(tensors);
  of(self).versions_of = Py_NewRef(versions_of);
  of(self).seen = new (std::nothrow) std::vector<Version>;
  of(self).spare = new (std::nothrow) std::vector<Version>;
  if (of(self).seen != nullptr && of(self).spare != nullptr) return self;
  Py_DECREF(self);
  return PyErr_NoMemory();
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(of(self).tensors);
  Py_VISIT(of(self).versions_of);
  return 0;
}

// Without tp_clear: a tuple of tensors and a function are in no ring that goes through this object alone.
void deallocate(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Py_CLEAR(of(self).tensors);
  Py_CLEAR(of(self).versions_of);
  delete of(self).seen;
  delete of(self).spare;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef kMethods[] = {
    {"look", look, METH_NOARGS, "Look at all tensors."},
    {"changed", changed, METH_NOARGS, "The numbers of those written to, or elsewhere, since the last look."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot kSlots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                        {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                        {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                        {Py_tp_methods, kMethods},
                        {0, nullptr}};
PyType_Spec kSpec = {"jitckpt._tensors.Writes", sizeof(Writes), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                     kSlots};

PyMethodDef kFunctions[] = {
    {"addresses", addresses, METH_VARARGS, "Where each tensor of a tuple lies, 64 bits each."},
    {"gradients_required", gradients_required, METH_O,
     "Whether each tensor of a tuple requires gradients, a byte each."},
    {"gradients_there", gradients_there, METH_O,
     "Whether each tensor of a tuple has no gradient (0), a sparse one (2) or another (1), a byte each."},
    {"drawn", drawn, METH_O,
     "Of a GPU's generator its seed and how far it has come, 64 bits each; None of any other."},
    {"numbers", numbers, METH_VARARGS,
     "The bytes of tensors of one number each, on the host, one behind the other."},
    {"fetch", fetch, METH_O,
     "Have what tells of the tensors of a tuple, and their first values, in the caches."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef kModule = {.m_base = PyModuleDef_HEAD_INIT,
                       .m_name = "_tensors",
                       .m_doc = nullptr,
                       .m_size = -1,
                       .m_methods = kFunctions,
                       .m_slots = nullptr,
                       .m_traverse = nullptr,
                       .m_clear = nullptr,
                       .m_free = nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__tensors() {
  PyObject* module = PyModule_Create(&kModule);
  PyObject* type = PyType_FromSpec(&kSpec);
  if (module == nullptr || type == nullptr || PyModule_AddObjectRef(module, "Writes", type) != 0 ||
      PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION) != 0) {
    Py_XDECREF(type);
    Py_XDECREF(module);
    return nullptr;
  }
  Py_DECREF(type);
  return module;
}
