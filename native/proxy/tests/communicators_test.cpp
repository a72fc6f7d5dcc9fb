// NCCL through the proxy: two ranks, a process each.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <string>
#include <thread>

#include "proxy/tests/support.h"

namespace {

void run_rank(int rank, const ncclUniqueId& id) {
  ok(cudaSetDevice(rank));
  const OwnStream stream;
  ncclComm_t all = nullptr, half = nullptr;
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.commName = "everybody";
  ok(ncclCommInitRankConfig(&all, 2, id, rank, &configuration));
  int count = 0, own = -1;
  ok(ncclCommCount(all, &count));
  ok(ncclCommUserRank(all, &own));
  EXPECT_EQ(count, 2);
  EXPECT_EQ(own, rank);

  const DeviceInts mine(3, 10 + rank), sum(3), from_other(3);
  ok(ncclAllReduce(mine.get(), sum.get(), 3, ncclInt32, ncclSum, all, stream));
  EXPECT_EQ(sum.read(stream), std::vector<int>(3, 21));

  ok(ncclGroupStart());
  ok(ncclSend(mine.get(), 3, ncclInt32, 1 - rank, all, stream));
  ok(ncclRecv(from_other.get(), 3, ncclInt32, 1 - rank, all, stream));
  ok(ncclGroupEnd());
  EXPECT_EQ(from_other.read(stream), std::vector<int>(3, 11 - rank));

  ok(ncclCommSplit(all, rank, 0, &half, nullptr));
  ok(ncclAllReduce(mine.get(), sum.get(), 3, ncclInt32, ncclSum, half, stream));
  EXPECT_EQ(sum.read(stream), std::vector<int>(3, 10 + rank));
  ncclResult_t state = ncclInternalError;
  ok(ncclCommGetAsyncError(all, &state));
  EXPECT_EQ(state, ncclSuccess);

  // A failure that nobody waited for is the next NCCL call's.
  ok(ncclSend(nullptr, 3, ncclInt32, 5, all, stream));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorUnknown);
  EXPECT_NE(std::string(cudaGetErrorString(cudaErrorUnknown)).find("there is no rank 5"), std::string::npos);
  EXPECT_EQ(cudaGetLastError(), cudaErrorUnknown);
  ok(ncclCommDestroy(half));
  ok(ncclCommAbort(all));
  EXPECT_EQ(ncclCommCount(all, &count), ncclInvalidArgument);
}

TEST(Alone, IsRankOne) {
  const char* const id = std::getenv("PROXY_TEST_ID");
  if (!alone() || !id) GTEST_SKIP() << "only for other tests";
  run_rank(1, id_of(id));
}

TEST(Communicators, TwoRanksMeetThroughTheirServers) {
  ncclUniqueId id;
  ok(ncclGetUniqueId(&id));
  Ended other{-1, ""};
  std::thread process([&] { other = run_alone("Alone.IsRankOne", {"PROXY_TEST_ID=" + hex(id)}); });
  run_rank(0, id);
  process.join();
  ok(cudaSetDevice(0));
  EXPECT_EQ(other.status, 0) << other.output;
}

// C10d's watchdog asks several times a step.
TEST(Communicators, WhileNothingHasFailedTheServerIsNotAsked) {
  ncclUniqueId id;
  ncclComm_t alone = nullptr;
  ok(ncclGetUniqueId(&id));
  ok(ncclCommInitRank(&alone, 1, id, 0));
  kill(find_server(), SIGSTOP);
  auto asked = std::async(std::launch::async, [alone] {
    ncclResult_t state = ncclInternalError;
    ok(ncclCommGetAsyncError(alone, &state));
    return state;
  });
  const bool answered = asked.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  kill(find_server(), SIGCONT);
  EXPECT_TRUE(answered);
  EXPECT_EQ(asked.get(), ncclSuccess);
  ok(ncclCommDestroy(alone));
}

}  // namespace
