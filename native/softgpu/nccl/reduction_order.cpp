#include "softgpu/nccl/reduction_order.h"

#include <cstdlib>
#include <string_view>

#include "softgpu/nccl/failure.h"

namespace softgpu::nccl {

// In NCCL's rings a part comes to the rank that ends it last, from the one behind it on. So with three ranks
// and more it depends on a number's place in its buffer how it is rounded.
int first_reduced(int rank, int ranks) {
  const char* const given = std::getenv("SOFTGPU_REDUCTION");
  const std::string_view order = given ? given : "";
  if (order.empty() || order == "ranks") return 0;
  if (order == "ring") return (rank + 1) % ranks;
  throw NcclFailure(ncclInvalidArgument, "SOFTGPU_REDUCTION is '", order, "'; set it to ranks or ring");
}

}  // namespace softgpu::nccl
