// How communicators are made, asked, split and ended.
#include <gtest/gtest.h>
#include <nccl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "softgpu/nccl/tests/rank_processes.h"

namespace {

// The sum over all ranks of the communicator, each giving this value.
int sum(ncclComm_t comm, int value) {
  const Stream stream;
  const Buffer buffer(bytes_of(std::vector<int>{value}));
  EXPECT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt32, ncclSum, comm, stream), ncclSuccess)
      << ncclGetLastError(comm);
  stream.synchronize();
  return values_in<int>(buffer)[0];
}

int rank_in(ncclComm_t comm) {
  int rank = -1;
  EXPECT_EQ(ncclCommUserRank(comm, &rank), ncclSuccess);
  return rank;
}
int count_of(ncclComm_t comm) {
  int count = -1;
  EXPECT_EQ(ncclCommCount(comm, &count), ncclSuccess);
  return count;
}

void wait_until_ready(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while (state == ncclInProgress) {
    std::this_thread::yield();
    ASSERT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
  }
  ASSERT_EQ(state, ncclSuccess) << ncclGetLastError(comm);
}

TEST(Communicators, KnowTheirRankCountAndDevice) {
  run_ranks(3, [](Rank& rank) {
    ASSERT_EQ(cudaSetDevice(rank.rank % 2), cudaSuccess);
    const ncclComm_t comm = rank.communicator();
    EXPECT_EQ(rank_in(comm), rank.rank);
    EXPECT_EQ(count_of(comm), 3);
    int device = -1;
    EXPECT_EQ(ncclCommCuDevice(comm, &device), ncclSuccess);
    EXPECT_EQ(device, rank.rank % 2);
    ncclResult_t state = ncclInternalError;
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    EXPECT_EQ(state, ncclSuccess);
    EXPECT_EQ(ncclCommFinalize(comm), ncclSuccess);
    EXPECT_EQ(ncclCommFinalize(comm), ncclInvalidUsage);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(comm), ncclInvalidArgument);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find("no such communicator"), std::string::npos);
  });
}

TEST(Communicators, OfTheVersionWhoseHeaderTheyWereBuiltWith) {
  int version = 0;
  EXPECT_EQ(ncclGetVersion(&version), ncclSuccess);
  EXPECT_EQ(version, NCCL_VERSION_CODE);
  for (int result = 0; result < ncclNumResults; ++result) {
    EXPECT_STRNE(ncclGetErrorString(static_cast<ncclResult_t>(result)), "unknown result code");
  }
}

TEST(Communicators, SeveralAtOnceFromSeveralThreads) {
  run_ranks(3, [](Rank& rank) {
    std::vector<ncclUniqueId> ids;
    for (int i = 0; i < 4; ++i) ids.push_back(rank.id(i));
    // Made beforehand: to allocate and free may wait for the whole device, and so for the other threads'
    // ranks.
    const Stream streams[4];
    std::vector<std::unique_ptr<Buffer>> buffers;
    for (int i = 0; i < 4; ++i)
      buffers.push_back(std::make_unique<Buffer>(bytes_of(std::vector<int>{rank.rank + i})));
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        ncclComm_t comm;
        ASSERT_EQ(ncclCommInitRank(&comm, 3, ids[i], rank.rank), ncclSuccess) << ncclGetLastError(nullptr);
        for (int round = 0; round < 20; ++round) {
          ASSERT_EQ(ncclAllReduce(buffers[i]->at(), buffers[i]->at(), 1, ncclInt32,
                                  round == 0 ? ncclSum : ncclMax, comm, streams[i]),
                    ncclSuccess);
        }
        ASSERT_EQ(ncclCommDestroy(comm), ncclSuccess);  // waits for them
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int i = 0; i < 4; ++i) EXPECT_EQ(values_in<int>(*buffers[i]), std::vector<int>{3 * i + 3});
  });
}

TEST(Communicators, MadeFromSeveralIds) {
  run_ranks(2, [](Rank& rank) {
    ncclUniqueId ids[] = {rank.id(0), rank.id(1)};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    ASSERT_EQ(ncclCommInitRankScalable(&comm, 2, rank.rank, 2, ids, &config), ncclSuccess);
    EXPECT_EQ(sum(comm, 1), 2);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    EXPECT_EQ(ncclCommInitRankScalable(&comm, 2, rank.rank, 3, ids, &config), ncclInvalidArgument);
  });
}

// Both devices of one process, by one thread.
TEST(Communicators, ForAllDevicesOfOneProcess) {
  run_ranks(1, [](Rank&) {
    ncclComm_t comms[2];
    ASSERT_EQ(ncclCommInitAll(comms, 2, nullptr), ncclSuccess) << ncclGetLastError(nullptr);
    std::vector<std::unique_ptr<Buffer>> buffers;
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    for (int device = 0; device < 2; ++device) {
      ASSERT_EQ(cudaSetDevice(device), cudaSuccess);
      buffers.push_back(std::make_unique<Buffer>(bytes_of(std::vector<int>{device + 1})));
    }
    for (int device = 0; device < 2; ++device) {  // null streams, of the communicator's device
      ASSERT_EQ(ncclAllReduce(buffers[device]->at(), buffers[device]->at(), 1, ncclInt32, ncclSum,
                              comms[device], nullptr),
                ncclSuccess);
    }
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    for (int device = 0; device < 2; ++device) {
      ASSERT_EQ(cudaSetDevice(device), cudaSuccess);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_EQ(values_in<int>(*buffers[device]), std::vector<int>{3});
      EXPECT_EQ(ncclCommDestroy(comms[device]), ncclSuccess);
    }
    const int twice[] = {1, 1};
    EXPECT_EQ(ncclCommInitAll(comms, 2, twice), ncclInvalidUsage);
    EXPECT_EQ(ncclCommInitAll(comms, 99, nullptr), ncclInvalidArgument);
  });
}

// NCCL's own words, which its users search for.
TEST(Communicators, RefuseTwoRanksOnOneDevice) {
  run_ranks(3, [](Rank& rank) {
    setenv("CUDA_VISIBLE_DEVICES", rank.rank == 0 ? "0" : "1", 1);  // nothing has used CUDA yet
    ncclComm_t comm = nullptr;
    const ncclResult_t result = ncclCommInitRank(&comm, 3, rank.id(), rank.rank);
    const std::string text = ncclGetLastError(nullptr);
    if (!rank.shares_host_with(rank.rank + 1)) {  // ranks 1 and 2 are on two hosts then
      EXPECT_EQ(result, ncclSuccess) << text;
    } else if (rank.rank == 0) {
      EXPECT_EQ(result, ncclRemoteError);
      EXPECT_EQ(text, "Rank 1 and rank 2 are on one device, so this communicator can't be made.");
    } else {
      EXPECT_EQ(result, ncclInvalidUsage);
      EXPECT_EQ(text, rank.rank == 1 ? "Duplicate GPU detected : rank 1 and rank 2 both on CUDA device 2000"
                                     : "Duplicate GPU detected : rank 2 and rank 1 both on CUDA device 2000");
    }
  });
}

TEST(Communicators, MadeInAGroup) {
  run_ranks(2, [](Rank& rank) {
    const ncclUniqueId first = rank.id(0), second = rank.id(1);
    ncclComm_t comms[2];
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    for (const int i : {rank.rank, 1 - rank.rank}) {  // in opposite orders
      ASSERT_EQ(ncclCommInitRank(&comms[i], 2, i == 0 ? first : second, rank.rank), ncclSuccess);
    }
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    for (const ncclComm_t comm : comms) {
      EXPECT_EQ(sum(comm, 1), 2);
      EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    }
  });
}

TEST(Communicators, ThatDoNotBlockAreInProgressUntilAllHaveCome) {
  run_ranks(2, [](Rank& rank) {
    const ncclUniqueId id = rank.id();
    if (rank.rank == 1) rank.wait_for(0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm;
    ASSERT_EQ(ncclCommInitRankConfig(&comm, 2, id, rank.rank, &config), ncclInProgress);
    if (rank.rank == 0) {
      ncclResult_t state;
      ASSERT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
      EXPECT_EQ(state, ncclInProgress);
      int count;
      EXPECT_EQ(ncclCommCount(comm, &count), ncclInvalidArgument);
      rank.set(0);
    }
    wait_until_ready(comm);
    EXPECT_EQ(sum(comm, 1), 2);

    ncclComm_t part = nullptr;
    ASSERT_EQ(ncclCommSplit(comm, rank.rank, 0, &part, nullptr), ncclInProgress);
    wait_until_ready(comm);
    wait_until_ready(part);
    EXPECT_EQ(sum(part, 5), 5);

    EXPECT_EQ(ncclCommFinalize(comm), ncclInProgress);
    wait_until_ready(comm);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(part), ncclSuccess);
  });
}

TEST(Communicators, SplitByColorAndOrderByKey) {
  run_ranks(6, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    ncclComm_t part = nullptr;
    // Colors 0 and 1 by parity, except rank 5; keys turn the order round, ranks 1 and 3 have the same.
    const int color = rank.rank == 5 ? NCCL_SPLIT_NOCOLOR : rank.rank % 2;
    ASSERT_EQ(ncclCommSplit(comm, color, color == 0 ? -rank.rank : 7, &part, nullptr), ncclSuccess)
        << ncclGetLastError(comm);
    if (rank.rank == 5) {
      EXPECT_EQ(part, nullptr);
    } else {
      EXPECT_EQ(count_of(part), color == 0 ? 3 : 2);
      EXPECT_EQ(rank_in(part), color == 0 ? 2 - rank.rank / 2 : rank.rank / 2);
      EXPECT_EQ(sum(part, rank.rank), color == 0 ? 6 : 4);
    }
    EXPECT_EQ(sum(comm, 1), 6);  // the parent goes on

    ncclComm_t again = nullptr;
    ASSERT_EQ(ncclCommSplit(comm, 3, rank.rank, &again, nullptr), ncclSuccess);
    EXPECT_EQ(sum(again, 1), 6);
    EXPECT_EQ(ncclCommSplit(comm, -7, 0, &again, nullptr), ncclInvalidArgument);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(part), ncclSuccess);  // none is none
  });
}

TEST(Communicators, ShrinkWithoutADeadRankWhoseCollectiveHangs) {
  RankProcesses ranks(4, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    if (rank.rank == 2) {
      rank.set(0);
      pause();
    }
    const Stream stream;
    const Buffer buffer(bytes_of(std::vector<int>{1}));
    ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt32, ncclSum, comm, stream), ncclSuccess);
    rank.wait_for(1);
    ncclComm_t rest = nullptr;
    int excluded[] = {2};
    ASSERT_EQ(ncclCommShrink(comm, excluded, 1, &rest, nullptr, NCCL_SHRINK_ABORT), ncclSuccess)
        << ncclGetLastError(comm);
    stream.synchronize();  // what hung has returned
    EXPECT_EQ(count_of(rest), 3);
    EXPECT_EQ(rank_in(rest), rank.rank == 3 ? 2 : rank.rank);
    EXPECT_EQ(sum(rest, rank.rank), 4);
    const ncclResult_t refused = ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt32, ncclSum, comm, stream);
    // On another host than the dead rank's the broken connection may have been seen before.
    EXPECT_TRUE(refused == ncclInvalidUsage || (refused == ncclRemoteError && !rank.shares_host_with(2)));
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(rest), ncclSuccess);
  });
  ranks.wait_for(0);
  ranks.signal(2, SIGKILL);
  ranks.wait(2);
  Rank(0, 0, ranks.shared()).set(1);
  for (const int rank : {0, 1, 3}) ranks.expect_success(rank);
}

TEST(Communicators, RefuseToShrinkByWrongLists) {
  run_ranks(1, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    ncclComm_t rest = nullptr;
    int itself[] = {0}, stranger[] = {4};
    EXPECT_EQ(ncclCommShrink(comm, itself, 1, &rest, nullptr, 0), ncclInvalidArgument);
    EXPECT_EQ(ncclCommShrink(comm, stranger, 1, &rest, nullptr, 0), ncclInvalidArgument);
    EXPECT_EQ(ncclCommShrink(comm, itself, 0, &rest, nullptr, 0), ncclInvalidArgument);
    EXPECT_EQ(ncclCommShrink(comm, stranger, 1, &rest, nullptr, 8), ncclInvalidArgument);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST(Communicators, RegisterBuffersAndAllocateMemory) {
  run_ranks(1, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    void* memory = nullptr;
    ASSERT_EQ(ncclMemAlloc(&memory, 1000), ncclSuccess);
    void* registration = nullptr;
    ncclWindow_t window = nullptr;
    EXPECT_EQ(ncclCommRegister(comm, memory, 1000, &registration), ncclSuccess);
    EXPECT_EQ(ncclCommWindowRegister(comm, memory, 1000, &window, NCCL_WIN_DEFAULT), ncclSuccess);
    EXPECT_EQ(ncclCommDeregister(comm, registration), ncclSuccess);
    EXPECT_EQ(ncclCommDeregister(comm, registration), ncclInvalidArgument);
    EXPECT_EQ(ncclCommWindowDeregister(comm, window), ncclSuccess);
    EXPECT_EQ(ncclMemFree(memory), ncclSuccess);
    EXPECT_EQ(ncclMemFree(memory), ncclUnhandledCudaError);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

}  // namespace
