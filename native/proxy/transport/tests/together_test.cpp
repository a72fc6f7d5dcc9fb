// The step barrier: who waits goes on when all have come, in this recovery, and not before.
#include "together.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace jitckpt::proxy {
namespace {

// What an agent makes for so many ranks.
class Barrier {
 public:
  explicit Barrier(uint64_t ranks, uint64_t magic = Together::magic, uint64_t room = 0)
      : file_(memfd_create("barrier", MFD_CLOEXEC)) {
    const uint64_t head[] = {magic, ranks};
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
