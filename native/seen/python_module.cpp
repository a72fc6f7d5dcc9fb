// jitckpt._seen: whether the objects of a training are as they were when they were looked at, in one call.
// In every step some hundred entries of dicts and tensors are compared; in Python that would be slow.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "seen/dlpack.h"
#include "seen/living.h"
#include "seen/plain.h"

namespace {

namespace dlpack = jitckpt::dlpack;

constexpr size_t kCacheLine = 64;

// What was seen. The objects are borrowed from the list of those that are held.
struct Attribute {
  PyObject *object, *name, *value;
};
struct Entry {
  PyObject *dict, *key, *value;
};
struct Values {
  PyObject *dict, *list;
  Py_ssize_t size;
};
struct Elements {
  PyObject *seen, *copy;  // a list, and what was in it
};
struct Size {
  PyObject* container;
  Py_ssize_t size;
};
struct Place {
  PyObject* tensor;
  const dlpack::ExchangeApi* api;
  dlpack::Tensor before;
  std::vector<int64_t> shape_and_strides;
};
struct Memory {
  const char* address;
  std::string bytes;
};

// Those of a kind together, so that they take little memory. In deques: a key's own __eq__ may look at more
// while all is compared.
template <class... Kinds>
using InKinds = std::tuple<std::deque<Kinds>...>;
using Looks = InKinds<Attribute, Entry, Values, Elements, Size, Place, Memory>;

struct Seen {
  PyObject_HEAD PyObject* held;
  Looks* looks;
};

Seen* seen_of(PyObject* self) { return reinterpret_cast<Seen*>(self); }

const char* data_of(const dlpack::Tensor& tensor) {
  return static_cast<const char*>(tensor.data) + tensor.byte_offset;
}

// 1: as it was; 0: not; -1: a Python exception is set.

int is_same(const Attribute& seen) {
  PyObject* now = PyObject_GetAttr(seen.object, seen.name);
  Py_XDECREF(now);
  return now == nullptr ? -1 : now == seen.value;
}

int is_same(const Entry& seen) {
  PyObject* now = PyDict_GetItemWithError(seen.dict, seen.key);
  return now == nullptr && PyErr_Occurred() != nullptr ? -1 : now == seen.value;
}

int is_same(const Values& seen) {
  if (PyDict_GET_SIZE(seen.dict) != seen.size) return 0;
  if (seen.size == 0) return 1;
  Py_ssize_t position = 0;
  PyObject* value = nullptr;
  for (Py_ssize_t index = 0; PyDict_Next(seen.dict, &position, nullptr, &value) != 0; ++index)
    if (value != PyList_GET_ITEM(seen.list, index)) return 0;
  return 1;
}

int is_same(const Elements& seen) {
  const Py_ssize_t size = PyList_GET_SIZE(seen.copy);
  if (PyList_GET_SIZE(seen.seen) != size) return 0;
  for (Py_ssize_t index = 0; index < size; ++index)
    if (PyList_GET_ITEM(seen.seen, index) != PyList_GET_ITEM(seen.copy, index)) return 0;
  return 1;
}

int is_same(const Size& seen) {
  const Py_ssize_t now =
      PyDict_CheckExact(seen.container) ? PyDict_GET_SIZE(seen.container) : PyObject_Size(seen.container);
  return now < 0 ? -1 : now == seen.size;
}

int is_same(const Place& seen) {
  dlpack::Tensor now{};
  if (seen.api->tensor_of(seen.tensor, &now) != 0) return -1;
  const dlpack::Tensor& before = seen.before;
  const int64_t* numbers = seen.shape_and_strides.data();
  return data_of(now) == data_of(before) && now.device == before.device && now.type == before.type &&
         now.dimensions == before.dimensions && std::equal(now.shape, now.shape + now.dimensions, numbers) &&
         std::equal(now.strides, now.strides + now.dimensions, numbers + now.dimensions);
}

int is_same(const Memory& seen) {
  return std::memcmp(seen.address, seen.bytes.data(), seen.bytes.size()) == 0;
}

// After a step all of it is cold in the caches, so what is compared soon is asked for before: first the
// objects, and once these have come, what they refer to.

void prefetch(const void* memory) { __builtin_prefetch(memory); }

void prefetch_keys(PyObject* dict) {
  const char* const keys = reinterpret_cast<const char*>(reinterpret_cast<PyDictObject*>(dict)->ma_keys);
  prefetch(keys);
  prefetch(keys + kCacheLine);
}

template <class Look>
void prefetch_objects(const Look&) {}
void prefetch_objects(const Entry& seen) { prefetch(seen.dict); }
void prefetch_objects(const Size& seen) { prefetch(seen.container); }
void prefetch_objects(const Place& seen) { prefetch(seen.tensor); }
void prefetch_objects(const Values& seen) {
  prefetch(seen.dict);
  prefetch(seen.list);
}

template <class Look>
void prefetch_contents(const Look&) {}
void prefetch_contents(const Entry& seen) { prefetch_keys(seen.dict); }
void prefetch_contents(const Values& seen) {
  if (seen.size == 0) return;
  prefetch_keys(seen.dict);
  prefetch(PySequence_Fast_ITEMS(seen.list));
}

// As is_same of one.
template <class Look>
int are_same(const std::deque<Look>& looks) {
  constexpr size_t at_a_time = 32;
  for (size_t begin = 0, count = looks.size(); begin < count; begin += at_a_time) {
    const size_t end = std::min(count, begin + at_a_time);
    for (size_t index = begin; index < end; ++index) prefetch_objects(looks[index]);
    for (size_t index = begin; index < end; ++index) prefetch_contents(looks[index]);
    for (size_t index = begin; index < end; ++index)
      if (const int result = is_same(looks[index]); result != 1) return result;
  }
  return 1;
}

// How torch tells where a tensor lies; null with an exception set.
const dlpack::ExchangeApi* api_of(PyObject* tensor) {
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(tensor)), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) return nullptr;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, dlpack::kCapsule));
  Py_DECREF(capsule);  // its type keeps it
  if (api != nullptr && (api->version.major != dlpack::kMajorVersion || api->tensor_of == nullptr)) {
    PyErr_Format(PyExc_TypeError, "torch offers version %u of DLPack's C API; jitckpt knows version %u.",
                 api->version.major, dlpack::kMajorVersion);
    return nullptr;
  }
  return api;
}

// Holds the objects and keeps the look; returns None, or null with an exception set.
template <class Look>
PyObject* keep(PyObject* self, std::initializer_list<PyObject*> objects, Look look) {
  for (PyObject* object : objects)
    if (object != nullptr && PyList_Append(seen_of(self)->held, object) != 0) return nullptr;
  try {
    std::get<std::deque<Look>>(*seen_of(self)->looks).push_back(std::move(look));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

PyObject* attribute(PyObject* self, PyObject* args) {
  PyObject *object, *name;
  if (PyArg_ParseTuple(args, "OU:attribute", &object, &name) == 0) return nullptr;
  PyObject* value = PyObject_GetAttr(object, name);
  if (value == nullptr) return nullptr;
  PyObject* result = keep(self, {object, name, value}, Attribute{object, name, value});
  Py_DECREF(value);
  return result;
}

PyObject* entry(PyObject* self, PyObject* args) {
  PyObject *dict, *key;
  if (PyArg_ParseTuple(args, "O!O:entry", &PyDict_Type, &dict, &key) == 0) return nullptr;
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred() != nullptr) return nullptr;
  return keep(self, {dict, key, value}, Entry{dict, key, value});
}

PyObject* values(PyObject* self, PyObject* dict) {
  if (PyDict_Check(dict) == 0) return PyErr_Format(PyExc_TypeError, "values() takes a dict");
  PyObject* list = PyDict_Values(dict);
  if (list == nullptr) return nullptr;
  PyObject* result = keep(self, {dict, list}, Values{dict, list, PyList_GET_SIZE(list)});
  Py_DECREF(list);
  return result;
}

PyObject* elements(PyObject* self, PyObject* list) {
  if (PyList_Check(list) == 0) return PyErr_Format(PyExc_TypeError, "elements() takes a list");
  PyObject* copy = PyList_GetSlice(list, 0, PyList_GET_SIZE(list));
  if (copy == nullptr) return nullptr;
  PyObject* result = keep(self, {list, copy}, Elements{list, copy});
  Py_DECREF(copy);
  return result;
}

PyObject* size(PyObject* self, PyObject* container) {
  const Py_ssize_t size = PyObject_Size(container);
  return size < 0 ? nullptr : keep(self, {container}, Size{container, size});
}

PyObject* place(PyObject* self, PyObject* tensor) {
  const dlpack::ExchangeApi* api = api_of(tensor);
  dlpack::Tensor now{};
  if (api == nullptr || api->tensor_of(tensor, &now) != 0) return nullptr;
  std::vector<int64_t> numbers(now.shape, now.shape + now.dimensions);
  numbers.insert(numbers.end(), now.strides, now.strides + now.dimensions);
  return keep(self, {tensor}, Place{tensor, api, now, std::move(numbers)});
}

PyObject* memory(PyObject* self, PyObject* args) {
  unsigned long long address;
  Py_ssize_t length;
  if (PyArg_ParseTuple(args, "Kn:memory", &address, &length) == 0) return nullptr;
  const char* begin = reinterpret_cast<const char*>(static_cast<uintptr_t>(address));
  return keep(self, {}, Memory{begin, std::string(begin, static_cast<size_t>(length))});
}

PyObject* is_same_method(PyObject* self, PyObject*) {
  int result = 1;
  std::apply([&](const auto&... kind) { ((result = are_same(kind), result == 1) && ...); },
             *seen_of(self)->looks);
  return result < 0 ? nullptr : PyBool_FromLong(result);
}

// Asks torch for one tensor after the other, most of one type.
class Places {
 public:
  // False with an exception set.
  bool of(PyObject* tensor, dlpack::Tensor& now) {
    if (Py_TYPE(tensor) != type_) {
      api_ = api_of(tensor);
      type_ = Py_TYPE(tensor);
    }
    return api_ != nullptr && api_->tensor_of(tensor, &now) == 0;
  }

 private:
  const dlpack::ExchangeApi* api_ = nullptr;
  PyTypeObject* type_ = nullptr;
};

// The bytes that `write` appends for each entry of a list; `write` returns false with an exception set, or
// without one where the whole is None.
template <class Write>
PyObject* bytes_of(const char* function, PyObject* tensors, const Write& write) {
  if (PyList_Check(tensors) == 0)
    return PyErr_Format(PyExc_TypeError, "%s() takes a list of tensors", function);
  std::string bytes;
  // Its length may change while it is gone through.
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(tensors); ++index) {
    PyObject* tensor = Py_NewRef(PyList_GET_ITEM(tensors, index));
    const bool written = write(tensor, bytes);
    Py_DECREF(tensor);
    if (written) continue;
    if (PyErr_Occurred() != nullptr) return nullptr;
    Py_RETURN_NONE;
  }
  return PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
}

void append(std::string& bytes, uint64_t one, uint64_t other) {
  const uint64_t both[] = {one, other};
  bytes.append(reinterpret_cast<const char*>(both), sizeof both);
}

// Made at their first use, which is in every step from then on.
PyObject* attribute_of(PyObject* object, PyObject*& name, const char* text) {
  if (name == nullptr) name = PyUnicode_InternFromString(text);
  return name == nullptr ? nullptr : PyObject_GetAttr(object, name);
}

std::size_t element_bytes(const dlpack::Tensor& tensor) { return tensor.type.bits / 8U * tensor.type.lanes; }

PyObject* numbers(PyObject*, PyObject* tensors) {
  Places places;
  return bytes_of("numbers", tensors, [&](PyObject* tensor, std::string& bytes) {
    dlpack::Tensor now{};
    if (!places.of(tensor, now)) return false;
    if (now.dimensions != 0 || now.device.type != dlpack::kCpu) {
      PyErr_Format(PyExc_ValueError, "numbers() takes tensors of one number, on the host");
      return false;
    }
    bytes.append(data_of(now), element_bytes(now));
    return true;
  });
}

// How many elements lie one behind the other; 0 if they lie otherwise.
uint64_t elements_in_one_piece(const dlpack::Tensor& tensor) {
  int64_t count = 1;
  bool dense = true;
  for (int32_t index = tensor.dimensions; index-- > 0;) {
    dense &= tensor.shape[index] == 1 || tensor.strides[index] == count;
    count *= tensor.shape[index];
  }
  return dense ? static_cast<uint64_t>(count) : 0;
}

PyObject* gradients(PyObject*, PyObject* args) {
  PyObject *parameters, *plain;
  if (PyArg_ParseTuple(args, "OO:gradients", &parameters, &plain) == 0) return nullptr;
  Places places;
  return bytes_of("gradients", parameters, [&](PyObject* parameter, std::string& bytes) {
    static PyObject* grad = nullptr;
    PyObject* gradient = attribute_of(parameter, grad, "grad");
    if (gradient == nullptr) return false;
    dlpack::Tensor now{};
    const bool is_plain = reinterpret_cast<PyObject*>(Py_TYPE(gradient)) == plain;
    const bool is_there = is_plain && places.of(gradient, now);
    if (is_plain && !is_there) PyErr_Clear();  // it has no memory of its own
    const bool none = gradient == Py_None;
    Py_DECREF(gradient);
    if (!is_there) return none;
    const uint64_t size = elements_in_one_piece(now) * element_bytes(now);
    if (now.device.type == dlpack::kCuda && size != 0)
      append(bytes, reinterpret_cast<uint64_t>(data_of(now)), size);
    return true;
  });
}

PyObject* versions(PyObject*, PyObject* parameters) {
  Places places;
  return bytes_of("versions", parameters, [&](PyObject* parameter, std::string& bytes) {
    static PyObject* name = nullptr;
    PyObject* number = attribute_of(parameter, name, "_version");
    if (number == nullptr) return false;
    const unsigned long long version = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    dlpack::Tensor now{};
    if (PyErr_Occurred() != nullptr || !places.of(parameter, now)) return false;
    append(bytes, version, reinterpret_cast<uint64_t>(data_of(now)));
    return true;
  });
}

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  seen_of(self)->held = PyList_New(0);
  seen_of(self)->looks = new (std::nothrow) Looks;
  if (seen_of(self)->held != nullptr && seen_of(self)->looks != nullptr) return self;
  Py_DECREF(self);
  return PyErr_NoMemory();
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(seen_of(self)->held);
  return 0;
}

int clear(PyObject* self) {
  if (seen_of(self)->looks != nullptr) *seen_of(self)->looks = {};
  Py_CLEAR(seen_of(self)->held);
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  delete seen_of(self)->looks;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef kMethods[] = {
    {"attribute", attribute, METH_VARARGS, "Look at an object's attribute."},
    {"entry", entry, METH_VARARGS, "Look at a dict's entry, which may be missing."},
    {"values", values, METH_O, "Look at all values of a dict, in their order."},
    {"elements", elements, METH_O, "Look at all elements of a list, in their order."},
    {"size", size, METH_O, "Look at how many entries a container has."},
    {"place", place, METH_O,
     "Look at where a tensor lies, on its device, and how it is read; not at what it holds."},
    {"memory", memory, METH_VARARGS, "Look at the bytes from an address on."},
    {"is_same", is_same_method, METH_NOARGS,
     "Whether all that was looked at is the same; of objects, the very same."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot kSlots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                        {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                        {Py_tp_clear, reinterpret_cast<void*>(clear)},
                        {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                        {Py_tp_methods, kMethods},
                        {0, nullptr}};
PyType_Spec kSpec = {"jitckpt._seen.Seen", sizeof(Seen), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};

PyMethodDef kFunctions[] = {
    {"numbers", numbers, METH_O, "The bytes of tensors of one number each, one behind the other."},
    {"plain_copy", jitckpt::seen::plain_copy, METH_O, "A copy of a value that is plain; None of any other."},
    {"same_settings", jitckpt::seen::same_settings, METH_VARARGS,
     "Whether plain values of two dicts are the same, but for some keys'."},
    {"living", jitckpt::seen::living, METH_O, "The living objects of some types."},
    {"living_tuples", jitckpt::seen::living_tuples, METH_O, "Id, length and first element of living tuples."},
    {"gradients", gradients, METH_VARARGS, "Address and bytes of gradients on a GPU, in one piece each."},
    {"versions", versions, METH_O, "How often torch has written to each tensor, and where it lies."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef kModule = {.m_base = PyModuleDef_HEAD_INIT,
                       .m_name = "_seen",
                       .m_doc = nullptr,
                       .m_size = -1,
                       .m_methods = kFunctions,
                       .m_slots = nullptr,
                       .m_traverse = nullptr,
                       .m_clear = nullptr,
                       .m_free = nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__seen() {
  PyObject* module = PyModule_Create(&kModule);
  PyObject* type = PyType_FromSpec(&kSpec);
  if (module == nullptr || type == nullptr || PyModule_AddObjectRef(module, "Seen", type) != 0) {
    Py_XDECREF(type);
    Py_XDECREF(module);
    return nullptr;
  }
  Py_DECREF(type);
  return module;
}
