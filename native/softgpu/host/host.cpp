// libsoftgpu_host.so: softgpu's part in a process whose device is in another one. Its operators are packed
// and launched here, and run there, so what running them needs must never be called here.
#pragma GCC visibility push(default)
#include <cuda_runtime_api.h>

#include "softgpu/module.h"
#pragma GCC visibility pop

#include <cstdio>
#include <cstdlib>

namespace {

[[noreturn]] void no_kernel_runs_here(const char* function) {
  std::fprintf(stderr, "softgpu: %s was called in a process that has no device; its kernels run elsewhere\n",
               function);
  std::abort();
}

}  // namespace

void* softgpu_shadow(const void*) { no_kernel_runs_here("softgpu_shadow"); }

void softgpu_fail(softgpu_launch_t*, cudaError_t, const char*) { no_kernel_runs_here("softgpu_fail"); }
