// Copies between pinned memory and the device read and write when their streams come to them, also in a
// replay: random programs of them see what they should, whatever befalls their servers.
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>

#include "copy_programs.h"
#include "jitckpt_proxy.h"
#include "ranks_job.h"

namespace {

void keep() { ok(static_cast<cudaError_t>(jitckpt_proxy_keep())); }

// Many more on order: PROXY_TEST_PROGRAMS.
uint32_t programs(uint32_t usual) {
  return static_cast<uint32_t>(number_of("PROXY_TEST_PROGRAMS", static_cast<int>(usual)));
}

// Runs programs with the seeds from `first` on, and has each see what it should.
void expect_right(const CopyPlatform& platform, std::size_t cell_ints, uint32_t first, uint32_t count) {
  CopyPrograms all(platform, cell_ints);
  for (uint32_t seed = first; seed < first + count; ++seed) {
    const std::string difference = all.run(seed);
    ASSERT_EQ(difference, "");
  }
}

// Before one call of each of these programs, or some time after its beginning, the server is killed.
void expect_right_though_killed(std::size_t cell_ints, uint32_t first, uint32_t count) {
  testing::internal::CaptureStderr();
  std::mt19937 random(first);
  int until = 0;
  std::thread later;
  CopyPlatform platform{.keep = keep, .call = [&] {
                          if (until-- == 0) kill_server();
                        }};
  CopyPrograms all(platform, cell_ints);
  for (uint32_t seed = first; seed < first + count && !testing::Test::HasFailure(); ++seed) {
    keep();
    until = random() % 2 == 0 ? static_cast<int>(random() % 150) : -1;
    if (until < 0) {
      later = std::thread([after = random() % 5000, server = jitckpt_proxy_server()] {
        std::this_thread::sleep_for(std::chrono::microseconds(after));
        kill(server, SIGKILL);
      });
    }
    EXPECT_EQ(all.run(seed), "");
    until = -1;
    if (later.joinable()) later.join();
  }
  testing::internal::GetCapturedStderr();
}

TEST(Copies, ArePartOfProgramsThatSeeWhatTheyShould) {
  expect_right({.keep = keep}, 8, 0, programs(150));
  expect_right({.keep = keep}, 4096, 1'000'000, programs(150) / 3);
}

TEST(Copies, SeeTheSameWhenServersDie) { expect_right_though_killed(8, 2'000'000, programs(40)); }

TEST(Copies, LongOnesSeeTheSameWhenServersDie) {
  expect_right_though_killed(8192, 3'000'000, programs(40) / 3);
}

// Nothing is ever kept here.
TEST(Alone, RunsCopyPrograms) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  expect_right({}, 8, 4'000'000, programs(150));
}

TEST(Copies, SeeTheSameWhereNothingIsKept) {
  const Ended ended = run_alone("Alone.RunsCopyPrograms");
  EXPECT_EQ(ended.status, 0) << ended.output;
}

// Two ranks run the same programs, with collectives. In each, PROXY_TEST_FAULT befalls one of them, so that
// both go back to where it began; what came behind a collective that is ended then counts for nothing.
TEST(Alone, RunsCopyProgramsAsARank) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  const Store store(std::getenv("PROXY_TEST_STORE"));
  const int rank = number_of("RANK");
  ok(cudaSetDevice(rank));
  const ncclComm_t both = meet(store, "both");
  const std::string fault = std::getenv("PROXY_TEST_FAULT");
  const auto seed = static_cast<uint32_t>(number_of("PROXY_TEST_FIRST"));
  std::mt19937 random(seed);
  int until = 0;
  CopyPlatform platform{.keep = keep, .gates = false, .communicator = both, .ranks = 2};
  (fault == "kill" ? platform.call : platform.collective) = [&] {
    if (until-- != 0) return;
    if (fault == "kill")
      kill_server();
    else
      order_fault(fault);  // for that collective
  };
  cudaEvent_t event = nullptr;
  ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  {
    const Watchdog watchdog(both, event);
    CopyPrograms all(platform, 8);
    for (uint32_t number = 0; number < programs(20); ++number) {
      const auto which = static_cast<int>(random() % (fault == "kill" ? 80 : 4));
      until = static_cast<int>(random() % 2) == rank ? which : -1;
      EXPECT_EQ(all.run(seed + number), "");
    }
  }
  store.set("over-" + std::to_string(rank), "");
  store.get("over-" + std::to_string(1 - rank));
  ok(cudaEventDestroy(event));
  ok(ncclCommDestroy(both));
}

std::vector<Coordinator::Recovery> recoveries_of_copy_programs(const std::string& fault, int first) {
  Job job(2);
  job.run("Alone.RunsCopyProgramsAsARank",
          {"PROXY_TEST_FIRST=" + std::to_string(first), "PROXY_TEST_FAULT='" + fault + "'",
           "PROXY_TEST_PROGRAMS=" + std::to_string(programs(20))});
  EXPECT_EQ(job.coordinator.complaint(), "");
  return job.coordinator.recoveries();
}

TEST(Copies, SeeTheSameOnRanksWhoseServersDie) {
  EXPECT_GE(recoveries_of_copy_programs("kill", 5'000'000).size(), programs(20) / 2);
}

TEST(Copies, SeeTheSameOnRanksWhoseServersStay) {
  const auto recoveries = recoveries_of_copy_programs("kind=collective-error", 6'000'000);
  EXPECT_GE(recoveries.size(), programs(20) / 2);
  EXPECT_EQ(recoveries.front().stayed.size(), 2u);
}

TEST(Copies, SeeTheSameOnRanksWhoseDevicesBreak) {
  EXPECT_GE(recoveries_of_copy_programs("kind=sticky at=collective", 7'000'000).size(), programs(20) / 2);
}

}  // namespace
