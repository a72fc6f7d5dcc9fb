#include <gtest/gtest.h>

#include "softgpu/runtime/range_allocator.h"

using softgpu::RangeAllocator;

constexpr std::size_t page = RangeAllocator::granule;

TEST(RangeAllocator, TakesTheLowestPlaceThatFits) {
  RangeAllocator ranges(16 * page, 16 * page);
  EXPECT_EQ(ranges.allocate(2 * page), 0u);
  EXPECT_EQ(ranges.allocate(page), 2 * page);
  EXPECT_EQ(ranges.release(0), 2 * page);
  EXPECT_EQ(ranges.allocate(3 * page), 3 * page);
  EXPECT_EQ(ranges.allocate(2 * page), 0u);
}

TEST(RangeAllocator, RoundsUpToWholeGranules) {
  RangeAllocator ranges(16 * page, 16 * page);
  EXPECT_EQ(ranges.allocate(1), 0u);
  EXPECT_EQ(ranges.allocate(page + 1), page);
  EXPECT_EQ(ranges.used(), 3 * page);
}

TEST(RangeAllocator, RefusesMoreThanTheCapacity) {
  RangeAllocator ranges(16 * page, 2 * page);
  EXPECT_EQ(ranges.allocate(3 * page), std::nullopt);
  EXPECT_EQ(ranges.allocate(SIZE_MAX), std::nullopt);
  EXPECT_EQ(ranges.allocate(2 * page), 0u);
  EXPECT_EQ(ranges.allocate(1), std::nullopt);
  EXPECT_EQ(ranges.used(), 2 * page);
}

TEST(RangeAllocator, JoinsWhatIsFreedOnBothSides) {
  RangeAllocator ranges(4 * page, 4 * page);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(ranges.allocate(page), i * page);
  EXPECT_EQ(ranges.release(0), page);
  EXPECT_EQ(ranges.release(2 * page), page);
  EXPECT_EQ(ranges.allocate(3 * page), std::nullopt);
  EXPECT_EQ(ranges.release(page), page);
  EXPECT_EQ(ranges.allocate(3 * page), 0u);
}

TEST(RangeAllocator, ReleasesOnlyWholeBlocks) {
  RangeAllocator ranges(4 * page, 4 * page);
  ranges.allocate(2 * page);
  EXPECT_EQ(ranges.release(page), std::nullopt);
  EXPECT_EQ(ranges.release(0), 2 * page);
  EXPECT_EQ(ranges.release(0), std::nullopt);
}

TEST(RangeAllocator, KnowsWhatLiesInOneBlock) {
  RangeAllocator ranges(8 * page, 8 * page);
  ranges.allocate(page);
  ranges.allocate(page);
  EXPECT_TRUE(ranges.holds(0, page));
  EXPECT_TRUE(ranges.holds(page - 1, 1));
  EXPECT_FALSE(ranges.holds(0, page + 1));
  EXPECT_FALSE(ranges.holds(page - 1, 2));
  EXPECT_FALSE(ranges.holds(2 * page, 1));
  EXPECT_FALSE(ranges.holds(1, SIZE_MAX));
}

TEST(RangeAllocator, ReservesAddressesThatCountForNothing) {
  RangeAllocator ranges(4 * page, 2 * page);
  EXPECT_EQ(ranges.allocate(2 * page), 0u);
  EXPECT_EQ(ranges.reserve(page), 2 * page);
  EXPECT_EQ(ranges.used(), 2 * page);
  EXPECT_EQ(ranges.reserve(2 * page), std::nullopt);
  EXPECT_EQ(ranges.release(2 * page), page);
  EXPECT_EQ(ranges.used(), 2 * page);
  EXPECT_EQ(ranges.reserve(2 * page), 2 * page);
}

TEST(RangeAllocator, FindsTheBlockThatHoldsAnOffset) {
  RangeAllocator ranges(8 * page, 8 * page);
  ranges.allocate(page);
  ranges.allocate(2 * page);
  EXPECT_EQ(ranges.block_at(page - 1), 0u);
  EXPECT_EQ(ranges.block_at(3 * page - 1), page);
  EXPECT_EQ(ranges.block_at(3 * page), std::nullopt);
  ranges.release(0);
  EXPECT_EQ(ranges.block_at(0), std::nullopt);
}
