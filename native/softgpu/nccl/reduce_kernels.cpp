#include "softgpu/nccl/reduce_kernels.h"

#include <cstring>
#include <type_traits>

#include "softgpu/nccl/narrow_floats.h"

namespace softgpu::nccl {
namespace {

// What an element is computed in: load gives it, store rounds it to the element again.
template <class Element>
struct Arithmetic {
  using Value = Element;
  static Value load(Element element) { return element; }
  static Element store(Value value) { return value; }
};
template <class Element>
  requires std::is_class_v<Element>
struct Arithmetic<Element> {
  using Value = float;
  static Value load(Element element) { return widen(element); }
  static Element store(Value value) { return narrow<Element>(value); }
};

// Integers overflow as on the device; signed ones may not in C++.
template <class Value>
auto wrapping(Value value) {
  if constexpr (std::is_integral_v<Value>) {
    return static_cast<std::make_unsigned_t<Value>>(value);
  } else {
    return value;
  }
}

struct Sum {
  template <class Value>
  Value operator()(Value left, Value right) const {
    return static_cast<Value>(wrapping(left) + wrapping(right));
  }
};
struct Product {
  template <class Value>
  Value operator()(Value left, Value right) const {
    return static_cast<Value>(wrapping(left) * wrapping(right));
  }
};
struct Maximum {
  template <class Value>
  Value operator()(Value left, Value right) const {
    return left > right || right != right ? left : right;
  }
};
struct Minimum {
  template <class Value>
  Value operator()(Value left, Value right) const {
    return left < right || right != right ? left : right;
  }
};

template <class Element, class Operation>
void combine_elements(void* __restrict accumulator, const void* __restrict right, size_t count) {
  auto* __restrict left_elements = static_cast<Element*>(accumulator);
  const auto* __restrict right_elements = static_cast<const Element*>(right);
  using As = Arithmetic<Element>;
  for (size_t i = 0; i < count; ++i) {
    left_elements[i] = As::store(Operation()(As::load(left_elements[i]), As::load(right_elements[i])));
  }
}

// Calls work with a value of the type's C++ element.
template <class Work>
void with_element(ncclDataType_t type, Work work) {
  switch (type) {
    case ncclInt8:
      return work(int8_t());
    case ncclUint8:
      return work(uint8_t());
    case ncclInt32:
      return work(int32_t());
    case ncclUint32:
      return work(uint32_t());
    case ncclInt64:
      return work(int64_t());
    case ncclUint64:
      return work(uint64_t());
    case ncclFloat16:
      return work(Half());
    case ncclFloat32:
      return work(float());
    case ncclFloat64:
      return work(double());
    case ncclBfloat16:
      return work(BFloat16());
    case ncclFloat8e4m3:
      return work(Float8E4M3());
    case ncclFloat8e5m2:
      return work(Float8E5M2());
    case ncclNumTypes:
      return;
  }
}

}  // namespace

void combine(ncclDataType_t type, ncclRedOp_t operation, void* accumulator, const void* right, size_t count) {
  with_element(type, [&]<class Element>(Element) {
    switch (operation) {
      case ncclProd:
        return combine_elements<Element, Product>(accumulator, right, count);
      case ncclMax:
        return combine_elements<Element, Maximum>(accumulator, right, count);
      case ncclMin:
        return combine_elements<Element, Minimum>(accumulator, right, count);
      default:
        return combine_elements<Element, Sum>(accumulator, right, count);
    }
  });
}

void divide(ncclDataType_t type, void* values, int ranks, size_t count) {
  with_element(type, [&]<class Element>(Element) {
    using As = Arithmetic<Element>;
    using Value = typename As::Value;
    // Wide enough for the number of ranks where the element is not.
    using Wide = std::conditional_t<std::is_floating_point_v<Value>, Value,
                                    std::conditional_t<std::is_signed_v<Value>, int64_t, uint64_t>>;
    auto* elements = static_cast<Element*>(values);
    const auto divisor = static_cast<Wide>(ranks);
    for (size_t i = 0; i < count; ++i) {
      elements[i] = As::store(static_cast<Value>(static_cast<Wide>(As::load(elements[i])) / divisor));
    }
  });
}

void multiply(ncclDataType_t type, void* result, const void* source, const void* scalar, size_t count) {
  with_element(type, [&]<class Element>(Element factor) {
    using As = Arithmetic<Element>;
    std::memcpy(&factor, scalar, sizeof factor);
    const auto value = As::load(factor);
    auto* __restrict results = static_cast<Element*>(result);
    const auto* __restrict sources = static_cast<const Element*>(source);
    for (size_t i = 0; i < count; ++i) results[i] = As::store(Product()(As::load(sources[i]), value));
  });
}

}  // namespace softgpu::nccl
