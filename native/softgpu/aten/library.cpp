// What happens when the library is loaded: every ATen operator that has a CUDA kernel gets ours instead.
#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <unordered_set>

#include "softgpu/aten/call.h"
#include "softgpu/aten/launch.h"
#include "softgpu/aten/operators.h"
#include "softgpu/aten/output_memory.h"
#include "softgpu/aten/special.h"

namespace softgpu::aten {
namespace {

// Their CUDA kernels touch metadata, the allocator and copies only, so they work on softgpu as they are.
const std::unordered_set<std::string> kept = {
    "aten::_efficientzerotensor",
    "aten::_local_scalar_dense",
    "aten::_resize_output_",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
};

// Operators that have no CUDA kernel of their own, but where their tensors are CUDA's, decide for NVIDIA's
// libraries or launch one of torch's kernels.
const char* const added[] = {
    "aten::_convolution",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::convolution",
    "aten::mkldnn_rnn_layer",
    "aten::mkldnn_rnn_layer_backward",
    "aten::mode.values",
};

// Of operators on sparse tensors, those that only look at or pass on their parts.
const std::unordered_set<std::string> kept_for_sparse = {
    "aten::_coalesced_",
    "aten::_dimI",
    "aten::_dimV",
    "aten::_indices",
    "aten::_nnz",
    "aten::_sparse_coo_tensor_with_dims",
    "aten::_sparse_coo_tensor_with_dims_and_tensors",
    "aten::_values",
    "aten::ccol_indices",
    "aten::clone",
    "aten::col_indices",
    "aten::copy_",
    "aten::copy_sparse_to_sparse_",
    "aten::crow_indices",
    "aten::dense_dim",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::indices",
    "aten::is_coalesced",
    "aten::resize_",
    "aten::resize_as_sparse_",
    "aten::row_indices",
    "aten::sparse_dim",
    "aten::sparse_resize_",
    "aten::sparse_resize_and_clear_",
    "aten::values",
};

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(Operator& op) : op_(op) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, c10::Stack* stack) {
    call_operator(op_, stack);
  }

 private:
  Operator& op_;
};

class Refusal final : public c10::OperatorKernel {
 public:
  explicit Refusal(const Operator& op) : op_(op) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, c10::Stack*) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "softgpu has no operator ", op_.name,
        ": torch has a CUDA kernel for it, but none for the CPU. Use another operator here, or "
        "run this on a GPU.");
  }

 private:
  const Operator& op_;
};

class SparseRefusal final : public c10::OperatorKernel {
 public:
  explicit SparseRefusal(const Operator& op) : op_(op) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, c10::Stack*) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "softgpu has no operator ", op_.name,
                                " for sparse tensors: use dense ones here, or run this on a GPU.");
  }

 private:
  const Operator& op_;
};

// We replace kernels on purpose, so torch's warning about it is for nobody.
class Silence final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

template <class Functor>
void implement(torch::Library& library, Operator& op) {
  library.impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Functor>(op)));
}

void refuse_sparse(c10::DispatchKey key) {
  auto& library = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);  // never freed
  for (Operator* op : all_operators()) {
    if (op->handle.hasKernelForDispatchKey(key) && !kept_for_sparse.contains(op->name))
      implement<SparseRefusal>(library, *op);
  }
}

void install() {
  register_kernels();
  install_output_memory();
  define_gradients();
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  // Never freed: torch takes operators apart at exit, when streams may still run them.
  auto& library =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& autograd =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCUDA, __FILE__, __LINE__);
  SpecialKernels special(library, autograd);
  register_attention(special);
  register_copies(special);
  register_cudnn(special);
  register_dropout(special);
  register_indexing(special);
  register_mixed_matmul(special);
  register_recurrent_cells(special);
  register_softmax(special);
  register_sync_batch_norm(special);
  register_whole_operators(special);
  for (Operator* op : all_operators()) {
    if (kept.contains(op->name) || special.has(op->name) || op->view ||
        !op->handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
      continue;
    }
    if (op->handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      implement<Kernel>(library, *op);
    } else {
      implement<Refusal>(library, *op);
    }
  }
  for (const char* name : added) {
    if (Operator* op = find_operator(name)) implement<Kernel>(library, *op);
  }
  refuse_sparse(c10::DispatchKey::SparseCUDA);
  refuse_sparse(c10::DispatchKey::SparseCsrCUDA);
  // cuDNN's kernels cannot run here, so nothing need ask for them.
  at::globalContext().setUserEnabledCuDNN(false);
}

[[maybe_unused]] const bool installed = (install(), true);

}  // namespace
}  // namespace softgpu::aten
