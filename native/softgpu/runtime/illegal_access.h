// Work on a stream that uses device memory which is not allocated.
//
// A kernel is any code, and may hold locks (of the host allocator, of a thread pool) when it goes astray, so
// it can't be left in the middle. Instead the signal's handler puts pages of zeros where the kernel goes, and
// notes it: the kernel comes to its end on them, and then the device fails.
#pragma once
#include <cstddef>

namespace softgpu {

// From `shadow` on lies device memory as kernels see it, `span` bytes for each device.
void catch_illegal_accesses(void* shadow, std::size_t devices, std::size_t span);

bool any_illegal_access();

// How many bytes behind the device's first address its first illegal access was; -1: there was none.
std::ptrdiff_t illegal_access(std::size_t device);

}  // namespace softgpu
