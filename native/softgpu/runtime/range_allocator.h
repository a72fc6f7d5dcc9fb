// Which parts of a device's address range are taken. Pure bookkeeping on offsets; touches no memory.
#pragma once
#include <cstddef>
#include <map>
#include <optional>

namespace softgpu {

// The range is longer than the memory that it hands out, so that scattered blocks seldom stand in the way of
// a large one, as on a GPU, which maps pages. Lowest fitting place first: the same calls give the same
// addresses.
class RangeAllocator {
 public:
  static constexpr std::size_t granule = 4096;

  RangeAllocator(std::size_t span, std::size_t capacity) : capacity_(capacity), free_{{0, span}} {}

  struct Block {
    std::size_t length;
    bool counted;  // against the capacity
  };

  // Offset of a new block, or nothing if the capacity is used up or no gap is long enough. bytes > 0.
  std::optional<std::size_t> allocate(std::size_t bytes);

  // The same for memory that is somebody else's: it only takes addresses.
  std::optional<std::size_t> reserve(std::size_t bytes) { return take(bytes, false); }

  // Frees the block that starts at the offset; returns its length, or nothing if no block starts there.
  std::optional<std::size_t> release(std::size_t offset);

  // Whether [offset, offset + bytes) lies within one block.
  bool holds(std::size_t offset, std::size_t bytes) const;

  // The offset of the block that holds the offset, or nothing.
  std::optional<std::size_t> block_at(std::size_t offset) const;

  const std::map<std::size_t, Block>& blocks() const { return taken_; }  // by offset
  std::size_t capacity() const { return capacity_; }
  std::size_t used() const { return used_; }

 private:
  std::optional<std::size_t> take(std::size_t bytes, bool counted);

  std::size_t capacity_, used_ = 0;
  std::map<std::size_t, std::size_t> free_;  // offset -> length
  std::map<std::size_t, Block> taken_;
};

}  // namespace softgpu
