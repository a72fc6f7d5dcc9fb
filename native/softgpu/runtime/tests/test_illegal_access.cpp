// Kernels that use device memory which is not allocated. Each test fails a device for good, and so has a
// process of its own.
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include "softgpu/runtime/enqueue.h"
#include "softgpu/runtime/tests/support.h"

namespace {

constexpr int passed = 42;
constexpr std::size_t mebibyte = std::size_t{1} << 20;

[[noreturn]] void finish() { std::_Exit(testing::Test::HasFailure() ? 1 : passed); }

char* freed_memory(std::size_t bytes) {
  void* memory = nullptr;
  ok(cudaMalloc(&memory, bytes));
  ok(cudaFree(memory));
  return static_cast<char*>(memory);
}

char* shadow_of(void* pointer) { return static_cast<char*>(softgpu_shadow(pointer)); }

void launch_add(void* to, cudaStream_t stream = nullptr) {
  int one = 1;
  void* arguments[] = {&to, &one};
  ok(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 0, stream));
}

void freed_memory_is_used() {
  DeviceInts kept(1);
  kept.write({5});
  char* const freed = freed_memory(mebibyte) + 1000;
  char address[32];
  std::snprintf(address, sizeof address, "%p", static_cast<void*>(freed));
  launch_add(freed);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  EXPECT_EQ(std::string(cudaGetErrorString(cudaErrorIllegalAddress)),
            "an illegal memory access was encountered: work on a stream used the address " +
                std::string(address) + ", where no memory is allocated (any more)");
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, 1), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  EXPECT_EQ(*reinterpret_cast<int*>(shadow_of(kept.get())), 5);
  ok(cudaSetDevice(1));  // the other device is well
  ok(cudaDeviceSynchronize());
  finish();
}

void a_wild_pointer_is_used() {
  DeviceInts memory(1);
  launch_add(reinterpret_cast<char*>(memory.get()) + 100 * mebibyte);  // more than the device has
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  finish();
}

void work_behind_it_is_dropped() {
  OwnStream stream;
  DeviceInts counter(1);
  counter.write({1});
  char* const freed = freed_memory(mebibyte);
  {
    Gate gate(stream);
    launch_add(freed, stream);
    launch_add(counter.get(), stream);
  }
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  EXPECT_EQ(*reinterpret_cast<int*>(shadow_of(counter.get())), 1);
  finish();
}

// What a kernel of torch's may do: hold a lock, go over all of it, and let other threads help.
void the_kernel_comes_to_its_end() {
  std::mutex mutex;
  char* const freed = shadow_of(freed_memory(32 * mebibyte));
  bool ended = false;
  ok(softgpu::enqueue(nullptr, [&] {
    const std::lock_guard lock(mutex);
    std::thread helper([&] {
      for (std::size_t i = 0; i < 16 * mebibyte; ++i) freed[i] = 1;
    });
    for (std::size_t i = 16 * mebibyte; i < 32 * mebibyte; ++i) freed[i] = 1;
    helper.join();
    ended = true;
    return cudaSuccess;
  }));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  const std::lock_guard lock(mutex);
  EXPECT_TRUE(ended);
  finish();
}

void the_cause_is_told_not_what_came_of_it() {
  char* const freed = shadow_of(freed_memory(mebibyte));
  ok(softgpu::enqueue(nullptr, [freed] { return *freed == 0 ? cudaErrorAssert : cudaSuccess; }));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  finish();
}

void each_device_fails_by_its_own() {
  ok(cudaSetDevice(1));
  launch_add(freed_memory(mebibyte));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  ok(cudaSetDevice(0));
  ok(cudaDeviceSynchronize());
  launch_add(freed_memory(mebibyte));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  finish();
}

// Signals that are not about device memory are the program's, as before.
void other_faults_go_to_the_programs_handler() {
  std::signal(SIGSEGV, [](int) { std::_Exit(passed); });
  DeviceInts memory(1);
  *memory.get() = 1;
}

void a_null_pointer_is_used() {
  launch_add(nullptr);
  cudaDeviceSynchronize();
  finish();
}

}  // namespace

TEST(IllegalAccess, ToFreedMemoryFailsTheDevice) {
  EXPECT_EXIT(freed_memory_is_used(), testing::ExitedWithCode(passed),
              "softgpu: device 0 has failed \\(cudaErrorIllegalAddress\\)");
}

TEST(IllegalAccess, ByAWildPointerFailsTheDevice) {
  EXPECT_EXIT(a_wild_pointer_is_used(), testing::ExitedWithCode(passed), "");
}

TEST(IllegalAccess, DropsTheWorkBehindIt) {
  EXPECT_EXIT(work_behind_it_is_dropped(), testing::ExitedWithCode(passed), "");
}

TEST(IllegalAccess, LetsTheKernelComeToItsEnd) {
  EXPECT_EXIT(the_kernel_comes_to_its_end(), testing::ExitedWithCode(passed), "");
}

TEST(IllegalAccess, IsToldBeforeWhatCameOfIt) {
  EXPECT_EXIT(the_cause_is_told_not_what_came_of_it(), testing::ExitedWithCode(passed), "");
}

TEST(IllegalAccess, FailsEachDeviceByItself) {
  EXPECT_EXIT(each_device_fails_by_its_own(), testing::ExitedWithCode(passed), "device 1 has failed");
}

TEST(IllegalAccess, LeavesOtherFaultsToTheProgram) {
  EXPECT_EXIT(other_faults_go_to_the_programs_handler(), testing::ExitedWithCode(passed), "");
}

TEST(IllegalAccess, OutsideOfTheDevicesEndsTheProcess) { EXPECT_DEATH(a_null_pointer_is_used(), ""); }
