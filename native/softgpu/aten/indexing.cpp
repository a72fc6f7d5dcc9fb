// Indexing accepts indices from the host, and masks, whose number of results only the device knows.
#include <ATen/core/List.h>

#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

bool is_mask(const c10::IValue& index) {
  return index.isTensor() && index.toTensor().defined() &&
         (index.toTensor().scalar_type() == at::kBool || index.toTensor().scalar_type() == at::kByte);
}

bool has_mask(c10::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& index : arguments[1].toListRef()) {
    if (is_mask(index)) return true;
  }
  return false;
}

// (self, indices, ...): moves the indices to self's device.
template <size_t argument_count>
void move_indices(c10::Stack* stack) {
  c10::IValue* arguments = &*(stack->end() - argument_count);
  const at::Tensor& self = arguments[0].toTensor();
  c10::List<std::optional<at::Tensor>> indices;
  for (const c10::IValue& index : arguments[1].toListRef()) {
    if (index.isTensor() && index.toTensor().defined()) {
      indices.push_back(index.toTensor().to(self.device()));
    } else {
      indices.push_back(std::nullopt);
    }
  }
  arguments[1] = indices;
}

void prepare(const char* name, Prepare function, Waits waits) {
  if (Operator* op = find_operator(name)) {
    op->prepare = function;
    op->waits = waits;
  }
}

}  // namespace

void register_indexing(SpecialKernels&) {
  prepare("aten::index.Tensor", move_indices<2>, has_mask);
  prepare("aten::index.Tensor_out", move_indices<3>, has_mask);
  prepare("aten::_index_put_impl_", move_indices<5>, nullptr);
}

}  // namespace softgpu::aten
