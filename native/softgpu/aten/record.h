// The wire format of one operator call. A record holds device addresses but no host pointer, so any process
// that maps the same device memory and has the same torch can execute it.
//
//     Header | Randomness, of a random operator | Storage[storages] | uint64_t output_address[outputs] | key
//     | values | output layouts
//
// The key is what the results' shapes depend on (which operator, the shapes of tensors, integers, flags); the
// values are the rest (offsets, floats, scalars, the bytes of small CPU tensors). Both are read side by side.
#pragma once
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace softgpu::aten {

struct Header {
  uint32_t bytes;  // of the whole record
  uint32_t operator_index, operator_check;
  uint32_t storages, outputs;
  uint32_t key_bytes, value_bytes, layout_bytes;
  uint64_t random;  // whether there is a Randomness
  uint64_t reply;   // device address of a Reply where the host waits for the results, else 0
};

// What a random operator's numbers come from: the state of the CUDA generator. In a graph the state lies on
// the device, and is another one in each launch; the offset is then what has to be added to that.
struct Randomness {
  uint64_t seed, offset;
  uint64_t seed_address, offset_address;  // device addresses, or 0
};

struct Storage {
  uint64_t address, bytes;
};

// What the device side answers to a call that the host waits for; the results stay with the device side,
// under the reply's address, until the host has allocated memory for them.
struct Reply {
  static constexpr size_t capacity = 4096;
  enum Status : uint32_t {
    returned,
    index_error,
    value_error,
    type_error,
    not_implemented,
    linear_algebra,
    other
  };
  uint32_t status;
  uint32_t bytes;  // of the layouts and values that were returned, or of the error's text
  uint8_t content[capacity - 8];
};

enum class Tag : uint8_t {
  none,
  tensor,
  same_tensor,  // as an earlier one of this call: an in-place operator on its own argument
  undefined_tensor,
  value_tensor,  // a CPU tensor, passed with its bytes
  integer,
  floating,
  boolean,
  complex,
  integer_value,  // as above, but the number is among the values
  floating_value,
  boolean_value,
  complex_value,
  string,
  device,
  generator,
  tensor_list,
  optional_tensor_list,
  integer_list,
  floating_list,
  boolean_list,
  number_list,
};

enum TensorFlags : uint8_t { wrapped_number = 1, conjugate = 2, negative = 4, resizable = 8 };

class Writer {
 public:
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(&value, sizeof value);
  }
  void append(const void* data, size_t bytes) {
    const auto* first = static_cast<const uint8_t*>(data);
    bytes_.append(first, first + bytes);
  }
  const uint8_t* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  std::string_view view() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

 private:
  c10::SmallVector<uint8_t, 512> bytes_;
};

class Reader {
 public:
  Reader(const uint8_t* data, size_t bytes) : next_(data), end_(data + bytes) {}
  template <class T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  const uint8_t* take(size_t bytes) {
    if (bytes > static_cast<size_t>(end_ - next_))
      throw std::runtime_error("an operator record is shorter than it says");
    const uint8_t* taken = next_;
    next_ += bytes;
    return taken;
  }
  bool at_end() const { return next_ == end_; }

 private:
  const uint8_t* next_;
  const uint8_t* end_;
};

}  // namespace softgpu::aten
