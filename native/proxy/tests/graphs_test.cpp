// Stream capture and CUDA graphs, which the client keeps; a new server has them again.
#include <signal.h>

#include <functional>
#include <thread>

#include "proxy/client/jitckpt_proxy.h"
#include "proxy/tests/support.h"

namespace {

using Numbers = std::vector<int>;

void fails(cudaError_t error, cudaError_t expected) {
  EXPECT_STREQ(cudaGetErrorName(error), cudaGetErrorName(expected)) << cudaGetErrorString(error);
  cudaGetLastError();
}

void begin(cudaStream_t stream) { ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal)); }

cudaError_t ended(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  const cudaError_t error = cudaStreamEndCapture(stream, &graph);
  EXPECT_EQ(graph, nullptr);
  cudaGetLastError();
  return error;
}

cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  ok(cudaStreamIsCapturing(stream, &status));
  return status;
}

class OwnGraph {
 public:
  explicit OwnGraph(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(stream, &graph));
    ok(cudaGraphGetNodes(graph, nullptr, &size));
    ok(cudaGraphInstantiateWithFlags(&executable_, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
    ok(cudaGraphDestroy(graph));
  }
  ~OwnGraph() { ok(cudaGraphExecDestroy(executable_)); }
  OwnGraph(const OwnGraph&) = delete;
  OwnGraph& operator=(const OwnGraph&) = delete;
  void launch(cudaStream_t stream) const { ok(cudaGraphLaunch(executable_, stream)); }

  std::size_t size = 0;

 private:
  cudaGraphExec_t executable_ = nullptr;
};

void kill_server() { ASSERT_EQ(kill(jitckpt_proxy_server(), SIGKILL), 0); }

TEST(Graphs, RunWhatWasCapturedEachTimeTheyAreLaunched) {
  const OwnStream stream, side;
  const DeviceInts numbers(2, 1);
  int* pinned = nullptr;
  cudaEvent_t event = nullptr;
  ok(cudaMallocHost(reinterpret_cast<void**>(&pinned), 2 * sizeof(int)));
  ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  begin(stream);
  launch_add(numbers.get(), 10, stream);
  ok(cudaEventRecord(event, stream));
  ok(cudaStreamWaitEvent(side, event, 0));
  EXPECT_EQ(status_of(side), cudaStreamCaptureStatusActive);
  ok(cudaMemcpyAsync(numbers.get() + 1, pinned, sizeof(int), cudaMemcpyHostToDevice, side));
  launch_add(numbers.get() + 1, 1, side);
  ok(cudaMemcpyAsync(pinned + 1, numbers.get() + 1, sizeof(int), cudaMemcpyDeviceToHost, side));
  ok(cudaEventRecord(event, side));
  ok(cudaStreamWaitEvent(stream, event, 0));
  launch_add(numbers.get(), 1, stream);
  {
    const OwnGraph graph(stream);
    EXPECT_EQ(graph.size, 5u);
    EXPECT_EQ(status_of(side), cudaStreamCaptureStatusNone);
    EXPECT_EQ(numbers.read(stream), (Numbers{1, 1})) << "nothing runs before it is launched";
    for (int i = 1; i < 4; ++i) {
      pinned[0] = i;
      graph.launch(i == 2 ? side : stream);  // which waits for the launch before
      ok(cudaStreamSynchronize(i == 2 ? side : stream));
      EXPECT_EQ(pinned[1], i + 1);
    }
    EXPECT_EQ(numbers.read(stream), (Numbers{34, 4}));
  }
  fails(cudaEventQuery(event), cudaErrorCapturedEvent);
  ok(cudaEventRecord(event, stream));
  ok(cudaEventSynchronize(event));
  ok(cudaEventDestroy(event));
  ok(cudaFreeHost(pinned));
}

TEST(Graphs, BecomePartOfOthers) {
  const OwnStream stream;
  const DeviceInts number(1);
  begin(stream);
  launch_add(number.get(), 1, stream);
  const OwnGraph inner(stream);
  begin(stream);
  inner.launch(stream);
  ok(cudaMemsetAsync(number.get(), 0, 1, stream));
  inner.launch(stream);
  const OwnGraph outer(stream);
  outer.launch(stream);
  EXPECT_EQ(number.read(stream), Numbers{1});
}

TEST(Graphs, AreThereAfterTheDeathOfAServer) {
  const OwnStream stream;
  const DeviceInts number(1);
  ok(static_cast<cudaError_t>(jitckpt_proxy_keep()));
  begin(stream);
  launch_add(number.get(), 1, stream);
  const OwnGraph graph(stream);
  for (int i = 0; i < 3; ++i) {
    ok(static_cast<cudaError_t>(jitckpt_proxy_keep()));
    graph.launch(stream);
    kill_server();
    graph.launch(stream);
  }
  EXPECT_EQ(number.read(stream), Numbers{6});
  begin(stream);
  launch_add(number.get(), 1, stream);
  kill_server();
  launch_add(number.get(), 1, stream);
  const OwnGraph captured_meanwhile(stream);
  captured_meanwhile.launch(stream);
  EXPECT_EQ(number.read(stream), Numbers{8});
}

TEST(Graphs, HaveGroupsOfCollectives) {
  const OwnStream stream;
  const DeviceInts from(4, 3), to(4);
  ncclUniqueId id;
  ncclComm_t alone = nullptr;
  ok(ncclGetUniqueId(&id));
  ok(ncclCommInitRank(&alone, 1, id, 0));
  begin(stream);
  ok(ncclGroupStart());
  ok(ncclAllReduce(from.get(), to.get(), 2, ncclInt32, ncclSum, alone, stream));
  ok(ncclSend(from.get() + 2, 2, ncclInt32, 0, alone, stream));
  ok(ncclRecv(to.get() + 2, 2, ncclInt32, 0, alone, stream));
  ok(ncclGroupEnd());
  ok(ncclAllReduce(to.get(), from.get(), 4, ncclInt32, ncclSum, alone, stream));
  const OwnGraph graph(stream);
  EXPECT_EQ(graph.size, 2u);
  EXPECT_EQ(to.read(stream), Numbers(4, 0));
  graph.launch(stream);
  graph.launch(stream);
  EXPECT_EQ(to.read(stream), Numbers(4, 3));
  ok(ncclCommDestroy(alone));
}

TEST(Graphs, WhatACaptureDoesNotBearEndsIt) {
  const OwnStream stream, other;
  const DeviceInts number(1);
  int pageable = 0;
  void* pointer = nullptr;
  cudaEvent_t before = nullptr, within = nullptr;
  ok(cudaEventCreate(&before));
  ok(cudaEventCreate(&within));
  ok(cudaEventRecord(before, other));
  const std::vector<std::pair<std::function<cudaError_t()>, cudaError_t>> calls = {
      {[&] { return cudaMalloc(&pointer, 16); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaFree(number.get()); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaStreamSynchronize(stream); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaStreamQuery(stream); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaDeviceSynchronize(); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaEventQuery(before); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaMemset(number.get(), 0, sizeof(int)); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaMemcpyAsync(number.get(), &pageable, 4, cudaMemcpyHostToDevice, stream); },
       cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaStreamWaitEvent(stream, before, 0); }, cudaErrorStreamCaptureIsolation},
      {[&] { return cudaEventQuery(within); }, cudaErrorCapturedEvent},
      {[&] { return cudaStreamWaitEvent(cudaStreamLegacy, within, 0); }, cudaErrorStreamCaptureImplicit},
      {[&] { return cudaEventRecordWithFlags(within, stream, cudaEventRecordExternal); },
       cudaErrorNotSupported},
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    begin(stream);
    ok(cudaEventRecord(within, stream));
    fails(calls[i].first(), calls[i].second);
    EXPECT_EQ(status_of(stream), cudaStreamCaptureStatusInvalidated);
    EXPECT_EQ(ended(stream), cudaErrorStreamCaptureInvalidated);
  }
  launch_add(number.get(), 1, stream);
  EXPECT_EQ(number.read(stream), Numbers{1});
  ok(cudaEventDestroy(before));
  ok(cudaEventDestroy(within));
}

TEST(Graphs, AnUnjoinedStreamAndAWrongThreadAreNamed) {
  const OwnStream origin, side;
  const DeviceInts number(1);
  cudaEvent_t fork = nullptr;
  cudaGraph_t graph = nullptr;
  ok(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  begin(origin);
  std::thread([&] { fails(cudaStreamEndCapture(origin, &graph), cudaErrorStreamCaptureWrongThread); }).join();
  ok(cudaEventRecord(fork, origin));
  ok(cudaStreamWaitEvent(side, fork, 0));
  launch_add(number.get(), 1, side);
  EXPECT_EQ(ended(origin), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(ended(origin), cudaErrorIllegalState);
  fails(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
  ok(cudaEventDestroy(fork));
}

TEST(Graphs, TheLegacyStreamDoesNotWaitForWhatIsCaptured) {
  const DeviceInts number(1);
  cudaStream_t blocking = nullptr;
  ok(cudaStreamCreate(&blocking));
  begin(blocking);
  void* arguments[] = {nullptr, nullptr};
  int *to = number.get(), amount = 1;
  arguments[0] = &to;
  arguments[1] = &amount;
  fails(cudaLaunchKernel(kernels::add(), dim3(1), dim3(1), arguments, 0, nullptr),
        cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(ended(blocking), cudaErrorStreamCaptureInvalidated);
  ok(cudaStreamDestroy(blocking));
}

}  // namespace
