// Fork and exit.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "softgpu/runtime/enqueue.h"
#include "softgpu/runtime/tests/support.h"

namespace {

bool is_child = false;

// The exit status of a child that runs the body. Other threads should stand still: what they have locked in
// the sanitizers' allocator or in the C library stays so in the child.
template <class Body>
int status_of_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    is_child = true;
    std::_Exit(body());
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  return WEXITSTATUS(status);
}

}  // namespace

// Asked by the leak sanitizer at exit. A child lacks the threads on whose stacks there is what they work at.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off();
int __lsan_is_turned_off() { return is_child ? 1 : 0; }

TEST(Fork, AChildOfAProcessThatUsesTheDeviceHasNone) {
  OwnStream stream;
  DeviceInts memory(1);
  Gate gate(stream);
  gate.wait_for_streams();
  EXPECT_EQ(status_of_child([&] {
              int count = 0;
              void* pointer = nullptr;
              if (cudaMalloc(&pointer, 1) != cudaErrorInitializationError) return 1;
              if (cudaGetDeviceCount(&count) != cudaErrorInitializationError) return 2;
              if (cudaStreamSynchronize(stream) != cudaErrorInitializationError) return 3;
              if (cudaMemcpy(&count, memory.get(), 4, cudaMemcpyDefault) != cudaErrorInitializationError)
                return 4;
              const std::string text = cudaGetErrorString(cudaErrorInitializationError);
              return text.find("spawn") == std::string::npos ? 5 : 0;
            }),
            0);
  gate.open();
  ok(cudaStreamSynchronize(stream));  // the parent goes on
}

TEST(Fork, AChildExitsLikeAnyProcess) {
  OwnStream stream;
  Gate gate(stream);
  gate.wait_for_streams();
  EXPECT_EQ(status_of_child([] {
              std::exit(7);
              return 0;
            }),
            7);
}

TEST(Fork, AChildMayImportLibrariesWithKernels) {
  OwnStream stream;
  Gate gate(stream);
  gate.wait_for_streams();
  EXPECT_EQ(status_of_child([] {
              kernels::register_all();
              return 5;
            }),
            5);
}

namespace {

void fork_first() {  // nothing has used the device yet: the child may
  std::_Exit(status_of_child([] {
    void* pointer = nullptr;
    return cudaMalloc(&pointer, 1) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess ? 9 : 1;
  }));
}

void exit_with_hung_streams() {
  cudaStream_t other = nullptr;
  ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  ok(softgpu::enqueue(nullptr, [] {
    for (;;) pause();
    return cudaSuccess;
  }));
  ok(cudaMemsetAsync(nullptr, 0, 0, nullptr));
  ok(cudaLaunchHostFunc(nullptr, [](void*) {}, nullptr));
  std::thread([] { cudaDeviceSynchronize(); }).detach();
  std::exit(11);
}

// Destroyed at exit: gives a thread that does not stay where it is the time to show it.
struct SlowExit {
  ~SlowExit() {
    if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  bool slow = false;
} slow_exit;

bool sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  const std::string stat(std::istreambuf_iterator<char>(file), {});
  const size_t name_ends = stat.rfind(") ");
  return name_ends != std::string::npos && stat[name_ends + 2] == 'S';
}

void exit_while_a_thread_waits() {
  ok(softgpu::enqueue(nullptr, [] {
    for (;;) pause();
    return cudaSuccess;
  }));
  slow_exit.slow = true;
  std::atomic<pid_t> waiting{0};
  std::thread([&waiting] {
    waiting = gettid();
    cudaDeviceSynchronize();
    std::_Exit(1);  // the thread goes on, into libraries that are being destroyed
  }).detach();
  while (waiting == 0) std::this_thread::yield();
  while (!sleeps(waiting)) std::this_thread::yield();
  std::exit(15);
}

void exit_with_a_kernel_that_never_ends() {
  std::atomic<bool> running{false};
  ok(cudaLaunchHostFunc(
      nullptr,
      [](void* argument) {
        *static_cast<std::atomic<bool>*>(argument) = true;
        for (;;) pause();
      },
      &running));
  while (!running) std::this_thread::yield();
  std::exit(12);
}

// Destroyed at exit, after the driver has gone: as in a library whose objects hold streams and memory.
struct LateCaller {
  ~LateCaller() {
    if (!stream) return;
    const bool refused = cudaStreamSynchronize(stream) == cudaErrorCudartUnloading &&
                         cudaStreamDestroy(stream) == cudaErrorCudartUnloading &&
                         cudaFree(nullptr) == cudaErrorCudartUnloading;
    std::fprintf(stderr, "%s, %s\n", refused ? "refused" : "not refused",
                 cudaGetErrorString(cudaGetLastError()));
  }
  cudaStream_t stream = nullptr;
} late_caller;

void call_late() {
  ok(cudaStreamCreate(&late_caller.stream));
  ok(softgpu::enqueue(late_caller.stream, [] {
    for (;;) pause();
    return cudaSuccess;
  }));
  std::exit(13);
}

// What a kernel still uses when exit begins; destroyed at exit.
struct KernelData {
  ~KernelData() { alive = false; }
  std::atomic<bool> alive{true};
} kernel_data;

void exit_during_a_kernel() {
  static std::atomic<bool> running{false};
  ok(cudaLaunchHostFunc(
      nullptr,
      [](void*) {
        running = true;
        for (int i = 0; i < 100; ++i) {
          if (!kernel_data.alive) std::_Exit(1);
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      },
      nullptr));
  while (!running) std::this_thread::yield();
  std::exit(14);
}

}  // namespace

TEST(Fork, AChildOfAProcessThatHasNotUsedTheDeviceMayUseIt) {
  EXPECT_EXIT(fork_first(), testing::ExitedWithCode(9), "");
}

TEST(Exit, DoesNotWaitForAHungStream) {
  EXPECT_EXIT(exit_with_hung_streams(), testing::ExitedWithCode(11), "");
}

TEST(Exit, DoesNotWaitForEverForAKernel) {
  EXPECT_EXIT(exit_with_a_kernel_that_never_ends(), testing::ExitedWithCode(12), "");
}

TEST(Exit, LeavesThreadsThatWaitWhereTheyAre) {
  EXPECT_EXIT(exit_while_a_thread_waits(), testing::ExitedWithCode(15), "");
}

TEST(Exit, LateCallersAreToldThatTheDriverIsGone) {
  EXPECT_EXIT(call_late(), testing::ExitedWithCode(13), "^refused, driver shutting down");
}

TEST(Exit, LetsARunningKernelFinishBeforeItsLibraryIsDestroyed) {
  EXPECT_EXIT(exit_during_a_kernel(), testing::ExitedWithCode(14), "");
}
