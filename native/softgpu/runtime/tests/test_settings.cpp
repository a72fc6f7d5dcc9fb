#include <gtest/gtest.h>

#include <cstdlib>

#include "softgpu/runtime/error.h"
#include "softgpu/runtime/settings.h"

using softgpu::visible_devices;
using Devices = std::vector<int>;

TEST(VisibleDevices, FollowCudasRules) {
  EXPECT_EQ(visible_devices(4, "0,1,2,3"), (Devices{0, 1, 2, 3}));
  EXPECT_EQ(visible_devices(4, "3,1"), (Devices{3, 1}));
  EXPECT_EQ(visible_devices(4, ""), Devices{});
  EXPECT_EQ(visible_devices(4, "-1"), Devices{});
  EXPECT_EQ(visible_devices(4, "1,7,2"), Devices{1});
  EXPECT_EQ(visible_devices(4, "1,two,2"), Devices{1});
  EXPECT_EQ(visible_devices(4, "1,1"), Devices{});
}

namespace {

// What a fresh process says to these settings.
void count_devices_with(const char* variable, const char* value) {
  setenv(variable, value, 1);
  int count = -1;
  const cudaError_t error = cudaGetDeviceCount(&count);
  std::fprintf(stderr, "%s, %d devices\n", cudaGetErrorName(error), count);
  std::_Exit(0);
}

}  // namespace

TEST(MachineSettings, MoreMemoryThanThereAreAddressesIsASentence) {
  setenv("SOFTGPU_MEMORY", "1099511627776", 1);  // 1 TiB, for each of 64 devices
  EXPECT_EXIT(count_devices_with("SOFTGPU_DEVICES", "64"), testing::ExitedWithCode(0),
              "can't reserve [0-9]+ MiB of addresses for the devices; raise the "
              "limit(.|\n)*cudaErrorMemoryAllocation, 0");
  setenv("SOFTGPU_MEMORY", "67108864", 1);
}

TEST(MachineSettings, NonsenseIsASentenceAndNoDevice) {
  const auto done = testing::ExitedWithCode(0);
  EXPECT_EXIT(
      count_devices_with("SOFTGPU_DEVICES", "many"), done,
      "SOFTGPU_DEVICES is 'many'; set it to a whole number from 0 to 64(.|\n)*cudaErrorNoDevice, 0 devices");
  EXPECT_EXIT(count_devices_with("SOFTGPU_DEVICES", "-1"), done, "cudaErrorNoDevice");
  EXPECT_EXIT(count_devices_with("SOFTGPU_MEMORY", "16GB"), done, "SOFTGPU_MEMORY is '16GB'");
  EXPECT_EXIT(count_devices_with("SOFTGPU_DEVICES", "0"), done, "cudaErrorNoDevice, 0 devices");
  EXPECT_EXIT(count_devices_with("SOFTGPU_DEVICES", "5"), done, "cudaSuccess, 5 devices");
  EXPECT_EXIT(count_devices_with("CUDA_VISIBLE_DEVICES", "1"), done, "cudaSuccess, 1 devices");
}
