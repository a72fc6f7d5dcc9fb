// Copies between pinned memory and the device read and write when their streams come to them, also in a
// replay: random programs of them see what they should, whatever befalls their servers.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <future>
#include <random>
#include <thread>

#include "proxy/client/jitckpt_proxy.h"
#include "proxy/tests/copy_programs.h"
#include "proxy/tests/ranks_job.h"

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
  const uint64_t different = jitckpt_proxy_different_answers();
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
  EXPECT_EQ(jitckpt_proxy_different_answers(), different);
  testing::internal::GetCapturedStderr();
}

// Pinned memory.
class PinnedInts {
 public:
  explicit PinnedInts(std::size_t count) {
    ok(cudaMallocHost(reinterpret_cast<void**>(&begin_), count * sizeof(int)));
  }
  ~PinnedInts() { ok(cudaFreeHost(begin_)); }
  PinnedInts(const PinnedInts&) = delete;
  PinnedInts& operator=(const PinnedInts&) = delete;
  int* get() const { return begin_; }
  int& operator[](std::size_t index) const { return begin_[index]; }

 private:
  int* begin_ = nullptr;
};

void to_host(const PinnedInts& to, const DeviceInts& from, cudaStream_t stream) {
  ok(cudaMemcpyAsync(to.get(), from.get(), sizeof(int), cudaMemcpyDeviceToHost, stream));
}

void to_device(const DeviceInts& to, const PinnedInts& from, cudaStream_t stream) {
  ok(cudaMemcpyAsync(to.get(), from.get(), sizeof(int), cudaMemcpyHostToDevice, stream));
}

// A call that is left out in a replay, since what it has written is there, lay between two others: a stream
// that waits for the legacy stream does so by its calls, and the host has waited for both by waiting for it.
TEST(Copies, WhatIsLeftOutStillOrdersStreams) {
  testing::internal::CaptureStderr();
  cudaStream_t blocking = nullptr;
  ok(cudaStreamCreate(&blocking));
  const OwnStream other;
  const DeviceInts number(1, 5), one(1, 1), unused(1);
  const PinnedInts pinned(1);
  for (const bool fills : {false, true}) {
    keep();
    launch_nap(20'000);
    launch_mix(number.get(), one.get());
    if (fills)
      ok(cudaMemsetAsync(pinned.get(), 0, sizeof(int), blocking));
    else
      to_host(pinned, unused, blocking);
    ok(cudaStreamSynchronize(blocking));
    ok(cudaMemsetAsync(number.get(), 0, sizeof(int), other));
    ok(cudaStreamSynchronize(other));
    kill_server();
    ok(cudaDeviceSynchronize());
    EXPECT_EQ(number.read(), std::vector<int>{0});
  }
  ok(cudaStreamDestroy(blocking));
  testing::internal::GetCapturedStderr();
}

TEST(Copies, ReadPinnedMemoryWhenTheirStreamComesToThem) {
  testing::internal::CaptureStderr();
  const OwnStream stream;
  const DeviceInts number(1, 5), other(1);
  const PinnedInts pinned(1);
  for (const bool dies : {false, true}) {
    keep();
    pinned[0] = 1;
    {
      Gate gate(stream);
      to_host(pinned, number, stream);
      to_device(other, pinned, stream);
      if (dies) kill_server();
      gate.open();
    }
    EXPECT_EQ(other.read(stream), std::vector<int>{5});
    // The host may write there until it lets the stream go on.
    {
      Gate gate(stream);
      to_device(other, pinned, stream);
      pinned[0] = 7;
      if (dies) kill_server();
      gate.open();
    }
    EXPECT_EQ(other.read(stream), std::vector<int>{7});
  }
  testing::internal::GetCapturedStderr();
}

TEST(Copies, ReadInAReplayWhatTheyHaveReadBefore) {
  testing::internal::CaptureStderr();
  const OwnStream stream;
  const DeviceInts one(1), other(1);
  const PinnedInts pinned(1);
  keep();
  pinned[0] = 5;
  to_device(one, pinned, stream);
  ok(cudaStreamSynchronize(stream));
  pinned[0] = 6;
  ok(cudaMemcpy(other.get(), pinned.get(), sizeof(int), cudaMemcpyHostToDevice));
  pinned[0] = 7;
  kill_server();
  EXPECT_EQ(one.read(stream), std::vector<int>{5});
  EXPECT_EQ(other.read(stream), std::vector<int>{6});
  EXPECT_EQ(pinned[0], 7);
  testing::internal::GetCapturedStderr();
}

TEST(Copies, FillsAreNotMadeAgainOverWhatTheProgramHasPutThere) {
  testing::internal::CaptureStderr();
  const OwnStream stream;
  const DeviceInts other(1);
  const PinnedInts pinned(4);
  keep();
  std::fill_n(pinned.get(), 4, 9);
  ok(cudaMemset2DAsync(pinned.get(), 8, 0, 4, 2, stream));
  to_device(other, pinned, stream);
  ok(cudaMemset(pinned.get() + 3, 1, 4));
  EXPECT_EQ(pinned[3], 0x01010101);
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(std::vector<int>(pinned.get(), pinned.get() + 3), (std::vector<int>{0, 9, 0}));
  std::fill_n(pinned.get(), 4, 77);
  kill_server();
  EXPECT_EQ(other.read(stream), std::vector<int>{0});
  EXPECT_EQ(std::vector<int>(pinned.get(), pinned.get() + 4), (std::vector<int>{77, 77, 77, 77}));
  testing::internal::GetCapturedStderr();
}

// More than there is room for: what is beyond waits for its stream, and travels with the call.
TEST(Alone, CopiesMuchFromPinnedMemory) {
  if (!alone()) GTEST_SKIP() << "only for other tests";
  constexpr std::size_t count = 100'000;
  const OwnStream stream;
  const DeviceInts numbers(count);
  const PinnedInts pinned(count);
  for (int minibatch = 0; minibatch < 6; ++minibatch) {
    keep();
    for (int copy = 0; copy < 4; ++copy) {
      pinned[copy * 30'000] = minibatch + copy;
      ok(cudaMemcpyAsync(numbers.get(), pinned.get(), count * sizeof(int), cudaMemcpyHostToDevice, stream));
      ok(cudaStreamSynchronize(stream));
    }
    if (minibatch % 2 == 1) kill_server();
    const std::vector<int> seen = numbers.read(stream);
    for (int copy = 0; copy < 4; ++copy) EXPECT_EQ(seen[copy * 30'000], minibatch + copy);
  }
}

TEST(Copies, NoneIsTooMany) {
  const Ended ended = run_alone("Alone.CopiesMuchFromPinnedMemory",
                                {"JITCKPT_PROXY_SEGMENT_BYTES=262144", "JITCKPT_PROXY_LOG_BYTES=4194304"});
  EXPECT_EQ(ended.status, 0) << ended.output;
  EXPECT_EQ(ended.output.find("unprotected"), std::string::npos) << ended.output;
}

// A stream that waits for the legacy one, which is held up: only who waits for the copy waits.
TEST(Copies, NobodyElseWaitsForThoseToPageableMemory) {
  const OwnStream side;
  const DeviceInts number(1, 5);
  cudaStream_t blocking = nullptr;
  ok(cudaStreamCreate(&blocking));
  Gate gate(nullptr);
  std::future<int> copied = std::async(std::launch::async, [&] { return number.read(blocking)[0]; });
  EXPECT_EQ(copied.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  std::future<cudaError_t> other =
      std::async(std::launch::async, [&] { return cudaStreamSynchronize(side); });
  EXPECT_EQ(other.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  gate.open();
  EXPECT_EQ(copied.get(), 5);
  ok(other.get());
  ok(cudaStreamDestroy(blocking));
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
  int until = 0, at = -1;
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
    // PROXY_TEST_ONLY: that program alone, as often as others would be run.
    const auto only = static_cast<uint32_t>(number_of("PROXY_TEST_ONLY", -1));
    const uint32_t end = only + 1 == 0 ? programs(20) : only + programs(20);
    for (uint32_t number = 0; number < end; ++number) {
      if (number <= only) {
        const auto which = static_cast<int>(random() % (fault == "kill" ? 80 : 4));
        at = static_cast<int>(random() % 2) == rank ? which : -1;
        if (only + 1 != 0 && number < only) continue;
      }
      until = at;
      EXPECT_EQ(all.run(seed + std::min(number, only)), "");
    }
    EXPECT_EQ(jitckpt_proxy_different_answers(), 0u);
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
