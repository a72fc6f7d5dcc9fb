// Faults on order: each happens at the call that it was ordered for, with CUDA's own codes and texts. Most
// fail their device for good, and so have a process of their own.
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "softgpu/fault.h"
#include "softgpu/runtime/fault_registry.h"
#include "softgpu/runtime/tests/support.h"

namespace {

constexpr int passed = 42;

[[noreturn]] void finish() { std::_Exit(testing::Test::HasFailure() ? 1 : passed); }

std::string order(const char* text) {
  char answer[512] = "";
  EXPECT_EQ(softgpu_fault(text, answer, sizeof answer), 0) << answer;
  return answer;
}

cudaError_t launch(const char& kernel, const DeviceInts& memory, cudaStream_t stream = nullptr) {
  int* to = memory.get();
  int amount = 1;
  void* arguments[] = {&to, &amount};
  return cudaLaunchKernel(&kernel, 1, 1, arguments, 0, stream);
}

// The third launch fails its stream, and every call after it.
void device_fails(const char* kind, cudaError_t error, const char* text) {
  const DeviceInts memory(1);
  memory.write({0});
  EXPECT_EQ(order((std::string("call=3 kind=") + kind).c_str()),
            std::string("kind=") + kind + " call=3 is armed: kernel launch 3 from now on");
  ok(launch(kernels::add, memory));
  ok(launch(kernels::add, memory));
  EXPECT_EQ(memory.read(), std::vector<int>{2}) << "nothing happens before";
  ok(launch(kernels::add, memory));  // it is accepted, and fails on the stream
  EXPECT_EQ(cudaDeviceSynchronize(), error);
  EXPECT_EQ(launch(kernels::add, memory), error);
  EXPECT_EQ(cudaGetLastError(), error);
  EXPECT_EQ(std::string(cudaGetErrorString(error)), text);
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, 1), error);
  EXPECT_EQ(cudaSetDevice(0), error);
  finish();
}

void device_is_lost() {
  const OwnStream hung(cudaStreamNonBlocking);
  const DeviceInts memory(1);
  Gate gate(hung);
  order("kind=device-lost");
  std::thread waiting([&] { EXPECT_EQ(cudaStreamSynchronize(hung), cudaErrorUnknown); });
  EXPECT_EQ(launch(kernels::add, memory), cudaErrorUnknown) << "the call itself fails";
  EXPECT_EQ(std::string(cudaGetErrorString(cudaErrorUnknown)), "unknown error");
  waiting.join();  // although its stream has not moved
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorUnknown);
  finish();
}

void a_slow_kernel_is_slow() {
  const OwnStream stream(cudaStreamNonBlocking);
  const DeviceInts memory(1);
  memory.write({0});
  order("kind=slow factor=1000000");
  ok(launch(kernels::nap, memory, stream));
  // Its work is done in a millisecond; it takes a thousand seconds, or until it is healed.
  const auto* result = static_cast<int*>(softgpu_shadow(memory.get()));
  while (*static_cast<const volatile int*>(result) == 0) std::this_thread::yield();
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  order("kind=heal");
  ok(cudaStreamSynchronize(stream));
  finish();
}

void what_the_environment_orders(const char* faults, const char* rank) {
  setenv("SOFTGPU_FAULTS", faults, 1);
  if (rank) setenv("RANK", rank, 1);
  void* pointer = nullptr;
  const cudaError_t first = cudaMalloc(&pointer, 1), second = cudaMalloc(&pointer, 1);
  std::fprintf(stderr, "%s, %s\n", cudaGetErrorName(first), cudaGetErrorName(second));
  std::_Exit(0);
}

}  // namespace

TEST(Faults, StickyIsAnIllegalAddress) {
  EXPECT_EXIT(device_fails("sticky", cudaErrorIllegalAddress, "an illegal memory access was encountered"),
              testing::ExitedWithCode(passed),
              "the rehearsed fault 'kind=sticky call=3' happens at kernel launch 3");
}

TEST(Faults, EccIsUncorrectable) {
  EXPECT_EXIT(device_fails("ecc", cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"),
              testing::ExitedWithCode(passed), "device 0 has failed \\(cudaErrorECCUncorrectable\\)\n");
}

TEST(Faults, ALostDeviceFailsEverythingAtOnce) {
  EXPECT_EXIT(device_is_lost(), testing::ExitedWithCode(passed), "");
}

TEST(Faults, ASlowKernelIsSlowUntilItIsHealed) {
  EXPECT_EXIT(a_slow_kernel_is_slow(), testing::ExitedWithCode(passed), "");
}

TEST(Faults, OneAllocationFails) {
  order("kind=failed-allocation call=2");
  const DeviceInts first(1);
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(std::string(cudaGetErrorString(cudaErrorMemoryAllocation)), "out of memory");
  const DeviceInts third(1);
}

TEST(Faults, MemoryIsTakenUntilItIsHealed) {
  std::size_t free = 1, total = 0;
  void* pointer = nullptr;
  order("kind=oom call=2");
  {
    const DeviceInts first(1);
    for (int attempt = 0; attempt < 3; ++attempt) {
      EXPECT_EQ(cudaMalloc(&pointer, 1), cudaErrorMemoryAllocation);
    }
  }
  ok(cudaMemGetInfo(&free, &total));
  EXPECT_EQ(free, 0u);
  order("kind=heal");
  const DeviceInts memory(1);
  ok(cudaMemGetInfo(&free, &total));
  EXPECT_GT(free, 0u);
}

TEST(Faults, HealDisarms) {
  order("kind=failed-allocation");
  EXPECT_EQ(order("kind=heal"), "what lasted has ended, and nothing is armed any more");
  const DeviceInts memory(1);
}

TEST(Faults, OfOneCallHappenOneAfterTheOther) {
  order("kind=failed-allocation call=2");
  order("kind=failed-allocation call=1");
  order("kind=failed-allocation call=1");
  void* pointer = nullptr;
  for (int call = 1; call <= 3; ++call) EXPECT_EQ(cudaMalloc(&pointer, 1), cudaErrorMemoryAllocation) << call;
  const DeviceInts memory(1);
}

TEST(Faults, OfAnotherRankAreRefused) {
  char answer[512] = "";
  EXPECT_EQ(softgpu_fault("kind=sticky rank=1", answer, sizeof answer), -1);
  EXPECT_EQ(std::string(answer),
            "it is meant for rank 1, and this process has no rank (RANK in its environment)");
  EXPECT_EQ(softgpu_fault("kind=sticky rank=1", answer, 6), -1);
  EXPECT_EQ(std::string(answer), "it is");
  EXPECT_EQ(softgpu_fault(nullptr, nullptr, 0), -1);
}

TEST(Faults, AskingIsFreeWhileNothingIsArmed) {
  EXPECT_FALSE(softgpu::fault_registry::is_noteworthy(~0u));
  order("kind=failed-allocation call=9");
  EXPECT_TRUE(
      softgpu::fault_registry::is_noteworthy(softgpu::fault_registry::bit(softgpu::FaultPoint::allocation)));
  EXPECT_FALSE(
      softgpu::fault_registry::is_noteworthy(softgpu::fault_registry::bit(softgpu::FaultPoint::launch)));
  order("kind=heal");
  EXPECT_FALSE(softgpu::fault_registry::is_noteworthy(~0u));
}

TEST(Faults, OfTheEnvironmentAreThereFromTheFirstCall) {
  const auto done = testing::ExitedWithCode(0);
  EXPECT_EXIT(what_the_environment_orders("kind=failed-allocation call=2", nullptr), done,
              "cudaSuccess, cudaErrorMemoryAllocation");
  EXPECT_EXIT(what_the_environment_orders(";kind=failed-allocation; kind=failed-allocation rank=1 ;", "1"),
              done, "cudaErrorMemoryAllocation, cudaErrorMemoryAllocation");
  EXPECT_EXIT(what_the_environment_orders("rank=1 kind=oom", "0"), done, "cudaSuccess, cudaSuccess");
  EXPECT_EXIT(what_the_environment_orders("rank=1 kind=oom", nullptr), done, "cudaSuccess, cudaSuccess");
  EXPECT_EXIT(what_the_environment_orders("kind=oom;kind=burn", nullptr), done,
              "SOFTGPU_FAULTS holds 'kind=burn': kind must be(.|\n)*cudaErrorNoDevice, cudaErrorNoDevice");
}
