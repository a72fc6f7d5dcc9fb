// What is said when the ranks' calls do not match.
#pragma once
#include "softgpu/nccl/operation.h"
#include "softgpu/nccl/shared_segment.h"

namespace softgpu::nccl {

// One line on stderr for each communicator, whichever rank sees it first. The communicator hangs then, as
// with NCCL.
void report_mismatch(SharedSegment& shared, int rank, const Descriptor& ours, int other,
                     const Descriptor& theirs);

}  // namespace softgpu::nccl
