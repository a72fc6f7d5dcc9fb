// Kernels are known to both sides by the library that holds their host stub, and the stub's place in it.
#pragma once
#include <cstdint>

namespace jitckpt::proxy::client {

// The server's number for the kernel of this host stub, or for what __cudaGetKernel made of it. 0 if there is
// none, which is then the thread's failure.
uint64_t kernel_number(const void* stub_or_kernel);

}  // namespace jitckpt::proxy::client
