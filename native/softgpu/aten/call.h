// The one function that every ATen operator on the CUDA dispatch key runs through.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include "softgpu/aten/operators.h"

namespace softgpu::aten {

// Replaces the arguments on the stack by the results, whose memory is allocated but not yet written: the CPU
// kernel runs on the current stream. Waits for it where the operator's results cannot be known beforehand.
void call_operator(Operator& op, c10::Stack* stack);

// The same for an operator that returns one tensor.
template <class... Arguments>
at::Tensor call_operator(Operator& op, Arguments&&... arguments) {
  c10::Stack stack = {c10::IValue(std::forward<Arguments>(arguments))...};
  call_operator(op, &stack);
  return stack.back().toTensor();
}

}  // namespace softgpu::aten
