#include "spin.h"

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

}  // namespace
}  // namespace jitckpt::proxy
