#include "softgpu/nccl/mismatch.h"

#include <cstdio>

namespace softgpu::nccl {
namespace {

std::string call_of(int rank, const Descriptor& descriptor) {
  std::string text = "rank " + std::to_string(rank) + " calls " + to_text(descriptor);
  if (descriptor.number != 0) text += " as its collective " + std::to_string(descriptor.number);
  return text;
}

}  // namespace

void report_mismatch(SharedSegment& shared, int rank, const Descriptor& ours, int other,
                     const Descriptor& theirs) {
  if (!shared.claim_mismatch_report()) return;
  std::fprintf(
      stderr,
      "softgpu NCCL: calls on one communicator do not match: %s, %s. It hangs until it is aborted; make all "
      "ranks call the same in the same order.\n",
      call_of(rank, ours).c_str(), call_of(other, theirs).c_str());
}

}  // namespace softgpu::nccl
