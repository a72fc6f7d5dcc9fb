// Launching kernels, and what can be asked about them.
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "softgpu/runtime/capture.h"
#include "softgpu/runtime/device.h"
#include "softgpu/runtime/enqueue.h"
#include "softgpu/runtime/fault_registry.h"
#include "softgpu/runtime/kernel_registry.h"
#include "softgpu/runtime/limits.h"
#include "softgpu/runtime/stream_functions.h"

namespace softgpu {
namespace {

std::string readable(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
  return status == 0 ? name.get() : mangled;
}

// In the place of a kernel: it fails as if the kernel had.
std::unique_ptr<Work> failing_kernel(Device& device, FaultKind kind) {
  const CudaFailure failure{error_of(kind), ""};
  if (kind == FaultKind::device_lost) device.fail(failure);  // nobody waits for a device that is gone
  return make_work([failure] { throw failure; });
}

struct Shape {
  dim3 grid, block;
  std::size_t shared_bytes;
};

class KernelLaunch final : public Work {
 public:
  KernelLaunch(const Kernel& kernel, const Shape& shape, void** arguments, int device, cudaStream_t stream)
      : code_(*kernel.code), failure_{cudaSuccess, ""} {
    launch_ = {code_.name,
               {shape.grid.x, shape.grid.y, shape.grid.z},
               {shape.block.x, shape.block.y, shape.block.z},
               shape.shared_bytes,
               device,
               stream,
               &failure_};
    // The pointers to the parameters lie in front of them, in one piece of memory.
    bytes_ = pointer_bytes() + kernel.parameter_bytes;
    memory_.reset(new char[bytes_]);
    for (std::size_t i = 0; i < code_.parameter_count; ++i) {
      char* const place = parameters() + code_.parameters[i].offset;
      std::memcpy(place, arguments[i], code_.parameters[i].size);
      pointers()[i] = place;
    }
  }

  // The same launch once more, for a graph: a kernel may write to its parameters.
  KernelLaunch(const KernelLaunch& other)
      : code_(other.code_), launch_(other.launch_), failure_{cudaSuccess, ""}, bytes_(other.bytes_) {
    launch_.failure = &failure_;
    memory_.reset(new char[bytes_]);
    std::memcpy(memory_.get(), other.memory_.get(), bytes_);
    for (std::size_t i = 0; i < code_.parameter_count; ++i)
      pointers()[i] = parameters() + code_.parameters[i].offset;
  }

  void run() override {
    run_slowed(
        kernel_factor(), [this] { code_.run(pointers(), &launch_); },
        [this] { return !device_usable(launch_.device) || kernel_factor() <= 1; });
    if (failure_.error != cudaSuccess) throw failure_;
  }

  bool foreign() const override { return true; }

 private:
  void** pointers() { return reinterpret_cast<void**>(memory_.get()); }
  std::size_t pointer_bytes() const { return (code_.parameter_count * sizeof(void*) + 15) / 16 * 16; }
  char* parameters() { return memory_.get() + pointer_bytes(); }

  const softgpu_kernel_t& code_;
  softgpu_launch_t launch_;
  CudaFailure failure_;
  std::size_t bytes_ = 0;
  std::unique_ptr<char[]> memory_;
};

// What goes on the stream for a launch, in a graph or not.
template <class Make>
std::unique_ptr<Work> kernel_work(Device& device, const Stream& stream, const char* name, Make make) {
  if (machine().settings.launch_trace) {
    std::fprintf(stderr, "softgpu: launch %s device=%d stream=%llu\n", name, device.index,
                 static_cast<unsigned long long>(stream.id));
  }
  if (const auto fault = fault_at(FaultPoint::launch)) return failing_kernel(device, fault->kind);
  return make();
}

void require_shape(const Shape& shape) {
  const dim3 &grid = shape.grid, &block = shape.block;
  require(grid.x && grid.y && grid.z && block.x && block.y && block.z, cudaErrorInvalidConfiguration,
          "a side of the grid or of the block is 0");
  require(block.x <= limits::block_x && block.y <= limits::block_y && block.z <= limits::block_z &&
              std::size_t{block.x} * block.y * block.z <= limits::threads_per_block,
          cudaErrorInvalidConfiguration, "the block has too many threads");
  require(grid.x <= limits::grid_x && grid.y <= limits::grid_yz && grid.z <= limits::grid_yz,
          cudaErrorInvalidConfiguration, "the grid is too large");
  require(shape.shared_bytes <= limits::shared_bytes_opt_in, cudaErrorInvalidValue, "too much shared memory");
}

const Kernel& require_kernel(const void* function) {
  const Kernel* kernel = find_kernel(function);
  require(kernel != nullptr, cudaErrorInvalidDeviceFunction, "no kernel is registered at this address");
  return *kernel;
}

void launch(const void* function, const Shape& shape, void** arguments, cudaStream_t handle) {
  const Kernel& kernel = require_kernel(function);
  if (!kernel.code) {
    throw CudaFailure{cudaErrorNotSupported, "softgpu can't run NVIDIA's kernel " + readable(kernel.name)};
  }
  require_shape(shape);
  Device& device = current_device_state();
  const auto stream = find_stream(handle);
  require(&stream->device == &device, cudaErrorInvalidResourceHandle,
          "the stream to launch on belongs to another device than the current one");
  if (captures(*stream)) {
    const auto captured =
        std::make_shared<const KernelLaunch>(kernel, shape, arguments, device.index, handle);
    add_node(*stream, cudaGraphNodeTypeKernel, kernel.name, [captured, &device, stream, name = kernel.name] {
      return kernel_work(device, *stream, name, [&] { return std::make_unique<KernelLaunch>(*captured); });
    });
    return;
  }
  const Point end = device.enqueue(*stream, kernel_work(device, *stream, kernel.name, [&] {
    return std::make_unique<KernelLaunch>(kernel, shape, arguments, device.index, handle);
  }));
  if (machine().settings.launch_blocking) wait_on_host(end);
}

// What <<<...>>> leaves for the host stub that nvcc generated.
struct CallConfiguration {
  Shape shape;
  cudaStream_t stream;
};

std::vector<CallConfiguration>& call_configurations() {
  thread_local std::vector<CallConfiguration> configurations;
  return configurations;
}

int blocks_per_multiprocessor(int block_threads, std::size_t shared_bytes) {
  require(block_threads > 0 && block_threads <= static_cast<int>(limits::threads_per_block),
          cudaErrorInvalidValue, "the block's number of threads is out of range");
  const std::size_t by_threads = limits::threads_per_multiprocessor / static_cast<std::size_t>(block_threads);
  const std::size_t by_memory =
      limits::shared_bytes_per_multiprocessor / (shared_bytes + limits::shared_bytes_reserved);
  return static_cast<int>(std::min({by_threads, by_memory, limits::blocks_per_multiprocessor}));
}

}  // namespace
}  // namespace softgpu

using namespace softgpu;

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared_bytes, cudaStream_t stream) {
  return call([&] {
    launch(function, {grid, block, shared_bytes}, arguments, stream);
    return cudaSuccess;
  });
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

// The attributes (clusters, launch order on the device, priorities) say how a GPU may schedule the kernel;
// here it just runs.
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function,
                                void** arguments) {
  if (!configuration)
    return call([]() -> cudaError_t { throw CudaFailure{cudaErrorInvalidValue, "no launch configuration"}; });
  return cudaLaunchKernel(function, configuration->gridDim, configuration->blockDim, arguments,
                          configuration->dynamicSmemBytes, configuration->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared_bytes, stream);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream) {
  call_configurations().push_back({{grid, block, shared_bytes}, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  return call([&] {
    auto& configurations = call_configurations();
    require(!configurations.empty(), cudaErrorMissingConfiguration, "");
    const CallConfiguration configuration = configurations.back();
    configurations.pop_back();
    *grid = configuration.shape.grid;
    *block = configuration.shape.block;
    *shared_bytes = configuration.shape.shared_bytes;
    *static_cast<cudaStream_t*>(stream) = configuration.stream;
    return cudaSuccess;
  });
}

void softgpu_fail(softgpu_launch_t* launch, cudaError_t error, const char* text) {
  auto* failure = static_cast<CudaFailure*>(launch->failure);
  if (failure->error == cudaSuccess) *failure = {error, std::string(launch->kernel) + ": " + text};
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  return device_call([&](Device&) {
    require_kernel(function);
    std::memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = static_cast<int>(limits::threads_per_block);
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 10 * limits::compute_major + limits::compute_minor;
    attributes->maxDynamicSharedSizeBytes = static_cast<int>(limits::shared_bytes_per_block);
    attributes->preferredShmemCarveout = cudaSharedmemCarveoutDefault;
    return cudaSuccess;
  });
}

// The settable attributes guide a GPU's scheduling and shared memory; kernels run here without either.
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int) {
  return device_call([&](Device&) {
    require_kernel(function);
    require(attribute > 0 && attribute < cudaFuncAttributeMax, cudaErrorInvalidValue,
            "unknown function attribute");
    return cudaSuccess;
  });
}

cudaError_t cudaFuncGetName(const char** name, const void* function) {
  return call([&] {
    *name = require_kernel(function).name;
    return cudaSuccess;
  });
}

cudaError_t cudaFuncGetParamInfo(const void* function, size_t index, size_t* offset, size_t* size) {
  return call([&] {
    const Kernel& kernel = require_kernel(function);
    if (!kernel.code) {
      throw CudaFailure{cudaErrorNotSupported,
                        "softgpu does not know the parameters of NVIDIA's kernel " + readable(kernel.name)};
    }
    require(index < kernel.code->parameter_count, cudaErrorInvalidValue, "the kernel has fewer parameters");
    if (offset) *offset = kernel.code->parameters[index].offset;
    if (size) *size = kernel.code->parameters[index].size;
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function,
                                                                   int block_threads, size_t shared_bytes,
                                                                   unsigned flags) {
  return device_call([&](Device&) {
    require((flags & ~unsigned{cudaOccupancyDisableCachingOverride}) == 0, cudaErrorInvalidValue,
            "unknown flags");
    require_kernel(function);
    *blocks = blocks_per_multiprocessor(block_threads, shared_bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int block_threads, size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_threads, shared_bytes,
                                                                cudaOccupancyDefault);
}
