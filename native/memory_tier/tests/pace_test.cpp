#include "memory_tier/pace.h"

#include <gtest/gtest.h>

namespace jitckpt::memory_tier {
namespace {

using namespace std::chrono_literals;

constexpr Pace::Clock::time_point start{1h};

TEST(Pace, ANewOneLetsAllThrough) {
  Pace pace;
  EXPECT_EQ(pace.take(1 << 30, start).bytes, 1u << 30);
}

TEST(Pace, KeepsToItsRate) {
  Pace pace;
  pace.set_rate(100e6);
  auto now = start;
  for (uint64_t left = 50'000'000; left > 0;) {
    const Pace::Turn turn = pace.take(left, now);
    if (turn.bytes == 0) {
      ASSERT_GT(turn.when, now);
      now = turn.when;
    }
    left -= turn.bytes;
  }
  EXPECT_GE(now - start, 480ms);
  EXPECT_LE(now - start, 500ms);
}

TEST(Pace, WhoComesLateGetsNoBurst) {
  Pace pace;
  pace.set_rate(100e6);
  ASSERT_GT(pace.take(1 << 30, start).bytes, 0u);
  uint64_t at_once = 0;
  while (const uint64_t bytes = pace.take(1 << 30, start + 10s).bytes) at_once += bytes;
  EXPECT_LE(at_once, 2'000'000u);
}

TEST(Pace, TheSlowestIsNeverSilentForLong) {
  Pace pace;
  pace.set_rate(1);
  ASSERT_GT(pace.take(1000, start).bytes, 0u);
  const Pace::Turn turn = pace.take(1000, start);
  EXPECT_EQ(turn.bytes, 0u);
  EXPECT_LE(turn.when, start + 1s);
}

}  // namespace
}  // namespace jitckpt::memory_tier
