#include <set>
#include <string>
#include <thread>

#include "softgpu/runtime/tests/support.h"

extern "C" int softgpu_device_active(int device);

TEST(Devices, AreCountedAndChosenByEachThread) {
  int count = 0, device = -1;
  ok(cudaGetDeviceCount(&count));
  EXPECT_EQ(count, 2);
  ok(cudaSetDevice(1));
  std::thread([] {
    int theirs = -1;
    ok(cudaGetDevice(&theirs));
    EXPECT_EQ(theirs, 0);
  }).join();
  ok(cudaGetDevice(&device));
  EXPECT_EQ(device, 1);
  ok(cudaSetDevice(0));
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

TEST(Devices, DescribeThemselves) {
  cudaDeviceProp properties;
  ok(cudaGetDeviceProperties(&properties, 1));
  EXPECT_STREQ(properties.name, "SoftGPU");
  EXPECT_EQ(properties.major, 9);
  EXPECT_EQ(properties.minor, 0);
  EXPECT_EQ(properties.totalGlobalMem, 64u << 20);
  EXPECT_EQ(properties.warpSize, 32);
  const std::pair<cudaDeviceAttr, int> expected[] = {
      {cudaDevAttrComputeCapabilityMajor, properties.major},
      {cudaDevAttrComputeCapabilityMinor, properties.minor},
      {cudaDevAttrMultiProcessorCount, properties.multiProcessorCount},
      {cudaDevAttrMaxThreadsPerBlock, properties.maxThreadsPerBlock},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(properties.sharedMemPerBlockOptin)},
      {cudaDevAttrPciBusId, properties.pciBusID},
      {cudaDevAttrUnifiedAddressing, properties.unifiedAddressing},
      {cudaDevAttrIpcEventSupport, properties.ipcEventSupported},
      {cudaDevAttrMemoryPoolsSupported, properties.memoryPoolsSupported},
      {cudaDevAttrStreamPrioritiesSupported, properties.streamPrioritiesSupported},
      {cudaDevAttrManagedMemory, properties.managedMemory}};
  for (const auto& [attribute, value] : expected) {
    int got = -1;
    ok(cudaDeviceGetAttribute(&got, attribute, 1));
    EXPECT_EQ(got, value) << attribute;
  }
  int value = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(9999), 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 9), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

TEST(Devices, HaveAPciBusIdEach) {
  std::set<std::string> ids;
  for (int device : {0, 1}) {
    char id[32];
    int found = -1;
    ok(cudaDeviceGetPCIBusId(id, sizeof id, device));
    ok(cudaDeviceGetByPCIBusId(&found, id));
    EXPECT_EQ(found, device);
    ids.insert(id);
  }
  EXPECT_EQ(ids, (std::set<std::string>{"0000:01:00.0", "0000:02:00.0"}));
  char small[8];
  int device = 0;
  EXPECT_EQ(cudaDeviceGetPCIBusId(small, sizeof small, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaDeviceGetByPCIBusId(&device, "0000:77:00.0"), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaDeviceGetByPCIBusId(&device, "nonsense"), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(Devices, AreEachOthersPeers) {
  int can = -1;
  ok(cudaDeviceCanAccessPeer(&can, 0, 1));
  EXPECT_EQ(can, 1);
  ok(cudaDeviceCanAccessPeer(&can, 1, 1));
  EXPECT_EQ(can, 0);
  ok(cudaDeviceEnablePeerAccess(1, 0));
  EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
  ok(cudaDeviceDisablePeerAccess(1));
  EXPECT_EQ(cudaDeviceDisablePeerAccess(1), cudaErrorPeerAccessNotEnabled);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(0, 0), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(Devices, AreActiveOnceUsed) {
  ok(cudaSetDevice(1));
  ok(cudaDeviceReset());
  EXPECT_EQ(softgpu_device_active(1), 0);
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(softgpu_device_active(1), 1);
  ok(cudaSetDevice(0));
}

TEST(Devices, SynchroniseWithAllTheirStreams) {
  OwnStream blocking, other(cudaStreamNonBlocking);
  Diary diary;
  Gate gate(blocking);
  gate.close(other);
  diary.note(blocking, 1);
  diary.note(other, 1);
  diary.note(nullptr, 1);
  diary.note(cudaStreamPerThread, 1);
  std::thread opener([&] { gate.open(); });
  ok(cudaDeviceSynchronize());
  EXPECT_EQ(diary.read().size(), 4u);
  opener.join();
}

TEST(Devices, SayTheirVersion) {
  int driver = 0, runtime = 0;
  ok(cudaDriverGetVersion(&driver));
  ok(cudaRuntimeGetVersion(&runtime));
  EXPECT_EQ(driver, CUDART_VERSION);
  EXPECT_EQ(runtime, CUDART_VERSION);
}
