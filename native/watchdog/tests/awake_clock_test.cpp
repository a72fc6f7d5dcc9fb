#include "watchdog/awake_clock.h"

#include <gtest/gtest.h>

namespace jitckpt::watchdog {
namespace {

TEST(AwakeClock, follows_time) {
  AwakeClock clock;
  clock.tick(1000);
  const double begin = clock.now();
  clock.tick(1000.5);
  clock.tick(1001.25);
  EXPECT_DOUBLE_EQ(clock.now() - begin, 1.25);
}

TEST(AwakeClock, stands_still_while_the_process_is_stopped) {
  AwakeClock clock;
  clock.tick(1000);
  const double begin = clock.now();
  clock.tick(5000);
  EXPECT_LE(clock.now() - begin, 1.0);
}

TEST(AwakeClock, never_goes_back) {
  AwakeClock clock;
  clock.tick(1000);
  const double begin = clock.now();
  clock.tick(999);
  EXPECT_GE(clock.now(), begin);
}

}  // namespace
}  // namespace jitckpt::watchdog
