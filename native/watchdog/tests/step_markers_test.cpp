#include "watchdog/step_markers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "watchdog/tests/fake_events.h"

namespace jitckpt::watchdog {
namespace {

class StepMarkersTest : public testing::Test {
 protected:
  bool poll() {
    return markers.poll([this](Event event) { return events(event); },
                        [this](Event event) { given_back.push_back(event.handle); });
  }

  FakeEvents events;
  StepMarkers markers;
  std::vector<void*> given_back;
};

TEST_F(StepMarkersTest, the_device_follows_the_host) {
  markers.begin(1, FakeEvents::event(1));
  markers.end(1, FakeEvents::event(2));
  markers.begin(2, FakeEvents::event(3));
  EXPECT_EQ(markers.progress().host_begun, 2u);
  EXPECT_EQ(markers.progress().host_ended, 1u);
  EXPECT_EQ(markers.progress().device_begun, 0u);
  EXPECT_EQ(markers.progress().queued, 3u);
  EXPECT_FALSE(poll());

  events.finish(1);
  EXPECT_TRUE(poll());
  EXPECT_EQ(markers.progress().device_begun, 1u);
  EXPECT_EQ(markers.progress().device_ended, 0u);

  events.finish(2);
  EXPECT_TRUE(poll());
  EXPECT_EQ(markers.progress().device_ended, 1u);
  EXPECT_EQ(markers.steps_ahead(), 1u);
  EXPECT_EQ(given_back.size(), 2u);
}

TEST_F(StepMarkersTest, a_later_marker_does_not_overtake) {
  markers.begin(1, FakeEvents::event(1));
  markers.end(1, FakeEvents::event(2));
  events.finish(2);
  EXPECT_FALSE(poll());
  EXPECT_EQ(markers.progress().device_ended, 0u);
}

TEST_F(StepMarkersTest, a_base_drops_what_is_queued) {
  markers.begin(1, FakeEvents::event(1));
  markers.set_base(20, [this](Event event) { given_back.push_back(event.handle); });
  const StepProgress progress = markers.progress();
  EXPECT_EQ(progress.host_begun, 20u);
  EXPECT_EQ(progress.device_begun, 20u);
  EXPECT_EQ(progress.device_ended, 20u);
  EXPECT_EQ(progress.queued, 0u);
  EXPECT_EQ(markers.steps_ahead(), 0u);
  EXPECT_EQ(given_back.size(), 1u);
}

TEST_F(StepMarkersTest, an_event_used_again_while_it_is_asked_for_counts_for_nothing) {
  // The first marker's event is given back and used for the third marker while a second thread still asks for
  // it.
  markers.begin(1, FakeEvents::event(1));
  bool nested = false;
  markers.poll(
      [&](Event) {
        if (nested) return false;
        nested = true;
        events.finish(1);
        poll();                                // somebody else sees it finish
        markers.end(1, FakeEvents::event(1));  // and it is recorded anew
        return true;                           // this answer was for the first record
      },
      [](Event) { FAIL() << "the event stands for another marker now"; });
  EXPECT_EQ(markers.progress().device_begun, 1u);
  EXPECT_EQ(markers.progress().device_ended, 0u);
}

TEST_F(StepMarkersTest, two_threads_poll_while_one_adds) {
  constexpr uint64_t steps = 2000;
  std::atomic<bool> added{false};
  std::atomic<uint64_t> recycled{0};
  const auto work = [&] {
    while (!added || markers.progress().queued > 0) {
      markers.poll([this](Event event) { return events(event); }, [&](Event) { ++recycled; });
    }
  };
  std::thread one(work), two(work);
  for (uint64_t step = 1; step <= steps; ++step) {
    events.finish(static_cast<long>(2 * step));
    markers.begin(step, FakeEvents::event(static_cast<long>(2 * step)));
    events.finish(static_cast<long>(2 * step + 1));
    markers.end(step, FakeEvents::event(static_cast<long>(2 * step + 1)));
  }
  added = true;
  one.join();
  two.join();
  EXPECT_EQ(markers.progress().device_ended, steps);
  EXPECT_EQ(recycled, 2 * steps) << "each event goes back once";
}

}  // namespace
}  // namespace jitckpt::watchdog
