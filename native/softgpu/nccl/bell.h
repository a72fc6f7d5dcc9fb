// A bell in shared memory: one rank waits at it, the others ring it when they have made progress.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

namespace softgpu::nccl {

class Bell {
 public:
  // Read this first, then look whether there is something to do, then wait for a ring after this one.
  uint32_t rings() const { return rings_.load(std::memory_order_acquire); }

  void ring();

  // Returns after a ring later than `heard`, or after `limit`, or earlier for no reason.
  void wait_after(uint32_t heard, std::chrono::milliseconds limit);

 private:
  std::atomic<uint32_t> rings_;
  std::atomic<uint32_t> sleepers_;  // ring() need not call the kernel while it is 0
};

}  // namespace softgpu::nccl
