// From an operator's arguments to the parts of a record.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

#include "softgpu/aten/operators.h"
#include "softgpu/aten/record.h"

namespace softgpu::aten {

struct Packed {
  c10::SmallVector<Storage, 8> storages;
  Writer key, values;
  c10::SmallVector<at::Tensor, 8> tensors;  // the call's device tensors, in the order of the key
  c10::SmallVector<size_t, 4> outs;         // which of them are out= arguments
  std::optional<at::Generator> generator;
  std::optional<c10::Device> device;  // that of the tensors, else the one named by an argument
};

// Throws torch's own errors for tensors on different devices, and one that names the operator for an argument
// that cannot be passed to the device.
Packed pack(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

void put_layout(Writer& to, const TensorLayout& layout);
TensorLayout get_layout(Reader& from);
// Throws an error that names the operator for a tensor that is not strided.
TensorLayout layout_of(const Operator& op, const at::Tensor& tensor);

}  // namespace softgpu::aten
