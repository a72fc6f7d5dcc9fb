#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "softgpu/runtime/tests/support.h"

using Numbers = std::vector<int>;

extern "C" {  // as programs see them that were built for per-thread default streams
cudaError_t cudaMemcpy_ptds(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemset_ptds(void* to, int value, size_t bytes);
cudaError_t cudaMemcpyAsync_ptsz(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                 cudaStream_t stream);
}

namespace {

// Pinned ints.
class PinnedInts {
 public:
  explicit PinnedInts(const Numbers& values) {
    ok(cudaMallocHost(reinterpret_cast<void**>(&begin_), values.size() * sizeof(int)));
    std::copy(values.begin(), values.end(), begin_);
  }
  ~PinnedInts() { ok(cudaFreeHost(begin_)); }
  int* get() const { return begin_; }

 private:
  int* begin_ = nullptr;
};

}  // namespace

TEST(Copies, FromPageableMemoryHaveReadItWhenTheCallReturns) {
  OwnStream stream;
  DeviceInts memory(3);
  Numbers values{1, 2, 3};
  {
    Gate gate(stream);
    ok(cudaMemcpyAsync(memory.get(), values.data(), 12, cudaMemcpyHostToDevice, stream));
    values = {7, 8, 9};
  }
  EXPECT_EQ(memory.read(), (Numbers{1, 2, 3}));
}

TEST(Copies, ToPageableMemoryAreFinishedWhenTheCallReturns) {
  OwnStream stream;
  DeviceInts memory(3);
  memory.write({1, 2, 3});
  Numbers values(3);
  Gate gate(stream);
  std::thread opener([&] { gate.open(); });
  ok(cudaMemcpyAsync(values.data(), memory.get(), 12, cudaMemcpyDeviceToHost, stream));
  EXPECT_EQ(values, (Numbers{1, 2, 3}));
  opener.join();
}

TEST(Copies, OfPinnedMemoryAreAsynchronous) {
  OwnStream stream(cudaStreamNonBlocking);
  DeviceInts memory(2);
  PinnedInts from({1, 2}), to({0, 0});
  Gate gate(stream);
  ok(cudaMemcpyAsync(memory.get(), from.get(), 8, cudaMemcpyHostToDevice, stream));
  ok(cudaMemcpyAsync(to.get(), memory.get(), 8, cudaMemcpyDeviceToHost, stream));
  from.get()[1] = 5;  // not read yet
  EXPECT_EQ(to.get()[0], 0);
  gate.open();
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(to.get()[0], 1);
  EXPECT_EQ(to.get()[1], 5);
}

TEST(Copies, BetweenDevicesAreInStreamOrder) {
  DeviceInts first(2);
  ok(cudaSetDevice(1));
  DeviceInts second(2);
  ok(cudaSetDevice(0));
  first.write({1, 2});
  ok(cudaMemcpyPeerAsync(second.get(), 1, first.get(), 0, 8, nullptr));
  ok(cudaMemsetAsync(first.get(), 0, 8, nullptr));
  EXPECT_EQ(first.read(), (Numbers{0, 0}));
  EXPECT_EQ(second.read(), (Numbers{1, 2}));
  ok(cudaMemcpyPeer(first.get(), 0, second.get(), 1, 4));
  EXPECT_EQ(first.read(), (Numbers{1, 0}));
  EXPECT_EQ(cudaMemcpyPeer(first.get(), 1, second.get(), 1, 4), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(Copies, WithinTheDeviceDoNotHoldTheHostUp) {
  OwnStream blocking;
  DeviceInts from(2), to(2);
  from.write({3, 4});
  Gate gate(blocking);
  ok(cudaMemcpy(to.get(), from.get(), 8, cudaMemcpyDeviceToDevice));
  ok(cudaMemset(from.get(), 0, 8));
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  gate.open();
  EXPECT_EQ(to.read(), (Numbers{3, 4}));
  EXPECT_EQ(from.read(), (Numbers{0, 0}));
}

TEST(Copies, SynchronousOnesComeAfterBlockingStreams) {
  OwnStream blocking;
  DeviceInts memory(1);
  memory.write({1});
  int value = 0;
  Gate gate(blocking);
  ok(cudaMemsetAsync(memory.get(), 0xff, 4, blocking));
  std::thread opener([&] { gate.open(); });
  ok(cudaMemcpy(&value, memory.get(), 4, cudaMemcpyDeviceToHost));
  EXPECT_EQ(value, -1);
  opener.join();
}

TEST(Copies, OnABlockingStreamComeAfterTheLegacyStream) {
  OwnStream blocking;
  DeviceInts memory(1);
  memory.write({1});
  {
    Gate gate(cudaStreamLegacy);
    int value = 2;
    ok(cudaMemcpyAsync(memory.get(), &value, 4, cudaMemcpyHostToDevice, blocking));
    EXPECT_EQ(*static_cast<int*>(softgpu_shadow(memory.get())), 1);
  }
  EXPECT_EQ(memory.read(), Numbers{2});
  int value = 0;
  Gate gate(cudaStreamLegacy);
  ok(cudaMemsetAsync(memory.get(), 0xff, 4, cudaStreamLegacy));
  std::thread opener([&] { gate.open(); });
  ok(cudaMemcpyAsync(&value, memory.get(), 4, cudaMemcpyDeviceToHost, blocking));
  EXPECT_EQ(value, -1);
  opener.join();
}

TEST(Copies, ForPerThreadDefaultStreamsWaitForThatStreamOnly) {
  OwnStream other;  // a blocking stream: the legacy default stream would wait for it
  DeviceInts memory(1);
  memory.write({1});
  PinnedInts pinned({0});
  Gate gate(other);
  int value = 5;
  ok(cudaMemcpy_ptds(memory.get(), &value, 4, cudaMemcpyHostToDevice));
  ok(cudaMemcpy_ptds(&value, memory.get(), 4, cudaMemcpyDeviceToHost));
  EXPECT_EQ(value, 5);
  ok(cudaMemset_ptds(memory.get(), 0xff, 4));
  ok(cudaMemcpyAsync_ptsz(pinned.get(), memory.get(), 4, cudaMemcpyDeviceToHost, nullptr));
  ok(cudaStreamSynchronize(cudaStreamPerThread));
  EXPECT_EQ(*pinned.get(), -1);
}

TEST(Copies, OnTheHostAreFinishedWhenTheCallReturns) {
  Numbers from{1, 2}, to(2);
  ok(cudaMemcpyAsync(to.data(), from.data(), 8, cudaMemcpyHostToHost, nullptr));
  EXPECT_EQ(to, from);
  PinnedInts pinned({0, 0});
  ok(cudaMemcpyAsync(pinned.get(), from.data(), 8, cudaMemcpyDefault, nullptr));
  EXPECT_EQ(pinned.get()[1], 2);
}

TEST(Copies, FindTheirDirectionByThePointers) {
  DeviceInts memory(2), other(2);
  Numbers from{1, 2}, to(2);
  ok(cudaMemcpy(memory.get(), from.data(), 8, cudaMemcpyDefault));
  ok(cudaMemcpy(other.get(), memory.get(), 8, cudaMemcpyDefault));
  ok(cudaMemcpy(to.data(), other.get(), 8, cudaMemcpyDefault));
  EXPECT_EQ(to, from);
}

TEST(Copies, InTheWrongDirectionAreRefused) {
  DeviceInts memory(2);
  Numbers host(2);
  EXPECT_EQ(cudaMemcpy(host.data(), host.data(), 8, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(memory.get(), host.data(), 8, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(memory.get(), host.data(), 8, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(memory.get(), memory.get(), 8, cudaMemcpyHostToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(memory.get(), host.data(), 8, static_cast<cudaMemcpyKind>(7)),
            cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidMemcpyDirection);
}

TEST(Copies, BeyondAnAllocationAreRefused) {
  DeviceInts memory(1024);  // one page
  std::vector<char> host(8192);
  EXPECT_EQ(cudaMemcpy(memory.get(), host.data(), 4097, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(host.data(), memory.get() + 1, 4096, cudaMemcpyDeviceToHost, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(memory.get(), 0, 4097), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(host.data(), 0, 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(nullptr, host.data(), 1, cudaMemcpyDefault), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(Copies, OfNothingDoNothing) {
  ok(cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyHostToDevice));
  ok(cudaMemcpyAsync(nullptr, nullptr, 0, cudaMemcpyDefault, nullptr));
  ok(cudaMemset(nullptr, 0, 0));
}

TEST(Copies, InTwoDimensionsFollowThePitch) {
  // 2 rows of 2 ints, out of rows of 3, into rows of 4.
  DeviceInts memory(8);
  memory.write(Numbers(8, 0));
  OwnStream stream;
  {
    Gate gate(stream);
    Numbers from{1, 2, 9, 3, 4, 9};
    ok(cudaMemcpy2DAsync(memory.get(), 16, from.data(), 12, 8, 2, cudaMemcpyHostToDevice, stream));
    from.assign(6, 5);
  }
  EXPECT_EQ(memory.read(), (Numbers{1, 2, 0, 0, 3, 4, 0, 0}));
  Numbers to(4);
  ok(cudaMemcpy2D(to.data(), 8, memory.get(), 16, 8, 2, cudaMemcpyDeviceToHost));
  EXPECT_EQ(to, (Numbers{1, 2, 3, 4}));
  ok(cudaMemset2D(memory.get() + 1, 16, 0xff, 4, 2));
  EXPECT_EQ(memory.read(), (Numbers{1, -1, 0, 0, 3, -1, 0, 0}));
  ok(cudaMemset2DAsync(memory.get(), 16, 0, 8, 2, nullptr));
  EXPECT_EQ(memory.read(), Numbers(8, 0));
  EXPECT_EQ(cudaMemcpy2D(to.data(), 4, memory.get(), 16, 8, 2, cudaMemcpyDeviceToHost),
            cudaErrorInvalidPitchValue);
  EXPECT_EQ(cudaMemset2D(memory.get(), 4, 0, 8, 2), cudaErrorInvalidPitchValue);
  EXPECT_EQ(cudaMemcpy2D(memory.get(), 16, to.data(), 8, 8, 3, cudaMemcpyDeviceToHost),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(Copies, OfRegisteredMemoryAreAsynchronous) {
  OwnStream stream(cudaStreamNonBlocking);
  DeviceInts memory(1);
  memory.write({6});
  int value = 0;
  ok(cudaHostRegister(&value, sizeof value, cudaHostRegisterDefault));
  Gate gate(stream);
  ok(cudaMemcpyAsync(&value, memory.get(), 4, cudaMemcpyDeviceToHost, stream));
  EXPECT_EQ(value, 0);
  gate.open();
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(value, 6);
  ok(cudaHostUnregister(&value));
}
