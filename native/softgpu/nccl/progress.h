// Runs the operations that one launch has for one communicator, on the thread of the stream.
#pragma once
#include <vector>

#include "softgpu/nccl/communicator.h"
#include "softgpu/nccl/operation.h"

namespace softgpu::nccl {

// Returns when all are finished, or when the communicator has to stop. All sends and receives and the oldest
// unfinished collective move on together, so no order of calls within a group can deadlock. Waits without
// using the processor, for ever if another rank never comes.
void run_operations(Communicator& communicator, const std::vector<Operation>& operations);

}  // namespace softgpu::nccl
