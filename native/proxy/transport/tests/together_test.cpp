// The step barrier: who waits goes on when all have come, in this recovery, and not before.
#include "proxy/transport/together.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace jitckpt::proxy {
namespace {

// What an agent makes for so many ranks of its host.
class Barrier {
 public:
  explicit Barrier(uint64_t ranks, uint64_t magic = Together::magic, uint64_t room = 0, uint64_t hosts = 1)
      : file_(memfd_create("barrier", MFD_CLOEXEC)) {
    const uint64_t head[] = {magic, ranks, hosts};
    EXPECT_EQ(ftruncate(file_, static_cast<off_t>(4096 + 64 * (room ? room : ranks))), 0);
    EXPECT_EQ(pwrite(file_, head, sizeof head, 0), ssize_t{sizeof head});
  }
  ~Barrier() { close(file_); }
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

TEST(Together, AllHaveComeWhenEachIsThereSinceTheSameRecovery) {
  const Barrier barrier(2);
  Together one(barrier.path(), 0), other(barrier.path(), 1);
  one.come(0, 5);
  EXPECT_FALSE(one.all_have_come(0, 5));
  other.come(0, 5);
  EXPECT_TRUE(one.all_have_come(0, 5));
  EXPECT_TRUE(other.all_have_come(0, 5));
  other.come(0, 6);  // it was faster
  EXPECT_TRUE(one.all_have_come(0, 5));
  EXPECT_FALSE(other.all_have_come(0, 6));
  other.come(1, 5);  // it has gone back, and this one not yet
  EXPECT_FALSE(one.all_have_come(0, 5));
  EXPECT_FALSE(other.all_have_come(1, 5));
  one.come(1, 5);
  EXPECT_TRUE(other.all_have_come(1, 5));
}

TEST(Together, IsLeftByAll) {
  const Barrier barrier(2);
  Together one(barrier.path(), 0), other(barrier.path(), 1);
  EXPECT_FALSE(one.has_been_left());
  other.leave();
  EXPECT_TRUE(one.has_been_left());
}

TEST(Together, OnlyTheLastThatComesWakesTheOthers) {
  const Barrier barrier(3);
  Together first(barrier.path(), 0), second(barrier.path(), 1), last(barrier.path(), 2);
  const uint32_t seen = first.happenings();
  first.come(0, 5);
  second.come(0, 6);  // a step that this one did not come to before, nor will the last
  second.notify();
  EXPECT_EQ(first.happenings(), seen);
  last.come(0, 6);
  EXPECT_NE(first.happenings(), seen);
  const uint32_t again = first.happenings();
  last.leave();
  EXPECT_NE(first.happenings(), again);
}

TEST(Together, NobodyGoesOnBeforeTheLast) {
  constexpr uint64_t ranks = 4, steps = 200;
  const Barrier barrier(ranks);
  std::atomic<uint64_t> arrived{0};
  std::vector<std::thread> threads;
  for (uint64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Together together(barrier.path(), rank);
      for (uint64_t step = 1; step <= steps; ++step) {
        ++arrived;
        together.come(3, step);
        for (;;) {
          const uint32_t seen = together.happenings();
          if (together.all_have_come(3, step)) break;
          together.wait(seen, std::chrono::seconds(10));
        }
        EXPECT_GE(arrived, ranks * step);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What the agents of several hosts do, all in one.
class Agents {
 public:
  explicit Agents(std::vector<Together*> hosts) : hosts_(std::move(hosts)) {}
  void tell() {
    Together::Come all{~uint64_t{0}, 0, false};
    for (const Together* const host : hosts_) {
      const Together::Come here = host->here();
      all.recovery_and_step = std::min(all.recovery_and_step, here.recovery_and_step);
      if (here.whole_from != 0 && (all.whole_from == 0 || here.whole_from < all.whole_from))
        all.whole_from = here.whole_from;
      all.left |= here.left;
    }
    for (Together* const host : hosts_) host->everywhere(all);
  }

 private:
  std::vector<Together*> hosts_;
};

class TwoHosts : public testing::Test {
 protected:
  const Barrier here_{2, Together::magic, 0, 2}, there_{1, Together::magic, 0, 2};
  Together first_{here_.path(), 0}, second_{here_.path(), 1}, other_{there_.path(), 0};
  Together agent_{here_.path(), Together::agent}, others_agent_{there_.path(), Together::agent};
  Agents agents_{{&agent_, &others_agent_}};
};

TEST_F(TwoHosts, WaitForEachOther) {
  const uint32_t seen = agent_.happenings();
  first_.come(0, 5);
  EXPECT_EQ(agent_.happenings(), seen);  // nothing to tell
  second_.come(0, 5);
  EXPECT_NE(agent_.happenings(), seen);
  agents_.tell();
  EXPECT_FALSE(first_.all_have_come(0, 5));
  other_.come(0, 5);
  EXPECT_FALSE(other_.all_have_come(0, 5));
  const uint32_t waiting = first_.happenings(), others = other_.happenings();
  agents_.tell();
  EXPECT_NE(first_.happenings(), waiting);
  EXPECT_NE(other_.happenings(), others);
  EXPECT_TRUE(first_.all_have_come(0, 5));
  EXPECT_TRUE(other_.all_have_come(0, 5));
  EXPECT_FALSE(first_.all_have_come(0, 6));
}

TEST_F(TwoHosts, OneThatHasGoneBackDoesNotCount) {
  first_.come(0, 5);
  second_.come(0, 6);
  EXPECT_EQ(agent_.here().recovery_and_step, 5);
  first_.come(1, 5);
  EXPECT_EQ(agent_.here().recovery_and_step, 0);
  second_.come(1, 4);
  EXPECT_EQ(agent_.here().recovery_and_step, (uint64_t{1} << Together::step_bits) + 4);
  other_.come(1, 5);
  agents_.tell();
  EXPECT_TRUE(second_.all_have_come(1, 4));
  EXPECT_FALSE(other_.all_have_come(1, 5));
  EXPECT_FALSE(second_.all_have_come(0, 4));
  agent_.everywhere({3, 0, false});  // late
  EXPECT_TRUE(second_.all_have_come(1, 4));
}

TEST_F(TwoHosts, HearWhereTheStateLeaves) {
  const uint32_t seen = agent_.happenings();
  first_.leave_after(6);
  EXPECT_NE(agent_.happenings(), seen);
  other_.leave_after(5);  // the same step, as another rank counts that is behind
  agents_.tell();
  EXPECT_EQ(second_.whole_from(), 7);
  EXPECT_EQ(other_.whole_from(), 7);
}

TEST_F(TwoHosts, AreLeftByAll) {
  const uint32_t seen = agent_.happenings(), others = other_.happenings();
  second_.leave();
  EXPECT_NE(agent_.happenings(), seen);
  agents_.tell();
  EXPECT_TRUE(other_.has_been_left());
  EXPECT_NE(other_.happenings(), others);
}

TEST(Together, RefusesWhatIsNoBarrier) {
  EXPECT_THROW(Together("/proc/self/fd/9999", 0), std::runtime_error);
  EXPECT_THROW(Together("/dev/null", 0), std::runtime_error);
  const Barrier barrier(2), wrong(2, 1), short_of(3, Together::magic, 2);
  EXPECT_THROW(Together(barrier.path(), 2), std::runtime_error);
  EXPECT_THROW(Together(wrong.path(), 0), std::runtime_error);
  EXPECT_THROW(Together(short_of.path(), 0), std::runtime_error);
}

}  // namespace
}  // namespace jitckpt::proxy
