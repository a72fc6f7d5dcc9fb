// What happens to an operation that a fault was ordered for (runtime/fault.h).
#pragma once
#include "softgpu/nccl/communicator.h"
#include "softgpu/runtime/fault.h"

namespace softgpu::nccl {

// Runs in the place of the launch's operations. Returns when the communicator has to stop.
void suffer(Communicator& communicator, const Fault& fault);

}  // namespace softgpu::nccl
