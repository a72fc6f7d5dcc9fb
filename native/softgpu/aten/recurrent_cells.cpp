// The cells that torch's recurrent layers use on CUDA, built from elementary operators.
#include <ATen/ops/add.h>

#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor with_bias(const at::Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? at::add(gates, *bias) : gates;
}

// Returns the new hidden state, the new cell state and a workspace.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates,
                                                         const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell,
                                                         const OptionalTensor& input_bias,
                                                         const OptionalTensor& hidden_bias) {
  const at::Tensor gates = with_bias(input_gates, input_bias).add(with_bias(hidden_gates, hidden_bias));
  const auto parts = gates.unsafe_chunk(4, 1);
  const at::Tensor next = parts[1].sigmoid().mul(cell).add(parts[0].sigmoid().mul(parts[2].tanh()));
  return {parts[3].sigmoid().mul(next.tanh()), next, gates};
}

// Returns the new hidden state and a workspace.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const OptionalTensor& input_bias,
                                            const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).unsafe_chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).unsafe_chunk(3, 1);
  const at::Tensor reset = from_hidden[0].add(from_input[0]).sigmoid();
  const at::Tensor update = from_hidden[1].add(from_input[1]).sigmoid();
  const at::Tensor fresh = from_input[2].add(from_hidden[2].mul(reset)).tanh();
  return {hidden.sub(fresh).mul(update).add(fresh), input_gates};
}

}  // namespace

void register_recurrent_cells(SpecialKernels& kernels) {
  kernels.implement_composite("aten::_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  kernels.implement_composite("aten::_thnn_fused_gru_cell", TORCH_FN(gru_cell));
}

}  // namespace softgpu::aten
