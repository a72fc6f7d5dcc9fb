#include "watchdog/rest.h"

#include <gtest/gtest.h>

namespace jitckpt::watchdog {
namespace {

Observation busy(uint64_t signature) { return {.idle = false, .inside_step = false, .signature = signature}; }
Observation idle() { return {.idle = true, .inside_step = false, .signature = 0}; }
Observation in_step(uint64_t signature) {
  return {.idle = false, .inside_step = true, .signature = signature};
}

TEST(RestDecision, idle_twice_is_rest) {
  RestDecision rest(0, 0.5, 10);
  EXPECT_FALSE(rest.look(0.00, idle()));
  EXPECT_EQ(rest.look(0.01, idle()), RestOutcome::idle);
}

TEST(RestDecision, idle_with_work_in_between_is_not) {
  RestDecision rest(0, 0.5, 10);
  EXPECT_FALSE(rest.look(0.00, idle()));
  EXPECT_FALSE(rest.look(0.01, busy(1)));
  EXPECT_FALSE(rest.look(0.02, idle()));
}

TEST(RestDecision, settles_when_nothing_changes) {
  RestDecision rest(0, 0.5, 10);
  EXPECT_FALSE(rest.look(0.1, busy(1)));
  EXPECT_FALSE(rest.look(0.4, busy(2)));
  EXPECT_FALSE(rest.look(0.89, busy(2)));
  EXPECT_EQ(rest.look(0.9, busy(2)), RestOutcome::settled);
}

TEST(RestDecision, does_not_settle_inside_an_optimizer_step) {
  RestDecision rest(0, 0.5, 10);
  EXPECT_FALSE(rest.look(0.1, in_step(1)));
  EXPECT_FALSE(rest.look(9.9, in_step(1)));
  EXPECT_EQ(rest.look(10, in_step(1)), RestOutcome::bound);
}

TEST(RestDecision, an_idle_device_inside_a_step_waits_for_the_host_to_enqueue_the_rest_of_it) {
  RestDecision rest(0, 0.5, 10);
  Observation seen = idle();
  seen.inside_step = true;
  seen.signature = 1;
  EXPECT_FALSE(rest.look(0.1, seen));
  EXPECT_FALSE(rest.look(5, seen));
  EXPECT_FALSE(rest.look(5.01, idle()));
  EXPECT_EQ(rest.look(5.02, idle()), RestOutcome::idle);
}

TEST(RestDecision, work_without_end_is_bounded) {
  RestDecision rest(0, 0.5, 10);
  uint64_t signature = 0;
  for (double now = 0; now < 10; now += 0.1) EXPECT_FALSE(rest.look(now, busy(++signature)));
  EXPECT_EQ(rest.look(10, busy(++signature)), RestOutcome::bound);
}

TEST(RestDecision, a_poller_that_is_stuck_counts_as_nothing_moving) {
  RestDecision rest(0, 0.5, 10);
  EXPECT_FALSE(rest.look(0.4, std::nullopt));
  EXPECT_EQ(rest.look(0.5, std::nullopt), RestOutcome::settled);
}

TEST(RestDecision, outcomes_have_names) {
  EXPECT_STREQ(name(RestOutcome::idle), "idle");
  EXPECT_STREQ(name(RestOutcome::settled), "settled");
  EXPECT_STREQ(name(RestOutcome::bound), "bound");
}

}  // namespace
}  // namespace jitckpt::watchdog
