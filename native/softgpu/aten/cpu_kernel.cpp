#include "softgpu/aten/cpu_kernel.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace softgpu::aten {

void run_cpu_kernel(const Operator& op, c10::Stack& stack) {
  static const c10::DispatchKeySet excluded =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  c10::impl::ForceDispatchKeyGuard plain(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), excluded);
  at::DisableRecordFunctionGuard unprofiled;
  op.handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

std::vector<at::Tensor> fresh_results(const Operator& op, const c10::Stack& results,
                                      std::vector<int>& list_lengths) {
  std::vector<at::Tensor> fresh;
  for (size_t i = 0; i < op.returns.size(); ++i) {
    if (!op.returns[i].tensor || op.returns[i].argument >= 0) continue;
    if (results[i].isTensor() || results[i].isNone()) {
      list_lengths.push_back(-1);
      fresh.push_back(results[i].isNone() ? at::Tensor() : results[i].toTensor());
    } else {
      list_lengths.push_back(static_cast<int>(results[i].toListRef().size()));
      for (const c10::IValue& element : results[i].toListRef()) fresh.push_back(element.toTensor());
    }
  }
  return fresh;
}

at::Generator& seeded_generator(uint64_t seed) {
  thread_local at::Generator generator = at::detail::createCPUGenerator();
  generator.set_current_seed(seed);
  return generator;
}

}  // namespace softgpu::aten
