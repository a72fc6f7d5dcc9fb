// jitckpt._seen: whether the objects of a training are as they were when they were looked at, in one call.
// In every step some hundred entries of dicts and tensors are compared; in Python that would be slow.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "seen/calls.h"
#include "seen/dlpack.h"
#include "seen/exits.h"
#include "seen/living.h"
#include "seen/plain.h"
#include "seen/sealed.h"

namespace {

namespace dlpack = jitckpt::dlpack;

constexpr size_t kCacheLine = 64;

// What was seen. The objects are borrowed from the list of those that are held.
struct Attribute {
  PyObject *object, *name, *value;
};
struct Entry {
  PyObject *key, *value;
};
// Of one dict: some of its entries, which lie in one piece among those of all dicts; how many it has, if that
// was looked at; and all its values, or null.
struct Dict {
  PyObject* dict;
  size_t begin, end;
  Py_ssize_t size;
  PyObject* values;
  mutable uint64_t version;  // with which it was as it is here; 0: that was not seen yet
};
constexpr Py_ssize_t kAnySize = -1;
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
using Looks = InKinds<Attribute, Dict, Elements, Size, Place, Memory>;

struct Seen {
  PyObject_HEAD PyObject* held;
  Looks* looks;
  std::deque<Entry>* entries;
  bool has_ended;
  uint8_t
      kinds;  // a bit for each kind of which there are looks: the others need not be fetched into the caches
};

Seen* seen_of(PyObject* self) { return reinterpret_cast<Seen*>(self); }

template <class Look, class... Kinds>
constexpr uint8_t bit_in(const InKinds<Kinds...>*) {
  uint8_t bit = 1;
  ((std::is_same_v<Look, Kinds> ? false : (bit = static_cast<uint8_t>(bit << 1U), true)) && ...);
  return bit;
}

template <class Look>
constexpr uint8_t kBitOf = bit_in<Look>(static_cast<const Looks*>(nullptr));

constexpr uintptr_t kLowestAddress = 1U << 16U;  // Linux's vm.mmap_min_addr

const char* data_of(const dlpack::Tensor& tensor) {
  return static_cast<const char*>(tensor.data) + tensor.byte_offset;
}

// 1: as it was; 0: not; -1: a Python exception is set.

int is_same(const Attribute& seen, const Seen&) {
  PyObject* now = PyObject_GetAttr(seen.object, seen.name);
  Py_XDECREF(now);
  return now == nullptr ? -1 : now == seen.value;
}

// What CPython changes with every change of a dict, and never uses twice; 0 where it has no such number, or
// wants nobody to ask for it.
uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  static_cast<void>(dict);
  return 0;
#endif
}

bool is_untouched(const Dict& seen) { return seen.version != 0 && seen.version == version_of(seen.dict); }

bool are_values_same(const Dict& seen) {
  Py_ssize_t position = 0;
  PyObject* value = nullptr;
  for (Py_ssize_t index = 0; PyDict_Next(seen.dict, &position, nullptr, &value) != 0; ++index)
    if (value != PyList_GET_ITEM(seen.values, index)) return false;
  return true;
}

int is_same(const Dict& seen, const Seen& of) {
  if (is_untouched(seen)) return 1;
  const uint64_t version = version_of(seen.dict);
  if (seen.size != kAnySize && PyDict_GET_SIZE(seen.dict) != seen.size) return 0;
  if (seen.values != nullptr && seen.size != 0 && !are_values_same(seen)) return 0;
  for (size_t index = seen.begin; index < seen.end; ++index) {
    const Entry& entry = (*of.entries)[index];
    PyObject* now = PyDict_GetItemWithError(seen.dict, entry.key);
    if (now == nullptr && PyErr_Occurred() != nullptr) return -1;
    if (now != entry.value) return 0;
  }
  seen.version = version;
  return 1;
}

int is_same(const Elements& seen, const Seen&) {
  const Py_ssize_t size = PyList_GET_SIZE(seen.copy);
  if (PyList_GET_SIZE(seen.seen) != size) return 0;
  for (Py_ssize_t index = 0; index < size; ++index)
    if (PyList_GET_ITEM(seen.seen, index) != PyList_GET_ITEM(seen.copy, index)) return 0;
  return 1;
}

int is_same(const Size& seen, const Seen&) {
  const Py_ssize_t now = PyObject_Size(seen.container);
  return now < 0 ? -1 : now == seen.size;
}

int is_same(const Place& seen, const Seen&) {
  dlpack::Tensor now{};
  if (seen.api->tensor_of(seen.tensor, &now) != 0) return -1;
  const dlpack::Tensor& before = seen.before;
  const int64_t* numbers = seen.shape_and_strides.data();
  return data_of(now) == data_of(before) && now.device == before.device && now.type == before.type &&
         now.dimensions == before.dimensions && std::equal(now.shape, now.shape + now.dimensions, numbers) &&
         std::equal(now.strides, now.strides + now.dimensions, numbers + now.dimensions);
}

int is_same(const Memory& seen, const Seen&) {
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
void prefetch_objects(const Attribute& seen) { prefetch(seen.object); }
void prefetch_objects(const Dict& seen) { prefetch(&reinterpret_cast<PyDictObject*>(seen.dict)->ma_keys); }
void prefetch_objects(const Size& seen) { prefetch(seen.container); }
void prefetch_objects(const Place& seen) { prefetch(seen.tensor); }
void prefetch_objects(const Memory& seen) {
  prefetch(seen.address);
  prefetch(seen.address + seen.bytes.size() - 1);
  prefetch(seen.bytes.data());
  prefetch(seen.bytes.data() + seen.bytes.size() - 1);
}

template <class Look>
void prefetch_contents(const Look&) {}
void prefetch_contents(const Dict& seen) {
  if (is_untouched(seen) || seen.size == 0) return;
  prefetch_keys(seen.dict);
  if (seen.values != nullptr) prefetch(PySequence_Fast_ITEMS(seen.values));
}

// As is_same of one.
template <class Look>
int are_same(const std::deque<Look>& looks, const Seen& of) {
  constexpr size_t at_a_time = 32;
  for (size_t begin = 0, count = looks.size(); begin < count; begin += at_a_time) {
    const size_t end = std::min(count, begin + at_a_time);
    for (size_t index = begin; index < end; ++index) prefetch_objects(looks[index]);
    for (size_t index = begin; index < end; ++index) prefetch_contents(looks[index]);
    for (size_t index = begin; index < end; ++index)
      if (const int result = is_same(looks[index], of); result != 1) return result;
  }
  return 1;
}

// The same of those of one kind.
template <class Look>
int are_same(const Seen& seen) {
  return (seen.kinds & kBitOf<Look>) == 0 ? 1 : are_same(std::get<std::deque<Look>>(*seen.looks), seen);
}

template <class... Kinds>
int are_all_kinds_same(const Seen& seen, const InKinds<Kinds...>*) {
  int result = 1;
  ((result = are_same<Kinds>(seen), result == 1) && ...);
  return result;
}

int are_same(const Seen& seen) {
  return seen.has_ended ? 0 : are_all_kinds_same(seen, static_cast<const Looks*>(nullptr));
}

// Calls `visit` with those of each kind of which there are some.
template <class Visit, class... Kinds>
void for_each_kind(const Seen& seen, const Visit& visit, const InKinds<Kinds...>*) {
  (((seen.kinds & kBitOf<Kinds>) != 0 ? visit(std::get<std::deque<Kinds>>(*seen.looks)) : void()), ...);
}

template <class Visit>
void for_each_kind(const Seen& seen, const Visit& visit) {
  for_each_kind(seen, visit, static_cast<const Looks*>(nullptr));
}

// Of several that are to be compared: most have few looks, so what these need is asked for of all of them
// before it is of use to one.
void prefetch_looks(PyObject* const* several, Py_ssize_t count) {
  constexpr size_t at_most = 32;  // of a kind; those of many are fetched as they are compared
  const auto for_each_look = [&](const auto& visit) {
    for (Py_ssize_t index = 0; index < count; ++index)
      for_each_kind(*seen_of(several[index]), [&](const auto& looks) {
        for (size_t number = 0; number < std::min(looks.size(), at_most); ++number) visit(looks[number]);
      });
  };
  for (Py_ssize_t index = 0; index < count; ++index)
    for_each_kind(*seen_of(several[index]), [](const auto& looks) {
      prefetch(&looks);
      prefetch(reinterpret_cast<const char*>(&looks + 1) - 1);
    });
  for (Py_ssize_t index = 0; index < count; ++index)
    for_each_kind(*seen_of(several[index]), [](const auto& looks) { prefetch(&looks.front()); });
  for_each_look([](const auto& look) { prefetch_objects(look); });
  for_each_look([](const auto& look) { prefetch_contents(look); });
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
    seen_of(self)->kinds |= kBitOf<Look>;
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

// Keeps a look at a dict, with those before if they are of the same; null with an exception set.
template <class Add>
PyObject* keep_of_dict(PyObject* self, std::initializer_list<PyObject*> objects, PyObject* dict,
                       const Add& add) {
  for (PyObject* object : objects)
    if (object != nullptr && PyList_Append(seen_of(self)->held, object) != 0) return nullptr;
  try {
    auto& dicts = std::get<std::deque<Dict>>(*seen_of(self)->looks);
    auto& entries = *seen_of(self)->entries;
    if (dicts.empty() || dicts.back().dict != dict || dicts.back().size != kAnySize)
      dicts.push_back({dict, entries.size(), entries.size(), kAnySize, nullptr, 0});
    dicts.back().version = 0;
    seen_of(self)->kinds |= kBitOf<Dict>;
    add(dicts.back(), entries);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

PyObject* entry(PyObject* self, PyObject* args) {
  PyObject *dict, *key;
  if (PyArg_ParseTuple(args, "O!O:entry", &PyDict_Type, &dict, &key) == 0) return nullptr;
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred() != nullptr) return nullptr;
  return keep_of_dict(self, {dict, key, value}, dict, [&](Dict& seen, std::deque<Entry>& entries) {
    entries.push_back({key, value});
    seen.end = entries.size();
  });
}

PyObject* values(PyObject* self, PyObject* dict) {
  if (PyDict_Check(dict) == 0) return PyErr_Format(PyExc_TypeError, "values() takes a dict");
  PyObject* list = PyDict_Values(dict);
  if (list == nullptr) return nullptr;
  PyObject* result = keep_of_dict(self, {dict, list}, dict, [&](Dict& seen, std::deque<Entry>&) {
    seen.values = list;
    seen.size = PyList_GET_SIZE(list);
  });
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
  if (size < 0) return nullptr;
  if (PyDict_CheckExact(container) == 0) return keep(self, {container}, Size{container, size});
  return keep_of_dict(self, {container}, container,
                      [&](Dict& seen, std::deque<Entry>&) { seen.size = size; });
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
  const int result = are_same(*seen_of(self));
  return result < 0 ? nullptr : PyBool_FromLong(result);
}

PyObject* end(PyObject* self, PyObject*) {
  seen_of(self)->has_ended = true;
  Py_RETURN_NONE;
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
    // A script may free a tensor's storage: what lies in it is then so many bytes from address 0, in pages
    // that no process may have.
    if (reinterpret_cast<uintptr_t>(data_of(now)) < kLowestAddress) {
      PyErr_Format(PyExc_ValueError, "numbers() takes tensors that have memory");
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
  seen_of(self)->entries = new (std::nothrow) std::deque<Entry>;
  const Seen& made = *seen_of(self);
  if (made.held != nullptr && made.looks != nullptr && made.entries != nullptr) return self;
  Py_DECREF(self);
  return PyErr_NoMemory();
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(seen_of(self)->held);
  return 0;
}

int clear(PyObject* self) {
  seen_of(self)->kinds = 0;
  if (seen_of(self)->looks != nullptr) *seen_of(self)->looks = {};
  if (seen_of(self)->entries != nullptr) seen_of(self)->entries->clear();
  Py_CLEAR(seen_of(self)->held);
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  delete seen_of(self)->looks;
  delete seen_of(self)->entries;
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
    {"end", end, METH_NOARGS, "From now on it is not the same any more."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot kSlots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                        {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                        {Py_tp_clear, reinterpret_cast<void*>(clear)},
                        {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                        {Py_tp_methods, kMethods},
                        {0, nullptr}};
PyType_Spec kSpec = {"jitckpt._seen.Seen", sizeof(Seen), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};

// As is_same of one.
int are_all_same(PyObject* several) {
  PyObject* const* const items = PySequence_Fast_ITEMS(several);
  const Py_ssize_t count = PyTuple_GET_SIZE(several);
  for (Py_ssize_t index = 0; index < count; ++index) prefetch(items[index]);
  for (Py_ssize_t index = 0; index < count; ++index)
    if (Py_TYPE(items[index])->tp_dealloc != deallocate) {
      PyErr_Format(PyExc_TypeError, "a tuple of Seen is needed");
      return -1;
    }
  prefetch_looks(items, count);
  for (Py_ssize_t index = 0; index < count; ++index)
    if (const int result = are_same(*seen_of(items[index])); result != 1) return result;
  return 1;
}

PyObject* all_same(PyObject*, PyObject* several) {
  if (PyTuple_Check(several) == 0) return PyErr_Format(PyExc_TypeError, "all_same() takes a tuple");
  const int result = are_all_same(several);
  return result < 0 ? nullptr : PyBool_FromLong(result);
}

PyObject* gone_on(PyObject*, PyObject* args) {
  PyObject *looks, *going_on, *known;
  if (PyArg_ParseTuple(args, "O!O!O!:gone_on", &PyTuple_Type, &looks, &PyTuple_Type, &going_on, &PyDict_Type,
                       &known) == 0)
    return nullptr;
  if (const int result = are_all_same(looks); result != 1) return result < 0 ? nullptr : Py_NewRef(Py_None);
  PyObject* const found = PyList_New(0);
  for (Py_ssize_t index = 0; found != nullptr && index < PyTuple_GET_SIZE(going_on); ++index) {
    PyObject *name = nullptr, *read = nullptr;
    bool is_told = PyArg_ParseTuple(PyTuple_GET_ITEM(going_on, index), "OO", &name, &read) != 0;
    PyObject* const now = is_told ? PyObject_CallNoArgs(read) : nullptr;
    PyObject* const before = now == nullptr ? nullptr : PyDict_GetItemWithError(known, name);
    const int is_same = before == nullptr ? 0 : PyObject_RichCompareBool(now, before, Py_EQ);
    is_told = now != nullptr && is_same >= 0 && PyErr_Occurred() == nullptr;
    if (is_told && is_same == 0) {
      PyObject* const pair = PyTuple_Pack(2, name, now);
      is_told = pair != nullptr && PyList_Append(found, pair) == 0;
      Py_XDECREF(pair);
    }
    Py_XDECREF(now);
    if (is_told) continue;
    Py_DECREF(found);
    return nullptr;
  }
  return found;
}

PyMethodDef kFunctions[] = {
    {"all_same", all_same, METH_O, "Whether all that each Seen of a tuple has looked at is the same."},
    {"call_if_none", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(jitckpt::seen::call_if_none)),
     METH_FASTCALL | METH_KEYWORDS, "Call one of two functions, by what a third one answers."},
    {"call_native", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(jitckpt::seen::call_native)),
     METH_FASTCALL, "Call a C function with numbers."},
    {"gone_on", gone_on, METH_VARARGS,
     "What is told of that which goes on, if it is other than known, and all else the same; else None."},
    {"numbers", numbers, METH_O, "The bytes of tensors of one number each, one behind the other."},
    {"plain_copy", jitckpt::seen::plain_copy, METH_O, "A copy of a value that is plain; None of any other."},
    {"same_settings", jitckpt::seen::same_settings, METH_VARARGS,
     "Whether plain values of dicts are the same, but for some keys'."},
    {"settings_of", jitckpt::seen::settings_of, METH_O, "What parameter groups say beside their parameters."},
    {"living", jitckpt::seen::living, METH_O, "The living objects of some types."},
    {"living_tuples", jitckpt::seen::living_tuples, METH_O, "Id, length and first element of living tuples."},
    {"write_sealed", jitckpt::seen::write_sealed, METH_VARARGS,
     "Fill a blob's head in, and copy it into a ring."},
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
  PyObject* seen = PyType_FromSpec(&kSpec);
  PyObject* exit = jitckpt::seen::exit_type();
  const bool is_made = module != nullptr && seen != nullptr && exit != nullptr &&
                       PyModule_AddObjectRef(module, "Seen", seen) == 0 &&
                       PyModule_AddObjectRef(module, "Exit", exit) == 0;
  Py_XDECREF(seen);
  Py_XDECREF(exit);
  if (!is_made) Py_CLEAR(module);
  return module;
}
