// cudart's functions as softgpu defines them: NVIDIA's prototypes, visible to everybody who loads
// libsoftgpu.so.
#pragma once
#pragma GCC visibility push(default)
#include <cuda_runtime_api.h>

extern "C" {
// Of cuda_profiler_api.h, which torch's wheels don't bring.
cudaError_t cudaProfilerStart();
cudaError_t cudaProfilerStop();

// What nvcc's generated code calls; declared in headers that only nvcc can read (crt/host_runtime.h,
// crt/device_functions.h).
void** __cudaRegisterFatBinary(void* wrapper);
void __cudaRegisterFatBinaryEnd(void** module);
void __cudaUnregisterFatBinary(void** module);
char __cudaInitModule(void** module);
void __cudaRegisterFunction(void** module, const char* host_stub, char* device_stub, const char* name,
                            int thread_limit, uint3* thread, uint3* block, dim3* block_size, dim3* grid_size,
                            int* warp_size);
void __cudaRegisterVar(void** module, char* host_variable, char* device_address, const char* name,
                       int external, size_t size, int constant, int global);
void __cudaRegisterManagedVar(void** module, void** host_variable, char* device_address, const char* name,
                              int external, size_t size, int constant, int global);
void __cudaRegisterHostVar(void** module, const char* name, char* host_variable, size_t size);
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream);
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream);
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_stub);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream);

// For softgpu's libcuda.so.1: 1 if the program has used the device, which is when CUDA makes its primary
// context.
int softgpu_device_active(int device);
}
#include "softgpu/module.h"
#pragma GCC visibility pop
