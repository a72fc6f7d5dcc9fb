// What generated records are made of, beside numbers and addresses.
#pragma once
#include <cstddef>
#include <cstdint>

namespace jitckpt::proxy::wire {

// A number of any type, or where it lies on the device.
struct Scalar {
  uint64_t address = 0;  // on the device; 0: on the host
  uint64_t given = 0;    // 0: there is none, the program gave a null pointer
  alignas(16) std::byte value[16] = {};

  const void* pointer() const {
    return given == 0 ? nullptr : address != 0 ? reinterpret_cast<const void*>(address) : value;
  }
};

// A structure behind a pointer that may be null.
template <class Structure>
struct Given {
  Structure value;
  uint64_t given;

  const Structure* pointer() const { return given != 0 ? &value : nullptr; }
};

}  // namespace jitckpt::proxy::wire
