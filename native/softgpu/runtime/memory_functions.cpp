// Allocation: device memory, pinned and registered host memory, and what a pointer is.
#include <cstring>

#include "softgpu/runtime/capture.h"
#include "softgpu/runtime/device.h"
#include "softgpu/runtime/fault_registry.h"
#include "softgpu/runtime/host_memory.h"

using namespace softgpu;

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return device_call([&](Device& device) {
    require(pointer != nullptr, cudaErrorInvalidValue, "no place to put the new pointer");
    forbid_unsafe_call();
    require(!fault_at(FaultPoint::allocation) && !memory_is_taken(), cudaErrorMemoryAllocation, "");
    *pointer = device.memory.allocate(bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaFree(void* pointer) {
  return device_call([&](Device&) {
    if (!pointer) return cudaSuccess;
    forbid_unsafe_call();
    Device* owner = device_of(pointer);
    require(owner != nullptr, cudaErrorInvalidValue, "the pointer to free is not a device pointer");
    synchronize(*owner);
    owner->memory.free(pointer);
    return cudaSuccess;
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return device_call([&](Device& device) {
    if (total) *total = device.memory.capacity();
    if (free) *free = memory_is_taken() ? 0 : device.memory.capacity() - device.memory.used();
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  return device_call([&](Device& device) {
    require(pointer != nullptr, cudaErrorInvalidValue, "no place to put the new pointer");
    require(
        (flags & ~unsigned{cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined}) == 0,
        cudaErrorInvalidValue, "unknown flags for pinned memory");
    forbid_unsafe_call();
    *pointer = bytes ? HostMemory::get().allocate(bytes, flags, device.index) : nullptr;
    return cudaSuccess;
  });
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* pointer) {
  return device_call([&](Device&) {
    if (!pointer) return cudaSuccess;
    forbid_unsafe_call();
    for (const auto& device : machine().devices) synchronize(*device);
    HostMemory::get().free(pointer);
    return cudaSuccess;
  });
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned flags) {
  return device_call([&](Device& device) {
    require(pointer != nullptr && bytes > 0, cudaErrorInvalidValue, "no memory to register");
    require(!device_of(pointer), cudaErrorInvalidValue, "device memory can't be registered as host memory");
    forbid_unsafe_call();
    HostMemory::get().add(pointer, bytes, flags, device.index);
    return cudaSuccess;
  });
}

cudaError_t cudaHostUnregister(void* pointer) {
  return device_call([&](Device&) {
    forbid_unsafe_call();
    for (const auto& device : machine().devices) synchronize(*device);
    HostMemory::get().remove(pointer);
    return cudaSuccess;
  });
}

cudaError_t cudaHostGetDevicePointer(void** device_pointer, void* host_pointer, unsigned flags) {
  return device_call([&](Device&) {
    require(device_pointer != nullptr && flags == 0, cudaErrorInvalidValue,
            "no place for the pointer, or flags not 0");
    require(HostMemory::get().find(host_pointer).has_value(), cudaErrorInvalidValue,
            "the host pointer is neither pinned nor registered");
    *device_pointer = host_pointer;
    return cudaSuccess;
  });
}

cudaError_t cudaHostGetFlags(unsigned* flags, void* host_pointer) {
  return device_call([&](Device&) {
    require_place(flags);
    const auto block = HostMemory::get().find(host_pointer);
    require(block && !block->registered, cudaErrorInvalidValue,
            "the pointer was not allocated as pinned host memory");
    *flags = block->flags;
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return device_call([&](Device&) {
    require(attributes != nullptr, cudaErrorInvalidValue, "no place to put the attributes");
    std::memset(attributes, 0, sizeof *attributes);
    void* const address = const_cast<void*>(pointer);
    if (Device* owner = device_of(pointer); owner && owner->memory.holds(pointer, 1)) {
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = owner->index;
      attributes->devicePointer = address;
    } else if (const auto block = HostMemory::get().find(pointer)) {
      attributes->type = cudaMemoryTypeHost;
      attributes->device = block->device;
      attributes->devicePointer = attributes->hostPointer = address;
    } else {
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = cudaInvalidDeviceId;
      attributes->hostPointer = address;
    }
    return cudaSuccess;
  });
}
