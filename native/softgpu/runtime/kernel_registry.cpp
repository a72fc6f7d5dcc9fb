#include "softgpu/runtime/kernel_registry.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace softgpu {
namespace {

// One registered fat binary. Its handle is what NVIDIA's ABI calls void**.
struct Module {
  const softgpu_module_t* code;  // null: NVIDIA's
  std::vector<const void*> stubs;
};

class Modules {
 public:
  // Never destroyed: libraries unregister their kernels while the process exits.
  static Modules& get() {
    static auto* const registry = [] {
      auto* const made = new Modules;
      // A forked child imports libraries too; the lock must not be held by a thread that it does not have
      // (and no std::shared_mutex: a child can't unlock that).
      pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                     [] { get().mutex_.unlock(); });
      return made;
    }();
    return *registry;
  }

  Module* add_module(const void* wrapper) {
    const auto* fatbin = static_cast<const softgpu_fatbin_wrapper_t*>(wrapper);
    const softgpu_module_t* code = nullptr;
    if (fatbin && fatbin->magic == SOFTGPU_FATBIN_WRAPPER_MAGIC && fatbin->data) {
      const auto* candidate = static_cast<const softgpu_module_t*>(fatbin->data);
      if (candidate->magic == SOFTGPU_MODULE_MAGIC) code = candidate;
    }
    std::lock_guard lock(mutex_);
    return modules_.emplace_back(std::make_unique<Module>(Module{code, {}})).get();
  }

  void add_kernel(Module* module, const void* stub, const char* name) {
    std::lock_guard lock(mutex_);
    auto kernel = std::make_unique<Kernel>(make_kernel(module, name));
    by_handle_[kernel.get()] = kernel.get();
    by_stub_[stub] = std::move(kernel);
    module->stubs.push_back(stub);
  }

  void remove_module(Module* module) {
    std::lock_guard lock(mutex_);
    for (const void* stub : module->stubs) {
      const auto kernel = by_stub_.find(stub);
      if (kernel == by_stub_.end()) continue;
      by_handle_.erase(kernel->second.get());
      by_stub_.erase(kernel);
    }
    std::erase_if(modules_, [module](const auto& other) { return other.get() == module; });
  }

  const Kernel* find(const void* stub_or_handle) {
    std::lock_guard lock(mutex_);
    if (const auto stub = by_stub_.find(stub_or_handle); stub != by_stub_.end()) return stub->second.get();
    const auto handle = by_handle_.find(stub_or_handle);
    return handle == by_handle_.end() ? nullptr : handle->second;
  }

 private:
  static Kernel make_kernel(const Module* module, const char* name) {
    Kernel kernel{name, nullptr, 0};
    if (!module->code) return kernel;
    const auto* const end = module->code->kernels + module->code->kernel_count;
    const auto* const code = std::find_if(
        module->code->kernels, end,
        [name](const softgpu_kernel_t& candidate) { return std::strcmp(candidate.name, name) == 0; });
    if (code == end) {
      std::fprintf(stderr, "softgpu: a library registers the kernel %s, which its module does not have\n",
                   name);
      return kernel;
    }
    kernel.code = code;
    for (std::size_t i = 0; i < code->parameter_count; ++i) {
      kernel.parameter_bytes =
          std::max(kernel.parameter_bytes, code->parameters[i].offset + code->parameters[i].size);
    }
    return kernel;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Module>> modules_;
  std::unordered_map<const void*, std::unique_ptr<Kernel>> by_stub_;
  std::unordered_map<const void*, const Kernel*> by_handle_;
};

}  // namespace

const Kernel* find_kernel(const void* stub_or_handle) { return Modules::get().find(stub_or_handle); }

}  // namespace softgpu

using namespace softgpu;

void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(Modules::get().add_module(wrapper));
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void** module) {
  Modules::get().remove_module(reinterpret_cast<Module*>(module));
}

char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void** module, const char* host_stub, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  Modules::get().add_kernel(reinterpret_cast<Module*>(module), host_stub, name);
}

// A module of softgpu has no variables, and NVIDIA's code that would use its own never runs; who asks for one
// (cudaGetSymbolAddress) is refused.
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterHostVar(void**, const char*, char*, size_t) {}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_stub) {
  return call([&] {
    const Kernel* found = find_kernel(host_stub);
    require(found != nullptr, cudaErrorInvalidDeviceFunction, "no kernel is registered at this address");
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<Kernel*>(found));
    return cudaSuccess;
  });
}

cudaError_t cudaGetKernel(cudaKernel_t* kernel, const void* host_stub) {
  return __cudaGetKernel(kernel, host_stub);
}
