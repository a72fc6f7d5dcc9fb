#include "softgpu/runtime/host_memory.h"

#include <sys/mman.h>

namespace softgpu {
namespace {

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

void unmap(const HostBlock& block) {
  if (!block.registered) munmap(block.begin, block.bytes);
}

}  // namespace

HostMemory& HostMemory::get() {
  static auto* const memory = new HostMemory;
  return *memory;
}

void* HostMemory::allocate(std::size_t bytes, unsigned flags, int device) {
  void* begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) {
    throw CudaFailure{cudaErrorMemoryAllocation,
                      "the host has no " + std::to_string(bytes) + " bytes of memory left to pin"};
  }
  std::lock_guard lock(mutex_);
  blocks_[address(begin)] = {begin, bytes, flags, device, false};
  return begin;
}

void HostMemory::free(void* begin) {
  std::lock_guard lock(mutex_);
  const auto block = blocks_.find(address(begin));
  require(block != blocks_.end() && !block->second.registered, cudaErrorInvalidValue,
          "the pointer was not allocated as pinned host memory");
  unmap(block->second);
  blocks_.erase(block);
}

void HostMemory::add(void* begin, std::size_t bytes, unsigned flags, int device) {
  std::lock_guard lock(mutex_);
  const auto after = blocks_.lower_bound(address(begin) + bytes);
  if (after != blocks_.begin()) {
    const HostBlock& before = std::prev(after)->second;
    require(address(before.begin) + before.bytes <= address(begin), cudaErrorHostMemoryAlreadyRegistered, "");
  }
  blocks_[address(begin)] = {begin, bytes, flags, device, true};
}

void HostMemory::remove(void* begin) {
  std::lock_guard lock(mutex_);
  const auto block = blocks_.find(address(begin));
  require(block != blocks_.end() && block->second.registered, cudaErrorHostMemoryNotRegistered, "");
  blocks_.erase(block);
}

void HostMemory::free_all_of(int device) {
  std::lock_guard lock(mutex_);
  std::erase_if(blocks_, [device](const auto& entry) {
    if (entry.second.device != device) return false;
    unmap(entry.second);
    return true;
  });
}

std::optional<HostBlock> HostMemory::find(const void* pointer) {
  std::lock_guard lock(mutex_);
  const auto after = blocks_.upper_bound(address(pointer));
  if (after == blocks_.begin()) return std::nullopt;
  const HostBlock& block = std::prev(after)->second;
  if (address(pointer) - address(block.begin) >= block.bytes) return std::nullopt;
  return block;
}

}  // namespace softgpu
