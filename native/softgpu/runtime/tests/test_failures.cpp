// Sticky errors. Each test fails its device for good, and so has a process of its own.
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "softgpu/runtime/enqueue.h"
#include "softgpu/runtime/tests/support.h"

namespace {

constexpr int passed = 42;

// Ends the process of a test: with status 42 if nothing has failed in it.
[[noreturn]] void finish() { std::_Exit(testing::Test::HasFailure() ? 1 : passed); }

void fail_device() {
  ok(cudaLaunchKernel(&kernels::fail, 1, 1, nullptr, 0, nullptr));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
}

void every_later_call_fails() {
  DeviceInts memory(1);
  OwnEvent event;
  OwnStream stream;
  fail_device();
  int value = 0;
  int* to = memory.get();
  void* arguments[] = {&to, &value};
  void* pointer = nullptr;
  cudaStream_t other = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, 1), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaFree(to), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaMemcpy(&value, to, 4, cudaMemcpyDeviceToHost), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 0, nullptr), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaStreamCreate(&other), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaEventRecord(event, stream), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaEventSynchronize(event), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaSetDevice(0), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaDeviceReset(), cudaErrorIllegalAddress);
  std::thread([] { EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress); }).join();
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_EQ(std::string(cudaGetErrorString(cudaErrorIllegalAddress)),
            "an illegal memory access was encountered: fail: it wrote where nothing is.");
  ok(cudaSetDevice(1));  // the other device is well
  ok(cudaDeviceSynchronize());
  finish();
}

void waiting_host_is_let_go() {
  OwnStream hung(cudaStreamNonBlocking), failing(cudaStreamNonBlocking);
  Gate gate(hung);
  Gate fuse(failing);
  ok(cudaLaunchKernel(&kernels::fail, 1, 1, nullptr, 0, failing));
  std::thread trigger([&] { fuse.open(); });
  EXPECT_EQ(cudaStreamSynchronize(hung), cudaErrorIllegalAddress);
  trigger.join();
  finish();
}

void queued_work_is_dropped() {
  OwnStream stream;
  Diary diary;
  {
    Gate gate(stream);
    ok(cudaLaunchKernel(&kernels::fail, 1, 1, nullptr, 0, stream));
    diary.note(stream, 1);
  }
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  EXPECT_TRUE(diary.read().empty());
  finish();
}

void enqueued_work_fails_the_device() {
  EXPECT_TRUE(softgpu::device_usable(0));
  ok(softgpu::enqueue(nullptr, [] { return cudaErrorECCUncorrectable; }));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorECCUncorrectable);
  EXPECT_EQ(softgpu::enqueue(nullptr, [] { return cudaSuccess; }), cudaErrorECCUncorrectable);
  EXPECT_FALSE(softgpu::device_usable(0));
  EXPECT_TRUE(softgpu::device_usable(1));
  finish();
}

void an_exception_fails_the_device() {
  ok(softgpu::enqueue(nullptr, []() -> cudaError_t { throw std::runtime_error("the plug was pulled"); }));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
  EXPECT_EQ(std::string(cudaGetErrorString(cudaErrorLaunchFailure)),
            "unspecified launch failure: the plug was pulled");
  finish();
}

void a_blocking_launch_fails_itself() {
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  EXPECT_EQ(cudaLaunchKernel(&kernels::fail, 1, 1, nullptr, 0, nullptr), cudaErrorIllegalAddress);
  finish();
}

}  // namespace

TEST(Failures, ABlockingLaunchFailsItself) {
  EXPECT_EXIT(a_blocking_launch_fails_itself(), testing::ExitedWithCode(passed), "");
}

TEST(Failures, EveryLaterCallFails) {
  EXPECT_EXIT(every_later_call_fails(), testing::ExitedWithCode(passed),
              "softgpu: device 0 has failed \\(cudaErrorIllegalAddress\\): fail: it wrote where nothing is.");
}

TEST(Failures, AWaitingHostIsLetGo) {
  EXPECT_EXIT(waiting_host_is_let_go(), testing::ExitedWithCode(passed), "");
}

TEST(Failures, QueuedWorkIsDropped) {
  EXPECT_EXIT(queued_work_is_dropped(), testing::ExitedWithCode(passed), "");
}

TEST(Failures, EnqueuedWorkFailsTheDevice) {
  EXPECT_EXIT(enqueued_work_fails_the_device(), testing::ExitedWithCode(passed), "cudaErrorECCUncorrectable");
}

TEST(Failures, AnExceptionFailsTheDevice) {
  EXPECT_EXIT(an_exception_fails_the_device(), testing::ExitedWithCode(passed), "the plug was pulled");
}

TEST(Enqueue, RunsWorkInStreamOrder) {
  OwnStream stream;
  int value = 0;
  Gate gate(stream);
  ok(softgpu::enqueue(stream, [&] {
    value = 1;
    return cudaSuccess;
  }));
  EXPECT_EQ(value, 0);
  gate.open();
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(value, 1);
  EXPECT_EQ(softgpu::stream_device(stream), 0);
  EXPECT_EQ(softgpu::stream_device(nullptr), softgpu::current_device());
  cudaStream_t destroyed = nullptr;
  ok(cudaStreamCreate(&destroyed));
  ok(cudaStreamDestroy(destroyed));
  EXPECT_EQ(softgpu::stream_device(destroyed), -1);
  EXPECT_EQ(softgpu::enqueue(destroyed, [] { return cudaSuccess; }), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}
