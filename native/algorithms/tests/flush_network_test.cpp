#include "algorithms/flush_network.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

namespace jitckpt::algorithms {
namespace {

constexpr double unlimited = std::numeric_limits<double>::infinity();

TEST(FlushNetwork, NothingToSendTakesNoTime) {
  const FlushNetwork network(2, {{0, 1, 5.0}}, {0, 0});
  const double supply[] = {0, 0};
  const double room[] = {0, unlimited};
  const FlushPlan plan = network.fastest(supply, room);
  EXPECT_EQ(plan.seconds, 0);
  EXPECT_EQ(plan.link_bytes[0], 0);
}

TEST(FlushNetwork, OneLinkIsAsFastAsItIs) {
  const FlushNetwork network(2, {{0, 1, 5.0}}, {0, 0});
  const double supply[] = {20, 0};
  const double room[] = {0, unlimited};
  EXPECT_DOUBLE_EQ(network.fastest(supply, room).seconds, 4);
}

// 0 may use both 2 and 3, 1 only 2; sharing 2 by need ends all links at once.
TEST(FlushNetwork, LeavesTheSharedReceiverToTheOneThatNeedsIt) {
  const FlushNetwork network(4, {{0, 2, 10.0}, {0, 3, 10.0}, {1, 2, 10.0}}, {0, 0, 0, 0});
  const double supply[] = {100, 90, 0, 0};
  const double room[] = {0, 0, 100, 200};
  const FlushPlan plan = network.fastest(supply, room);
  EXPECT_DOUBLE_EQ(plan.seconds, 9);
  EXPECT_DOUBLE_EQ(plan.link_bytes[2], 90);
  EXPECT_DOUBLE_EQ(plan.link_bytes[0] + plan.link_bytes[1], 100);
  EXPECT_LE(plan.link_bytes[0], 10 + 1e-9);
  EXPECT_LE(plan.link_bytes[1], 90 + 1e-9);
}

TEST(FlushNetwork, OthersBytesPassThroughASwitchOnly) {
  const std::vector<Link> chain = {{0, 1, 4.0}, {1, 2, 2.0}};
  const double supply[] = {8, 0, 0};
  const double room[] = {0, 0, unlimited};
  EXPECT_DOUBLE_EQ(FlushNetwork(3, chain, {0, 1, 0}).fastest(supply, room).seconds, 4);
  EXPECT_THROW((void)FlushNetwork(3, chain, {0, 0, 0}).fastest(supply, room), Unreachable);
}

TEST(FlushNetwork, NamesWhoCannotGetRidOfItsBytes) {
  const FlushNetwork network(4, {{0, 2, 1.0}, {1, 3, 1.0}}, {0, 0, 0, 0});
  const double supply[] = {1, 1, 0, 0};
  const double room[] = {0, 0, 0.5, 1};
  try {
    (void)network.fastest(supply, room);
    FAIL() << "half of vertex 0's bytes have no room";
  } catch (const Unreachable& error) {
    EXPECT_EQ(error.vertices, std::vector<int32_t>{0});
  }
}

TEST(FlushNetwork, RefusesNonsense) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(FlushNetwork(1, {{0, 1, 1.0}}, {0}), std::invalid_argument);
  EXPECT_THROW(FlushNetwork(2, {{0, 1, nan}}, {0, 0}), std::invalid_argument);
  EXPECT_THROW(FlushNetwork(2, {{0, 1, -1.0}}, {0, 0}), std::invalid_argument);
  EXPECT_THROW(FlushNetwork(2, {{0, 1, 1.0}}, {0}), std::invalid_argument);
  const FlushNetwork network(2, {{0, 1, 1.0}}, {0, 0});
  const double bad[] = {nan, 0};
  const double room[] = {0, 1};
  EXPECT_THROW((void)network.fastest(bad, room), std::invalid_argument);
  EXPECT_THROW((void)network.fastest(room, bad), std::invalid_argument);
}

}  // namespace
}  // namespace jitckpt::algorithms
