#include <cstdlib>
#include <string>
#include <thread>

#include "softgpu/runtime/tests/support.h"

using Numbers = std::vector<int>;

extern "C" {
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                    size_t shared_bytes, cudaStream_t stream);
cudaError_t cudaLaunchKernel_ptsz(const void* function, dim3 grid, dim3 block, void** arguments,
                                  size_t shared_bytes, cudaStream_t stream);
cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t* configuration, const void* function,
                                     void** arguments);
}

TEST(Kernels, RunByEveryWayToLaunchThem) {
  DeviceInts counter(1);
  counter.write({0});
  int* to = counter.get();
  int amount = 1;
  void* arguments[] = {&to, &amount};
  cudaKernel_t kernel = nullptr;
  ok(__cudaGetKernel(&kernel, &kernels::add));
  cudaLaunchConfig_t configuration{};
  configuration.gridDim = configuration.blockDim = dim3(1, 1, 1);

  ok(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 0, nullptr));
  EXPECT_EQ(counter.read(), Numbers{1});
  ok(__cudaLaunchKernel(kernel, 1, 1, arguments, 0, nullptr));
  EXPECT_EQ(counter.read(), Numbers{2});
  ok(cudaLaunchKernelExC(&configuration, &kernels::add, arguments));
  EXPECT_EQ(counter.read(), Numbers{3});
  ok(cudaLaunchKernel_ptsz(&kernels::add, 1, 1, arguments, 0, nullptr));
  EXPECT_EQ(counter.read(), Numbers{4});
  ok(__cudaLaunchKernel_ptsz(kernel, 1, 1, arguments, 0, nullptr));
  EXPECT_EQ(counter.read(), Numbers{5});
  ok(cudaLaunchKernelExC_ptsz(&configuration, &kernels::add, arguments));
  EXPECT_EQ(counter.read(), Numbers{6});
  ok(cudaLaunchCooperativeKernel(&kernels::add, 1, 1, arguments, 0, nullptr));
  EXPECT_EQ(counter.read(), Numbers{7});
  ok(cudaLaunchKernel(kernel, 1, 1, arguments, 0, nullptr));  // a handle where a function is asked for
  EXPECT_EQ(counter.read(), Numbers{8});
}

TEST(Kernels, TheTwinsLaunchOnTheThreadsOwnStream) {
  DeviceInts counter(1);
  counter.write({0});
  Gate gate(cudaStreamPerThread);
  int* to = counter.get();
  int amount = 1;
  void* arguments[] = {&to, &amount};
  std::thread([&] {
    ok(cudaLaunchKernel_ptsz(&kernels::add, 1, 1, arguments, 0, nullptr));
    ok(cudaStreamSynchronize(cudaStreamPerThread));
  }).join();
  ok(cudaLaunchKernel_ptsz(&kernels::add, 1, 1, arguments, 0, nullptr));
  EXPECT_EQ(*static_cast<int*>(softgpu_shadow(to)), 1);
}

TEST(Kernels, GetTheArgumentsOfTheTimeOfTheLaunch) {
  DeviceInts counter(1);
  counter.write({0});
  int* to = counter.get();
  int amount = 3;
  void* arguments[] = {&to, &amount};
  {
    OwnStream stream;
    Gate gate(stream);
    ok(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 0, stream));
    amount = 100;
    to = nullptr;
  }
  EXPECT_EQ(counter.read(), Numbers{3});
}

TEST(Kernels, CarryTheirCallConfiguration) {
  OwnStream stream;
  EXPECT_EQ(__cudaPushCallConfiguration(dim3(2, 3, 4), dim3(5, 6, 7), 8, stream), 0u);
  EXPECT_EQ(__cudaPushCallConfiguration(1, 1, 0, nullptr), 0u);
  dim3 grid, block;
  std::size_t shared_bytes = 99;
  cudaStream_t popped = stream;
  ok(__cudaPopCallConfiguration(&grid, &block, &shared_bytes, &popped));
  EXPECT_EQ(grid.x, 1u);
  EXPECT_EQ(popped, nullptr);
  ok(__cudaPopCallConfiguration(&grid, &block, &shared_bytes, &popped));
  EXPECT_EQ(grid.z, 4u);
  EXPECT_EQ(block.y, 6u);
  EXPECT_EQ(shared_bytes, 8u);
  EXPECT_EQ(popped, stream);
  EXPECT_EQ(__cudaPopCallConfiguration(&grid, &block, &shared_bytes, &popped), cudaErrorMissingConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMissingConfiguration);
}

TEST(Kernels, OfNvidiaAreRefusedByName) {
  EXPECT_EQ(cudaLaunchKernel(&kernels::nvidia, 1, 1, nullptr, 0, nullptr), cudaErrorNotSupported);
  EXPECT_EQ(std::string(cudaGetErrorString(cudaErrorNotSupported)),
            "operation not supported: softgpu can't run NVIDIA's kernel at::native::fill(float*, int)");
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotSupported);
  ok(cudaDeviceSynchronize());  // no sticky error
}

TEST(Kernels, MustBeRegistered) {
  cudaKernel_t kernel = nullptr;
  EXPECT_EQ(__cudaGetKernel(&kernel, &kernels::missing), cudaErrorInvalidDeviceFunction);
  EXPECT_EQ(cudaLaunchKernel(&kernels::missing, 1, 1, nullptr, 0, nullptr), cudaErrorInvalidDeviceFunction);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDeviceFunction);
}

TEST(Kernels, AreGoneWithTheirModule) {
  static const softgpu_kernel_t code[] = {{"nothing", [](void**, softgpu_launch_t*) {}, nullptr, 0}};
  static const softgpu_module_t module{SOFTGPU_MODULE_MAGIC, code, 1};
  softgpu_fatbin_wrapper_t wrapper{SOFTGPU_FATBIN_WRAPPER_MAGIC, 1, &module, nullptr};
  char stub = 0;
  void** handle = __cudaRegisterFatBinary(&wrapper);
  __cudaRegisterFunction(handle, &stub, nullptr, "nothing", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  __cudaRegisterFatBinaryEnd(handle);
  ok(cudaLaunchKernel(&stub, 1, 1, nullptr, 0, nullptr));
  ok(cudaDeviceSynchronize());
  __cudaUnregisterFatBinary(handle);
  EXPECT_EQ(cudaLaunchKernel(&stub, 1, 1, nullptr, 0, nullptr), cudaErrorInvalidDeviceFunction);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDeviceFunction);
}

TEST(Kernels, ImpossibleLaunchesAreRefused) {
  int* to = nullptr;
  int amount = 0;
  void* arguments[] = {&to, &amount};
  EXPECT_EQ(cudaLaunchKernel(&kernels::add, dim3(0), 1, arguments, 0, nullptr),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaLaunchKernel(&kernels::add, 1, dim3(1025), arguments, 0, nullptr),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaLaunchKernel(&kernels::add, 1, dim3(32, 33), arguments, 0, nullptr),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaLaunchKernel(&kernels::add, dim3(1, 65536), 1, arguments, 0, nullptr),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 1 << 20, nullptr), cudaErrorInvalidValue);
  ok(cudaSetDevice(1));
  OwnStream other;
  ok(cudaSetDevice(0));
  EXPECT_EQ(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 0, other), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}

TEST(Kernels, CanBeAskedAbout) {
  std::size_t offset = 0, size = 0;
  ok(cudaFuncGetParamInfo(&kernels::add, 1, &offset, &size));
  EXPECT_EQ(offset, 8u);
  EXPECT_EQ(size, 4u);
  EXPECT_EQ(cudaFuncGetParamInfo(&kernels::add, 2, &offset, &size), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncGetParamInfo(&kernels::nvidia, 0, &offset, &size), cudaErrorNotSupported);
  const char* name = nullptr;
  ok(cudaFuncGetName(&name, &kernels::add));
  EXPECT_STREQ(name, "add");
  cudaFuncAttributes attributes;
  ok(cudaFuncGetAttributes(&attributes, &kernels::nvidia));
  EXPECT_EQ(attributes.maxThreadsPerBlock, 1024);
  EXPECT_EQ(attributes.binaryVersion, 90);
  ok(cudaFuncSetAttribute(&kernels::add, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 16));
  EXPECT_EQ(cudaFuncSetAttribute(&kernels::missing, cudaFuncAttributeMaxDynamicSharedMemorySize, 0),
            cudaErrorInvalidDeviceFunction);
  int blocks = 0;
  ok(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, &kernels::add, 256, 0));
  EXPECT_EQ(blocks, 8);
  ok(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, &kernels::add, 32, 100 << 10, 0));
  EXPECT_EQ(blocks, 2);
  EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, &kernels::add, 0, 0),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

namespace {

void launch_with_trace() {
  setenv("SOFTGPU_LAUNCH_TRACE", "1", 1);
  DeviceInts counter(1);
  int* to = counter.get();
  int amount = 1;
  void* arguments[] = {&to, &amount};
  ok(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 0, nullptr));
  ok(cudaDeviceSynchronize());
  std::_Exit(0);
}

}  // namespace

TEST(Kernels, AreTracedOnDemand) {
  EXPECT_EXIT(launch_with_trace(), testing::ExitedWithCode(0), "^softgpu: launch add device=0 stream=0\n$");
}
