#include <atomic>
#include <chrono>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>

#include "softgpu/runtime/tests/support.h"

using Numbers = std::vector<int>;

TEST(Streams, RunInOrderAndDoNotHoldTheHostUp) {
  OwnStream stream;
  Diary diary;
  Gate gate(stream);
  for (int i = 0; i < 1000; ++i) diary.note(stream, i);
  EXPECT_EQ(diary.read(), Numbers{});
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  gate.open();
  ok(cudaStreamSynchronize(stream));
  Numbers expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(diary.read(), expected);
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
}

TEST(Streams, AHungOneHoldsUpOnlyItsOwnFollowers) {
  OwnStream hung, free(cudaStreamNonBlocking), follower(cudaStreamNonBlocking);
  OwnEvent event;
  Diary diary;
  Gate gate(hung);
  ok(cudaEventRecord(event, hung));
  ok(cudaStreamWaitEvent(follower, event, 0));
  diary.note(follower, 2);
  diary.note(free, 1);
  ok(cudaStreamSynchronize(free));
  EXPECT_EQ(diary.read(), Numbers{1});
  EXPECT_EQ(cudaStreamQuery(follower), cudaErrorNotReady);
  gate.open();
  ok(cudaStreamSynchronize(follower));
  EXPECT_EQ(diary.read(), (Numbers{1, 2}));
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
}

TEST(Streams, TheLegacyStreamWaitsForEarlierWorkOfBlockingStreams) {
  OwnStream blocking;
  Diary diary;
  Gate gate(blocking);
  diary.note(nullptr, 2);
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
  diary.note(blocking, 3);  // later than the legacy stream's: after it
  gate.open();
  ok(cudaStreamSynchronize(blocking));
  EXPECT_EQ(diary.read(), (Numbers{2, 3}));
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
}

TEST(Streams, BlockingStreamsWaitForEarlierWorkOfTheLegacyStream) {
  OwnStream blocking, exempt(cudaStreamNonBlocking);
  Diary diary;
  Gate gate(cudaStreamLegacy);
  diary.note(blocking, 2);
  diary.note(exempt, 1);
  ok(cudaStreamSynchronize(exempt));
  EXPECT_EQ(diary.read(), Numbers{1});
  gate.open();
  ok(cudaStreamSynchronize(blocking));
  EXPECT_EQ(diary.read(), (Numbers{1, 2}));
}

TEST(Streams, TheLegacyStreamDoesNotWaitForNonBlockingOnes) {
  OwnStream exempt(cudaStreamNonBlocking);
  Diary diary;
  Gate gate(exempt);
  diary.note(nullptr, 1);
  ok(cudaStreamSynchronize(nullptr));
  EXPECT_EQ(diary.read(), Numbers{1});
}

TEST(Streams, TheLegacyStreamOfAnotherDeviceIsNotConcerned) {
  OwnStream blocking;
  Diary diary;
  Gate gate(blocking);
  ok(cudaSetDevice(1));
  diary.note(nullptr, 1);
  ok(cudaStreamSynchronize(nullptr));
  ok(cudaSetDevice(0));
  EXPECT_EQ(diary.read(), Numbers{1});
}

TEST(Streams, SynchronisingTheLegacyStreamWaitsForBlockingStreams) {
  OwnStream blocking;
  Diary diary;
  Gate gate(blocking);
  diary.note(blocking, 1);
  std::thread opener([&] { gate.open(); });
  ok(cudaStreamSynchronize(nullptr));
  EXPECT_EQ(diary.read(), Numbers{1});
  opener.join();
}

TEST(Streams, OrderHoldsUnderConcurrentLaunches) {
  // Two threads launch on the legacy stream and a blocking one at once: whatever the order, no two items wait
  // for each other, and each sees all effects of what came before.
  OwnStream blocking;
  DeviceInts counter(1);
  counter.write({0});
  const auto launch = [&](cudaStream_t stream) {
    int* to = counter.get();
    int one = 1;
    void* arguments[] = {&to, &one};
    for (int i = 0; i < 2000; ++i) ok(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 0, stream));
  };
  std::thread other([&] { launch(blocking); });
  launch(nullptr);
  other.join();
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(counter.read(), Numbers{4000});  // no addition was lost: the kernels never ran side by side
}

TEST(Streams, EveryThreadHasADefaultStreamOfItsOwn) {
  Diary diary;
  Gate gate(cudaStreamPerThread);
  unsigned long long mine = 0, theirs = 0;
  ok(cudaStreamGetId(cudaStreamPerThread, &mine));
  std::thread([&] {
    diary.note(cudaStreamPerThread, 1);
    ok(cudaStreamSynchronize(cudaStreamPerThread));
    ok(cudaStreamGetId(cudaStreamPerThread, &theirs));
  }).join();
  EXPECT_EQ(diary.read(), Numbers{1});
  EXPECT_NE(mine, theirs);
}

TEST(Streams, AThreadsDefaultStreamIsInOrderWithTheLegacyStream) {
  Diary diary;
  {
    Gate gate(cudaStreamLegacy);
    diary.note(cudaStreamPerThread, 1);
    expect_not_ready(cudaStreamQuery(cudaStreamPerThread));
  }
  ok(cudaStreamSynchronize(cudaStreamPerThread));
  {
    Gate gate(cudaStreamPerThread);
    diary.note(nullptr, 2);
    expect_not_ready(cudaStreamQuery(nullptr));
  }
  ok(cudaStreamSynchronize(nullptr));
  EXPECT_EQ(diary.read(), (Numbers{1, 2}));
}

TEST(Streams, TheHostRunsAheadAsFarAsAGpusQueueHolds) {
  OwnStream stream;
  DeviceInts counter(1);
  counter.write({0});
  int* to = counter.get();
  int one = 1;
  void* arguments[] = {&to, &one};
  Gate gate(stream);
  std::atomic<int> launched{0};
  const auto launch = [&](int count) {
    for (; count > 0; --count, ++launched) ok(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 0, stream));
  };
  launch(1000);
  EXPECT_EQ(*static_cast<int*>(softgpu_shadow(to)), 0);
  std::thread host([&] { launch(19000); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LE(launched, 1021);
  gate.open();
  host.join();
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(counter.read(), Numbers{20000});
}

TEST(Streams, AThreadsDefaultStreamOutlivesItsThread) {
  Diary diary;
  Gate gate;
  std::thread([&] {
    gate.close(cudaStreamPerThread);
    diary.note(cudaStreamPerThread, 1);
  }).join();
  gate.open();
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(diary.read(), Numbers{1});
}

TEST(Streams, ADestroyedOneStillDoesItsWork) {
  Diary diary;
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreate(&stream));
  Gate gate(stream);
  diary.note(stream, 1);
  ok(cudaStreamDestroy(stream));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(diary.read(), Numbers{});
  diary.note(nullptr, 2);  // the legacy stream waits for it even so
  gate.open();
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(diary.read(), (Numbers{1, 2}));
}

TEST(Streams, TheDefaultStreamsCanNotBeDestroyed) {
  EXPECT_EQ(cudaStreamDestroy(nullptr), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(cudaStreamLegacy), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(cudaStreamPerThread), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}

TEST(Streams, KeepTheirFlagsPriorityAndDevice) {
  int least = -1, greatest = 1;
  ok(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  EXPECT_EQ(least, 0);
  EXPECT_EQ(greatest, -5);
  cudaStream_t stream = nullptr;
  ok(cudaSetDevice(1));
  ok(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -3));
  ok(cudaSetDevice(0));
  int priority = 0, device = 0;
  unsigned flags = 0;
  ok(cudaStreamGetPriority(stream, &priority));
  ok(cudaStreamGetFlags(stream, &flags));
  ok(cudaStreamGetDevice(stream, &device));
  EXPECT_EQ(priority, -3);
  EXPECT_EQ(flags, unsigned{cudaStreamNonBlocking});
  EXPECT_EQ(device, 1);
  ok(cudaStreamDestroy(stream));
  ok(cudaStreamCreateWithPriority(&stream, cudaStreamDefault, -100));
  ok(cudaStreamGetPriority(stream, &priority));
  EXPECT_EQ(priority, greatest);
  ok(cudaStreamDestroy(stream));
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, 0x80), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(Streams, HaveACaptureModeForEachThread) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ok(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  ok(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
}

TEST(Streams, CallbacksGetTheirStreamAndArgument) {
  OwnStream stream;
  struct Seen {
    cudaStream_t stream = nullptr;
    cudaError_t status = cudaErrorUnknown;
  } seen;
  const auto callback = [](cudaStream_t which, cudaError_t status, void* argument) {
    *static_cast<Seen*>(argument) = {which, status};
  };
  ok(cudaStreamAddCallback(stream, callback, &seen, 0));
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(seen.stream, stream);
  EXPECT_EQ(seen.status, cudaSuccess);
}

namespace {

char state_of_thread(long id) {
  std::ifstream stat("/proc/self/task/" + std::to_string(id) + "/stat");
  std::string text((std::istreambuf_iterator<char>(stat)), {});
  return text[text.rfind(')') + 2];
}

}  // namespace

TEST(Streams, SleepWhileTheyHaveNothingToDo) {
  OwnStream stream;
  std::atomic<long> id{0};
  ok(cudaLaunchHostFunc(
      stream, [](void* argument) { *static_cast<std::atomic<long>*>(argument) = gettid(); }, &id));
  ok(cudaStreamSynchronize(stream));
  while (state_of_thread(id) != 'S') std::this_thread::yield();  // never, if it polled: the test's time limit
}

TEST(Streams, ManyCanBeMadeAndDestroyed) {
  for (int round = 0; round < 20; ++round) {
    std::vector<cudaStream_t> streams(20);
    Diary diary;
    for (auto& stream : streams) {
      ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      diary.note(stream, 1);
    }
    for (auto& stream : streams) ok(cudaStreamDestroy(stream));
    ok(cudaDeviceSynchronize());
    EXPECT_EQ(diary.read().size(), streams.size());
  }
}
