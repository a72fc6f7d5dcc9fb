// Which copies count that a device makes while it is being stopped.
#include "copy_flags.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "shared_file.h"

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

// A device goes on while the flags are looked at, from one call to the next: if a call counts, so do those
// that it was behind. Else a replay would read what the later one has put there.
TEST(CopyFlags, NoCallCountsWithoutThoseBeforeIt) {
  constexpr uint32_t calls = 20'000;
  Flags all;
  int in_between = 0;  // rounds in which the freeze came while the device was at them
  for (int round = 0; round < 200 && in_between < 20; ++round) {
    std::vector<uint32_t> order(calls);
    for (uint32_t& flag : order) {
      flag = all.flags.take().value();
      all.flags.give(flag, 1);
    }
    std::atomic<bool> goes{false};
    std::thread device([&] {
      goes = true;
      for (const uint32_t flag : order) all.log.control().copied[flag] = 1;
    });
    while (!goes) std::this_thread::yield();
    all.flags.freeze();
    device.join();
    uint32_t counted = 0;
    while (counted < calls && !all.flags.is_since_freeze(order[counted])) ++counted;
    if (counted != 0 && counted != calls) ++in_between;
    for (uint32_t later = counted; later < calls; ++later)
      ASSERT_TRUE(all.flags.is_since_freeze(order[later]))
          << later << " counts, and " << counted << " does not";
    all.flags.forget_since_freeze();
    all.flags.forget_before(2);
  }
  EXPECT_GT(in_between, 0);
}

}  // namespace
}  // namespace jitckpt::proxy::client
