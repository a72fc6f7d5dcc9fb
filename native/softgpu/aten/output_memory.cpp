#include "softgpu/aten/output_memory.h"

#include <c10/core/CPUAllocator.h>

#include <ranges>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace softgpu::aten {
namespace {

// Of an operator that returns a list there may be thousands. By length those that are still there, the first
// last.
struct Offered {
  std::unordered_map<size_t, std::vector<OutputBlock*>> left;
  std::unordered_set<const void*> taken;
};
thread_local Offered offered;

c10::DeleterFnPtr usual_deleter = nullptr;

// Frees what kernels allocate without a DataPtr: their scratch memory, which never outlives them.
void release(void* memory) {
  if (!offered.taken.contains(memory)) usual_deleter(memory);
}

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator& usual) : usual_(usual) { usual_deleter = usual.raw_deleter(); }

  c10::DataPtr allocate(size_t bytes) override {
    const auto fitting = offered.left.find(bytes);
    if (fitting == offered.left.end() || fitting->second.empty()) return usual_.allocate(bytes);
    OutputBlock& block = *fitting->second.back();
    fitting->second.pop_back();
    block.taken = true;
    offered.taken.insert(block.address);
    return {block.address, block.address, c10::detail::deleteNothing, c10::kCPU};
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return usual_.is_simple_data_ptr(data); }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    usual_.copy_data(to, from, bytes);
  }

 private:
  c10::Allocator& usual_;
};

}  // namespace

void install_output_memory() {
  constexpr uint8_t above_default = 1;
  // Never freed: tensors ask for their allocator until the process ends.
  static auto* allocator = new Allocator(*c10::GetCPUAllocator());
  c10::SetCPUAllocator(allocator, above_default);
}

OutputMemory::OutputMemory(std::span<OutputBlock> blocks) {
  for (OutputBlock& block : std::views::reverse(blocks)) {
    if (block.taken)
      offered.taken.insert(block.address);
    else
      offered.left[block.bytes].push_back(&block);
  }
}

OutputMemory::~OutputMemory() { offered = {}; }

}  // namespace softgpu::aten
