// Which copies count that a device makes while it is being stopped.
#include "proxy/client/copy_flags.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "proxy/transport/shared_file.h"

namespace jitckpt::proxy::client {
namespace {

struct Flags {
  Flags()
      : file("copy-flags-test", geometry.bytes()),
        mapping(file),
        log(mapping.begin(), geometry),
        flags(log) {}
  static constexpr Geometry geometry{4096, 1};
  SharedFile file;
  Mapping mapping;
  Log log;
  CopyFlags flags;
};

TEST(CopyFlags, WhatIsOverFromAFreezeOnIsForgotten) {
  Flags all;
  const uint32_t before = all.flags.take().value(), since = all.flags.take().value();
  all.log.control().copied[before] = 1;
  all.flags.freeze();
  all.log.control().copied[since] = 1;
  EXPECT_FALSE(all.flags.is_since_freeze(before));
  EXPECT_TRUE(all.flags.is_since_freeze(since));
  all.flags.freeze();  // before those of the first are forgotten it changes nothing
  EXPECT_TRUE(all.flags.is_since_freeze(since));
  all.flags.forget_since_freeze();
  EXPECT_EQ(all.log.control().copied[before], 1);
  EXPECT_EQ(all.log.control().copied[since], 0);
}

// A device goes on while the flags are looked at. If a call counts, so do those that it was behind: else a
// replay would read what the later one has put there.
TEST(CopyFlags, NoCallCountsWithoutThoseBeforeIt) {
  constexpr int between = 60'000;  // looking at them takes as long as a device takes for many calls
  Flags all;
  std::mt19937 random(20261125);
  for (int round = 0; round < 100; ++round) {
    std::vector<uint32_t> flags(between + 2);
    for (uint32_t& flag : flags) {
      flag = all.flags.take().value();
      all.flags.give(flag, 1);
    }
    std::atomic<bool> goes{false};
    const auto after = std::chrono::microseconds(random() % 200);
    std::thread device([&] {
      const auto begun = std::chrono::steady_clock::now();
      goes = true;
      while (std::chrono::steady_clock::now() - begun < after) {
      }
      all.log.control().copied[flags.front()] = 1;
      all.log.control().copied[flags.back()] = 1;
    });
    while (!goes) std::this_thread::yield();
    all.flags.freeze();
    device.join();
    ASSERT_TRUE(!all.flags.is_since_freeze(flags.front()) || all.flags.is_since_freeze(flags.back()));
    all.flags.forget_since_freeze();
    all.flags.forget_before(2);
  }
}

}  // namespace
}  // namespace jitckpt::proxy::client
