// Collectives in CUDA graphs: each launch is one more of them, on all ranks.
#include <gtest/gtest.h>
#include <nccl.h>

#include <string>

#include "softgpu/nccl/tests/rank_processes.h"
#include "softgpu/nccl/tests/reference.h"

namespace {

cudaGraphExec_t captured(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  return executable;
}

// Puts one stream behind another, in a capture or not.
void follow(cudaStream_t stream, cudaStream_t other) {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, other), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
}

TEST(CollectivesInGraphs, AreOneMoreWithEachLaunch) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream(cudaStreamNonBlocking);
    const Buffer sum(bytes_of(std::vector<float>{1, 2}));
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    ASSERT_EQ(ncclAllReduce(sum.at(), sum.at(), 2, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    ASSERT_EQ(ncclAllReduce(sum.at(), sum.at(), 2, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    const cudaGraphExec_t graph = captured(stream);
    EXPECT_EQ(values_in<float>(sum), (std::vector<float>{1, 2}));
    ASSERT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
    ASSERT_EQ(ncclAllReduce(sum.at(), sum.at(), 2, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    ASSERT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
    stream.synchronize();
    EXPECT_EQ(values_in<float>(sum), (std::vector<float>{32, 64}));
    EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST(CollectivesInGraphs, AGroupIsOneAlsoOnSeveralStreams) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream(cudaStreamNonBlocking), side(cudaStreamNonBlocking);
    const float own = static_cast<float>(rank.rank + 1);
    const Buffer sent(bytes_of(std::vector<float>{own})), received(4), sum(bytes_of(std::vector<float>{own}));
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    follow(side, stream);
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    ASSERT_EQ(ncclSend(sent.at(), 1, ncclFloat32, 1 - rank.rank, comm, stream), ncclSuccess);
    ASSERT_EQ(ncclRecv(received.at(), 1, ncclFloat32, 1 - rank.rank, comm, stream), ncclSuccess);
    ASSERT_EQ(ncclAllReduce(sum.at(), sum.at(), 1, ncclFloat32, ncclSum, comm, side), ncclSuccess);
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    follow(stream, side);
    const cudaGraphExec_t graph = captured(stream);
    for (int launch = 0; launch < 3; ++launch) ASSERT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
    stream.synchronize();
    EXPECT_EQ(values_in<float>(received), std::vector<float>{3 - own});
    EXPECT_EQ(values_in<float>(sum), std::vector<float>{12});
    EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST(CollectivesInGraphs, AGroupOfWhichAPartIsCapturedIsRefused) {
  run_ranks(1, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream(cudaStreamNonBlocking), eager(cudaStreamNonBlocking);
    const Buffer number(4);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    ASSERT_EQ(ncclAllReduce(number.at(), number.at(), 1, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    ASSERT_EQ(ncclAllReduce(number.at(), number.at(), 1, ncclFloat32, ncclSum, comm, eager), ncclSuccess);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find("captured into the same one"), std::string::npos);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    cudaGetLastError();
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

}  // namespace
