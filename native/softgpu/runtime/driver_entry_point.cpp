// Driver functions by name, out of softgpu's own libcuda.so.1.
#include <dlfcn.h>

#include "softgpu/runtime/error.h"

namespace softgpu {
namespace {

using FindFunction = void* (*)(const char* name);

// Another libcuda.so.1, that of a GPU, knows nothing of softgpu's devices: then no function is found.
FindFunction softgpu_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library ? reinterpret_cast<FindFunction>(dlsym(library, "softgpu_driver_function")) : nullptr;
}

}  // namespace
}  // namespace softgpu

using namespace softgpu;

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
  return call([&] {
    static const FindFunction find = softgpu_driver();
    require(symbol && function, cudaErrorInvalidValue, "no name to look for, or no place for the function");
    *function = find ? find(symbol) : nullptr;
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function || result ? cudaSuccess : cudaErrorSymbolNotFound;
  });
}

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(symbol, function, CUDART_VERSION, flags, result);
}
