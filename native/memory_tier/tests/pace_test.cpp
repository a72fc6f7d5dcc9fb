#include "memory_tier/pace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

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

// A training that uses the network whenever `used` says so, and takes no notice of what is sent at 1 MB/s.
struct MakesWay {
  MakesWay() {
    pace.listen({[this] { return began; }, [] { return false; }, [this] { return used; }});
    pace.set_rate(1e6, 50ms);
  }
  // How many bytes go until then, by one who asks whenever it may.
  uint64_t sent_until(Pace::Clock::duration end) {
    uint64_t sent = 0;
    while (now < start + end) {
      const Pace::Turn turn = pace.take(1 << 30, now);
      sent += turn.bytes;
      if (turn.bytes == 0) now = std::min(turn.when, start + end);
    }
    return sent;
  }

  Pace pace;
  Pace::Clock::time_point began{}, now = start;
  bool used = false;
};

TEST(Pace, MakesWayAndMakesUpForIt) {
  MakesWay one;
  EXPECT_NEAR(double(one.sent_until(100ms)), 100e3, 20e3);
  one.used = true;
  EXPECT_EQ(one.sent_until(140ms), 0u);
  one.used = false;
  EXPECT_NEAR(double(one.sent_until(141ms)), 40e3, 20e3) << "at once";
  EXPECT_NEAR(double(one.sent_until(200ms)), 60e3, 20e3) << "at its rate again";
}

TEST(Pace, MakesWayForNoLongerThanItCanSpare) {
  MakesWay one;
  one.used = true;
  EXPECT_NEAR(double(one.sent_until(500ms)), 450e3, 30e3) << "a network that is always used";
  one.pace.set_rate(1e6, 50ms);
  EXPECT_EQ(one.sent_until(540ms), 0u) << "the next snapshot may, again";
}

TEST(Pace, AsFastAsItGoesMakesNoWay) {
  MakesWay one;
  one.pace.set_rate(std::numeric_limits<double>::infinity(), 50ms);
  one.used = true;
  EXPECT_EQ(one.pace.take(1 << 30, start).bytes, 1u << 30);
}

TEST(Pace, ASlotMakesWayForACollectiveThatIsLate) {
  MakesWay one;
  one.began = start;
  one.pace.set_schedule({{10ms, 60ms, 20000}}, 100ms, 1e6);
  one.used = true;
  EXPECT_EQ(one.sent_until(30ms), 0u);
  one.used = false;
  EXPECT_EQ(one.sent_until(50ms), 20000u);
}

TEST(Pace, MakesNoWayForARankThatWasKilledInACollective) {
  MakesWay one;
  one.pace.set_rate(1e6, 10s);
  one.used = true;
  EXPECT_EQ(one.sent_until(900ms), 0u);
  EXPECT_GT(one.sent_until(1200ms), 100e3);
}

}  // namespace
}  // namespace jitckpt::memory_tier
