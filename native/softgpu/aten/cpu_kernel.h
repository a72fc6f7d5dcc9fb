// Runs an operator's CPU kernel, and nothing above it.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <vector>

#include "softgpu/aten/operators.h"

namespace softgpu::aten {

// Replaces the arguments on the stack by the results. Autograd, autocast and whatever else this thread has
// switched on see nothing of it.
void run_cpu_kernel(const Operator& op, c10::Stack& stack);

// The results that are new tensors, lists flattened; the lengths of the lists (-1 for a tensor) go to
// list_lengths.
std::vector<at::Tensor> fresh_results(const Operator& op, const c10::Stack& results,
                                      std::vector<int>& list_lengths);

// A CPU generator of this thread's own, in the state that the seed gives.
at::Generator& seeded_generator(uint64_t seed);

}  // namespace softgpu::aten
