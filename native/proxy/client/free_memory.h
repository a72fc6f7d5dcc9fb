// What of the device's memory is free: an allocator of the program's has it and has not given it out. It
// holds nothing, so what is read there before it is written may be anything.
#pragma once
#include <algorithm>
#include <cstdint>
#include <mutex>
#include <ranges>
#include <vector>

namespace jitckpt::proxy::client {

struct Extent {
  uint64_t begin, end;

  bool operator==(const Extent&) const = default;
};

// A set of addresses.
class Extents {
 public:
  Extents() = default;
  // Of all these, in any order; they may overlap.
  explicit Extents(std::vector<Extent> all);
  template <std::ranges::sized_range All, class ExtentOf>
  Extents(const All& all, const ExtentOf& extent_of) : Extents(extents_of(all, extent_of)) {}
  void add(const Extent& extent);
  void remove(const Extent& extent);
  // Calls `visit` with each part of an extent that is in the set, or is not; in order.
  template <class Visit>
  void inside(const Extent& extent, const Visit& visit) const {
    if (extent.begin >= extent.end) return;
    auto next = std::ranges::upper_bound(all_, extent.begin, {}, &Extent::end);
    for (; next != all_.end() && next->begin < extent.end; ++next)
      visit(Extent{std::max(next->begin, extent.begin), std::min(next->end, extent.end)});
  }
  template <class Visit>
  void outside(const Extent& extent, const Visit& visit) const {
    uint64_t begin = extent.begin;
    inside(extent, [&](const Extent& part) {
      if (begin < part.begin) visit(Extent{begin, part.begin});
      begin = part.end;
    });
    if (begin < extent.end) visit(Extent{begin, extent.end});
  }

 private:
  template <class All, class ExtentOf>
  static std::vector<Extent> extents_of(const All& all, const ExtentOf& extent_of) {
    std::vector<Extent> found(std::ranges::size(all));
    std::ranges::transform(all, found.begin(), extent_of);
    return found;
  }

  // In order, none empty; they don't touch. In one piece, as they are gone through in every step, when other
  // things have taken the caches.
  std::vector<Extent> all_;
};

// Memory that has been made, or a part of it.
struct Allocation {
  uint64_t address, bytes;
  int32_t device;

  Extent extent() const { return {address, address + bytes}; }
};

// An allocator says hundreds of times in a minibatch what it gives out and takes back, in the midst of the
// program's own work; it is asked for once. So what is said is only noted, and put together then.
class FreeMemory {
 public:
  // All else is with this held.
  std::mutex mutex;

  void free(const Extent& extent) { note({extent, true}); }
  void hold(const Extent& extent) { note({extent, false}); }
  // What the program holds of those, and is not left out, by address; with what little else lies between.
  std::vector<Allocation> held(std::vector<Allocation> memory, const Extents& left_out = {});

 private:
  struct Said {
    Extent extent;
    bool free;
  };
  void note(const Said& said);
  void put_together();

  Extents extents_;         // that are free, but for
  std::vector<Said> said_;  // what was said since, in this order
  std::vector<uint16_t> last_;
};

// Of this process.
FreeMemory& free_memory();

}  // namespace jitckpt::proxy::client
