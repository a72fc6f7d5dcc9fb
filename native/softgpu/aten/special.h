// Operators whose CUDA side is more than "the CPU kernel on the stream".
#pragma once
#include <torch/library.h>

#include <string>
#include <unordered_set>

#include "softgpu/aten/operators.h"

namespace softgpu::aten {

class SpecialKernels {
 public:
  SpecialKernels(torch::Library& library, torch::Library& autograd)
      : library_(library), autograd_(autograd) {}

  // The function (a TORCH_FN) is the operator's kernel on the CUDA key. Another torch may not have the
  // operator.
  template <class Function>
  void implement(const std::string& name, Function function) {
    if (find_operator(name) == nullptr) return;
    library_.impl(name.c_str(), function);
    names_.insert(name);
  }

  // The same for the autograd key too: the function is made of other operators, which autograd follows.
  template <class Function>
  void implement_composite(const std::string& name, Function function) {
    implement(name, function);
    if (has(name)) autograd_.impl(name.c_str(), function);
  }

  // A boxed kernel on either key.
  void implement_boxed(const std::string& name, torch::CppFunction device, torch::CppFunction autograd) {
    library_.impl(name.c_str(), std::move(device));
    autograd_.impl(name.c_str(), std::move(autograd));
    names_.insert(name);
  }

  bool has(const std::string& name) const { return names_.contains(name); }

 private:
  torch::Library& library_;
  torch::Library& autograd_;
  std::unordered_set<std::string> names_;
};

void register_attention(SpecialKernels& kernels);
void register_copies(SpecialKernels& kernels);
void register_cudnn(SpecialKernels& kernels);
void register_dropout(SpecialKernels& kernels);
void register_indexing(SpecialKernels& kernels);
void register_mixed_matmul(SpecialKernels& kernels);
void register_recurrent_cells(SpecialKernels& kernels);
void register_softmax(SpecialKernels& kernels);
void register_sync_batch_norm(SpecialKernels& kernels);
void register_whole_operators(SpecialKernels& kernels);

// Defines softgpu's own operators; before the list of all operators is made.
void define_gradients();

}  // namespace softgpu::aten
