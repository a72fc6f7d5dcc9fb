#include "proxy/server/kernels.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "proxy/server/failure.h"
#include "proxy/server/server.h"
#include "proxy/server/services.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

// Where the library's offset 0 lies; it is loaded if it is not.
const char* load(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!handle) {
    throw CallFailure(cudaErrorSharedObjectInitFailed, "the device proxy's server can't load " + library +
                                                           ", which holds kernels: " + dlerror());
  }
  const link_map* map = nullptr;
  dlinfo(handle, RTLD_DI_LINKMAP, &map);
  return reinterpret_cast<const char*>(map->l_addr);
}

}  // namespace

const Kernels::Kernel& Kernels::add(uint64_t number, const std::string& library, uint64_t offset) {
  // One at a time: what the loader gives to two threads at once is in order by a lock that sanitizers don't
  // know.
  std::unique_lock loading(loading_);
  Kernel kernel{load(library) + offset, {}, 0};
  loading.unlock();
  for (std::size_t index = 0;; ++index) {
    std::size_t begin = 0, bytes = 0;
    const cudaError_t error = real::cudaFuncGetParamInfo(kernel.stub, index, &begin, &bytes);
    if (error != cudaSuccess) {
      real::cudaGetLastError();
      if (error == cudaErrorInvalidValue) break;  // there is no such parameter
      throw CallFailure(error, "the device proxy's server does not know the parameters of a kernel of " +
                                   library + ": " + real::cudaGetErrorString(error));
    }
    kernel.parameters.push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(bytes)});
    kernel.parameter_bytes = std::max(kernel.parameter_bytes, static_cast<uint32_t>(begin + bytes));
  }
  if (kernel.parameters.size() > wire::most_parameters)
    throw CallFailure(cudaErrorNotSupported, "a kernel of " + library + " has more than 512 parameters");
  std::lock_guard lock(mutex_);
  return kernels_.insert_or_assign(number, std::move(kernel)).first->second;
}

const Kernels::Kernel& Kernels::at(uint64_t number) {
  std::lock_guard lock(mutex_);
  const auto kernel = kernels_.find(number);
  if (kernel == kernels_.end())
    throw CallFailure(cudaErrorInvalidDeviceFunction, "there is no kernel of this number");
  return kernel->second;
}

int32_t serve_find_kernel(Request& request) {
  const auto arguments = request.arguments<wire::find_kernel>();
  const void* const content = request.content_after<wire::find_kernel>(arguments.path_bytes);
  const std::string path(static_cast<const char*>(content), arguments.path_bytes);
  const auto& kernel = request.server.kernels.add(arguments.kernel, path, arguments.offset);
  auto& answer = request.answer<wire::find_kernel_answer>();
  answer.parameter_count = static_cast<uint32_t>(kernel.parameters.size());
  answer.parameter_bytes = kernel.parameter_bytes;
  std::ranges::copy(kernel.parameters, answer.parameters);
  return cudaSuccess;
}

int32_t serve_launch(Request& request) {
  const auto arguments = request.arguments<wire::launch>();
  const auto& kernel = request.server.kernels.at(arguments.kernel);
  const auto rest = request.rest<wire::launch>();
  constexpr std::size_t most_attributes = 16;
  const std::size_t attribute_bytes = arguments.attribute_count * sizeof(cudaLaunchAttribute);
  if (arguments.attribute_count > most_attributes || arguments.parameter_bytes != kernel.parameter_bytes ||
      rest.size() < attribute_bytes + arguments.parameter_bytes)
    throw CallFailure(cudaErrorInvalidValue, "a launch's record is shorter than it says");
  std::array<void*, wire::most_parameters> parameters;
  auto* const begin = const_cast<std::byte*>(rest.data() + attribute_bytes);
  for (std::size_t i = 0; i < kernel.parameters.size(); ++i)
    parameters[i] = begin + kernel.parameters[i].offset;
  const dim3 grid{arguments.grid[0], arguments.grid[1], arguments.grid[2]};
  const dim3 block{arguments.block[0], arguments.block[1], arguments.block[2]};
  const cudaStream_t stream = request.server.streams.find(arguments.stream);
  if (arguments.attribute_count == 0)
    return real::cudaLaunchKernel(kernel.stub, grid, block, parameters.data(), arguments.shared_bytes,
                                  stream);
  std::array<cudaLaunchAttribute, most_attributes> attributes;
  std::memcpy(attributes.data(), rest.data(), attribute_bytes);
  const cudaLaunchConfig_t configuration{
      grid, block, arguments.shared_bytes, stream, attributes.data(), arguments.attribute_count};
  return real::cudaLaunchKernelExC(&configuration, kernel.stub, parameters.data());
}

}  // namespace jitckpt::proxy
