// Where a program has cuDNN (or AMD's MIOpen) on, torch chooses it for these. softgpu says no where it is
// asked, and does cuDNN's part where it is not.
#include <ATen/ops/empty.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>

#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

bool is_acceptable(const at::Tensor&) { return false; }

bool use_ctc_loss(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) {
  return false;
}

bool use_ctc_loss_lengths(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          int64_t) {
  return false;
}

// Returns output, mean, inverse deviation and cuDNN's workspace.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training, double momentum,
    double epsilon) {
  auto [output, mean, deviation] =
      at::native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, epsilon);
  return {output, mean, deviation, at::empty({0}, input.options().dtype(at::kByte))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_backward(
    const at::Tensor& input, const at::Tensor& gradient, const at::Tensor& weight,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, const OptionalTensor& mean,
    const OptionalTensor& deviation, double epsilon, const at::Tensor& /*workspace*/) {
  constexpr bool training = true;  // cuDNN is asked for nothing else
  return at::native_batch_norm_backward(gradient, input, weight, running_mean, running_var, mean, deviation,
                                        training, epsilon, {true, true, true});
}

// cuDNN wants a recurrent layer's weights in one piece, nobody else does; the result is not used.
at::Tensor flatten_weights(at::TensorList weights, int64_t, c10::SymInt, int64_t, c10::SymInt, c10::SymInt,
                           int64_t, bool, bool) {
  return at::empty({0}, weights[0].options());
}

}  // namespace

void register_cudnn(SpecialKernels& kernels) {
  kernels.implement_composite("aten::cudnn_is_acceptable", TORCH_FN(is_acceptable));
  kernels.implement("aten::_use_cudnn_ctc_loss", TORCH_FN(use_ctc_loss));
  kernels.implement("aten::_use_cudnn_ctc_loss.Tensor", TORCH_FN(use_ctc_loss_lengths));
  kernels.implement("aten::_use_miopen_ctc_loss", TORCH_FN(use_ctc_loss));
  kernels.implement("aten::_use_miopen_ctc_loss.Tensor", TORCH_FN(use_ctc_loss_lengths));
  kernels.implement("aten::cudnn_batch_norm", TORCH_FN(batch_norm));
  kernels.implement("aten::cudnn_batch_norm_backward", TORCH_FN(batch_norm_backward));
  kernels.implement("aten::_cudnn_rnn_flatten_weight", TORCH_FN(flatten_weights));
}

}  // namespace softgpu::aten
