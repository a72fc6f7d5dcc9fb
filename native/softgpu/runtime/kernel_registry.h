// The kernels that libraries have registered, softgpu's (with code to run) and NVIDIA's (known by name only).
#pragma once
#include <cstddef>

#include "softgpu/runtime/error.h"

namespace softgpu {

struct Kernel {
  const char* name;              // mangled, as registered
  const softgpu_kernel_t* code;  // null: NVIDIA's, can't run here
  std::size_t parameter_bytes;   // up to the end of the last parameter
};

// The kernel that a launch means: a host stub, or what __cudaGetKernel made of it. Null if there is none.
const Kernel* find_kernel(const void* stub_or_handle);

}  // namespace softgpu
