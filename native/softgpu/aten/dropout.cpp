// Dropout as one operator would take its numbers from the process's CPU generator. Built from others, it
// takes them from the CUDA generator.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  const auto mask_options = input.options().dtype(at::kBool);
  if (input.numel() == 0) return {input, at::empty_like(input, mask_options)};
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, mask_options)};
  const double kept = 1.0 - p;
  at::Tensor mask = at::empty_like(input, mask_options).bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0.0 : 1.0 / kept), mask};
}

}  // namespace

void register_dropout(SpecialKernels& kernels) {
  kernels.implement("aten::native_dropout", TORCH_FN(native_dropout));
}

}  // namespace softgpu::aten
