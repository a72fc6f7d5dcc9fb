#include "watchdog/network_use.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace jitckpt::watchdog {
namespace {

// The device comes past events in the order of their numbers.
struct Used {
  Used() { use.want(true, recycle); }

  static Event event(long number) { return {reinterpret_cast<void*>(number), 0}; }
  void add(long stream, long begin, long end) {
    use.add(reinterpret_cast<void*>(stream), event(begin), event(end), recycle);
  }
  bool look(long device_at) {
    return use.look([=](Event one) { return reinterpret_cast<long>(one.handle) <= device_at; }, recycle);
  }

  std::vector<long> recycled;
  NetworkUse::Recycle recycle = [this](Event one) { recycled.push_back(reinterpret_cast<long>(one.handle)); };
  NetworkUse use;
};

TEST(NetworkUse, ACollectiveIsUnderWayWhileTheDeviceIsInsideOfIt) {
  Used one;
  EXPECT_FALSE(one.look(0));
  one.add(1, 10, 20);
  one.add(1, 30, 40);
  EXPECT_FALSE(one.look(9)) << "it was called, and the device has not come to it";
  EXPECT_TRUE(one.look(10));
  EXPECT_TRUE(one.look(19));
  EXPECT_FALSE(one.look(20));
  EXPECT_EQ(one.recycled, (std::vector<long>{10, 20}));
  EXPECT_TRUE(one.look(35));
  EXPECT_FALSE(one.look(40));
}

TEST(NetworkUse, AnyStreamCounts) {
  Used one;
  one.add(1, 10, 20);
  one.add(2, 15, 30);
  EXPECT_TRUE(one.look(25));
  EXPECT_FALSE(one.look(30));
  EXPECT_EQ(one.recycled.size(), 4u);
}

TEST(NetworkUse, WhatNobodyWantsIsGivenBack) {
  Used one;
  one.add(1, 10, 20);
  one.use.want(false, one.recycle);
  EXPECT_FALSE(one.use.is_wanted());
  EXPECT_FALSE(one.look(15));
  one.add(1, 30, 40);
  EXPECT_EQ(one.recycled, (std::vector<long>{10, 20, 30, 40}));
}

TEST(NetworkUse, AHostThatIsFarAheadTakesNoMoreMemory) {
  Used one;
  for (long number = 0; number < long(NetworkUse::most_queued) + 1; ++number)
    one.add(1, 10 * number + 1, 10 * number + 2);
  EXPECT_EQ(one.recycled.size(), 2u);
}

}  // namespace
}  // namespace jitckpt::watchdog
