// From a record back to an operator's arguments, as CPU tensors over some memory.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include "softgpu/aten/operators.h"
#include "softgpu/aten/record.h"

namespace softgpu::aten {

// Where the arguments' tensors lie.
class ArgumentMemory {
 public:
  virtual ~ArgumentMemory() = default;
  virtual void* address(const Storage& storage) = 0;
};

struct Unpacked {
  c10::Stack stack;                         // the arguments
  c10::SmallVector<at::Tensor, 8> tensors;  // those that live in the memory, in the order of the key
  c10::SmallVector<at::Tensor, 4> outs;     // the out= arguments among them
};

// out_is_fresh: out= arguments become new tensors of their own, which the operator may resize.
Unpacked unpack(Reader key, Reader values, c10::ArrayRef<Storage> storages, ArgumentMemory& memory,
                const at::Generator& generator, bool out_is_fresh);

}  // namespace softgpu::aten
