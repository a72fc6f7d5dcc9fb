// What one rank tells another: one of its counters has grown, and the slot that it speaks of is filled.
#pragma once
#include <cstdint>

#include "softgpu/nccl/operation.h"

namespace softgpu::nccl {

struct News {
  enum class Counter : uint32_t { written, reduced, done, sent, received, host_rounds };
  Counter counter{};
  uint32_t offset = 0, bytes = 0;  // what the other rank is going to read of the slot
  uint64_t value = 0;              // of the counter from now on
  Descriptor descriptor{};         // of the call that filled the slot
};

}  // namespace softgpu::nccl
