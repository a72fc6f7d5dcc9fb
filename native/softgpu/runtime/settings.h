// What the environment says about the machine that softgpu pretends to be.
#pragma once
#include <cstddef>
#include <vector>

namespace softgpu {

struct MachineSettings {
  std::vector<int>
      devices;  // number of each visible device on the machine; its index here is what programs call it
  std::size_t memory;            // bytes a device
  bool launch_trace = false;     // a line on stderr for each launch
  bool launch_blocking = false;  // a launch returns when the kernel has ended, so that it is the one to fail
};

// Reads SOFTGPU_DEVICES, SOFTGPU_MEMORY, SOFTGPU_LAUNCH_TRACE, CUDA_VISIBLE_DEVICES and CUDA_LAUNCH_BLOCKING.
// Throws CudaFailure with a sentence for a value that makes no sense.
MachineSettings read_settings();

// CUDA's rules: an entry that names no device ends the list, one that comes twice leaves no device at all.
std::vector<int> visible_devices(int device_count, const char* list);

}  // namespace softgpu
