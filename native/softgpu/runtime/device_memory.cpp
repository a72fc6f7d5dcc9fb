#include "softgpu/runtime/device_memory.h"

#include <sys/mman.h>

#include <atomic>
#include <string>

#include "softgpu/runtime/error.h"
#include "softgpu/runtime/illegal_access.h"

namespace softgpu {
namespace {

// Addresses in a device's range for each byte of its memory (see RangeAllocator).
constexpr std::size_t addresses_per_byte = 4;

// Of the one AddressSpace; globals because every kernel's every pointer is looked up here.
std::atomic<std::uintptr_t> range_begin{0}, range_bytes{0};

// Where the devices' addresses begin, unless something else is there: another process that takes over what
// this one had gets the same addresses. The thread sanitizer keeps most addresses for itself.
#ifdef __SANITIZE_THREAD__
constexpr std::uintptr_t wanted_begin = 0x7e90'0000'0000;
#else
constexpr std::uintptr_t wanted_begin = 0x2000'0000'0000;
#endif

char* reserve(std::size_t bytes) {
  void* begin = mmap(reinterpret_cast<void*>(wanted_begin), bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    throw CudaFailure{
        cudaErrorMemoryAllocation,
        "can't reserve " + std::to_string(bytes >> 20) +
            " MiB of addresses for the devices; raise the limit (ulimit -v) or set SOFTGPU_MEMORY or "
            "SOFTGPU_DEVICES to less"};
  }
  return static_cast<char*>(begin);
}

// Takes what is mapped there away; the addresses stay reserved. A forked child has no device, and needs none
// of its memory.
void make_inaccessible(void* address, std::size_t bytes) {
  mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  madvise(address, bytes, MADV_DONTFORK);
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
  madvise(begin_ + bytes, bytes, MADV_DONTFORK);
  range_begin = reinterpret_cast<std::uintptr_t>(begin_);
  range_bytes = bytes;
  catch_illegal_accesses(begin_ + bytes, devices_, span_);
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
    throw CudaFailure{cudaErrorMemoryAllocation, std::to_string(bytes) + " bytes asked for, " +
                                                     std::to_string(ranges_.capacity() - ranges_.used()) +
                                                     " of " + std::to_string(ranges_.capacity()) + " free"};
  }
  const std::size_t length = ranges_.blocks().at(*offset).length;
  try {
    const std::uint64_t place = PublishedFile::get().reserve(length);
    PublishedFile::get().map(place, length, shadow(begin_ + *offset));
    places_[*offset] = place;
  } catch (...) {
    ranges_.release(*offset);
    throw;
  }
  return begin_ + *offset;
}

void DeviceMemory::release(std::size_t offset) {
  const std::size_t bytes = *ranges_.release(offset);
  make_inaccessible(shadow(begin_ + offset), bytes);
  foreign_.erase(offset);
  if (const auto own = places_.extract(offset)) PublishedFile::get().give_back(own.mapped(), bytes);
}

void DeviceMemory::free(void* pointer) {
  std::lock_guard lock(mutex_);
  require(places_.contains(offset_of(pointer)), cudaErrorInvalidValue,
          "no allocation starts at the pointer to free");
  release(offset_of(pointer));
}

void DeviceMemory::free_all() {
  std::lock_guard lock(mutex_);
  while (!ranges_.blocks().empty()) release(ranges_.blocks().begin()->first);
}

SharedPiece DeviceMemory::publish(const void* pointer, int device) const {
  std::lock_guard lock(mutex_);
  const auto block = ranges_.block_at(offset_of(pointer));
  require(block.has_value(), cudaErrorInvalidValue, "the pointer is in no allocation");
  require(places_.contains(*block), cudaErrorInvalidValue,
          "memory that another process shares can only be shared on by that process");
  return PublishedFile::get().publish(SharedPiece::Kind::memory, device, places_.at(*block),
                                      ranges_.blocks().at(*block).length);
}

void* DeviceMemory::open(const SharedPiece& piece) {
  std::lock_guard lock(mutex_);
  for (auto& [offset, foreign] : foreign_) {
    if (foreign.piece.inode != piece.inode || foreign.piece.place != piece.place) continue;
    ++foreign.opened;
    return begin_ + offset;
  }
  const auto offset = ranges_.reserve(piece.bytes);
  require(offset.has_value(), cudaErrorMapBufferObjectFailed,
          "the device has no addresses left for another process's memory");
  try {
    map_foreign(piece, shadow(begin_ + *offset));
    foreign_[*offset] = {piece, 1};
  } catch (...) {
    ranges_.release(*offset);
    throw;
  }
  return begin_ + *offset;
}

void DeviceMemory::close(void* pointer) {
  std::lock_guard lock(mutex_);
  const auto found = foreign_.find(offset_of(pointer));
  require(found != foreign_.end(), cudaErrorInvalidValue,
          "no memory of another process starts at the pointer to close");
  if (--found->second.opened == 0) release(found->first);
}

bool DeviceMemory::holds(const void* pointer, std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  return ranges_.holds(offset_of(pointer), bytes);
}

std::size_t DeviceMemory::used() const {
  std::lock_guard lock(mutex_);
  return ranges_.used();
}

}  // namespace softgpu

void* softgpu_shadow(const void* device_pointer) { return softgpu::shadow(device_pointer); }
