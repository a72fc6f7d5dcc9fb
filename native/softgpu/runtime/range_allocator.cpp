#include "softgpu/runtime/range_allocator.h"

#include <algorithm>
#include <iterator>

namespace softgpu {

std::optional<std::size_t> RangeAllocator::allocate(std::size_t bytes) {
  if (bytes > capacity_ || (bytes + granule - 1) / granule * granule > capacity_ - used_) return std::nullopt;
  return take(bytes, true);
}

std::optional<std::size_t> RangeAllocator::take(std::size_t bytes, bool counted) {
  const std::size_t length = (bytes + granule - 1) / granule * granule;
  const auto gap = std::find_if(free_.begin(), free_.end(),
                                [length](const auto& candidate) { return candidate.second >= length; });
  if (gap == free_.end()) return std::nullopt;
  const auto [offset, gap_length] = *gap;
  free_.erase(gap);
  if (gap_length > length) free_[offset + length] = gap_length - length;
  taken_[offset] = {length, counted};
  if (counted) used_ += length;
  return offset;
}

std::optional<std::size_t> RangeAllocator::release(std::size_t offset) {
  const auto block = taken_.find(offset);
  if (block == taken_.end()) return std::nullopt;
  const auto [length, counted] = block->second;
  taken_.erase(block);
  if (counted) used_ -= length;
  auto gap = free_.emplace(offset, length).first;
  if (const auto after = std::next(gap); after != free_.end() && gap->first + gap->second == after->first) {
    gap->second += after->second;
    free_.erase(after);
  }
  if (gap != free_.begin()) {
    const auto before = std::prev(gap);
    if (before->first + before->second == gap->first) {
      before->second += gap->second;
      free_.erase(gap);
    }
  }
  return length;
}

std::optional<std::size_t> RangeAllocator::block_at(std::size_t offset) const {
  auto block = taken_.upper_bound(offset);
  if (block == taken_.begin()) return std::nullopt;
  --block;
  return offset - block->first < block->second.length ? std::optional(block->first) : std::nullopt;
}

bool RangeAllocator::holds(std::size_t offset, std::size_t bytes) const {
  const auto block = block_at(offset);
  return block && bytes <= taken_.at(*block).length - (offset - *block);
}

}  // namespace softgpu
