#include "watchdog/network_profile.h"

#include <gtest/gtest.h>

#include <set>

#include "watchdog/tests/fake_events.h"

namespace jitckpt::watchdog {
namespace {

// Event n is passed at n seconds.
class NetworkProfileTest : public testing::Test {
 protected:
  static Event event(long number) { return FakeEvents::event(number); }

  void boundary(long at) { profile.boundary(event(at), recycle); }
  void busy(long begin, long end) { profile.busy(event(begin), event(end), end - begin == 2, recycle); }
  std::optional<std::vector<Profiled>> take() {
    return profile.take([this](Event one) { return events(one); },
                        [](Event from, Event to) {
                          return std::optional(double(reinterpret_cast<long>(to.handle) -
                                                      reinterpret_cast<long>(from.handle)));
                        },
                        recycle);
  }

  FakeEvents events;
  NetworkProfile profile;
  std::multiset<long> given_back;
  NetworkProfile::Recycle recycle = [this](Event one) {
    given_back.insert(reinterpret_cast<long>(one.handle));
  };
};

TEST_F(NetworkProfileTest, what_was_ordered_is_there_once_the_device_has_passed_it) {
  EXPECT_FALSE(profile.is_on());
  profile.order(2, recycle);
  EXPECT_TRUE(profile.is_on());
  busy(1, 2);  // of a minibatch that had begun before
  boundary(10);
  busy(11, 13);
  busy(14, 15);
  boundary(20);
  busy(24, 29);
  EXPECT_FALSE(take());
  boundary(30);
  EXPECT_FALSE(profile.is_on());
  busy(31, 32);
  boundary(40);
  for (const long one : {13, 15, 20, 29}) events.finish(one);
  EXPECT_FALSE(take());
  events.finish(30);

  const auto profiled = take();
  ASSERT_TRUE(profiled);
  ASSERT_EQ(profiled->size(), 2u);
  EXPECT_EQ((*profiled)[0].seconds, 10);
  ASSERT_EQ((*profiled)[0].busy.size(), 2u);
  EXPECT_EQ((*profiled)[0].busy[1].begin, 4);
  EXPECT_EQ((*profiled)[0].busy[1].end, 5);
  EXPECT_EQ((*profiled)[1].busy[0].end, 9);
  EXPECT_FALSE(take());
  EXPECT_EQ(given_back, (std::multiset<long>{1, 2, 10, 11, 13, 14, 15, 20, 24, 29, 30, 31, 32, 40}));
}

TEST_F(NetworkProfileTest, what_the_stream_comes_to_is_there_with_its_time) {
  const auto point = [this](long at, Mark mark) { profile.point(event(at), mark, recycle); };
  profile.order(1, recycle);
  point(1, Mark::collective);  // of a minibatch that had begun before
  boundary(10);
  point(11, Mark::wait_begins);
  busy(11, 13);
  point(13, Mark::wait_ends);
  busy(14, 15);
  point(19, Mark::step_begins);
  boundary(20);
  for (const long one : {13, 15, 20}) events.finish(one);
  EXPECT_FALSE(take());
  for (const long one : {11, 13, 19}) events.finish(one);
  const auto profiled = take();
  ASSERT_TRUE(profiled);
  EXPECT_TRUE(profiled->front().busy[0].exchange);
  EXPECT_FALSE(profiled->front().busy[1].exchange);
  ASSERT_EQ(profiled->front().points.size(), 3u);
  EXPECT_EQ(profiled->front().points[0].at, 1);
  EXPECT_EQ(profiled->front().points[1].mark, Mark::wait_ends);
  EXPECT_EQ(profiled->front().points[2].mark, Mark::step_begins);
  EXPECT_EQ(given_back, (std::multiset<long>{1, 10, 11, 11, 13, 13, 14, 15, 19, 20}));
}

TEST_F(NetworkProfileTest, of_too_many_points_the_first_are_known) {
  profile.order(1, recycle);
  boundary(10);
  for (size_t number = 0; number <= NetworkProfile::most_points; ++number)
    profile.point(event(11), Mark::collective, recycle);
  EXPECT_EQ(given_back, (std::multiset<long>{11}));
  boundary(20);
  for (const long one : {11, 20}) events.finish(one);
  EXPECT_EQ(take()->front().points.size(), NetworkProfile::most_points);
}

TEST_F(NetworkProfileTest, an_order_forgets_the_one_before) {
  profile.order(3, recycle);
  boundary(10);
  boundary(20);
  busy(21, 22);
  profile.order(1, recycle);
  EXPECT_EQ(given_back, (std::multiset<long>{10, 20, 21, 22}));
  boundary(30);
  boundary(40);
  for (const long one : {30, 40}) events.finish(one);
  ASSERT_TRUE(take());
}

}  // namespace
}  // namespace jitckpt::watchdog
