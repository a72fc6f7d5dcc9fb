#include "device_memory.h"

#include <sys/mman.h>

#include <atomic>
#include <string>

#include "error.h"

namespace softgpu {
namespace {

// Addresses in a device's range for each byte of its memory (see RangeAllocator).
constexpr std::size_t addresses_per_byte = 4;

// Of the one AddressSpace; globals because every kernel's every pointer is looked up here.
std::atomic<std::uintptr_t> range_begin{0}, range_bytes{0};

char* reserve(std::size_t bytes) {
  void* begin = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    throw Failure{
        cudaErrorMemoryAllocation,
        "can't reserve " + std::to_string(bytes >> 20) +
            " MiB of addresses for the devices; raise the limit (ulimit -v) or set SOFTGPU_MEMORY or "
            "SOFTGPU_DEVICES to less"};
  }
  return static_cast<char*>(begin);
}

}  // namespace

AddressSpace::AddressSpace(std::size_t devices, std::size_t memory)
    : devices_(devices),
      span_((memory + RangeAllocator::granule - 1) / RangeAllocator::granule * RangeAllocator::granule *
            addresses_per_byte),
      begin_(nullptr) {
  if (devices == 0) return;
  const std::size_t bytes = devices_ * span_;
  begin_ = reserve(2 * bytes);
  madvise(begin_ + bytes, bytes,
          MADV_DONTFORK);  // a forked child has no device, and needs no copy of its memory
  range_begin = reinterpret_cast<std::uintptr_t>(begin_);
  range_bytes = bytes;
}

int AddressSpace::find(const void* pointer) const {
  const std::size_t offset = static_cast<std::size_t>(static_cast<const char*>(pointer) - begin_);
  return begin_ && offset < devices_ * span_ ? static_cast<int>(offset / span_) : -1;
}

void* shadow(const void* pointer) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(pointer);
  const std::uintptr_t bytes = range_bytes.load(std::memory_order_relaxed);
  const bool on_device = address - range_begin.load(std::memory_order_relaxed) < bytes;
  return reinterpret_cast<void*>(on_device ? address + bytes : address);
}

void* DeviceMemory::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  std::lock_guard lock(mutex_);
  const auto offset = ranges_.allocate(bytes);
  if (!offset) {
    throw Failure{cudaErrorMemoryAllocation, std::to_string(bytes) + " bytes asked for, " +
                                                 std::to_string(ranges_.capacity() - ranges_.used()) +
                                                 " of " + std::to_string(ranges_.capacity()) + " free"};
  }
  if (mprotect(shadow(begin_ + *offset), ranges_.blocks().at(*offset), PROT_READ | PROT_WRITE) != 0) {
    ranges_.release(*offset);
    throw Failure{cudaErrorMemoryAllocation,
                  "the host has no memory left for " + std::to_string(bytes) + " bytes"};
  }
  return begin_ + *offset;
}

void DeviceMemory::release(std::size_t offset) {
  char* const pages = static_cast<char*>(shadow(begin_ + offset));
  const std::size_t bytes = *ranges_.release(offset);
  madvise(pages, bytes, MADV_DONTNEED);
  mprotect(pages, bytes, PROT_NONE);
}

void DeviceMemory::free(void* pointer) {
  std::lock_guard lock(mutex_);
  const std::size_t offset = static_cast<std::size_t>(static_cast<char*>(pointer) - begin_);
  require(ranges_.blocks().contains(offset), cudaErrorInvalidValue,
          "no allocation starts at the pointer to free");
  release(offset);
}

void DeviceMemory::free_all() {
  std::lock_guard lock(mutex_);
  while (!ranges_.blocks().empty()) release(ranges_.blocks().begin()->first);
}

bool DeviceMemory::holds(const void* pointer, std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  return ranges_.holds(static_cast<std::size_t>(static_cast<const char*>(pointer) - begin_), bytes);
}

std::size_t DeviceMemory::used() const {
  std::lock_guard lock(mutex_);
  return ranges_.used();
}

}  // namespace softgpu

void* softgpu_shadow(const void* device_pointer) { return softgpu::shadow(device_pointer); }
