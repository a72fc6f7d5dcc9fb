// When a replay stands still: played with numbers.
#include "proxy/client/hang_watch.h"

#include <gtest/gtest.h>

namespace {

using namespace std::chrono_literals;
using jitckpt::proxy::client::ReplayWatch;

constexpr ReplayWatch::Clock::time_point start(1h);
constexpr auto longest = 120s;

TEST(ReplayWatch, WhatAServerDoesAloneMayTakeAnyTime) {
  ReplayWatch watch;
  watch.begin(start);
  for (const auto time : {1s, 100s, 1000s})
    EXPECT_FALSE(watch.stands_still(false, 7, 10ms, 1, longest, start + time));
}

TEST(ReplayWatch, AReplayWithoutProgressStandsStill) {
  ReplayWatch watch;
  watch.begin(start);
  EXPECT_FALSE(watch.stands_still(false, 7, 10ms, 1, longest, start + 1s));
  EXPECT_FALSE(watch.stands_still(true, 7, 10ms, 1, longest, start + 15900ms));
  EXPECT_TRUE(watch.stands_still(true, 7, 10ms, 1, longest, start + 16s));
}

TEST(ReplayWatch, EachCallIsProgress) {
  ReplayWatch watch;
  watch.begin(start);
  for (uint64_t call = 1; call < 100; ++call)
    EXPECT_FALSE(watch.stands_still(true, call, 10ms, 1, longest, start + call * 14s));
}

TEST(ReplayWatch, LongMinibatchesAndSlowServersGetMoreTime) {
  ReplayWatch watch;
  watch.begin(start);
  EXPECT_FALSE(watch.stands_still(false, 7, 4s, 1, longest, start));
  EXPECT_FALSE(watch.stands_still(true, 7, 4s, 1, longest, start + 39s));
  EXPECT_TRUE(watch.stands_still(true, 7, 4s, 1, longest, start + 40s));
  watch.begin(start);
  EXPECT_FALSE(watch.stands_still(false, 7, 1s, 1, longest, start + 6s));
  EXPECT_FALSE(watch.stands_still(true, 7, 1s, 1, longest, start + 65s));
  EXPECT_TRUE(watch.stands_still(true, 7, 1s, 1, longest, start + 66s));
}

TEST(ReplayWatch, EachFurtherTryGetsTwiceTheTimeUpToTheLongest) {
  for (const auto& [tries, patience] :
       {std::pair{0, 15s}, {1, 15s}, {2, 30s}, {3, 60s}, {9, 120s}, {99, 120s}}) {
    ReplayWatch watch;
    watch.begin(start);
    EXPECT_FALSE(watch.stands_still(true, 0, 10ms, tries, longest, start + patience - 1ms)) << tries;
    EXPECT_TRUE(watch.stands_still(true, 0, 10ms, tries, longest, start + patience)) << tries;
  }
}

}  // namespace
