// Tells the device proxy what torch's allocator has given out of the device's memory, and what it only keeps.
#include <c10/cuda/CUDACachingAllocator.h>

#include <exception>
#include <string>

#include "proxy/client/jitckpt_proxy.h"

namespace {

using c10::cuda::CUDACachingAllocator::TraceEntry;

// The allocator gives no less, and this much of the memory behind a tensor is nobody else's.
constexpr uint64_t least_block = 512;

// Called with the allocator's lock held.
void tell(const TraceEntry& entry) {
  const uint64_t bytes = (entry.size_ + least_block - 1) / least_block * least_block;
  if (entry.action_ == TraceEntry::ALLOC) jitckpt_proxy_hold(entry.addr_, bytes);
  // Not where it is only asked for: the streams that use the block may not be through.
  if (entry.action_ == TraceEntry::FREE_COMPLETED || entry.action_ == TraceEntry::SEGMENT_ALLOC)
    jitckpt_proxy_free(entry.addr_, bytes);
}

}  // namespace

// From here on the proxy is told, of what is given out, given back or added from now on. Returns null, or why
// that can't be done.
extern "C" __attribute__((visibility("default"))) const char* jitckpt_torch_tell_proxy(void) {
  static std::string reason;
  try {
    c10::cuda::CUDACachingAllocator::get()->attachAllocatorTraceTracker(tell);
  } catch (const std::exception& error) {
    reason = error.what();
    return reason.c_str();
  }
  return nullptr;
}
