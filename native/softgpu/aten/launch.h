// softgpu's kernels for operators, and their launches from the host through CUDA's ordinary path.
#pragma once
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace softgpu::aten {

// Makes the kernels known to the CUDA runtime, once in the life of the process.
void register_kernels();

// How long a record's buffer must be for the kernel that takes it by value: at least as long as the record.
size_t record_capacity(size_t bytes);

// Each throws c10::Error if the runtime refuses the launch. The record's length is a record_capacity.
void launch_call(c10::ArrayRef<uint8_t> record, c10::cuda::CUDAStream stream);
void launch_collect(uint64_t reply, uint64_t index, void* address, uint64_t bytes,
                    c10::cuda::CUDAStream stream);
void launch_release(uint64_t reply, c10::cuda::CUDAStream stream);

}  // namespace softgpu::aten
