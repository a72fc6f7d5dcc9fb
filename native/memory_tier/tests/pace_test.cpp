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

// A minibatch of 100 ms with two slots, on a network that takes 1,000 bytes in a millisecond.
struct Scheduled {
  Scheduled() {
    pace.set_rate(1e6);
    pace.set_schedule({{10ms, 12ms, 1000}, {50ms, 60ms, 2000}}, 100ms, 1e6);
    pace.listen({[this] { return began; }, [this] { return awaited; }});
  }
  Pace::Turn take(uint64_t wanted, Pace::Clock::duration at) { return pace.take(wanted, began + at); }

  Pace pace;
  Pace::Clock::time_point began = start;
  bool awaited = false;
};

TEST(Pace, SendsInItsSlotsAlone) {
  Scheduled one;
  EXPECT_EQ(one.take(5000, 5ms).bytes, 0u);
  EXPECT_EQ(one.take(5000, 5ms).when, start + 10ms);
  EXPECT_EQ(one.take(5000, 2ms).when, start + 7ms);  // to look whether it is awaited
  EXPECT_EQ(one.take(400, 10ms).bytes, 400u);
  EXPECT_EQ(one.take(5000, 11ms).bytes, 600u);
  EXPECT_EQ(one.take(5000, 14ms).bytes, 0u);
  EXPECT_EQ(one.take(5000, 47ms).when, start + 50ms);
  EXPECT_EQ(one.take(5000, 55ms).bytes, 2000u);
  EXPECT_EQ(one.take(5000, 56ms).bytes, 0u);
  EXPECT_EQ(one.take(5000, 98ms).when, start + 100ms);
  EXPECT_GT(one.take(5000, 101ms).when, start + 101ms);  // the next one begins late
  one.began += 105ms;
  EXPECT_EQ(one.take(5000, 10ms).bytes, 1000u);
}

TEST(Pace, WhoComesLateSendsWhatStillFits) {
  Scheduled one;
  EXPECT_NEAR(double(one.take(5000, 11500us).bytes), 500, 1);
  EXPECT_EQ(one.take(5000, 13ms).bytes, 0u);
  EXPECT_EQ(one.take(5000, 61ms).bytes, 0u);
}

TEST(Pace, WhatIsAwaitedGoesAtOnce) {
  Scheduled one;
  one.awaited = true;
  EXPECT_EQ(one.take(50'000, 20ms).bytes, 50'000u);
  one.pace.set_schedule({}, 0ms, 0);
  EXPECT_EQ(one.take(5'000'000, 20ms).bytes, 5'000'000u);
}

TEST(Pace, WhereNoMinibatchBeginsTheRateCounts) {
  Scheduled one;
  EXPECT_GT(one.take(50'000, 250ms).bytes, 0u);
  EXPECT_EQ(one.take(50'000, 251ms).bytes, 0u);
  one.pace.set_schedule({}, 0ms, 0);
  one.pace.set_rate(std::numeric_limits<double>::infinity());
  EXPECT_EQ(one.take(50'000, 5ms).bytes, 50'000u);
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
