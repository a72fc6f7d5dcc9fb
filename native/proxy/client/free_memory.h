// What of the device's memory is free: an allocator of the program's has it and has not given it out. It
// holds nothing, so what is read there before it is written may be anything.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace jitckpt::proxy::client {

struct Extent {
  uint64_t begin, end;
};

// A set of addresses.
class Extents {
 public:
  void add(const Extent& extent);
  void remove(const Extent& extent);
  // The parts of an extent that are in the set, and those that are not; in order.
  std::vector<Extent> inside(const Extent& extent) const;
  std::vector<Extent> outside(const Extent& extent) const;

 private:
  // By their beginnings the ends of extents that don't touch.
  std::map<uint64_t, uint64_t> ends_;
};

// Memory that has been made, or a part of it.
struct Allocation {
  uint64_t address, bytes;
  int32_t device;

  Extent extent() const { return {address, address + bytes}; }
};

struct FreeMemory {
  std::mutex mutex;
  Extents extents;

  // What the program holds of those, and is not left out, by address; with what little else lies between.
  // With the mutex held.
  std::vector<Allocation> held(std::vector<Allocation> memory, const Extents& left_out = {}) const;
};

// Of this process.
FreeMemory& free_memory();

}  // namespace jitckpt::proxy::client
