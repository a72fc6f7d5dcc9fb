// The device side: executes records. Runs on a stream's thread and knows nothing of the process that packed
// them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "softgpu/module.h"

namespace softgpu::aten {

// Runs one operator call. A failing operator becomes the device's sticky error, or, where the host waits for
// a reply, the reply.
void execute_call(const uint8_t* record, size_t bytes, softgpu_launch_t* launch);

// Copies tensor number `index` of the results held under a reply's address to device memory.
void collect_result(uint64_t reply, size_t index, uint64_t address, size_t bytes, softgpu_launch_t* launch);

// Forgets the results held under a reply's address.
void release_results(uint64_t reply);

}  // namespace softgpu::aten
