// Lets an operator's results be born in the memory that was allocated for them on the device, which spares a
// copy: the CPU allocator hands that memory out to the allocation of the right size. Which allocation becomes
// the result nobody knows beforehand, so whoever uses this copies what came to lie elsewhere.
#pragma once
#include <cstddef>
#include <span>

namespace softgpu::aten {

struct OutputBlock {
  void* address;
  size_t bytes;
  bool taken = false;
};

// Puts the allocator in place, once in the life of the process.
void install_output_memory();

// While it lives, this thread's allocations of exactly a block's size take that block, in order.
class OutputMemory {
 public:
  explicit OutputMemory(std::span<OutputBlock> blocks);
  ~OutputMemory();
  OutputMemory(const OutputMemory&) = delete;
  OutputMemory& operator=(const OutputMemory&) = delete;
};

}  // namespace softgpu::aten
