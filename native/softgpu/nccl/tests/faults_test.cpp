// Faults on order in collectives, sends and the network between ranks.
#include <gtest/gtest.h>
#include <nccl.h>

#include <string>
#include <vector>

#include "softgpu/fault.h"
#include "softgpu/nccl/tests/rank_processes.h"

namespace {

void order(const char* text) {
  char answer[512] = "";
  EXPECT_EQ(softgpu_fault(text, answer, sizeof answer), 0) << answer;
}

ncclResult_t async_error(ncclComm_t comm) {
  ncclResult_t state = ncclInternalError;
  EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
  return state;
}

void all_reduce(ncclComm_t comm, const Buffer& buffer, const Stream& stream, size_t count = 1) {
  ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), count, ncclInt, ncclSum, comm, stream), ncclSuccess);
}

bool hangs(const Stream& stream) {
  usleep(200'000);  // longer than it would need to go wrong
  return cudaStreamQuery(stream) == cudaErrorNotReady;
}

// Flags by which the ranks of a test come to the same place.
void meet(Rank& rank, int place) {
  rank.set(8 * place + rank.rank);
  for (int other = 0; other < rank.ranks; ++other) rank.wait_for(8 * place + other);
}

}  // namespace

TEST(Faults, ACollectiveThatHangsHangsItsPeersToo) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const Buffer buffer(bytes_of(std::vector<int>{1}));
    if (rank.rank == 1) order("kind=collective-hang call=2");
    all_reduce(comm, buffer, stream);
    stream.synchronize();
    EXPECT_EQ(values_in<int>(buffer), std::vector<int>{2}) << "the first is well";
    all_reduce(comm, buffer, stream);
    all_reduce(comm, buffer, stream);
    EXPECT_TRUE(hangs(stream));
    EXPECT_EQ(values_in<int>(buffer), std::vector<int>{2});
    EXPECT_EQ(async_error(comm), ncclSuccess) << "nobody gets an error";
    meet(rank, 0);
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    stream.synchronize();
  });
}

TEST(Faults, AnAsynchronousErrorIsToldOnItsRankAlone) {
  for (const bool system : {false, true}) {
    run_ranks(2, [system](Rank& rank) {
      const ncclComm_t comm = rank.communicator();
      const Stream stream;
      const Buffer buffer(bytes_of(std::vector<int>{1}));
      const ncclResult_t error = system ? ncclSystemError : ncclRemoteError;
      if (rank.rank == 1)
        order(system ? "kind=collective-error result=system" : "kind=collective-error result=remote");
      all_reduce(comm, buffer, stream);
      if (rank.rank == 1) {
        while (async_error(comm) == ncclSuccess) usleep(1000);
        EXPECT_EQ(async_error(comm), error);
        const char* text = system ? "A call of the system failed (rehearsed)"
                                  : "Connection closed by remote peer (rehearsed)";
        EXPECT_EQ(std::string(ncclGetLastError(nullptr)), text) << "as torch asks";
        EXPECT_EQ(std::string(ncclGetLastError(comm)), text);
        EXPECT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt, ncclSum, comm, stream), error);
      }
      EXPECT_TRUE(hangs(stream));
      if (rank.rank == 0) {
        EXPECT_EQ(async_error(comm), ncclSuccess);
      }
      meet(rank, 0);
      EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
      stream.synchronize();
    });
  }
}

TEST(Faults, ADeviceFailsInItsCollective) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const Buffer buffer(bytes_of(std::vector<int>{1}));
    if (rank.rank == 1) order("kind=ecc at=collective");
    all_reduce(comm, buffer, stream);
    if (rank.rank == 1) {
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorECCUncorrectable);
      EXPECT_EQ(std::string(cudaGetErrorString(cudaErrorECCUncorrectable)),
                "uncorrectable ECC error encountered");
      EXPECT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt, ncclSum, comm, stream),
                ncclUnhandledCudaError);
    } else {
      EXPECT_TRUE(hangs(stream));
    }
    meet(rank, 0);
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  });
}

// Three ranks, and no bytes between 1 and 2.
TEST(Faults, ACutNetworkStopsWhatCrossesIt) {
  run_ranks(3, [](Rank& rank) {
    const ncclComm_t all = rank.communicator();
    ncclComm_t without_two = nullptr;
    ASSERT_EQ(ncclCommSplit(all, rank.rank < 2 ? 0 : NCCL_SPLIT_NOCOLOR, 0, &without_two, nullptr),
              ncclSuccess);
    const Stream across, beside;
    const Buffer buffer(bytes_of(std::vector<int>{1})), other(bytes_of(std::vector<int>{1}));
    constexpr size_t large = 1 << 20;  // more than the wire holds
    const Buffer message(large);
    if (rank.rank == 1) order("kind=network-cut peer=2");
    meet(rank, 0);

    if (rank.rank == 2) {
      ASSERT_EQ(ncclSend(message.at(), large, ncclInt8, 1, all, across), ncclSuccess);
    } else if (rank.rank == 1) {
      ASSERT_EQ(ncclRecv(message.at(), large, ncclInt8, 2, all, across), ncclSuccess);
    }
    all_reduce(all, buffer, across);
    if (rank.rank < 2) {
      all_reduce(without_two, other, beside);
      beside.synchronize();
      EXPECT_EQ(values_in<int>(other), std::vector<int>{2}) << "who is on one side goes on";
    }
    EXPECT_TRUE(hangs(across));
    EXPECT_EQ(async_error(all), ncclSuccess) << "nobody gets an error";
    meet(rank, 1);

    if (rank.rank == 1) order("kind=heal");
    across.synchronize();
    EXPECT_EQ(values_in<int>(buffer), std::vector<int>{3}) << "nothing is lost when the network comes back";
    EXPECT_EQ(ncclCommDestroy(without_two), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(all), ncclSuccess);
  });
}

// All peers, begun at a call: what ran before it is done, and no communicator is made either.
TEST(Faults, ACutNetworkBeginsAtACallAndStopsHostsToo) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const Buffer buffer(bytes_of(std::vector<int>{1}));
    if (rank.rank == 0) order("kind=network-cut call=2");
    all_reduce(comm, buffer, stream);
    stream.synchronize();
    all_reduce(comm, buffer, stream);
    EXPECT_TRUE(hangs(stream));
    meet(rank, 0);

    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t half = nullptr;
    EXPECT_EQ(ncclCommSplit(comm, 0, 0, &half, &config), ncclInProgress);
    usleep(200'000);
    EXPECT_EQ(async_error(half), ncclInProgress);
    meet(rank, 1);
    if (rank.rank == 0) order("kind=heal");
    while (async_error(half) == ncclInProgress) usleep(1000);
    EXPECT_EQ(async_error(half), ncclSuccess);
    stream.synchronize();
    EXPECT_EQ(values_in<int>(buffer), std::vector<int>{4});
    EXPECT_EQ(ncclCommAbort(half), ncclSuccess);
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  });
}

TEST(Faults, ASlowLinkIsSlowUntilItIsHealed) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    constexpr size_t count = 1 << 20;  // 16 chunks
    const Buffer buffer(bytes_of(std::vector<int>(count, 1)));
    if (rank.rank == 1) order("kind=slow part=link peer=0 factor=1000000");
    all_reduce(comm, buffer, stream, count);
    EXPECT_TRUE(hangs(stream));  // it would take minutes
    meet(rank, 0);
    if (rank.rank == 1) order("kind=heal");
    stream.synchronize();
    EXPECT_EQ(values_in<int>(buffer), std::vector<int>(count, 2));
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}
