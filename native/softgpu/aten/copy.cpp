// Copies: within a device as an operator on the stream, between devices and with the host by torch's own way,
// which uses nothing but cudaMemcpyAsync once both sides are contiguous and of one type.
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>

#include "softgpu/aten/call.h"
#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

bool dense_on_device(const at::Tensor& tensor) { return tensor.is_cuda() && tensor.layout() == at::kStrided; }

void copy_within(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  static Operator& op = *find_operator("aten::copy_");
  call_operator(op, target, source, non_blocking);
}

// Each device prepares its own side, and the same bytes go between them.
void copy_across(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  const at::Tensor sent =
      source.to(target.scalar_type()).expand_as(target).contiguous().resolve_conj().resolve_neg();
  const bool direct = target.is_contiguous() && !target.is_conj() && !target.is_neg();
  at::Tensor received = direct ? target : at::empty_like(sent, sent.options().device(target.device()));
  at::native::copy_(received, sent, non_blocking);
  if (!direct) copy_within(target, received, non_blocking);
}

at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  if (target.is_same(source)) return target;
  if (!dense_on_device(target) || !dense_on_device(source))
    return at::native::copy_(target, source, non_blocking);
  if (source._is_zerotensor()) return target.zero_();
  target.device() == source.device() ? copy_within(target, source, non_blocking)
                                     : copy_across(target, source, non_blocking);
  return target;
}

// As CUDA's: pair by pair where not all lie on one device.
void foreach_copy(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  static Operator& op = *find_operator("aten::_foreach_copy_");
  TORCH_CHECK(targets.size() == sources.size(), "Tensor lists must have the same number of tensors, got ",
              targets.size(), " and ", sources.size());
  bool together = !targets.empty();
  for (size_t i = 0; i < targets.size(); ++i) {
    together &= dense_on_device(targets[i]) && targets[i].device() == targets[0].device() &&
                sources[i].device() == targets[0].device();
  }
  if (together) {
    c10::Stack stack = {targets, sources, non_blocking};
    call_operator(op, &stack);
    return;
  }
  for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(sources[i], non_blocking);
}

}  // namespace

void register_copies(SpecialKernels& kernels) {
  kernels.implement("aten::copy_", TORCH_FN(copy));
  kernels.implement("aten::_foreach_copy_", TORCH_FN(foreach_copy));
}

}  // namespace softgpu::aten
