// Scaled dot product attention: CUDA chooses among NVIDIA's fused kernels, here the CPU's choice is taken,
// and its fused kernel runs under the operators that torch keeps for other makers' devices.
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>

#include <mutex>

#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// The program's switches, put back when this ends; the CPU's chooser knows two of the four.
class OpenSwitches {
 public:
  OpenSwitches() {
    context_.setSDPUseFlash(true);
    context_.setSDPUseMath(true);
  }
  ~OpenSwitches() {
    context_.setSDPUseFlash(flash_);
    context_.setSDPUseMath(math_);
  }
  OpenSwitches(const OpenSwitches&) = delete;
  OpenSwitches& operator=(const OpenSwitches&) = delete;

 private:
  at::Context& context_ = at::globalContext();
  const bool flash_ = context_.userEnabledFlashSDP(), math_ = context_.userEnabledMathSDP();
};

// NVIDIA's fused kernels, of which a program may switch off some, are one here. Where it has switched off all
// else and the CPU's fused kernel does not take the arguments (dropout), the unfused way it is.
int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const OptionalTensor& mask, double dropout_p, bool is_causal, std::optional<double> scale,
               bool enable_gqa) {
  static std::mutex switches_open;  // held by who opens them
  std::unique_lock lock(switches_open);
  const at::Context& context = at::globalContext();
  std::optional<OpenSwitches> open;
  if (context.userEnabledFlashSDP() || context.userEnabledMemEfficientSDP() || context.userEnabledCuDNNSDP())
    open.emplace();
  // The CPU's chooser looks at nothing but metadata, so it may look at device tensors.
  const int64_t chosen =
      at::_ops::_fused_sdp_choice::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), query, key, value,
                                              mask, dropout_p, is_causal, scale, enable_gqa);
  const bool fused = chosen == static_cast<int64_t>(at::SDPBackend::flash_attention);
  return fused ? static_cast<int64_t>(at::SDPBackend::overrideable) : chosen;
}

using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt,
                           at::Tensor, at::Tensor, at::Tensor>;

// In the places of a GPU's random state, which torch.compile saves for the backward pass as it does every
// tensor.
at::Tensor no_random_state(const at::Tensor& query) {
  return at::empty({}, query.options().dtype(at::kLong));
}

Forward fused_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const OptionalTensor& bias, double dropout_p, bool is_causal,
                      bool /*return_debug_mask*/, std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, bias, scale);
  return {output,
          logsumexp,
          {},
          {},
          query.sym_size(-2),
          key.sym_size(-2),
          no_random_state(query),
          no_random_state(query),
          {}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fused_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4> needed, const at::Tensor& output, const at::Tensor& logsumexp,
    const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout_p, bool is_causal,
    const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !bias.defined() || !needed[3],
      "softgpu's fused attention has no gradient for the attention mask: use the math backend "
      "(torch.nn.attention.sdpa_kernel)");
  auto [query_gradient, key_gradient, value_gradient] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          gradient, query, key, value, output, logsumexp, dropout_p, is_causal,
          bias.defined() ? OptionalTensor(bias) : std::nullopt, scale);
  return {query_gradient, key_gradient, value_gradient, {}};
}

// The operators of NVIDIA's kernels, for those who call them by name.
Forward flash_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      double dropout_p, bool is_causal, bool return_debug_mask, std::optional<double> scale) {
  return fused_forward(query, key, value, std::nullopt, dropout_p, is_causal, return_debug_mask, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& output, const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&, c10::SymInt,
    c10::SymInt, double dropout_p, bool is_causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, output, logsumexp, dropout_p, is_causal, std::nullopt, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& bias,
    bool /*compute_log_sumexp*/, double dropout_p, bool is_causal, std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, bias, scale);
  return {output, logsumexp, no_random_state(query), no_random_state(query)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, const at::Tensor& output, const at::Tensor& logsumexp, const at::Tensor&,
    const at::Tensor&, double dropout_p, std::array<bool, 4> needed, bool is_causal,
    std::optional<double> scale) {
  return fused_backward(gradient, query, key, value, bias, needed, output, logsumexp, {}, {}, 0, 0, dropout_p,
                        is_causal, {}, {}, scale);
}

Forward cudnn_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const OptionalTensor& bias, bool /*compute_log_sumexp*/, double dropout_p,
                      bool is_causal, bool return_debug_mask, std::optional<double> scale) {
  return fused_forward(query, key, value, bias, dropout_p, is_causal, return_debug_mask, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> cudnn_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& output, const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&,
    const at::Tensor& bias, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout_p,
    bool is_causal, std::optional<double> scale) {
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, output, logsumexp, dropout_p, is_causal,
      bias.defined() ? OptionalTensor(bias) : std::nullopt, scale);
}

}  // namespace

void register_attention(SpecialKernels& kernels) {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(choose);
  kernels.implement("aten::_fused_sdp_choice", TORCH_FN(choose));
  kernels.implement("aten::_scaled_dot_product_fused_attention_overrideable", TORCH_FN(fused_forward));
  kernels.implement("aten::_scaled_dot_product_fused_attention_overrideable_backward",
                    TORCH_FN(fused_backward));
  kernels.implement("aten::_scaled_dot_product_flash_attention", TORCH_FN(flash_forward));
  kernels.implement("aten::_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  kernels.implement("aten::_scaled_dot_product_efficient_attention", TORCH_FN(efficient_forward));
  kernels.implement("aten::_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
  kernels.implement("aten::_scaled_dot_product_cudnn_attention", TORCH_FN(cudnn_forward));
  kernels.implement("aten::_scaled_dot_product_cudnn_attention_backward", TORCH_FN(cudnn_backward));
}

}  // namespace softgpu::aten
