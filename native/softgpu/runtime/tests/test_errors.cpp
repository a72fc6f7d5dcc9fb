#include <dlfcn.h>

#include <string>
#include <thread>

#include "softgpu/runtime/tests/support.h"

extern "C" cudaError_t
cudaGraphInstantiateWithParams_ptsz();  // as a program sees it that was built for per-thread default streams

TEST(Errors, AreThoseOfTheRealRuntime) {
  void* real = dlopen(REAL_CUDART, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(real, nullptr) << dlerror();
  using Text = const char* (*)(cudaError_t);
  const auto real_name = reinterpret_cast<Text>(dlsym(real, "cudaGetErrorName"));
  const auto real_text = reinterpret_cast<Text>(dlsym(real, "cudaGetErrorString"));
  int version = 0;
  ok(reinterpret_cast<cudaError_t (*)(int*)>(dlsym(real, "cudaRuntimeGetVersion"))(&version));
  if (version != 13000) GTEST_SKIP() << "known_errors.inc has the errors of CUDA 13.0, this is " << version;
  std::thread([&] {  // one that has seen no failure, whose text would say more
    for (int number = 0; number < 10100; ++number) {
      const auto error = static_cast<cudaError_t>(number);
      EXPECT_STREQ(cudaGetErrorName(error), real_name(error)) << number;
      EXPECT_STREQ(cudaGetErrorString(error), real_text(error)) << number;
    }
  })
      .join();
}

TEST(Errors, TheLastOneStaysUntilItIsTaken) {
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
  ok(cudaSetDevice(0));
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(Errors, EveryThreadHasItsOwn) {
  EXPECT_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
  std::thread([] { EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess); }).join();
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

TEST(Errors, SayWhatHappenedAlsoAfterTheyWereTaken) {
  EXPECT_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(
      std::string(cudaGetErrorString(cudaErrorInvalidDevice)),
      "invalid device ordinal: device 99 of 2 devices: set SOFTGPU_DEVICES to as many as the program uses, "
      "and CUDA_VISIBLE_DEVICES to no fewer");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorIllegalAddress), "an illegal memory access was encountered");
}

TEST(Errors, ACallThatIsNotThereIsRefusedByName) {
  void* address = nullptr;
  EXPECT_EQ(cudaGetSymbolAddress(&address, &address), cudaErrorNotSupported);
  EXPECT_STREQ(cudaGetErrorString(cudaErrorNotSupported),
               "operation not supported: softgpu has no cudaGetSymbolAddress");
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotSupported);
}

TEST(Errors, GraphsThatAreMadeByHandAreRefusedWithAdvice) {
  cudaGraphNode_t node = nullptr;
  EXPECT_EQ(cudaGraphAddEmptyNode(&node, nullptr, nullptr, 0), cudaErrorNotSupported);
  EXPECT_STREQ(
      cudaGetErrorString(cudaErrorNotSupported),
      "operation not supported: softgpu has no cudaGraphAddEmptyNode: a graph is made by capturing a "
      "stream (torch.cuda.graph)");
  EXPECT_EQ(cudaGraphInstantiateWithParams_ptsz(), cudaErrorNotSupported);
  EXPECT_STREQ(
      cudaGetErrorString(cudaErrorNotSupported),
      "operation not supported: softgpu has no cudaGraphInstantiateWithParams_ptsz: a graph is made by "
      "capturing a stream (torch.cuda.graph)");
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotSupported);
}

TEST(Errors, MemoryPoolsAreRefusedWithAdvice) {
  const std::string advice =
      " and no memory pools: use torch's own allocator (no backend:cudaMallocAsync), or cudaMalloc";
  void* pointer = nullptr;
  cudaMemPool_t pool = nullptr;
  cudaMemPoolProps properties{};
  EXPECT_EQ(cudaMallocAsync(&pointer, 16, nullptr), cudaErrorNotSupported);
  EXPECT_EQ(cudaGetErrorString(cudaErrorNotSupported),
            "operation not supported: softgpu has no cudaMallocAsync" + advice);
  EXPECT_EQ(cudaFreeAsync(pointer, nullptr), cudaErrorNotSupported);
  EXPECT_EQ(cudaGetErrorString(cudaErrorNotSupported),
            "operation not supported: softgpu has no cudaFreeAsync" + advice);
  EXPECT_EQ(cudaMemPoolCreate(&pool, &properties), cudaErrorNotSupported);
  EXPECT_EQ(cudaGetErrorString(cudaErrorNotSupported),
            "operation not supported: softgpu has no cudaMemPoolCreate" + advice);
  int supported = -1;
  ok(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, 0));
  EXPECT_EQ(supported, 0);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotSupported);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // none of it is sticky
}

TEST(Errors, TheDriversFunctionsAreNotFound) {
  void* function = &function;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSuccess;
  ok(cudaGetDriverEntryPointByVersion("cuMemCreate", &function, 12000, cudaEnableDefault, &result));
  EXPECT_EQ(function, nullptr);
  EXPECT_EQ(result, cudaDriverEntryPointSymbolNotFound);
  EXPECT_EQ(cudaGetDriverEntryPointByVersion("cuMemCreate", &function, 12000, cudaEnableDefault, nullptr),
            cudaErrorSymbolNotFound);
  EXPECT_EQ(cudaGetLastError(), cudaErrorSymbolNotFound);
}
