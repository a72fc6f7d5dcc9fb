// Device memory between processes (CUDA's IPC memory).
#include <cstring>

#include "softgpu/runtime/device.h"

using namespace softgpu;

static_assert(sizeof(SharedPiece) <= sizeof(cudaIpcMemHandle_t));

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  return device_call([&](Device&) {
    require(handle != nullptr, cudaErrorInvalidValue, "no place to put the handle");
    Device* owner = device_of(pointer);
    require(owner != nullptr, cudaErrorInvalidValue, "the pointer to share is not a device pointer");
    const SharedPiece piece = owner->memory.publish(pointer, owner->number);
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &piece, sizeof piece);
    return cudaSuccess;
  });
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  return device_call([&](Device&) {
    require(pointer != nullptr && flags == cudaIpcMemLazyEnablePeerAccess, cudaErrorInvalidValue,
            "no place to put the pointer, or flags other than cudaIpcMemLazyEnablePeerAccess");
    SharedPiece piece;
    std::memcpy(&piece, &handle, sizeof piece);
    require_foreign(piece, SharedPiece::Kind::memory);
    *pointer = find_device_number(piece.device).memory.open(piece);
    return cudaSuccess;
  });
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  return device_call([&](Device&) {
    Device* owner = device_of(pointer);
    require(owner != nullptr, cudaErrorInvalidValue, "the pointer to close is not a device pointer");
    synchronize(*owner);
    owner->memory.close(pointer);
    return cudaSuccess;
  });
}
