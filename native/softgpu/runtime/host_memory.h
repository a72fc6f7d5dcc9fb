// Host memory that the device may reach on its own: allocated pinned, or registered.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "softgpu/runtime/device.h"

namespace softgpu {

struct HostBlock {
  void* begin;
  std::size_t bytes;
  unsigned flags;
  int device;       // the current one when it was made
  bool registered;  // by cudaHostRegister: the memory is the program's
};

class HostMemory {
 public:
  static HostMemory& get();

  void* allocate(std::size_t bytes, unsigned flags, int device);
  void free(void* begin);
  void add(void* begin, std::size_t bytes, unsigned flags, int device);  // register
  void remove(void* begin);                                              // unregister
  void free_all_of(int device);                                          // cudaDeviceReset

  std::optional<HostBlock> find(const void* pointer);  // the block that holds the address

 private:
  std::mutex mutex_;
  std::map<std::uintptr_t, HostBlock> blocks_;
};

}  // namespace softgpu
