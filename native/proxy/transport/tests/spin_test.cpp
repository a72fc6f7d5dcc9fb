#include "proxy/transport/spin.h"

#include <gtest/gtest.h>

namespace jitckpt::proxy {
namespace {

TEST(Spin, OnlyWhereARankHasTwoCores) {
  EXPECT_GT(usual_spin_time(2, 1).count(), 0);
  EXPECT_GT(usual_spin_time(16, 8).count(), 0);
  EXPECT_EQ(usual_spin_time(15, 8).count(), 0);
  EXPECT_EQ(usual_spin_time(1, 1).count(), 0);
  EXPECT_GT(usual_spin_time(2, 0).count(), 0);
}

TEST(Cores, ARankHasOneToItselfOnlyWhereTheyAreScarce) {
  EXPECT_EQ(core_of_rank({0, 1}, 2, 0), 0);
  EXPECT_EQ(core_of_rank({0, 1}, 2, 1), 1);
  EXPECT_EQ(core_of_rank({3, 5, 8}, 4, 3), 3);
  EXPECT_EQ(core_of_rank({3, 5, 8}, 4, 2), 8);
  EXPECT_EQ(core_of_rank({0, 1}, 1, 0), std::nullopt);
  EXPECT_EQ(core_of_rank({}, 2, 0), std::nullopt);
  EXPECT_EQ(core_of_rank({0, 1}, 2, -1), std::nullopt);
}

}  // namespace
}  // namespace jitckpt::proxy
