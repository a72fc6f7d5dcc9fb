#include "range_allocator.h"

#include <algorithm>
#include <iterator>

namespace softgpu {

std::optional<std::size_t> RangeAllocator::allocate(std::size_t bytes) {
  if (bytes > capacity_) return std::nullopt;
  const std::size_t length = (bytes + granule - 1) / granule * granule;
  if (length > capacity_ - used_) return std::nullopt;
  const auto gap = std::find_if(free_.begin(), free_.end(),
                                [length](const auto& candidate) { return candidate.second >= length; });
  if (gap == free_.end()) return std::nullopt;
  const auto [offset, gap_length] = *gap;
  free_.erase(gap);
  if (gap_length > length) free_[offset + length] = gap_length - length;
  taken_[offset] = length;
  used_ += length;
  return offset;
}

std::optional<std::size_t> RangeAllocator::release(std::size_t offset) {
  const auto block = taken_.find(offset);
  if (block == taken_.end()) return std::nullopt;
  const std::size_t length = block->second;
  taken_.erase(block);
  used_ -= length;
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

bool RangeAllocator::holds(std::size_t offset, std::size_t bytes) const {
  auto block = taken_.upper_bound(offset);
  if (block == taken_.begin()) return false;
  --block;
  const std::size_t within = offset - block->first;
  return within < block->second && bytes <= block->second - within;
}

}  // namespace softgpu
