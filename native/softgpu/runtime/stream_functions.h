#pragma once
#include <memory>

#include "softgpu/runtime/device.h"

namespace softgpu {

// The stream that a handle names: null and cudaStreamLegacy are the current device's legacy default stream,
// cudaStreamPerThread this thread's default stream on it. Throws CudaFailure for a handle that names none.
std::shared_ptr<Stream> find_stream(cudaStream_t handle);

void destroy_streams_of(Device& device);  // cudaDeviceReset

}  // namespace softgpu
