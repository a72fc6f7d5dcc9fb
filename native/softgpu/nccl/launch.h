// From calls to work on streams.
#pragma once
#include <memory>
#include <vector>

#include "softgpu/nccl/communicator.h"
#include "softgpu/nccl/operation.h"

namespace softgpu::nccl {

struct Call {
  std::shared_ptr<Communicator> communicator;
  cudaStream_t stream;
  Operation operation;
};

// Enqueues what was called in one group and returns at once. Calls that share a communicator or a stream,
// directly or through others, become one launch: it starts when all its streams have come to it, all its
// operations move on together, and its streams go on when all are finished.
void launch(const std::vector<Call>& calls);

}  // namespace softgpu::nccl
