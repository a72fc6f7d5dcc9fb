// What this folder needs of DLPack (https://github.com/dmlc/dlpack, version 1, whose binary interface is
// stable): how torch tells C where a tensor lies, with no Python and none of torch's own headers.
#pragma once

#include <cstdint>

namespace jitckpt::dlpack {

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  bool operator==(const DataType&) const = default;
};

struct TensorDevice {
  int32_t type;
  int32_t index;
  bool operator==(const TensorDevice&) const = default;
};
constexpr int32_t kCpu = 1, kCuda = 2;

struct Tensor {
  void* data;
  TensorDevice device;
  int32_t dimensions;
  DataType type;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// The table in the capsule of this name, which a tensor's class has as __dlpack_c_exchange_api__.
constexpr char kCapsule[] = "dlpack_exchange_api";
constexpr uint32_t kMajorVersion = 1;

struct ExchangeApi {
  struct {
    uint32_t major, minor;
  } version;
  void* previous_version;
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  // Fills in a tensor that refers to the object's own memory; 0, or -1 with a Python exception.
  int (*tensor_of)(void* object, Tensor* tensor);
};

}  // namespace jitckpt::dlpack
