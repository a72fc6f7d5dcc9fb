// Communicators between hosts with networks of their own, and what happens when a network is cut.
#include <gtest/gtest.h>
#include <nccl.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/sockets.h"
#include "softgpu/nccl/tests/namespaces.h"
#include "softgpu/nccl/tests/rank_processes.h"

namespace {

using softgpu::nccl::address_from;

class HostsOfTheirOwn : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = Namespaces::unavailable();
    if (!reason.empty()) GTEST_SKIP() << "no hosts of their own: " << reason;
  }
};

// The sum over all ranks, each giving its rank.
int sum_of_ranks(ncclComm_t comm) {
  int rank = -1;
  EXPECT_EQ(ncclCommUserRank(comm, &rank), ncclSuccess);
  const Stream stream;
  const Buffer buffer(bytes_of(std::vector<int>{rank}));
  EXPECT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt32, ncclSum, comm, stream), ncclSuccess)
      << ncclGetLastError(comm);
  stream.synchronize();
  return values_in<int>(buffer)[0];
}

std::string address_in(const ncclUniqueId& id) {
  const std::string text = id.internal;
  return text.substr(text.rfind(' ') + 1);
}

// Two ranks on each of three hosts, and what can be made out of them.
TEST_F(HostsOfTheirOwn, HaveCommunicatorsTogether) {
  const Namespaces hosts(3);
  run_ranks(6, [&](Rank& rank) {
    hosts.enter(rank.rank % 3);
    const ncclComm_t comm = rank.communicator();
    EXPECT_EQ(sum_of_ranks(comm), 15);

    ncclComm_t of_host = nullptr, across = nullptr, pair = nullptr, rest = nullptr;
    ASSERT_EQ(ncclCommSplit(comm, rank.rank % 3, 0, &of_host, nullptr), ncclSuccess)
        << ncclGetLastError(comm);
    EXPECT_EQ(sum_of_ranks(of_host), 1);
    ASSERT_EQ(ncclCommSplit(comm, rank.rank / 3, 0, &across, nullptr), ncclSuccess) << ncclGetLastError(comm);
    EXPECT_EQ(sum_of_ranks(across), 3);
    const int color = rank.rank % 3 == 2 ? NCCL_SPLIT_NOCOLOR : 0;
    ASSERT_EQ(ncclCommSplit(across, color, -rank.rank, &pair, nullptr), ncclSuccess)
        << ncclGetLastError(across);
    if (pair) {
      EXPECT_EQ(sum_of_ranks(pair), 1);
    }
    if (rank.rank != 4) {
      int excluded[] = {4};
      ASSERT_EQ(ncclCommShrink(comm, excluded, 1, &rest, nullptr, NCCL_SHRINK_DEFAULT), ncclSuccess);
      EXPECT_EQ(sum_of_ranks(rest), 10);
    }
    for (const ncclComm_t made : {comm, of_host, across, pair, rest}) {
      EXPECT_EQ(ncclCommDestroy(made), ncclSuccess);
    }
  });
}

// Nothing is wrong for those who wait, only slow: what was called before and after the cut arrives when the
// network is there again.
TEST_F(HostsOfTheirOwn, HangWhileTheNetworkIsCut) {
  const Namespaces hosts(2);
  RankProcesses ranks(2, [&](Rank& rank) {
    hosts.enter(rank.rank);
    const ncclComm_t comm = rank.communicator(), other = rank.communicator(1);
    EXPECT_EQ(sum_of_ranks(comm), 1);
    EXPECT_EQ(sum_of_ranks(other), 1);
    rank.set(rank.rank);
    rank.wait_for(2);
    const Stream stream, aborted;
    const Buffer buffer(bytes_of(std::vector<float>(100'000, 1))), lost(4);
    ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 100'000, ncclFloat, ncclSum, comm, stream),
              ncclSuccess);
    ASSERT_EQ(ncclAllReduce(lost.at(), lost.at(), 1, ncclFloat, ncclSum, other, aborted), ncclSuccess);
    usleep(300'000);
    for (const ncclComm_t each : {comm, other}) {
      ncclResult_t state = ncclInternalError;
      EXPECT_EQ(ncclCommGetAsyncError(each, &state), ncclSuccess);
      EXPECT_EQ(state, ncclSuccess);
    }
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    EXPECT_EQ(cudaStreamQuery(aborted), cudaErrorNotReady);
    std::thread aborter([&] { EXPECT_EQ(ncclCommAbort(other), ncclSuccess); });
    aborted.synchronize();
    aborter.join();
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);

    rank.set(3 + rank.rank);
    stream.synchronize();
    EXPECT_EQ(values_in<float>(buffer), std::vector<float>(100'000, 2));
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
  ranks.wait_for(0);
  ranks.wait_for(1);
  hosts.cut(1);
  Rank(0, 0, ranks.shared()).set(2);
  ranks.wait_for(3);
  ranks.wait_for(4);
  hosts.mend(1);
  ranks.expect_success(0);
  ranks.expect_success(1);
}

// While a communicator is made, too.
TEST_F(HostsOfTheirOwn, CanAbortACommunicatorThatACutNetworkKeepsFromBeingMade) {
  const Namespaces hosts(2);
  RankProcesses ranks(2, [&](Rank& rank) {
    hosts.enter(rank.rank);
    const ncclUniqueId id = rank.id();
    rank.set(rank.rank);
    rank.wait_for(2);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm;
    ASSERT_EQ(ncclCommInitRankConfig(&comm, 2, id, rank.rank, &config), ncclInProgress);
    usleep(200'000);
    if (rank.rank == 0) {  // the other has no way to it, and may know that by now
      ncclResult_t state;
      EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
      EXPECT_EQ(state, ncclInProgress);
    }
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  });
  ranks.wait_for(0);
  ranks.wait_for(1);
  hosts.cut(1);
  Rank(0, 0, ranks.shared()).set(2);
  ranks.expect_success(0);
  ranks.expect_success(1);
}

TEST_F(HostsOfTheirOwn, UseTheInterfaceThatTheVariableNames) {
  const Namespaces hosts(2);
  run_ranks(2, [&](Rank& rank) {
    hosts.enter(rank.rank);
    const auto address_with = [](const char* interfaces) {
      setenv("NCCL_SOCKET_IFNAME", interfaces, 1);
      ncclUniqueId id;
      EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess) << interfaces << ": " << ncclGetLastError(nullptr);
      return address_in(id).substr(0, address_in(id).rfind(':'));
    };
    const std::string end = std::to_string(rank.rank + 1);
    EXPECT_EQ(address_with(""), "10.77.0." + end);
    EXPECT_EQ(address_with("eth"), "10.77.0." + end);
    EXPECT_EQ(address_with("eth1"), "10.78.0." + end);
    EXPECT_EQ(address_with("=eth1,lo"), "10.78.0." + end);
    EXPECT_EQ(address_with("^eth0"), "10.78.0." + end);
    EXPECT_EQ(address_with("^eth"), "127.0.0.1");
    EXPECT_EQ(address_with("lo"), "127.0.0.1");
    setenv("NCCL_SOCKET_IFNAME", "=eth", 1);
    ncclUniqueId id;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclInvalidUsage);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("fits NCCL_SOCKET_IFNAME==eth"), std::string::npos)
        << ncclGetLastError(nullptr);

    setenv("NCCL_SOCKET_IFNAME", "eth1", 1);
    const ncclComm_t comm = rank.communicator();
    EXPECT_EQ(sum_of_ranks(comm), 1);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST_F(HostsOfTheirOwn, AreNotOneHostBecauseAVariableSaysSo) {
  const Namespaces hosts(2);
  run_ranks(2, [&](Rank& rank) {
    hosts.enter(rank.rank);
    setenv("NCCL_HOSTID", "one", 1);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm;
    ASSERT_EQ(ncclCommInitRankConfig(&comm, 2, rank.id(), rank.rank, &config), ncclInProgress);
    if (rank.rank == 1) {
      ncclResult_t state = ncclInProgress;
      while (state == ncclInProgress) ASSERT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
      EXPECT_EQ(state, ncclRemoteError);
      EXPECT_NE(std::string(ncclGetLastError(comm)).find("NCCL_HOSTID is the same"), std::string::npos)
          << ncclGetLastError(comm);
      rank.set(0);
    }
    rank.wait_for(0);  // the other waits for it
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  });
}

void be_a_host_of_its_own(const Rank& rank) { setenv("NCCL_HOSTID", std::to_string(rank.rank).c_str(), 1); }

ncclResult_t state_of(ncclComm_t comm) {
  ncclResult_t state = ncclInternalError;
  EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
  return state;
}

// Whoever waits for the dead rank hears of it, and nobody else.
TEST(BetweenHosts, ADeadRankIsAnErrorForThoseWhoWaitForIt) {
  RankProcesses ranks(3, [](Rank& rank) {
    be_a_host_of_its_own(rank);
    const ncclComm_t comm = rank.communicator();
    rank.set(rank.rank);
    if (rank.rank == 2) pause();
    rank.wait_for(3);
    const Stream stream, other;
    const Buffer buffer(bytes_of(std::vector<int>{5 + rank.rank})), lost(4);
    if (rank.rank == 0) {
      ASSERT_EQ(ncclRecv(buffer.at(), 1, ncclInt32, 1, comm, stream), ncclSuccess);
      usleep(300'000);  // longer than the news of a dead rank takes
      EXPECT_EQ(state_of(comm), ncclSuccess) << ncclGetLastError(comm);
      EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
      rank.set(4);
      stream.synchronize();
      EXPECT_EQ(values_in<int>(buffer), std::vector<int>{6});
      EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
      return;
    }
    rank.wait_for(4);
    ASSERT_EQ(ncclSend(buffer.at(), 1, ncclInt32, 0, comm, stream), ncclSuccess);
    stream.synchronize();
    ASSERT_EQ(ncclRecv(lost.at(), 1, ncclInt32, 2, comm, other), ncclSuccess);
    while (state_of(comm) == ncclSuccess) usleep(1000);
    EXPECT_EQ(state_of(comm), ncclRemoteError);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find("The connection from rank 2 has ended"),
              std::string::npos)
        << ncclGetLastError(comm);
    EXPECT_EQ(cudaStreamQuery(other), cudaErrorNotReady);
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    other.synchronize();
  });
  for (const int rank : {0, 1, 2}) ranks.wait_for(rank);
  ranks.signal(2, SIGKILL);
  ranks.wait(2);
  Rank(0, 0, ranks.shared()).set(3);
  ranks.expect_success(0);
  ranks.expect_success(1);
}

TEST(BetweenHosts, ADeadRankIsAnErrorForThoseWhoSplit) {
  RankProcesses ranks(2, [](Rank& rank) {
    be_a_host_of_its_own(rank);
    const ncclComm_t comm = rank.communicator();
    rank.set(rank.rank);
    if (rank.rank == 1) pause();
    ncclComm_t part = nullptr;
    EXPECT_EQ(ncclCommSplit(comm, 0, 0, &part, nullptr), ncclRemoteError);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("The connection from rank 1 has ended"),
              std::string::npos)
        << ncclGetLastError(nullptr);
    EXPECT_EQ(part, nullptr);
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  });
  for (const int rank : {0, 1}) ranks.wait_for(rank);
  ranks.signal(1, SIGKILL);
  ranks.wait(1);
  ranks.expect_success(0);
}

// What it has told arrives, though it has gone when the other comes to read.
TEST(BetweenHosts, ARankThatHasFinishedMayGo) {
  RankProcesses ranks(2, [](Rank& rank) {
    be_a_host_of_its_own(rank);
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const size_t count = 200'000;  // fits into the slots, so its sender need not wait
    const Buffer buffer(bytes_of(std::vector<float>(count, rank.rank == 0 ? 3.0f : 0.0f)));
    if (rank.rank == 1) rank.wait_for(0);
    ASSERT_EQ(ncclBroadcast(buffer.at(), buffer.at(), count, ncclFloat, 0, comm, stream), ncclSuccess);
    stream.synchronize();
    EXPECT_EQ(values_in<float>(buffer), std::vector<float>(count, 3));
    EXPECT_EQ(state_of(comm), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
  ranks.expect_success(0);
  Rank(0, 0, ranks.shared()).set(0);
  ranks.expect_success(1);
}

}  // namespace
