#include "watchdog/watch_list.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "watchdog/tests/fake_events.h"

namespace jitckpt::watchdog {
namespace {

int stream_objects[3];
void* stream(int index) { return &stream_objects[index]; }

class WatchListTest : public testing::Test {
 protected:
  void arm(int on, long event, uint64_t sequence, double now = 0) {
    list.arm(stream(on), {.communicator = 0, .sequence = sequence, .operation = "ncclAllReduce", .bytes = 8},
             FakeEvents::event(event), now);
  }
  void poll(double now = 0) {
    list.poll([this](Event event) { return events(event); },
              [this](Event event) { given_back.push_back(event.handle); }, [now] { return now; });
  }

  FakeEvents events;
  WatchList list;
  std::vector<void*> given_back;
};

TEST_F(WatchListTest, retires_what_has_finished_in_order) {
  arm(0, 1, 1);
  arm(0, 2, 2);
  arm(0, 3, 3);
  events.finish(1);
  events.finish(3);
  poll();
  ASSERT_EQ(list.in_flight(0).size(), 2u);
  EXPECT_EQ(list.in_flight(0)[0].watch.sequence, 2u);
  EXPECT_EQ(given_back, std::vector<void*>{FakeEvents::event(1).handle});
  EXPECT_EQ(list.finished(), 1u);
}

TEST_F(WatchListTest, a_stream_that_hangs_does_not_hide_another) {
  arm(0, 1, 1);
  arm(1, 2, 2);
  events.finish(2);
  poll();
  ASSERT_EQ(list.in_flight(0).size(), 1u);
  EXPECT_EQ(list.in_flight(0)[0].watch.sequence, 1u);
}

TEST_F(WatchListTest, learns_how_long_a_collective_may_take) {
  const Patience patience{5, 60};
  long event = 0;
  double now = 0;
  const auto finish_one = [&](double seconds) {
    arm(0, ++event, 1, now);
    events.finish(event);
    poll(now += seconds);
  };
  for (int count = 0; count < 49; ++count) finish_one(0.7);
  arm(0, ++event, 50, now);
  EXPECT_FALSE(list.overdue(now + 59, patience)) << "too few have been seen to learn from";
  events.finish(event);
  poll(now);
  arm(0, ++event, 51, now);
  EXPECT_FALSE(list.overdue(now + 6.9, patience));
  EXPECT_TRUE(list.overdue(now + 7.1, patience)) << "ten times the slowest";
  events.finish(event);
  poll(now);
  list.arm(stream(0), {.communicator = 0, .sequence = 52, .operation = "ncclAllReduce", .bytes = 16},
           FakeEvents::event(++event), now);
  EXPECT_FALSE(list.overdue(now + 13.9, patience)) << "twice the bytes may take twice as long";
  EXPECT_TRUE(list.overdue(now + 14.1, patience));
  events.finish(event);
  poll(now);
  for (int count = 0; count < 2000; ++count) finish_one(0.01);
  arm(0, ++event, 0, now);
  EXPECT_FALSE(list.overdue(now + 4.9, patience));
  EXPECT_TRUE(list.overdue(now + 5.1, patience)) << "what was long ago is forgotten; the floor holds";
}

TEST_F(WatchListTest, learns_nothing_from_graphs_and_of_them) {
  const Patience patience{5, 60};
  long event = 0;
  double now = 0;
  const auto finish_one = [&](double seconds, bool in_graph) {
    list.arm(
        stream(0),
        {.communicator = 0, .sequence = 1, .operation = "ncclAllReduce", .bytes = 8, .in_graph = in_graph},
        FakeEvents::event(++event), now);
    events.finish(event);
    poll(now += seconds);
  };
  for (int count = 0; count < 60; ++count) finish_one(0.7, false);
  finish_one(30, true);
  arm(0, ++event, 62, now);
  EXPECT_TRUE(list.overdue(now + 7.1, patience)) << "that the graph took long says nothing of a collective";
  events.finish(event);
  poll(now);
  list.arm(stream(0),
           {.communicator = 0, .sequence = 63, .operation = "ncclAllReduce", .bytes = 8, .in_graph = true},
           FakeEvents::event(++event), now);
  EXPECT_FALSE(list.overdue(now + 59, patience)) << "what else is in the graph takes its time";
  EXPECT_TRUE(list.overdue(now + 61, patience));
}

TEST_F(WatchListTest, counts_from_when_a_watch_became_the_oldest) {
  arm(0, 1, 1, 0);
  arm(0, 2, 2, 0);
  events.finish(1);
  poll(50);
  EXPECT_FALSE(list.overdue(100, {60, 60}))
      << "the second was armed 100 s ago, but is the oldest for only 50 s";
  const auto hung = list.overdue(110, {60, 60});
  ASSERT_TRUE(hung);
  EXPECT_EQ(hung->watch.sequence, 2u);
  EXPECT_DOUBLE_EQ(hung->seconds, 60);
}

TEST_F(WatchListTest, an_empty_stream_starts_its_clock_anew) {
  arm(0, 1, 1, 0);
  events.finish(1);
  poll(1);
  arm(0, 2, 2, 1000);
  EXPECT_FALSE(list.overdue(1059, {60, 60}));
  EXPECT_TRUE(list.overdue(1060, {60, 60}));
}

TEST_F(WatchListTest, names_a_hang_once_until_the_clocks_are_restarted) {
  arm(0, 1, 1, 0);
  EXPECT_TRUE(list.overdue(61, {60, 60}));
  EXPECT_FALSE(list.overdue(62, {60, 60}));
  list.restart_clocks(62);
  EXPECT_FALSE(list.overdue(121, {60, 60}));
  EXPECT_TRUE(list.overdue(122, {60, 60}));
}

TEST_F(WatchListTest, names_the_longest_of_several) {
  arm(0, 1, 1, 5);
  arm(1, 2, 2, 3);
  arm(2, 3, 3, 4);
  EXPECT_EQ(list.overdue(100, {60, 60})->watch.sequence, 2u);
  EXPECT_EQ(list.overdue(100, {60, 60})->watch.sequence, 3u);
}

TEST_F(WatchListTest, a_reused_handle_is_another_stream) {
  arm(0, 1, 1);
  list.forget_stream(stream(0));
  arm(0, 2, 2);
  events.finish(2);
  poll();
  ASSERT_EQ(list.in_flight(0).size(), 1u) << "the new stream is not behind the old one";
  EXPECT_EQ(list.in_flight(0)[0].watch.sequence, 1u);
  events.finish(1);
  poll();
  EXPECT_TRUE(list.in_flight(0).empty());
}

TEST_F(WatchListTest, a_stuck_query_keeps_nobody_from_arming_or_from_finding_the_hang) {
  arm(0, 1, 1, 0);
  std::atomic<bool> asked{false}, release{false};
  std::thread poller([&] {
    list.poll(
        [&](Event) {
          asked = true;
          while (!release) std::this_thread::yield();
          return false;
        },
        [](Event) {}, [] { return 0.0; });
  });
  while (!asked) std::this_thread::yield();
  arm(0, 2, 2, 30);
  const auto hung = list.overdue(60, {60, 60});
  release = true;
  poller.join();
  ASSERT_TRUE(hung);
  EXPECT_EQ(hung->watch.sequence, 1u);
}

TEST_F(WatchListTest, many_threads_arm_while_one_polls) {
  constexpr int threads = 3, each = 2000;
  std::atomic<int> armed{0};
  std::vector<std::thread> armers;
  for (int index = 0; index < threads; ++index) {
    armers.emplace_back([&, index] {
      for (int count = 0; count < each; ++count) {
        const long event = index * each + count + 1;
        events.finish(event);
        arm(index, event, static_cast<uint64_t>(event));
        ++armed;
      }
    });
  }
  while (armed < threads * each) poll();
  for (auto& armer : armers) armer.join();
  poll();
  EXPECT_EQ(list.finished(), static_cast<uint64_t>(threads * each));
  EXPECT_TRUE(list.in_flight(0).empty());
}

}  // namespace
}  // namespace jitckpt::watchdog
