// In which order the ranks' numbers are added up.
#pragma once

namespace softgpu::nccl {

// Which rank's come first in the part of each buffer that this rank reduces; the others follow in turn.
// Rank 0's, unless SOFTGPU_REDUCTION is "ring". Throws a NcclFailure for a value that makes no sense.
int first_reduced(int rank, int ranks);

}  // namespace softgpu::nccl
