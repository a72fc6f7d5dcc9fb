// Device memory whose addresses another server can give out again. CUDA's own allocator chooses them anew in
// each process, so where the driver can map memory at an address of our choice, this one chooses.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jitckpt::proxy {

// At `wanted`, or anywhere if that is 0. Elsewhere than wanted only where CUDA chooses; who calls looks.
cudaError_t allocate_device_memory(void** memory, uint64_t wanted, uint64_t bytes, int32_t device);

// Like cudaFree, it waits for the device.
cudaError_t free_device_memory(uint64_t address);

}  // namespace jitckpt::proxy
