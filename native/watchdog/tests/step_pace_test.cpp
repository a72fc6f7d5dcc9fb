#include "watchdog/step_pace.h"

#include <gtest/gtest.h>

namespace jitckpt::watchdog {
namespace {

TEST(StepPaceTest, one_step_says_nothing) {
  StepPace pace;
  EXPECT_FALSE(pace.seconds());
  pace.ended(7, 100);
  EXPECT_FALSE(pace.seconds());
}

TEST(StepPaceTest, several_steps_may_end_between_two_looks) {
  StepPace pace;
  pace.ended(7, 100);
  pace.ended(11, 102);
  pace.ended(11, 103);
  EXPECT_EQ(pace.seconds(), 0.5);
}

TEST(StepPaceTest, a_step_that_waited_for_an_evaluation_does_not_count) {
  StepPace pace;
  pace.ended(1, 10);
  pace.ended(2, 11);
  pace.ended(3, 71);
  EXPECT_EQ(pace.seconds(), 1.0);
  pace.ended(4, 73);
  EXPECT_EQ(pace.seconds(), 2.0);
}

TEST(StepPaceTest, steps_that_are_counted_anew_are_no_pace) {
  StepPace pace;
  pace.ended(5, 10);
  pace.ended(2, 20);
  EXPECT_FALSE(pace.seconds());
  pace.ended(3, 23);
  EXPECT_EQ(pace.seconds(), 3.0);
}

TEST(StepPaceTest, the_host_may_be_ahead_by_two_seconds_of_work) {
  EXPECT_EQ(steps_ahead_allowed(0.1, 32), 20u);
  EXPECT_EQ(steps_ahead_allowed(0.01, 32), 32u);
  EXPECT_EQ(steps_ahead_allowed(0, 32), 32u);
  EXPECT_EQ(steps_ahead_allowed(10, 32), 8u);
  EXPECT_EQ(steps_ahead_allowed({}, 32), 8u);
  EXPECT_EQ(steps_ahead_allowed(0.01, 3), 3u);
  EXPECT_EQ(steps_ahead_allowed({}, 3), 3u);
}

}  // namespace
}  // namespace jitckpt::watchdog
