#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "softgpu/runtime/tests/support.h"

namespace {

constexpr std::size_t mebibyte = std::size_t{1} << 20;

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  ok(cudaMemGetInfo(&free, &total));
  return free;
}

cudaPointerAttributes attributes_of(const void* pointer) {
  cudaPointerAttributes attributes;
  ok(cudaPointerGetAttributes(&attributes, pointer));
  return attributes;
}

}  // namespace

TEST(DeviceMemory, IsNotForTheHost) {
  DeviceInts memory(1);
  EXPECT_DEATH(*memory.get() = 1, "");
  EXPECT_DEATH(std::exit(*static_cast<volatile int*>(memory.get())), "");
}

TEST(DeviceMemory, HasAShadowThatKernelsUse) {
  DeviceInts memory(3);
  memory.write({1, 2, 3});
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(static_cast<int*>(softgpu_shadow(memory.get()))[2], 3);
  EXPECT_EQ(softgpu_shadow(memory.get() + 2), static_cast<int*>(softgpu_shadow(memory.get())) + 2);
  int on_host = 0;
  EXPECT_EQ(softgpu_shadow(&on_host), &on_host);
  EXPECT_EQ(softgpu_shadow(nullptr), nullptr);
}

TEST(DeviceMemory, IsCounted) {
  std::size_t free = 0, total = 0;
  ok(cudaMemGetInfo(&free, &total));
  EXPECT_EQ(total, 64 * mebibyte);
  void* pointer = nullptr;
  ok(cudaMalloc(&pointer, 10 * mebibyte));
  EXPECT_EQ(free_bytes(), free - 10 * mebibyte);
  ok(cudaSetDevice(1));
  EXPECT_EQ(free_bytes(), total);
  ok(cudaSetDevice(0));
  ok(cudaFree(pointer));
  EXPECT_EQ(free_bytes(), free);
}

TEST(DeviceMemory, RunsOut) {
  void *most = nullptr, *rest = nullptr;
  ok(cudaMalloc(&most, 60 * mebibyte));
  EXPECT_EQ(cudaMalloc(&rest, 10 * mebibyte), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  ok(cudaMalloc(&rest, mebibyte));  // no sticky error
  ok(cudaFree(rest));
  ok(cudaFree(most));
  ok(cudaMalloc(&most, 64 * mebibyte));
  ok(cudaFree(most));
}

TEST(DeviceMemory, ScatteredBlocksDoNotStandInTheWayOfALargeOne) {
  std::vector<void*> blocks(64);
  for (auto& block : blocks) ok(cudaMalloc(&block, mebibyte));
  for (std::size_t i = 0; i < blocks.size(); i += 2) ok(cudaFree(blocks[i]));
  void* large = nullptr;
  ok(cudaMalloc(&large, 32 * mebibyte));
  ok(cudaFree(large));
  for (std::size_t i = 1; i < blocks.size(); i += 2) ok(cudaFree(blocks[i]));
}

TEST(DeviceMemory, GivesItsPagesBack) {
  void* pointer = nullptr;
  ok(cudaMalloc(&pointer, mebibyte));
  ok(cudaMemset(pointer, 1, mebibyte));
  ok(cudaDeviceSynchronize());
  std::vector<unsigned char> resident(mebibyte / 4096);
  ASSERT_EQ(mincore(softgpu_shadow(pointer), mebibyte, resident.data()), 0);
  EXPECT_EQ(resident[0] & 1, 1);
  ok(cudaFree(pointer));
  ASSERT_EQ(mincore(softgpu_shadow(pointer), mebibyte, resident.data()), 0);
  EXPECT_EQ(resident[0] & 1, 0);
}

TEST(DeviceMemory, FreeingWaitsForTheDevice) {
  OwnStream stream(cudaStreamNonBlocking);
  void* pointer = nullptr;
  ok(cudaMalloc(&pointer, mebibyte));
  std::atomic<bool> finished{false};
  Gate gate(stream);
  ok(cudaLaunchHostFunc(
      stream, [](void* argument) { *static_cast<std::atomic<bool>*>(argument) = true; }, &finished));
  std::thread opener([&] { gate.open(); });
  ok(cudaFree(pointer));
  EXPECT_TRUE(finished);
  opener.join();
}

TEST(DeviceMemory, OfNoBytesIsNull) {
  void* pointer = &pointer;
  ok(cudaMalloc(&pointer, 0));
  EXPECT_EQ(pointer, nullptr);
  ok(cudaFree(nullptr));
}

TEST(DeviceMemory, OnlyWholeAllocationsAreFreed) {
  DeviceInts memory(4096);
  int on_host = 0;
  EXPECT_EQ(cudaFree(memory.get() + 1024), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(&on_host), cudaErrorInvalidValue);
  void* pointer = nullptr;
  ok(cudaMalloc(&pointer, 1));
  ok(cudaFree(pointer));
  EXPECT_EQ(cudaFree(pointer), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(Pointers, SayWhatTheyAre) {
  ok(cudaSetDevice(1));
  DeviceInts memory(4);
  ok(cudaSetDevice(0));
  EXPECT_EQ(attributes_of(memory.get() + 1).type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes_of(memory.get() + 1).device, 1);
  EXPECT_EQ(attributes_of(memory.get() + 1).devicePointer, memory.get() + 1);
  EXPECT_EQ(attributes_of(memory.get() + 1).hostPointer, nullptr);

  int* pinned = nullptr;
  ok(cudaMallocHost(reinterpret_cast<void**>(&pinned), 100 * sizeof(int)));
  EXPECT_EQ(attributes_of(pinned + 99).type, cudaMemoryTypeHost);
  EXPECT_EQ(attributes_of(pinned + 99).hostPointer, pinned + 99);
  EXPECT_EQ(attributes_of(pinned + 99).devicePointer, pinned + 99);
  EXPECT_EQ(attributes_of(pinned + 100).type, cudaMemoryTypeUnregistered);
  ok(cudaFreeHost(pinned));
  EXPECT_EQ(attributes_of(pinned).type, cudaMemoryTypeUnregistered);

  int on_host[4];
  EXPECT_EQ(attributes_of(on_host).type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(attributes_of(on_host).devicePointer, nullptr);
  ok(cudaHostRegister(on_host, sizeof on_host, cudaHostRegisterDefault));
  EXPECT_EQ(attributes_of(on_host + 3).type, cudaMemoryTypeHost);
  EXPECT_EQ(attributes_of(on_host + 4).type, cudaMemoryTypeUnregistered);
  ok(cudaHostUnregister(on_host));
  EXPECT_EQ(attributes_of(on_host).type, cudaMemoryTypeUnregistered);
}

TEST(HostMemory, IsRegisteredOnce) {
  std::vector<char> block(4096);
  ok(cudaHostRegister(block.data() + 1000, 1000, cudaHostRegisterDefault));
  for (std::size_t offset : {1000, 1999, 500}) {
    EXPECT_EQ(cudaHostRegister(block.data() + offset, 1000, cudaHostRegisterDefault),
              cudaErrorHostMemoryAlreadyRegistered);
  }
  ok(cudaHostRegister(block.data(), 1000, cudaHostRegisterDefault));
  ok(cudaHostUnregister(block.data()));
  EXPECT_EQ(cudaHostUnregister(block.data() + 1001), cudaErrorHostMemoryNotRegistered);
  ok(cudaHostUnregister(block.data() + 1000));
  EXPECT_EQ(cudaHostUnregister(block.data() + 1000), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaHostRegister(nullptr, 10, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(HostMemory, IsReadAndWrittenByBothSides) {
  int* pinned = nullptr;
  ok(cudaHostAlloc(reinterpret_cast<void**>(&pinned), sizeof(int), cudaHostAllocPortable));
  *pinned = 5;
  void* device_pointer = nullptr;
  ok(cudaHostGetDevicePointer(&device_pointer, pinned, 0));
  int amount = 2;
  void* arguments[] = {&device_pointer, &amount};
  ok(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 0, nullptr));
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(*pinned, 7);
  unsigned flags = 0;
  ok(cudaHostGetFlags(&flags, pinned));
  EXPECT_EQ(flags, unsigned{cudaHostAllocPortable});
  ok(cudaFreeHost(pinned));
  EXPECT_EQ(cudaFreeHost(pinned), cudaErrorInvalidValue);
  int on_host = 0;
  EXPECT_EQ(cudaHostGetDevicePointer(&device_pointer, &on_host, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(Devices, ResetFreesEverything) {
  void *memory = nullptr, *pinned = nullptr;
  cudaStream_t stream = nullptr;
  ok(cudaMalloc(&memory, 100));
  ok(cudaMallocHost(&pinned, 100));
  ok(cudaStreamCreate(&stream));
  ok(cudaDeviceReset());
  EXPECT_EQ(free_bytes(), 64 * mebibyte);
  EXPECT_EQ(attributes_of(pinned).type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}
