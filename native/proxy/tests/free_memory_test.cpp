// Sets of addresses against the same by single addresses, and what of memory is held.
#include "proxy/client/free_memory.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace jitckpt::proxy::client {
namespace {

std::set<uint64_t> addresses(const std::vector<Extent>& extents) {
  std::set<uint64_t> all;
  for (const Extent& one : extents) {
    EXPECT_LT(one.begin, one.end);
    for (uint64_t address = one.begin; address < one.end; ++address)
      EXPECT_TRUE(all.insert(address).second) << address << " twice";
  }
  return all;
}

TEST(FreeMemory, DrawnExtentsAreAddedAndRemoved) {
  std::mt19937 random(7);
  const auto draw = [&random] {
    const uint64_t begin = std::uniform_int_distribution<uint64_t>(0, 40)(random);
    return Extent{begin, begin + std::uniform_int_distribution<uint64_t>(0, 12)(random)};
  };
  for (int trial = 0; trial < 200; ++trial) {
    Extents extents;
    std::set<uint64_t> expected;
    for (int i = 0; i < 30; ++i) {
      const Extent one = draw();
      if (i % 2 == 0)
        extents.add(one);
      else
        extents.remove(one);
      for (uint64_t address = one.begin; address < one.end; ++address) {
        if (i % 2 == 0)
          expected.insert(address);
        else
          expected.erase(address);
      }
      const Extent asked = draw();
      std::set<uint64_t> inside, outside;
      for (uint64_t address = asked.begin; address < asked.end; ++address)
        (expected.contains(address) ? inside : outside).insert(address);
      std::vector<Extent> found_inside, found_outside, all;
      extents.inside(asked, [&](const Extent& part) { found_inside.push_back(part); });
      extents.outside(asked, [&](const Extent& part) { found_outside.push_back(part); });
      extents.inside({0, 100}, [&](const Extent& part) { all.push_back(part); });
      EXPECT_EQ(addresses(found_inside), inside);
      EXPECT_EQ(addresses(found_outside), outside);
      EXPECT_EQ(addresses(all), expected);
      for (std::size_t i = 1; i < all.size(); ++i) EXPECT_LT(all[i - 1].end, all[i].begin);
    }
  }
}

TEST(FreeMemory, AllAtOnceAreTheSameAsOneAfterTheOther) {
  std::mt19937 random(13);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<Extent> drawn(std::uniform_int_distribution<std::size_t>(0, 12)(random));
    Extents added;
    for (Extent& one : drawn) {
      one.begin = std::uniform_int_distribution<uint64_t>(0, 60)(random);
      one.end = one.begin + std::uniform_int_distribution<uint64_t>(0, 8)(random);
      added.add(one);
    }
    std::vector<Extent> found, expected;
    Extents(drawn).inside({0, 100}, [&](const Extent& part) { found.push_back(part); });
    added.inside({0, 100}, [&](const Extent& part) { expected.push_back(part); });
    EXPECT_EQ(found, expected) << "trial " << trial;
  }
}

TEST(FreeMemory, TheLastWordAboutAnAddressCounts) {
  constexpr uint64_t unit = 1 << 20, units = 40;
  std::mt19937 random(11);
  const auto draw = [&random](uint64_t least, uint64_t most) {
    return std::uniform_int_distribution<uint64_t>(least, most)(random);
  };
  FreeMemory memory;
  std::set<uint64_t> expected;  // what is held
  for (uint64_t one = 0; one < units; ++one) expected.insert(one);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<Extent> blocks;  // some overlap; of most there is more than one word
    for (int i = 0; i < 8; ++i) {
      const uint64_t begin = draw(0, units - 1);
      blocks.push_back({begin, draw(begin + 1, units)});
    }
    for (uint64_t words = draw(0, 40); words > 0; --words) {
      const Extent block = blocks[draw(0, blocks.size() - 1)];
      const bool free = draw(0, 1) == 0;
      const Extent extent{block.begin * unit, block.end * unit};
      free ? memory.free(extent) : memory.hold(extent);
      for (uint64_t one = block.begin; one < block.end; ++one) {
        if (free)
          expected.erase(one);
        else
          expected.insert(one);
      }
    }
    std::vector<Extent> held;
    for (const Allocation& one : memory.held({{0, units * unit, 0}}))
      held.push_back({one.address / unit, one.extent().end / unit});
    EXPECT_EQ(addresses(held), expected) << "trial " << trial;
  }
}

TEST(FreeMemory, WhatIsNotFreeIsHeldWithWhatLittleLiesBetween) {
  constexpr uint64_t mib = 1 << 20;
  FreeMemory memory;
  memory.free({10 * mib, 12 * mib});         // the end of the first
  memory.free({20 * mib, 22 * mib});         // all of the second
  memory.free({31 * mib, 31 * mib + 4096});  // not worth to be left out
  const auto held = memory.held({{30 * mib, 2 * mib, 1}, {8 * mib, 4 * mib, 0}, {20 * mib, 2 * mib, 0}});
  ASSERT_EQ(held.size(), 2);
  EXPECT_EQ(held[0].address, 8 * mib);
  EXPECT_EQ(held[0].bytes, 2 * mib);
  EXPECT_EQ(held[1].address, 30 * mib);
  EXPECT_EQ(held[1].bytes, 2 * mib);
  EXPECT_EQ(held[1].device, 1);
}

TEST(FreeMemory, WhatIsLeftOutIsCopiedWhereItIsLittleBetweenWhatIsHeld) {
  constexpr uint64_t mib = 1 << 20;
  FreeMemory memory;
  Extents left_out;
  left_out.add({8 * mib, 8 * mib + 256});          // a small tensor at the beginning
  left_out.add({8 * mib + 1024, 8 * mib + 1280});  // another one, with padding before and behind
  left_out.add({9 * mib, 10 * mib});               // a large one
  const auto held = memory.held({{8 * mib, 4 * mib, 0}}, left_out);
  ASSERT_EQ(held.size(), 2);
  EXPECT_EQ(held[0].address, 8 * mib + 256);
  EXPECT_EQ(held[0].extent().end, 9 * mib);
  EXPECT_EQ(held[1].address, 10 * mib);
  EXPECT_EQ(held[1].extent().end, 12 * mib);
}

TEST(FreeMemory, TheLastWordOnAnAddressCountsHoweverMuchWasSaidBefore) {
  constexpr uint64_t mib = 1 << 20;
  FreeMemory memory;
  for (int said = 0; said < 10'000; ++said) {  // more than is noted at a time
    memory.free({8 * mib, 12 * mib});
    memory.hold({8 * mib, 10 * mib});
    if (said % 3000 == 0) {
      EXPECT_EQ(memory.held({{8 * mib, 4 * mib, 0}}).size(), 1);
    }
  }
  memory.free({8 * mib, 9 * mib});
  const auto held = memory.held({{8 * mib, 4 * mib, 0}});
  ASSERT_EQ(held.size(), 1);
  EXPECT_EQ(held[0].address, 9 * mib);
  EXPECT_EQ(held[0].bytes, mib);
}

}  // namespace
}  // namespace jitckpt::proxy::client
