// Device memory: every device has a range of addresses that faults for everybody, and a shadow of it, at a
// constant distance, that only kernels and copies use.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "softgpu/runtime/published_file.h"
#include "softgpu/runtime/range_allocator.h"

namespace softgpu {

// One reservation for all devices, so that one comparison tells a device pointer from a host pointer.
class AddressSpace {
 public:
  // Throws CudaFailure if the process may not have so many addresses.
  AddressSpace(std::size_t devices, std::size_t memory);

  char* device_begin(std::size_t device) const { return begin_ + device * span_; }
  std::size_t span() const { return span_; }

  // The device that owns the address, or -1.
  int find(const void* pointer) const;

 private:
  std::size_t devices_, span_;
  char* begin_;
};

// Where kernels and copies find what the pointer points to; a host pointer comes back unchanged.
void* shadow(const void* pointer);

class DeviceMemory {
 public:
  DeviceMemory(char* begin, std::size_t span, std::size_t capacity)
      : begin_(begin), ranges_(span, capacity) {}

  // Throws CudaFailure (out of memory). Zero bytes are a null pointer.
  void* allocate(std::size_t bytes);
  // Gives the pages back. Throws CudaFailure if no allocation starts there.
  void free(void* pointer);
  void free_all();

  // Memory between processes: the allocation that holds the pointer, for others to map; and theirs, mapped
  // here as device memory that is not this process's to free. What is opened again is the same memory, to be
  // closed as often. Throw CudaFailure.
  SharedPiece publish(const void* pointer, int device) const;
  void* open(const SharedPiece& piece);
  void close(void* pointer);

  // Whether all of these bytes lie in one allocation.
  bool holds(const void* pointer, std::size_t bytes) const;

  std::size_t capacity() const { return ranges_.capacity(); }
  std::size_t used() const;

 private:
  struct Foreign {
    SharedPiece piece;
    int opened;  // times
  };

  std::size_t offset_of(const void* pointer) const {
    return static_cast<std::size_t>(static_cast<const char*>(pointer) - begin_);
  }
  void release(std::size_t offset);

  char* const begin_;
  mutable std::mutex mutex_;
  RangeAllocator ranges_;
  std::map<std::size_t, std::uint64_t> places_;  // in the process's file, of its own blocks, by offset
  std::map<std::size_t, Foreign> foreign_;       // the other blocks
};

}  // namespace softgpu
