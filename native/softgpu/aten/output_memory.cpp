#include "output_memory.h"

#include <c10/core/CPUAllocator.h>

namespace softgpu::aten {
namespace {

thread_local std::span<OutputBlock> offered;

c10::DeleterFnPtr usual_deleter = nullptr;

// Frees what kernels allocate without a DataPtr: their scratch memory, which never outlives them.
void release(void* memory) {
  for (const OutputBlock& block : offered) {
    if (block.taken && block.address == memory) return;
  }
  usual_deleter(memory);
}

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator& usual) : usual_(usual) { usual_deleter = usual.raw_deleter(); }

  c10::DataPtr allocate(size_t bytes) override {
    for (OutputBlock& block : offered) {
      if (block.taken || block.bytes != bytes) continue;
      block.taken = true;
      return {block.address, block.address, c10::detail::deleteNothing, c10::kCPU};
    }
    return usual_.allocate(bytes);
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

OutputMemory::OutputMemory(std::span<OutputBlock> blocks) { offered = blocks; }

OutputMemory::~OutputMemory() { offered = {}; }

}  // namespace softgpu::aten
