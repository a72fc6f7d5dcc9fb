// The calls of one process, as a program makes them.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>

#include "proxy/client/jitckpt_proxy.h"
#include "proxy/tests/support.h"

namespace {

TEST(Calls, KernelsAndCopiesKeepTheirOrder) {
  const DeviceInts numbers(4, 7);
  const OwnStream stream;
  ok(cudaDeviceSynchronize());
  for (int launch = 0; launch < 1000; ++launch) launch_add(numbers.get(), 1, stream);
  EXPECT_EQ(numbers.read(stream), (std::vector<int>{1007, 7, 7, 7}));
  ok(cudaMemsetAsync(numbers.get(), 0, 8, stream));
  EXPECT_EQ(numbers.read(stream), (std::vector<int>{0, 0, 7, 7}));
}

TEST(Calls, ManyThreadsCallAtOnce) {
  constexpr int threads = 8, rounds = 100;
  const DeviceInts sums(threads);
  ok(cudaDeviceSynchronize());
  std::vector<std::thread> callers;
  for (int thread = 0; thread < threads; ++thread) {
    callers.emplace_back([&, thread] {
      const OwnStream stream;
      for (int round = 1; round <= rounds; ++round) {
        launch_add(sums.get() + thread, round, stream);
        if (round % 10 == 0) ok(cudaStreamSynchronize(stream));
      }
      ok(cudaStreamSynchronize(stream));
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(sums.read(), std::vector<int>(threads, rounds * (rounds + 1) / 2));
}

// What torch does for each launch or collective waits for no answer: a server that stands still has it later.
TEST(Calls, CountingDevicesAndMakingEventsNeedNoAnswer) {
  int before = 0, after = 0;
  ok(cudaGetDeviceCount(&before));
  const DeviceInts number(1);
  ok(cudaDeviceSynchronize());
  const pid_t server = find_server();
  std::mutex mutex;
  std::condition_variable changed;
  bool made = false;
  ASSERT_EQ(kill(server, SIGSTOP), 0);
  std::thread last_resort([&] {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return made; }));
    kill(server, SIGCONT);
  });
  cudaEvent_t event = nullptr;
  ok(cudaGetDeviceCount(&after));
  ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  ok(cudaEventRecord(event, nullptr));
  ok(cudaEventDestroy(event));
  {
    std::lock_guard lock(mutex);
    made = true;
  }
  changed.notify_one();
  last_resort.join();
  EXPECT_EQ(after, before);
  launch_add(number.get(), 1);
  EXPECT_EQ(number.read(), std::vector<int>{1});
}

TEST(Calls, AThreadThatWaitsForTheDeviceHoldsUpNoOther) {
  const OwnStream stream, other;
  cudaEvent_t event = nullptr;
  ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  const DeviceInts number(1);
  ok(cudaDeviceSynchronize());
  std::thread waiting;
  {
    Gate gate(stream);
    ok(cudaEventRecord(event, stream));
    waiting = std::thread([&] { ok(cudaStreamSynchronize(stream)); });
    for (int query = 0; query < 20; ++query) {
      EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
      EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
      launch_add(number.get(), 1, other);
      EXPECT_EQ(number.read(other), std::vector<int>{query + 1});
    }
    gate.open();
    waiting.join();
  }
  ok(cudaEventQuery(event));
  ok(cudaEventDestroy(event));
}

TEST(Calls, CopiesOfEveryLengthArriveWhole) {
  std::mt19937 random(5);
  for (const std::size_t bytes : {1ul, 100ul, 65535ul, 65536ul, 65537ul, 262144ul, 1000003ul}) {
    std::vector<char> sent(bytes), received(bytes), middle(bytes);
    for (char& byte : sent) byte = static_cast<char>(random());
    void *device = nullptr, *pinned = nullptr;
    ok(cudaMalloc(&device, bytes));
    ok(cudaHostAlloc(&pinned, bytes, cudaHostAllocDefault));
    ok(cudaMemcpy(device, sent.data(), bytes, cudaMemcpyHostToDevice));
    ok(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, nullptr));
    ok(cudaStreamSynchronize(nullptr));
    EXPECT_EQ(std::memcmp(pinned, sent.data(), bytes), 0);
    ok(cudaMemset(device, 0, bytes));
    ok(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyDefault, nullptr));
    ok(cudaMemcpy(received.data(), device, bytes, cudaMemcpyDefault));
    EXPECT_EQ(received, sent);
    ok(cudaMemcpy(middle.data(), received.data(), bytes, cudaMemcpyHostToHost));
    EXPECT_EQ(middle, sent);
    ok(cudaFreeHost(pinned));
    ok(cudaFree(device));
  }
}

// What is in it then is there for others who have the file.
TEST(Calls, AFileOfTheProgramsCanBePinnedMemory) {
  const OwnStream stream;
  const int file = memfd_create("shared", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(file, 4 * 4096), 0);
  void* pinned = nullptr;
  ok(static_cast<cudaError_t>(jitckpt_proxy_share(file, 4096, 2 * 4096, &pinned)));
  ASSERT_NE(pinned, nullptr);
  uint64_t* const words = static_cast<uint64_t*>(pinned);
  const DeviceInts numbers(4, 7);
  {
    Gate gate(stream);
    ok(static_cast<cudaError_t>(jitckpt_proxy_write_word(words, 41, stream)));
    ok(cudaMemcpyAsync(words + 2, numbers.get(), 16, cudaMemcpyDeviceToHost, stream));
    ok(static_cast<cudaError_t>(jitckpt_proxy_write_word(words + 1, 43, stream)));
    EXPECT_EQ(numbers.read(), std::vector<int>(4, 7));  // the server has come so far
    EXPECT_EQ(words[0], 0u);
    gate.open();
  }
  ok(cudaStreamSynchronize(stream));
  struct Content {
    uint64_t begun, ended;
    int numbers[4];
  } content{};
  ASSERT_EQ(pread(file, &content, sizeof content, 4096), static_cast<ssize_t>(sizeof content));
  EXPECT_EQ(content.begun, 41u);
  EXPECT_EQ(content.ended, 43u);
  for (const int number : content.numbers) EXPECT_EQ(number, 7);
  close(file);

  EXPECT_EQ(jitckpt_proxy_share(-1, 0, 4096, &pinned), cudaErrorMemoryAllocation);
  EXPECT_EQ(pinned, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
}

TEST(Calls, PointersAreWhatTheyAre) {
  const DeviceInts device(1);
  void* pinned = nullptr;
  ok(cudaMallocHost(&pinned, 5000));
  int here = 0;
  cudaPointerAttributes attributes;
  ok(cudaPointerGetAttributes(&attributes, device.get()));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  ok(cudaPointerGetAttributes(&attributes, static_cast<char*>(pinned) + 4999));
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  ok(cudaPointerGetAttributes(&attributes, &here));
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
  ok(cudaFreeHost(pinned));
  EXPECT_EQ(cudaFreeHost(pinned), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(Calls, EachThreadChoosesItsDevice) {
  ok(cudaSetDevice(1));
  int device = -1, in_thread = -1;
  std::thread([&] { ok(cudaGetDevice(&in_thread)); }).join();
  ok(cudaGetDevice(&device));
  EXPECT_EQ(device, 1);
  EXPECT_EQ(in_thread, 0);
  const DeviceInts on_second(1, 3);
  cudaPointerAttributes attributes;
  ok(cudaPointerGetAttributes(&attributes, on_second.get()));
  EXPECT_EQ(attributes.device, 1);
  char text[32];
  ok(cudaDeviceGetPCIBusId(text, sizeof text, 1));
  EXPECT_STREQ(text, "0000:02:00.0");
  ok(cudaSetDevice(0));
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

TEST(Calls, AttributesOfALaunchArrive) {
  const DeviceInts number(1);
  int* to = number.get();
  int amount = 5;
  void* arguments[] = {&to, &amount};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributePriority;
  cudaLaunchConfig_t configuration{dim3(1), dim3(1), 0, nullptr, &attribute, 1};
  ok(cudaLaunchKernelExC(&configuration, kernels::add(), arguments));
  ok(cudaLaunchCooperativeKernel(kernels::add(), dim3(1), dim3(1), arguments, 0, nullptr));
  EXPECT_EQ(number.read(), std::vector<int>{10});
}

TEST(Calls, AKernelThatNobodyRegisteredIsRefused) {
  EXPECT_EQ(cudaLaunchKernel(kernels::unregistered(), dim3(1), dim3(1), nullptr, 0, nullptr),
            cudaErrorInvalidDeviceFunction);
  EXPECT_STREQ(cudaGetErrorString(cudaErrorInvalidDeviceFunction), "no kernel is registered at this address");
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDeviceFunction);
}

TEST(Calls, WhatTheProxyDoesNotCarryIsRefusedByName) {
  testing::internal::CaptureStderr();
  void* memory = nullptr;
  EXPECT_EQ(cudaMallocManaged(&memory, 8, cudaMemAttachGlobal), cudaErrorNotSupported);
  EXPECT_NE(std::string(cudaGetErrorString(cudaErrorNotSupported)).find("carries no cudaMallocManaged"),
            std::string::npos);
  cudaGraphNode_t node = nullptr;
  EXPECT_EQ(cudaGraphAddEmptyNode(&node, nullptr, nullptr, 0), cudaErrorNotSupported);
  EXPECT_EQ(ncclCommInitAll(nullptr, 1, nullptr), ncclInvalidUsage);
  EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("ncclCommInitAll"), std::string::npos);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotSupported);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("a graph is made by capturing a stream"), std::string::npos);
}

TEST(Calls, LibrariesThatWouldOpenTheDeviceThemselvesAreRefusedByName) {
  for (const auto& [name, refusal, said] :
       {std::tuple{"cudnnCreate", 3000, "torch.backends.cudnn.enabled = False"},
        std::tuple{"cusparseCreate", 10, "carries no cuSPARSE"},
        std::tuple{"cusparseLtInit", 10, "carries no cuSPARSELt"},
        std::tuple{"cusolverDnCreate", 9, "carries no cuSOLVER"},
        std::tuple{"cufftCreate", 16, "carries no cuFFT"}}) {
    testing::internal::CaptureStderr();
    const auto create = reinterpret_cast<int (*)(void*)>(dlsym(RTLD_DEFAULT, name));
    ASSERT_NE(create, nullptr) << name;
    void* handle = nullptr;
    EXPECT_EQ(create(&handle), refusal);
    EXPECT_EQ(create(&handle), refusal);
    EXPECT_EQ(handle, nullptr);
    const std::string text = testing::internal::GetCapturedStderr();
    EXPECT_NE(text.find(said), std::string::npos) << text;
    EXPECT_EQ(std::ranges::count(text, '\n'), 1) << text;  // once
  }
}

TEST(Calls, AFailureThatNobodyWaitedForComesUpLater) {
  const OwnStream stream;
  const DeviceInts number(1);
  int* to = number.get();
  int amount = 1;
  void* arguments[] = {&to, &amount};
  ok(cudaLaunchKernel(kernels::add(), dim3(1), dim3(5000), arguments, 0, stream));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidConfiguration);
  EXPECT_NE(std::string(cudaGetErrorString(cudaErrorInvalidConfiguration)).find("launch:"),
            std::string::npos);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  // It was no failure of the device.
  launch_add(number.get(), 2, stream);
  EXPECT_EQ(number.read(stream), std::vector<int>{2});
}

TEST(Calls, HandlesThatEndedAreUnknown) {
  cudaEvent_t event = nullptr;
  ok(cudaEventCreate(&event));
  ok(cudaEventDestroy(event));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}

}  // namespace
