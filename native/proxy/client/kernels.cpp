#include "proxy/client/kernels.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "proxy/client/capture.h"
#include "proxy/client/objects.h"
#include "proxy/client/requests.h"
#include "proxy_by_hand.h"

namespace jitckpt::proxy::client {
namespace {

// softgpu's (softgpu/module.h); a GPU's programs upload by copies.
constexpr std::string_view upload_kernel = "softgpu_upload";

struct Kernel {
  uint64_t number;
  uint32_t parameter_bytes;
  std::vector<wire::Parameter> parameters;
  bool uploads;  // it writes nothing itself: what it is given, others take from where it is put to
};

// Never destroyed: libraries unregister their kernels while the process exits.
struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;                    // by host stub, as registered
  std::unordered_map<const void*, std::unique_ptr<const Kernel>> found;  // by host stub
  std::unordered_map<const void*, const Kernel*> handles;                // what __cudaGetKernel has given
};

Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

std::string real_path(const char* path) {
  char* const resolved = realpath(path, nullptr);
  if (!resolved) return path;
  const std::string text = resolved;
  std::free(resolved);
  return text;
}

cudaError_t not_registered() {
  return cudaError_t(
      fail(Library::cudart, cudaErrorInvalidDeviceFunction, "no kernel is registered at this address"));
}

// Asks the server for the kernel of a host stub; null after a failure.
const Kernel* find(const void* stub) {
  Registry& all = registry();
  const char* name = nullptr;
  {
    std::lock_guard lock(all.mutex);
    if (const auto found = all.found.find(stub); found != all.found.end()) return found->second.get();
    if (const auto handle = all.handles.find(stub); handle != all.handles.end()) return handle->second;
    if (const auto registered = all.names.find(stub); registered != all.names.end())
      name = registered->second;
  }
  Dl_info info;
  if (!name || dladdr(stub, &info) == 0 || !info.dli_fname) {
    not_registered();
    return nullptr;
  }
  const std::string path = real_path(info.dli_fname);
  static std::atomic<uint64_t> newest_number{0};
  const wire::find_kernel arguments{
      ++newest_number,
      static_cast<uint64_t>(static_cast<const char*>(stub) - static_cast<const char*>(info.dli_fbase)),
      path.size()};
  auto answer = std::make_unique<wire::find_kernel_answer>();
  const Bytes path_bytes = std::as_bytes(std::span(path));
  if (ask<cudaError_t>(Call::find_kernel, arguments, *answer, path_bytes) != cudaSuccess) return nullptr;
  note_object(arguments.kernel, Call::find_kernel, bytes_of(arguments), path_bytes);
  auto kernel = std::make_unique<const Kernel>(
      Kernel{arguments.kernel,
             answer->parameter_bytes,
             {answer->parameters, answer->parameters + answer->parameter_count},
             std::string_view(name) == upload_kernel});
  std::lock_guard lock(all.mutex);
  return all.found.try_emplace(stub, std::move(kernel)).first->second.get();
}

constexpr std::size_t most_attributes = 16;

// The same again on another stream, for a graph.
int32_t launch_on(cudaStream_t stream, wire::launch arguments, const std::vector<std::byte>& content,
                  bool uploads) {
  if (captures(stream)) {
    return capture(Library::cudart, stream, cudaGraphNodeTypeKernel,
                   [=](cudaStream_t other) { return launch_on(other, arguments, content, uploads); });
  }
  arguments.stream = number_of(stream);
  if (uploads && state_is_still()) uploads_addresses(content);
  return tell<cudaError_t>(Call::launch, arguments, content);
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** parameters, std::size_t shared_bytes,
                   cudaStream_t stream, std::span<const cudaLaunchAttribute> attributes = {}) {
  const Kernel* const kernel = find(function);
  if (!kernel) return newest_error();
  const wire::launch arguments{.kernel = kernel->number,
                               .stream = number_of(stream),
                               .shared_bytes = shared_bytes,
                               .grid = {grid.x, grid.y, grid.z},
                               .block = {block.x, block.y, block.z},
                               .attribute_count = static_cast<uint32_t>(attributes.size()),
                               .parameter_bytes = kernel->parameter_bytes};
  thread_local std::vector<std::byte> content;
  const Bytes attribute_bytes = std::as_bytes(attributes);
  // What lies between two parameters is nothing by which two launches differ.
  content.assign(attribute_bytes.size() + kernel->parameter_bytes, {});
  if (!attribute_bytes.empty()) std::memcpy(content.data(), attribute_bytes.data(), attribute_bytes.size());
  std::byte* const begin = content.data() + attribute_bytes.size();
  for (std::size_t i = 0; i < kernel->parameters.size(); ++i) {
    const wire::Parameter& parameter = kernel->parameters[i];
    std::memcpy(begin + parameter.offset, parameters[i], parameter.bytes);
  }
  return cudaError_t(launch_on(stream, arguments, content, kernel->uploads));
}

// What <<<...>>> leaves for the host stub that nvcc generated.
struct Configuration {
  dim3 grid, block;
  std::size_t shared_bytes;
  cudaStream_t stream;
};

std::vector<Configuration>& configurations() {
  thread_local std::vector<Configuration> all;
  return all;
}

}  // namespace

uint64_t kernel_number(const void* stub_or_kernel) {
  const Kernel* const kernel = find(stub_or_kernel);
  return kernel ? kernel->number : 0;
}

}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

// Registration costs next to nothing: torch registers 21,504 kernels when it is imported, and uses few.
void** __cudaRegisterFatBinary(void*) {
  static char module;  // the same for all: what matters of a kernel is its host stub
  return reinterpret_cast<void**>(&module);
}
void __cudaRegisterFatBinaryEnd(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  std::lock_guard lock(registry().mutex);
  registry().names[stub] = name;
}

// Its kernels stay known: a library that is closed while the process goes on launches none any more.
void __cudaUnregisterFatBinary(void**) {}

// Who asks for a variable (cudaGetSymbolAddress, cudaMemcpyToSymbol) is refused.
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
#pragma GCC visibility push(default)
extern "C" {
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterHostVar(void**, const char*, char*, size_t) {}
}
#pragma GCC visibility pop

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  if (!kernel) return no_place<cudaError_t>();
  const Kernel* const found = find(stub);
  if (!found) return newest_error();
  std::lock_guard lock(registry().mutex);
  registry().handles[found] = found;
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<Kernel*>(found));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** parameters, size_t shared_bytes,
                             cudaStream_t stream) {
  return launch(stub, grid, block, parameters, shared_bytes, stream);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** parameters,
                               size_t shared_bytes, cudaStream_t stream) {
  return launch(kernel, grid, block, parameters, shared_bytes, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* stub,
                                void** parameters) {
  const std::span attributes(configuration->attrs, configuration->numAttrs);
  if (attributes.size() > most_attributes) {
    return cudaError_t(fail(Library::cudart, cudaErrorInvalidValue, "a launch has more than 16 attributes"));
  }
  for (const cudaLaunchAttribute& attribute : attributes) {
    const bool names_an_event = attribute.id == cudaLaunchAttributeProgrammaticEvent ||
                                attribute.id == cudaLaunchAttributeLaunchCompletionEvent ||
                                attribute.id == cudaLaunchAttributeDeviceUpdatableKernelNode;
    if (names_an_event) return refuse<cudaError_t>("launch attribute that names an event or a graph");
  }
  return launch(stub, configuration->gridDim, configuration->blockDim, parameters,
                configuration->dynamicSmemBytes, configuration->stream, attributes);
}

cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3 grid, dim3 block, void** parameters,
                                        size_t shared_bytes, cudaStream_t stream) {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  return launch(stub, grid, block, parameters, shared_bytes, stream, std::span(&cooperative, 1));
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream) {
  configurations().push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (configurations().empty()) return cudaError_t(fail(Library::cudart, cudaErrorMissingConfiguration, ""));
  const Configuration configuration = configurations().back();
  configurations().pop_back();
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}
