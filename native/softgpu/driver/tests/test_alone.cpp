// In a process without softgpu's runtime.
#include <cuda.h>

#include "softgpu/driver/tests/driver_library.h"

TEST(DriverAlone, HasNoDevice) {
  int count = -1, active = -1;
  unsigned flags = 0;
  CUdevice device = -1;
  EXPECT_EQ(driver_call("cuInit", 0u), CUDA_ERROR_NO_DEVICE);
  EXPECT_EQ(driver_call("cuDeviceGetCount", &count), CUDA_ERROR_NO_DEVICE);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(driver_call("cuDeviceGet", &device, 0), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(driver_call("cuDevicePrimaryCtxGetState", 0, &flags, &active), CUDA_ERROR_INVALID_DEVICE);
  CUcontext context = nullptr;
  EXPECT_EQ(driver_call("cuCtxGetCurrent", &context), CUDA_ERROR_NOT_INITIALIZED);
}
