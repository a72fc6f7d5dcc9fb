// Devices: which there are, what they are like, which one a thread uses.
#include <cstdio>
#include <cstring>

#include "softgpu/runtime/capture.h"
#include "softgpu/runtime/device.h"
#include "softgpu/runtime/enqueue.h"
#include "softgpu/runtime/host_memory.h"
#include "softgpu/runtime/limits.h"
#include "softgpu/runtime/stream_functions.h"

namespace softgpu {
namespace {

// A bus of its own for each device of the machine, so that NCCL-like programs tell them apart.
int pci_bus(const Device& device) { return device.number + 1; }

int attribute_of(const Device& device, cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      return limits::threads_per_block;
    case cudaDevAttrMaxBlockDimX:
      return limits::block_x;
    case cudaDevAttrMaxBlockDimY:
      return limits::block_y;
    case cudaDevAttrMaxBlockDimZ:
      return limits::block_z;
    case cudaDevAttrMaxGridDimX:
      return limits::grid_x;
    case cudaDevAttrMaxGridDimY:
      return limits::grid_yz;
    case cudaDevAttrMaxGridDimZ:
      return limits::grid_yz;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return limits::shared_bytes_per_block;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return limits::shared_bytes_opt_in;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return limits::shared_bytes_per_multiprocessor;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return limits::shared_bytes_reserved;
    case cudaDevAttrTotalConstantMemory:
      return limits::constant_bytes;
    case cudaDevAttrWarpSize:
      return limits::warp_threads;
    case cudaDevAttrMaxPitch:
      return 0x7fffffff;
    case cudaDevAttrMaxRegistersPerBlock:
      return limits::registers;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return limits::registers;
    case cudaDevAttrTextureAlignment:
      return limits::texture_alignment;
    case cudaDevAttrTexturePitchAlignment:
      return limits::texture_pitch_alignment;
    case cudaDevAttrSurfaceAlignment:
      return limits::texture_alignment;
    case cudaDevAttrGpuOverlap:
      return 1;
    case cudaDevAttrMultiProcessorCount:
      return limits::multiprocessors;
    case cudaDevAttrCanMapHostMemory:
      return 1;
    case cudaDevAttrComputeMode:
      return cudaComputeModeDefault;
    case cudaDevAttrConcurrentKernels:
      return 1;
    case cudaDevAttrPciBusId:
      return pci_bus(device);
    case cudaDevAttrGlobalMemoryBusWidth:
      return limits::memory_bus_bits;
    case cudaDevAttrL2CacheSize:
      return limits::l2_bytes;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return limits::threads_per_multiprocessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return limits::blocks_per_multiprocessor;
    case cudaDevAttrAsyncEngineCount:
      return limits::copy_engines;
    case cudaDevAttrUnifiedAddressing:
      return 1;
    case cudaDevAttrComputeCapabilityMajor:
      return limits::compute_major;
    case cudaDevAttrComputeCapabilityMinor:
      return limits::compute_minor;
    case cudaDevAttrStreamPrioritiesSupported:
      return 1;
    case cudaDevAttrGlobalL1CacheSupported:
      return 1;
    case cudaDevAttrLocalL1CacheSupported:
      return 1;
    case cudaDevAttrComputePreemptionSupported:
      return 1;
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      return 1;
    case cudaDevAttrCooperativeLaunch:
      return 1;
    case cudaDevAttrHostRegisterSupported:
      return 1;
    case cudaDevAttrNumaId:
      return -1;
    case cudaDevAttrIpcEventSupport:
      return 1;
    // What is left are features that softgpu does not have (managed memory, memory pools, textures, RDMA
    // ...).
    default:
      return 0;
  }
}

cudaDeviceProp properties_of(const Device& device) {
  cudaDeviceProp properties{};
  std::snprintf(properties.name, sizeof properties.name, "SoftGPU");
  std::snprintf(properties.uuid.bytes, sizeof properties.uuid.bytes, "SoftGPU-%d", device.number);
  properties.totalGlobalMem = device.memory.capacity();
  properties.major = limits::compute_major;
  properties.minor = limits::compute_minor;
  properties.multiProcessorCount = limits::multiprocessors;
  properties.warpSize = limits::warp_threads;
  properties.maxThreadsPerBlock = limits::threads_per_block;
  properties.maxThreadsPerMultiProcessor = limits::threads_per_multiprocessor;
  properties.maxBlocksPerMultiProcessor = limits::blocks_per_multiprocessor;
  properties.maxThreadsDim[0] = limits::block_x;
  properties.maxThreadsDim[1] = limits::block_y;
  properties.maxThreadsDim[2] = limits::block_z;
  properties.maxGridSize[0] = limits::grid_x;
  properties.maxGridSize[1] = properties.maxGridSize[2] = limits::grid_yz;
  properties.sharedMemPerBlock = limits::shared_bytes_per_block;
  properties.sharedMemPerBlockOptin = limits::shared_bytes_opt_in;
  properties.sharedMemPerMultiprocessor = limits::shared_bytes_per_multiprocessor;
  properties.reservedSharedMemPerBlock = limits::shared_bytes_reserved;
  properties.regsPerBlock = properties.regsPerMultiprocessor = limits::registers;
  properties.totalConstMem = limits::constant_bytes;
  properties.memPitch = 0x7fffffff;
  properties.textureAlignment = properties.surfaceAlignment = limits::texture_alignment;
  properties.texturePitchAlignment = limits::texture_pitch_alignment;
  properties.l2CacheSize = limits::l2_bytes;
  properties.memoryBusWidth = limits::memory_bus_bits;
  properties.asyncEngineCount = limits::copy_engines;
  properties.pciBusID = pci_bus(device);
  properties.concurrentKernels = 1;
  properties.unifiedAddressing = 1;
  properties.canMapHostMemory = 1;
  properties.streamPrioritiesSupported = 1;
  properties.globalL1CacheSupported = properties.localL1CacheSupported = 1;
  properties.computePreemptionSupported = 1;
  properties.canUseHostPointerForRegisteredMem = 1;
  properties.cooperativeLaunch = 1;
  properties.hostRegisterSupported = 1;
  properties.ipcEventSupported = 1;
  return properties;
}

}  // namespace
}  // namespace softgpu

using namespace softgpu;

cudaError_t cudaGetDeviceCount(int* count) {
  return call([&] {
    require(count != nullptr, cudaErrorInvalidValue, "no place to put the number of devices");
    *count = 0;
    *count = static_cast<int>(machine().devices.size());
    return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return call([&] {
    require_place(device);
    find_device(current_device());
    *device = current_device();
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call([&] {
    Device& chosen = find_device(device);
    use_device(device);
    chosen.active = true;
    chosen.check();
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return device_call([](Device& device) {
    forbid_waiting(device);
    synchronize(device);
    device.check();
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceReset() {
  return device_call([](Device& device) {
    forbid_waiting(device);
    synchronize(device);
    destroy_streams_of(device);
    device.memory.free_all();
    HostMemory::get().free_all_of(device.index);
    device.active = false;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call([&] {
    require_place(properties);
    *properties = properties_of(find_device(device));
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call([&] {
    require_place(value);
    const Device& described = find_device(device);
    require(attribute > 0 && attribute < cudaDevAttrMax, cudaErrorInvalidValue, "unknown device attribute");
    *value = attribute_of(described, attribute);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  return call([&] {
    require_place(text);
    const int needed =
        std::snprintf(text, static_cast<size_t>(length), "0000:%02X:00.0", pci_bus(find_device(device)));
    require(needed < length, cudaErrorInvalidValue, "no room for the PCI bus id (13 bytes)");
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* text) {
  return call([&] {
    require_place(device);
    require(text != nullptr, cudaErrorInvalidValue, "no PCI bus id");
    unsigned domain = 0, bus = 0, slot = 0, function = 0;
    require(std::sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) == 4, cudaErrorInvalidValue,
            "not a PCI bus id of the form 0000:01:00.0");
    for (const auto& candidate : machine().devices) {
      if (domain == 0 && static_cast<int>(bus) == pci_bus(*candidate) && slot == 0 && function == 0) {
        *device = candidate->index;
        return cudaSuccess;
      }
    }
    throw CudaFailure{cudaErrorInvalidDevice, "no visible device has this PCI bus id"};
  });
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call([&] {
    require_place(can);
    *can = &find_device(device) != &find_device(peer);
    return cudaSuccess;
  });
}

namespace {

// Every copy and kernel reaches every device anyway; what is kept is what CUDA would complain of.
cudaError_t set_peer_access(int peer, bool enable) {
  return device_call([&](Device& device) {
    require(&find_device(peer) != &device, cudaErrorInvalidDevice, "a device is no peer of its own");
    const std::uint64_t bit = std::uint64_t{1} << peer;
    const std::uint64_t before = enable ? device.peers.fetch_or(bit) : device.peers.fetch_and(~bit);
    if (enable == static_cast<bool>(before & bit)) {
      return enable ? cudaErrorPeerAccessAlreadyEnabled : cudaErrorPeerAccessNotEnabled;
    }
    return cudaSuccess;
  });
}

}  // namespace

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  if (flags != 0) {
    return call([]() -> cudaError_t { throw CudaFailure{cudaErrorInvalidValue, "flags must be 0"}; });
  }
  return set_peer_access(peer, true);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) { return set_peer_access(peer, false); }

cudaError_t cudaDriverGetVersion(int* version) {
  return call([&] {
    require_place(version);
    *version = CUDART_VERSION;
    return cudaSuccess;
  });
}

cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaProfilerStart() {
  return call([] { return cudaSuccess; });
}

cudaError_t cudaProfilerStop() { return cudaProfilerStart(); }

int softgpu_device_active(int device) {
  int active = 0;
  call([&] {
    active = find_device(device).active;
    return cudaSuccess;
  });
  return active;
}
