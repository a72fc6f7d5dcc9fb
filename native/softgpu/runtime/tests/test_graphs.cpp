// Stream capture and CUDA graphs.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "softgpu/fault.h"
#include "softgpu/runtime/tests/support.h"

using Numbers = std::vector<int>;

namespace {

cudaError_t add(const DeviceInts& memory, int amount, cudaStream_t stream,
                const char& kernel = kernels::add) {
  int* to = memory.get();
  void* arguments[] = {&to, &amount};
  return cudaLaunchKernel(&kernel, 1, 1, arguments, 0, stream);
}

void fails(cudaError_t error, cudaError_t expected) {
  EXPECT_STREQ(cudaGetErrorName(error), cudaGetErrorName(expected)) << cudaGetErrorString(error);
  cudaGetLastError();
}

void begin(cudaStream_t stream, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
  ok(cudaStreamBeginCapture(stream, mode));
}

// Ends a capture that came to nothing, and says why.
cudaError_t ended(cudaStream_t stream) {
  cudaGraph_t graph = reinterpret_cast<cudaGraph_t>(&graph);
  const cudaError_t error = cudaStreamEndCapture(stream, &graph);
  EXPECT_EQ(graph, nullptr);
  cudaGetLastError();
  return error;
}

// What a stream has captured, ready to be launched.
class OwnGraph {
 public:
  explicit OwnGraph(cudaStream_t stream) {
    ok(cudaStreamEndCapture(stream, &graph));
    ok(cudaGraphInstantiateWithFlags(&executable, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
  }
  ~OwnGraph() {
    ok(cudaGraphExecDestroy(executable));
    if (graph) ok(cudaGraphDestroy(graph));
  }
  void launch(cudaStream_t stream, int times = 1) const {
    for (int i = 0; i < times; ++i) ok(cudaGraphLaunch(executable, stream));
  }
  std::size_t size() const {
    std::size_t count = 0;
    ok(cudaGraphGetNodes(graph, nullptr, &count));
    return count;
  }

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
};

cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  ok(cudaStreamIsCapturing(stream, &status));
  return status;
}

}  // namespace

TEST(Graphs, RunWhatWasCapturedEachTimeTheyAreLaunched) {
  const OwnStream stream(cudaStreamNonBlocking);
  const DeviceInts memory(2);
  memory.write({1, 0});
  begin(stream);
  ok(add(memory, 10, stream));
  ok(cudaMemcpyAsync(memory.get() + 1, memory.get(), sizeof(int), cudaMemcpyDeviceToDevice, stream));
  ok(cudaMemsetAsync(memory.get(), 0, sizeof(int), stream));
  ok(add(memory, 5, stream));
  const OwnGraph graph(stream);
  EXPECT_EQ(graph.size(), 4u);
  EXPECT_EQ(memory.read(), (Numbers{1, 0})) << "nothing runs before it is launched";
  graph.launch(stream);
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(memory.read(), (Numbers{5, 11}));
  graph.launch(stream, 2);
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(memory.read(), (Numbers{5, 15}));
  graph.launch(cudaStreamLegacy);  // on any stream
  EXPECT_EQ(memory.read(), (Numbers{5, 15}));
}

TEST(Graphs, ReadPinnedMemoryWhenTheyRun) {
  const OwnStream stream(cudaStreamNonBlocking);
  const DeviceInts memory(1);
  int* pinned = nullptr;
  ok(cudaMallocHost(reinterpret_cast<void**>(&pinned), 2 * sizeof(int)));
  pinned[0] = 1;
  begin(stream);
  ok(cudaMemcpyAsync(memory.get(), pinned, sizeof(int), cudaMemcpyHostToDevice, stream));
  ok(add(memory, 1, stream));
  ok(cudaMemcpyAsync(pinned + 1, memory.get(), sizeof(int), cudaMemcpyDeviceToHost, stream));
  const OwnGraph graph(stream);
  for (int i = 10; i < 13; ++i) {
    pinned[0] = i;
    graph.launch(stream);
    ok(cudaStreamSynchronize(stream));
    EXPECT_EQ(pinned[1], i + 1);
  }
  ok(cudaFreeHost(pinned));
}

TEST(Graphs, FollowEventsToOtherStreamsAndBack) {
  const OwnStream origin(cudaStreamNonBlocking), side(cudaStreamNonBlocking);
  const OwnEvent fork(cudaEventDisableTiming), join;
  const DeviceInts memory(1);
  memory.write({0});
  begin(origin);
  ok(add(memory, 1, origin));
  EXPECT_EQ(status_of(side), cudaStreamCaptureStatusNone);
  ok(cudaEventRecord(fork, origin));
  ok(cudaStreamWaitEvent(side, fork, 0));
  EXPECT_EQ(status_of(side), cudaStreamCaptureStatusActive);
  ok(add(memory, 2, side, kernels::nap));
  ok(cudaEventRecord(join, side));
  ok(cudaStreamWaitEvent(origin, join, 0));
  ok(add(memory, 4, origin));
  const OwnGraph graph(origin);
  EXPECT_EQ(status_of(side), cudaStreamCaptureStatusNone);

  cudaGraphNode_t nodes[4] = {};
  std::size_t count = 4;
  ok(cudaGraphGetNodes(graph.graph, nodes, &count));
  ASSERT_EQ(count, 3u);
  EXPECT_EQ(nodes[3], nullptr);
  cudaGraphNodeType type{};
  ok(cudaGraphNodeGetType(nodes[1], &type));
  EXPECT_EQ(type, cudaGraphNodeTypeKernel);
  cudaGraphNode_t before[2] = {};
  cudaGraphEdgeData edges[2];
  count = 2;
  ok(cudaGraphNodeGetDependencies(nodes[2], before, edges, &count));
  ASSERT_EQ(count, 2u) << "what the stream itself has captured, and what it has waited for";
  EXPECT_EQ(before[0], nodes[0]);
  EXPECT_EQ(before[1], nodes[1]);
  count = 1;
  ok(cudaGraphGetRootNodes(graph.graph, before, &count));
  EXPECT_EQ(before[0], nodes[0]);

  graph.launch(side, 3);
  ok(cudaStreamSynchronize(side));
  EXPECT_EQ(memory.read(), Numbers{21});
  fails(cudaEventQuery(join), cudaErrorCapturedEvent);
  float milliseconds = 0;
  fails(cudaEventElapsedTime(&milliseconds, join, join), cudaErrorCapturedEvent);
  ok(cudaEventRecord(join, side));
  ok(cudaEventSynchronize(join));
}

TEST(Graphs, OneRunsOnceAtATime) {
  const OwnStream first(cudaStreamNonBlocking), second(cudaStreamNonBlocking);
  const DeviceInts memory(1);
  memory.write({0});
  begin(first);
  ok(add(memory, 1, first));
  const OwnGraph graph(first);
  Gate gate(first);
  graph.launch(first);
  graph.launch(second);
  EXPECT_EQ(cudaStreamQuery(second), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  gate.open();
  ok(cudaStreamSynchronize(second));
  EXPECT_EQ(memory.read(), Numbers{2});
}

TEST(Graphs, CallHostFunctions) {
  const OwnStream stream(cudaStreamNonBlocking);
  std::atomic<int> calls{0};
  begin(stream);
  ok(cudaLaunchHostFunc(stream, [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); }, &calls));
  const OwnGraph graph(stream);
  EXPECT_EQ(calls, 0);
  graph.launch(stream, 3);
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(calls, 3);
}

TEST(Graphs, BecomePartOfOthers) {
  const OwnStream stream(cudaStreamNonBlocking);
  const DeviceInts memory(1);
  memory.write({0});
  begin(stream);
  ok(add(memory, 1, stream));
  const OwnGraph inner(stream);
  begin(stream);
  inner.launch(stream, 2);
  ok(add(memory, 10, stream));
  const OwnGraph outer(stream);
  EXPECT_EQ(outer.size(), 3u);
  outer.launch(stream, 2);
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(memory.read(), Numbers{24});
}

TEST(Graphs, TakeTheWorkOfAnotherOfTheSameForm) {
  const OwnStream stream(cudaStreamNonBlocking);
  const DeviceInts memory(1);
  memory.write({0});
  begin(stream);
  ok(add(memory, 1, stream));
  OwnGraph one(stream);
  begin(stream);
  ok(add(memory, 100, stream));
  const OwnGraph other(stream);
  cudaGraphExecUpdateResultInfo result{};
  ok(cudaGraphExecUpdate(one.executable, other.graph, &result));
  ok(cudaGraphDestroy(one.graph));
  one.graph = nullptr;
  one.launch(stream);
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(memory.read(), Numbers{100});

  begin(stream);
  ok(cudaMemsetAsync(memory.get(), 0, sizeof(int), stream));
  const OwnGraph different(stream);
  fails(cudaGraphExecUpdate(one.executable, different.graph, &result), cudaErrorGraphExecUpdateFailure);
  EXPECT_EQ(result.result, cudaGraphExecUpdateErrorTopologyChanged);
  EXPECT_NE(result.errorNode, nullptr);
}

TEST(Graphs, AreDrawn) {
  const OwnStream stream(cudaStreamNonBlocking);
  const DeviceInts memory(1);
  begin(stream);
  ok(add(memory, 1, stream));
  ok(cudaMemsetAsync(memory.get(), 0, sizeof(int), stream));
  const OwnGraph graph(stream);
  const std::string path = testing::TempDir() + "graph" + std::to_string(getpid()) + ".dot";
  ok(cudaGraphDebugDotPrint(graph.graph, path.c_str(), cudaGraphDebugDotFlagsVerbose));
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(path);
  EXPECT_EQ(
      text,
      "digraph dot {\n  node0 [label=\"kernel add\"];\n  node1 [label=\"memset\"];\n  node0 -> node1;\n}\n");
  fails(cudaGraphDebugDotPrint(graph.graph, "/nowhere/graph.dot", 0), cudaErrorOperatingSystem);
}

TEST(Graphs, ACaptureIsKnownByItsNumberAndItsGraph) {
  const OwnStream stream(cudaStreamNonBlocking), other(cudaStreamNonBlocking);
  const DeviceInts memory(1);
  begin(stream);
  begin(other, cudaStreamCaptureModeThreadLocal);
  ok(add(memory, 1, stream));
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0, other_id = 0;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* nodes = nullptr;
  std::size_t count = 0;
  ok(cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &nodes, nullptr, &count));
  ok(cudaStreamGetCaptureInfo(other, &status, &other_id, nullptr, nullptr, nullptr, nullptr));
  EXPECT_NE(id, 0u);
  EXPECT_NE(id, other_id);
  ASSERT_EQ(count, 1u);
  cudaGraphNodeType type{};
  ok(cudaGraphNodeGetType(nodes[0], &type));
  EXPECT_EQ(type, cudaGraphNodeTypeKernel);
  const OwnGraph first(stream), second(other);
  EXPECT_EQ(first.graph, graph);
  EXPECT_EQ(second.size(), 0u);
  second.launch(stream);
  ok(cudaStreamSynchronize(stream));
}

TEST(Graphs, AnUnjoinedStreamSpoilsTheCapture) {
  const OwnStream origin(cudaStreamNonBlocking), side(cudaStreamNonBlocking);
  const OwnEvent fork;
  const DeviceInts memory(1);
  begin(origin);
  ok(cudaEventRecord(fork, origin));
  ok(cudaStreamWaitEvent(side, fork, 0));
  ok(add(memory, 1, side));
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(ended(origin), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(status_of(side), cudaStreamCaptureStatusNone);
  begin(origin);
  ok(cudaEventRecord(fork, origin));
  ok(cudaStreamWaitEvent(side, fork, 0));
  fails(cudaStreamEndCapture(side, &graph), cudaErrorStreamCaptureUnmatched);
  EXPECT_EQ(ended(origin), cudaErrorStreamCaptureInvalidated);
}

TEST(Graphs, WhatACaptureDoesNotBearEndsIt) {
  const OwnStream stream(cudaStreamNonBlocking), other(cudaStreamNonBlocking);
  const OwnEvent before, within;
  const DeviceInts memory(1);
  int pageable = 0;
  void* pointer = nullptr;
  ok(cudaEventRecord(before, other));
  using Call = std::function<cudaError_t()>;
  const std::vector<std::pair<Call, cudaError_t>> calls = {
      {[&] { return cudaMalloc(&pointer, 16); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaFree(memory.get()); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaMallocHost(&pointer, 16); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaStreamSynchronize(stream); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaStreamQuery(stream); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaDeviceSynchronize(); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaEventQuery(before); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaEventSynchronize(before); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaMemset(memory.get(), 0, sizeof(int)); }, cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaMemcpyAsync(memory.get(), &pageable, sizeof(int), cudaMemcpyDefault, stream); },
       cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaStreamAddCallback(stream, [](cudaStream_t, cudaError_t, void*) {}, nullptr, 0); },
       cudaErrorStreamCaptureUnsupported},
      {[&] { return cudaStreamWaitEvent(stream, before, 0); }, cudaErrorStreamCaptureIsolation},
      {[&] { return cudaEventQuery(within); }, cudaErrorCapturedEvent},
      {[&] { return cudaStreamWaitEvent(cudaStreamLegacy, within, 0); }, cudaErrorStreamCaptureImplicit},
      {[&] { return cudaEventRecordWithFlags(within, stream, cudaEventRecordExternal); },
       cudaErrorNotSupported},
      {[&] { return cudaStreamDestroy(stream); }, cudaErrorStreamCaptureUnsupported},
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    begin(stream);
    ok(cudaEventRecord(within, stream));
    fails(calls[i].first(), calls[i].second);
    EXPECT_EQ(status_of(stream), cudaStreamCaptureStatusInvalidated);
    fails(add(memory, 1, stream), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(ended(stream), cudaErrorStreamCaptureInvalidated);
  }
  ok(add(memory, 1, stream));
  ok(cudaStreamSynchronize(stream));
}

TEST(Graphs, ARelaxedThreadMayAllocateAndAsk) {
  const OwnStream stream(cudaStreamNonBlocking);
  const OwnEvent event;
  begin(stream);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ok(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  void* pointer = nullptr;
  ok(cudaMalloc(&pointer, 16));
  ok(cudaFree(pointer));
  ok(cudaEventQuery(event));
  fails(cudaDeviceSynchronize(),
        cudaErrorStreamCaptureUnsupported);  // the capturing stream is one of the device's
  ok(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(ended(stream), cudaErrorStreamCaptureInvalidated);
}

TEST(Graphs, OtherThreadsAreHeldToTheModeOfTheCapture) {
  const OwnStream stream(cudaStreamNonBlocking);
  const auto allocate = [](cudaStreamCaptureMode mode, cudaError_t expected) {
    std::thread([&] {
      ok(cudaThreadExchangeStreamCaptureMode(&mode));
      void* pointer = nullptr;
      const cudaError_t error = cudaMalloc(&pointer, 16);
      EXPECT_STREQ(cudaGetErrorName(error), cudaGetErrorName(expected));
      if (error == cudaSuccess) ok(cudaFree(pointer));
    }).join();
  };
  begin(stream);
  allocate(cudaStreamCaptureModeThreadLocal, cudaSuccess);
  allocate(cudaStreamCaptureModeGlobal, cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(ended(stream), cudaErrorStreamCaptureInvalidated);

  begin(stream, cudaStreamCaptureModeThreadLocal);
  allocate(cudaStreamCaptureModeGlobal, cudaSuccess);
  cudaGraph_t graph = nullptr;
  std::thread([&] { fails(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureWrongThread); }).join();
  const OwnGraph empty(stream);

  begin(stream, cudaStreamCaptureModeRelaxed);
  std::thread([&] { const OwnGraph elsewhere(stream); }).join();
}

TEST(Graphs, TheLegacyStreamDoesNotWaitForWhatIsCaptured) {
  const OwnStream blocking, free(cudaStreamNonBlocking);
  const DeviceInts memory(1);
  memory.write({0});
  fails(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
  begin(blocking);
  cudaStreamCaptureStatus status{};
  fails(cudaStreamIsCapturing(nullptr, &status), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(status_of(blocking), cudaStreamCaptureStatusActive) << "asking does no harm";
  fails(add(memory, 1, nullptr), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(ended(blocking), cudaErrorStreamCaptureInvalidated);
  begin(free);
  ok(add(memory, 1, nullptr));  // as it waits for no such stream
  const OwnGraph empty(free);
  EXPECT_EQ(memory.read(), Numbers{1});
}

TEST(Graphs, TwoCapturesDoNotMix) {
  const OwnStream one(cudaStreamNonBlocking), other(cudaStreamNonBlocking);
  const OwnEvent event;
  begin(one);
  fails(cudaStreamBeginCapture(one, cudaStreamCaptureModeGlobal), cudaErrorIllegalState);
  begin(other);
  ok(cudaEventRecord(event, one));
  fails(cudaStreamWaitEvent(other, event, 0), cudaErrorStreamCaptureMerge);
  EXPECT_EQ(ended(one), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(ended(other), cudaErrorStreamCaptureInvalidated);
  fails(ended(other), cudaErrorIllegalState);
  fails(cudaStreamWaitEvent(other, event, 0), cudaErrorCapturedEvent);
}

TEST(Graphs, AreRefusedOnceTheyAreDestroyed) {
  const OwnStream stream(cudaStreamNonBlocking);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  begin(stream);
  ok(cudaStreamEndCapture(stream, &graph));
  fails(cudaGraphInstantiate(&executable, graph, cudaGraphInstantiateFlagDeviceLaunch),
        cudaErrorNotSupported);
  ok(cudaGraphDestroy(graph));
  fails(cudaGraphDestroy(graph), cudaErrorInvalidValue);
  fails(cudaGraphInstantiate(&executable, graph, 0), cudaErrorInvalidValue);
  fails(cudaGraphLaunch(nullptr, stream), cudaErrorInvalidValue);
  fails(cudaGraphExecDestroy(nullptr), cudaErrorInvalidValue);
}

namespace {

constexpr int passed = 42;

// Launches in a graph count like others, each time that it is launched.
[[noreturn]] void a_kernel_of_a_graph_fails() {
  const OwnStream stream(cudaStreamNonBlocking);
  const DeviceInts memory(1);
  memory.write({0});
  begin(stream);
  ok(add(memory, 1, stream));
  ok(add(memory, 10, stream));
  const OwnGraph graph(stream);
  char answer[512] = "";
  EXPECT_EQ(softgpu_fault("kind=sticky call=4", answer, sizeof answer), 0) << answer;
  graph.launch(stream);
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(memory.read(), Numbers{11});
  graph.launch(stream);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGraphLaunch(graph.executable, stream), cudaErrorIllegalAddress);
  std::_Exit(testing::Test::HasFailure() ? 1 : passed);
}

}  // namespace

TEST(Graphs, FaultsOnOrderComeInThem) {
  EXPECT_EXIT(a_kernel_of_a_graph_fails(), testing::ExitedWithCode(passed), "");
}
