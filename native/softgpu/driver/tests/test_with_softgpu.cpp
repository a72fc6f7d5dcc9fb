// In a process that has softgpu's runtime (linked into this test, whose symbols the library sees).
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>

#include "softgpu/driver/tests/driver_library.h"

TEST(Driver, TellsOfTheDevices) {
  EXPECT_EQ(driver_call("cuInit", 0u), CUDA_SUCCESS);
  int count = 0, version = 0, major = 0;
  EXPECT_EQ(driver_call("cuDeviceGetCount", &count), CUDA_SUCCESS);
  EXPECT_EQ(count, 2);
  EXPECT_EQ(driver_call("cuDriverGetVersion", &version), CUDA_SUCCESS);
  EXPECT_EQ(version, CUDA_VERSION);
  CUdevice device = -1;
  EXPECT_EQ(driver_call("cuDeviceGet", &device, 1), CUDA_SUCCESS);
  EXPECT_EQ(device, 1);
  EXPECT_EQ(driver_call("cuDeviceGet", &device, 2), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(driver_call("cuDeviceGetAttribute", &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 1),
            CUDA_SUCCESS);
  EXPECT_EQ(major, 9);
  char name[32];
  EXPECT_EQ(driver_call("cuDeviceGetName", static_cast<char*>(name), 32, 1), CUDA_SUCCESS);
  EXPECT_STREQ(name, "SoftGPU");
  std::size_t bytes = 0;
  EXPECT_EQ(driver_call("cuDeviceTotalMem_v2", &bytes, 1), CUDA_SUCCESS);
  EXPECT_EQ(bytes, std::size_t{64} << 20);
}

TEST(Driver, KnowsWhichDevicesAreInUse) {
  unsigned flags = 7;
  int active = -1;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  ASSERT_EQ(cudaDeviceReset(), cudaSuccess);
  EXPECT_EQ(driver_call("cuDevicePrimaryCtxGetState", 1, &flags, &active), CUDA_SUCCESS);
  EXPECT_EQ(active, 0);
  EXPECT_EQ(flags, 0u);
  CUcontext context = nullptr;
  EXPECT_EQ(driver_call("cuCtxGetCurrent", &context), CUDA_SUCCESS);
  EXPECT_EQ(context, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(driver_call("cuDevicePrimaryCtxGetState", 1, &flags, &active), CUDA_SUCCESS);
  EXPECT_EQ(active, 1);
  EXPECT_EQ(driver_call("cuCtxGetCurrent", &context), CUDA_SUCCESS);
  CUcontext retained = nullptr;
  EXPECT_EQ(driver_call("cuDevicePrimaryCtxRetain", &retained, 1), CUDA_SUCCESS);
  EXPECT_EQ(context, retained);
  EXPECT_EQ(driver_call("cuDevicePrimaryCtxRelease_v2", 1), CUDA_SUCCESS);

  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(driver_call("cuCtxSetCurrent", context), CUDA_SUCCESS);
  CUdevice device = -1;
  EXPECT_EQ(driver_call("cuCtxGetDevice", &device), CUDA_SUCCESS);
  EXPECT_EQ(device, 1);
  EXPECT_EQ(driver_call("cuCtxSetCurrent", CUcontext{nullptr}), CUDA_ERROR_INVALID_CONTEXT);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

TEST(Driver, KnowsPointers) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 16), cudaSuccess);
  CUmemorytype type{};
  int device = -1, on_host = 0;
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  EXPECT_EQ(driver_call("cuPointerGetAttribute", &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address),
            CUDA_SUCCESS);
  EXPECT_EQ(type, CU_MEMORYTYPE_DEVICE);
  EXPECT_EQ(driver_call("cuPointerGetAttribute", &device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address),
            CUDA_SUCCESS);
  EXPECT_EQ(device, 0);
  EXPECT_EQ(driver_call("cuPointerGetAttribute", &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                        reinterpret_cast<CUdeviceptr>(&on_host)),
            CUDA_ERROR_INVALID_VALUE);
  std::size_t free = 0, total = 0;
  EXPECT_EQ(driver_call("cuMemGetInfo_v2", &free, &total), CUDA_SUCCESS);
  EXPECT_EQ(total - free, 4096u);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
}

TEST(Driver, RefusesByNameWhatItDoesNotHave) {
  EXPECT_EQ(driver_call("cuMemCreate"), CUDA_ERROR_NOT_SUPPORTED);
  const char *name = nullptr, *text = nullptr;
  EXPECT_EQ(driver_call("cuGetErrorName", CUDA_ERROR_NOT_SUPPORTED, &name), CUDA_SUCCESS);
  EXPECT_EQ(driver_call("cuGetErrorString", CUDA_ERROR_NOT_SUPPORTED, &text), CUDA_SUCCESS);
  EXPECT_STREQ(text, "operation not supported: softgpu has no cuMemCreate");
  EXPECT_EQ(driver_call("cuModuleLoad"), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(driver_call("cuGetErrorString", CUDA_ERROR_NOT_SUPPORTED, &text), CUDA_SUCCESS);
  EXPECT_STREQ(
      text,
      "operation not supported: softgpu has no cuModuleLoad and runs no kernels of torch.compile's or "
      "Triton's: train without, or with the backends aot_eager or cudagraphs");
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);  // the runtime's errors are its own
}

TEST(Driver, GivesItsFunctionsByName) {
  driver_library();
  const auto find = [](const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointVersionNotSufficent;
    EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result),
              cudaSuccess);
    EXPECT_EQ(result, function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound);
    return function;
  };
  EXPECT_EQ(find("cuDeviceGet"), dlsym(driver_library(), "cuDeviceGet"));
  EXPECT_EQ(find("cuMemGetInfo"), dlsym(driver_library(), "cuMemGetInfo_v2"));
  EXPECT_NE(find("cuMemCreate"), nullptr);  // refused when it is called
  EXPECT_EQ(find("cuNoSuchFunction"), nullptr);
}

int main(int argc, char** argv) {
  setenv("SOFTGPU_DEVICES", "2", 1);
  setenv("SOFTGPU_MEMORY", "67108864", 1);
  unsetenv("CUDA_VISIBLE_DEVICES");
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
