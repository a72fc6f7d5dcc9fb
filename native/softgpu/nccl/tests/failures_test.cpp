// Wrong calls, hangs, and ranks that die or stop.
#include <gtest/gtest.h>
#include <nccl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/sockets.h"
#include "softgpu/nccl/tests/rank_processes.h"
#include "softgpu/runtime/enqueue.h"

extern "C" {  // of a header of its own, whose types softgpu has no use for
struct ncclDevCommRequirements;
struct ncclDevComm;
ncclResult_t ncclDevCommCreate(ncclComm_t, const ncclDevCommRequirements*, ncclDevComm*);
ncclResult_t ncclDevCommDestroy(ncclComm_t, const ncclDevComm*);
}

namespace {

bool last_error_says(const std::string& words) {
  const std::string text = ncclGetLastError(nullptr);
  return text.find(words) != std::string::npos;
}

double processor_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

std::string contents(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Waits, with patience, for lines on a captured stderr, which is a file that the ranks' processes share.
void wait_until_said(int lines) {
  for (int looks = 0; looks < 100'000; ++looks) {
    const std::string said = contents("/proc/self/fd/2");
    if (std::count(said.begin(), said.end(), '\n') >= lines) return;
    usleep(1000);
  }
  ADD_FAILURE() << "nothing is said";
}

bool somebody_listens(const ncclUniqueId& id) {
  const std::string text = id.internal;
  const std::atomic<bool> aborted = false;
  try {
    softgpu::nccl::connect_to(softgpu::nccl::address_from(text.substr(text.rfind(' ') + 1)), aborted);
    return true;
  } catch (const softgpu::nccl::NcclFailure&) {
    return false;
  }
}

TEST(WrongCalls, AreRefusedWithASentence) {
  run_ranks(1, [](Rank& rank) {
    ncclComm_t comm = nullptr;
    ncclUniqueId foreign{};
    EXPECT_EQ(ncclCommInitRank(&comm, 1, foreign, 0), ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("not made by softgpu's ncclGetUniqueId"));
    EXPECT_EQ(comm, nullptr);
    EXPECT_EQ(ncclCommInitRank(&comm, 2, rank.id(1), 2), ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("Rank 2 is not one of 0 to 1"));
    EXPECT_EQ(ncclCommInitRank(&comm, 0, rank.id(2), 0), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(nullptr, 1, rank.id(3), 0), ncclInvalidArgument);
    ncclConfig_t config{};
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 1, rank.id(4), 0, &config), ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("NCCL_CONFIG_INITIALIZER"));
    EXPECT_EQ(ncclGetUniqueId(nullptr), ncclInvalidArgument);

    comm = rank.communicator();
    const Stream stream;
    const Buffer buffer(64);
    std::byte* at = buffer.at();
    EXPECT_EQ(ncclAllReduce(at, at, 4, static_cast<ncclDataType_t>(13), ncclSum, comm, stream),
              ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("no data type 13"));
    EXPECT_EQ(ncclAllReduce(at, at, 4, ncclFloat, static_cast<ncclRedOp_t>(77), comm, stream),
              ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("77 is neither"));
    EXPECT_EQ(ncclAllReduce(nullptr, at, 4, ncclFloat, ncclSum, comm, stream), ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("ncclAllReduce(count 4, float32, sum): a buffer is null"));
    EXPECT_EQ(ncclReduce(at, nullptr, 4, ncclFloat, ncclSum, 0, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclBroadcast(at, at, 4, ncclFloat, 1, comm, stream), ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("there is no rank 1"));
    EXPECT_EQ(ncclSend(at, 4, ncclFloat, -1, comm, stream), ncclInvalidArgument);
    EXPECT_EQ(ncclAllReduce(at, at, 4, ncclFloat, ncclSum, nullptr, stream), ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("no such communicator"));

    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    const Stream elsewhere;
    EXPECT_EQ(ncclAllReduce(at, at, 4, ncclFloat, ncclSum, comm, elsewhere), ncclInvalidUsage);
    EXPECT_TRUE(last_error_says("The stream belongs to device 1"));
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);

    const float two = 2;
    ncclRedOp_t operation;
    ASSERT_EQ(ncclRedOpCreatePreMulSum(&operation, const_cast<float*>(&two), ncclFloat,
                                       ncclScalarHostImmediate, comm),
              ncclSuccess);
    EXPECT_EQ(ncclAllReduce(at, at, 4, ncclInt32, operation, comm, stream), ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("was made for float32, not int32"));
    EXPECT_EQ(ncclRedOpDestroy(operation, comm), ncclSuccess);
    EXPECT_EQ(ncclRedOpDestroy(operation, comm), ncclInvalidArgument);
    EXPECT_EQ(ncclRedOpDestroy(ncclSum, comm), ncclInvalidArgument);

    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    EXPECT_EQ(ncclGroupSimulateEnd(&info), ncclInvalidUsage);
    EXPECT_TRUE(last_error_says("softgpu has no ncclGroupSimulateEnd"));
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);  // the group is over
    EXPECT_EQ(ncclDevCommCreate(comm, nullptr, nullptr), ncclInvalidUsage);
    EXPECT_TRUE(last_error_says("softgpu has no ncclDevCommCreate"));
    EXPECT_EQ(ncclDevCommDestroy(comm, nullptr), ncclInvalidUsage);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

// Those who contradict the first are refused, and the communicator is made by those who don't.
TEST(WrongCalls, ThatContradictOtherRanksAreRefused) {
  run_ranks(1, [](Rank& rank) {
    const ncclUniqueId id = rank.id();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t first, second, comm;
    ASSERT_EQ(ncclCommInitRankConfig(&first, 2, id, 0, &config), ncclInProgress);
    usleep(100'000);  // it has most likely come by then; whichever of the two comes late is refused
    EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 0), ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("Rank 0 has joined this communicator already")) << ncclGetLastError(nullptr);
    EXPECT_EQ(comm, nullptr);
    EXPECT_EQ(ncclCommInitRank(&comm, 5, id, 1), ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("5 ranks, the first to come said 2")) << ncclGetLastError(nullptr);
    EXPECT_TRUE(somebody_listens(id));
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    ASSERT_EQ(ncclCommInitRankConfig(&second, 2, id, 1, &config), ncclInProgress);
    for (const ncclComm_t made : {first, second}) {
      ncclResult_t state = ncclInProgress;
      while (state == ncclInProgress) ASSERT_EQ(ncclCommGetAsyncError(made, &state), ncclSuccess);
      EXPECT_EQ(state, ncclSuccess) << ncclGetLastError(made);
      EXPECT_EQ(ncclCommAbort(made), ncclSuccess);
    }
    while (somebody_listens(id)) usleep(1000);
    EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 1), ncclRemoteError);
    EXPECT_TRUE(last_error_says("Nobody listens")) << ncclGetLastError(nullptr);
  });
}

class Mismatches : public testing::Test {
 public:
  // Runs two ranks that call these, and gives what they say on stderr. Both have to hang until they abort.
  using Call = std::function<void(ncclComm_t, std::byte*, cudaStream_t)>;
  std::string stderr_of(const Call& first, const Call& second) {
    testing::internal::CaptureStderr();
    RankProcesses ranks(2, [&](Rank& rank) {
      const ncclComm_t comm = rank.communicator();
      const Stream stream;
      const Buffer buffer(bytes_of(std::vector<float>(100, 1)));
      (rank.rank == 0 ? first : second)(comm, buffer.at(), stream);
      rank.set(rank.rank);
      rank.wait_for(2);
      EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
      EXPECT_EQ(values_in<float>(buffer), std::vector<float>(100, 1));
      EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
      stream.synchronize();
    });
    ranks.wait_for(0);
    ranks.wait_for(1);
    wait_until_said(Rank::hosts());
    usleep(300'000);  // longer than any of them would need to go wrong
    Rank(0, 0, ranks.shared()).set(2);
    for (const int rank : {0, 1}) ranks.expect_success(rank);
    return testing::internal::GetCapturedStderr();
  }
};

void all_reduce(ncclComm_t comm, std::byte* at, cudaStream_t stream, size_t count, ncclDataType_t type,
                ncclRedOp_t operation) {
  ASSERT_EQ(ncclAllReduce(at, at, count, type, operation, comm, stream), ncclSuccess);
}

TEST_F(Mismatches, OfCounts) {
  const std::string said = stderr_of(
      [](auto comm, auto at, auto stream) { all_reduce(comm, at, stream, 10, ncclFloat, ncclSum); },
      [](auto comm, auto at, auto stream) { all_reduce(comm, at, stream, 20, ncclFloat, ncclSum); });
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), Rank::hosts()) << said;
  EXPECT_NE(said.find("rank 0 calls ncclAllReduce(count 10, float32, sum) as its collective 1"),
            std::string::npos)
      << said;
  EXPECT_NE(said.find("rank 1 calls ncclAllReduce(count 20, float32, sum) as its collective 1"),
            std::string::npos)
      << said;
}

TEST_F(Mismatches, OfTypesReductionsAndRoots) {
  EXPECT_NE(
      stderr_of([](auto comm, auto at, auto stream) { all_reduce(comm, at, stream, 10, ncclFloat, ncclSum); },
                [](auto comm, auto at, auto stream) { all_reduce(comm, at, stream, 10, ncclInt, ncclSum); })
          .find("int32"),
      std::string::npos);
  EXPECT_NE(
      stderr_of([](auto comm, auto at, auto stream) { all_reduce(comm, at, stream, 10, ncclFloat, ncclSum); },
                [](auto comm, auto at, auto stream) { all_reduce(comm, at, stream, 10, ncclFloat, ncclMax); })
          .find("max"),
      std::string::npos);
  EXPECT_NE(stderr_of([](auto comm, auto at,
                         auto stream) { ncclReduce(at, at, 10, ncclFloat, ncclSum, 0, comm, stream); },
                      [](auto comm, auto at, auto stream) {
                        ncclReduce(at, at, 10, ncclFloat, ncclSum, 1, comm, stream);
                      })
                .find("root 1"),
            std::string::npos);
}

TEST_F(Mismatches, OfKinds) {
  const std::string said =
      stderr_of([](auto comm, auto at, auto stream) { all_reduce(comm, at, stream, 10, ncclFloat, ncclSum); },
                [](auto comm, auto at, auto stream) { ncclAllGather(at, at, 10, ncclFloat, comm, stream); });
  EXPECT_NE(said.find("ncclAllReduce"), std::string::npos) << said;
  EXPECT_NE(said.find("ncclAllGather"), std::string::npos) << said;
}

// An empty collective is none, so the next one does not match.
TEST_F(Mismatches, OfNumbers) {
  const std::string said = stderr_of(
      [](auto comm, auto at, auto stream) {
        all_reduce(comm, at, stream, 0, ncclFloat, ncclSum);
        all_reduce(comm, at, stream, 10, ncclFloat, ncclSum);
      },
      [](auto comm, auto at, auto stream) { all_reduce(comm, at, stream, 5, ncclFloat, ncclSum); });
  EXPECT_NE(said.find("count 5"), std::string::npos) << said;
}

TEST(PointToPointMismatches, OfCountsAreSaid) {
  testing::internal::CaptureStderr();
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const Buffer buffer(400);
    if (rank.rank == 0) {
      ASSERT_EQ(ncclSend(buffer.at(), 10, ncclFloat, 1, comm, stream), ncclSuccess);
      stream.synchronize();
    } else {
      ASSERT_EQ(ncclRecv(buffer.at(), 20, ncclFloat, 0, comm, stream), ncclSuccess);
      wait_until_said(1);
      usleep(200'000);
      EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    }
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(
      said.find(
          "rank 1 calls ncclRecv(count 20, float32, from rank 0), rank 0 calls ncclSend(count 10, float32, "
          "to rank 1)"),
      std::string::npos)
      << said;
}

// The others wait for a dead rank for ever, without work for the processor, until they abort.
TEST(Hangs, AfterARankIsKilledUntilAborted) {
  RankProcesses ranks(3, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream, behind;
    const Buffer buffer(bytes_of(std::vector<float>(1'000'000, 1)));
    if (rank.rank == 1) {
      for (;;) {  // killed somewhere in here
        ncclAllReduce(buffer.at(), buffer.at(), 1'000'000, ncclFloat, ncclMax, comm, stream);
        stream.synchronize();
        rank.set(0);
      }
    }
    cudaEvent_t event;
    ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
    // On its own host nobody hears of its death; elsewhere its connections end.
    const ncclResult_t expected = rank.shares_host_with(1) ? ncclSuccess : ncclRemoteError;
    for (bool is_dead = false; !is_dead;) {
      is_dead = rank.is_set(1);
      const ncclResult_t result =
          ncclAllReduce(buffer.at(), buffer.at(), 1'000'000, ncclFloat, ncclMax, comm, stream);
      ASSERT_TRUE(result == ncclSuccess || result == expected) << ncclGetLastError(comm);
      while (cudaStreamQuery(stream) == cudaErrorNotReady && !rank.is_set(1)) usleep(100);
    }
    ncclResult_t state = ncclInternalError;
    do {
      ASSERT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    } while (state != expected);
    ASSERT_EQ(cudaEventRecord(event, stream), cudaSuccess);
    const double before = processor_seconds();
    usleep(500'000);
    EXPECT_LT(processor_seconds() - before, 0.1);
    EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    EXPECT_EQ(state, expected);
    if (state == ncclRemoteError) {
      EXPECT_NE(std::string(ncclGetLastError(comm)).find("The connection from rank 1 has ended"),
                std::string::npos);
      EXPECT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclFloat, ncclMax, comm, stream),
                ncclRemoteError);
    }

    std::thread aborter([&] { EXPECT_EQ(ncclCommAbort(comm), ncclSuccess); });
    stream.synchronize();
    aborter.join();
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
    EXPECT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclFloat, ncclMax, comm, stream),
              ncclInvalidArgument);
    EXPECT_EQ(ncclCommAbort(comm), ncclInvalidArgument);
    EXPECT_TRUE(last_error_says("no such communicator"));
    // The device is as good as ever.
    EXPECT_EQ(values_in<float>(buffer)[0], 1);
  });
  ranks.wait_for(0);
  ranks.signal(1, SIGKILL);
  EXPECT_TRUE(WIFSIGNALED(ranks.wait(1)));
  Rank(0, 0, ranks.shared()).set(1);
  ranks.expect_success(0);
  ranks.expect_success(2);
}

TEST(Hangs, EndWhenAStoppedRankGoesOn) {
  RankProcesses ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Stream stream;
    const Buffer buffer(bytes_of(std::vector<float>(100'000, 1)));
    rank.set(rank.rank);
    rank.wait_for(2);
    ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 100'000, ncclFloat, ncclSum, comm, stream),
              ncclSuccess);
    rank.set(3);
    stream.synchronize();
    EXPECT_EQ(values_in<float>(buffer), std::vector<float>(100'000, 2));
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
  ranks.wait_for(0);
  ranks.wait_for(1);
  ranks.signal(1, SIGSTOP);
  Rank(0, 0, ranks.shared()).set(2);
  ranks.wait_for(3);
  usleep(100'000);
  int status;
  EXPECT_EQ(waitpid(ranks.pid(0), &status, WNOHANG), 0);
  ranks.signal(1, SIGCONT);
  ranks.expect_success(0);
  ranks.expect_success(1);
}

TEST(Hangs, InMakingACommunicatorEndByAbort) {
  run_ranks(1, [](Rank& rank) {
    const ncclUniqueId id = rank.id();
    std::atomic<ncclComm_t> comm = nullptr;
    std::thread maker([&] {
      EXPECT_EQ(ncclCommInitRank(reinterpret_cast<ncclComm_t*>(&comm), 2, id, 0), ncclInternalError);
      EXPECT_TRUE(last_error_says("aborted"));
    });
    ncclComm_t known;
    while (!(known = comm)) usleep(100);
    usleep(100'000);
    EXPECT_EQ(ncclCommAbort(known), ncclSuccess);
    maker.join();
  });
}

TEST(Hangs, EndForTheOneThatAbortsOnly) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t hung = rank.communicator(0), well = rank.communicator(1);
    const Stream first, second;
    const Buffer buffer(bytes_of(std::vector<int>{1})), other(bytes_of(std::vector<int>{1}));
    if (rank.rank == 0) {
      ASSERT_EQ(ncclAllReduce(other.at(), other.at(), 1, ncclInt, ncclSum, hung, first), ncclSuccess);
      ASSERT_EQ(ncclAllReduce(other.at(), other.at(), 1, ncclInt, ncclSum, hung, first), ncclSuccess);
    }
    ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt, ncclSum, well, second), ncclSuccess);
    second.synchronize();
    if (rank.rank == 0) {
      EXPECT_EQ(cudaStreamQuery(first), cudaErrorNotReady);
      EXPECT_EQ(ncclCommRevoke(hung, NCCL_REVOKE_DEFAULT), ncclSuccess);
      first.synchronize();
      EXPECT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt, ncclSum, hung, first), ncclInvalidUsage);
    }
    ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt, ncclSum, well, second), ncclSuccess);
    second.synchronize();
    EXPECT_EQ(values_in<int>(buffer), std::vector<int>{4});
    EXPECT_EQ(ncclCommDestroy(hung), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(well), ncclSuccess);
  });
}

// As on a GPU: a failed kernel takes the whole device with it, and what waits on it.
TEST(Hangs, EndWhenTheDeviceIsLost) {
  run_ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    if (rank.rank == 1) return rank.wait_for(0);
    const Stream hung, behind, failing;
    const Buffer buffer(4);
    for (const Stream* stream : {&hung, &behind}) {
      ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt, ncclSum, comm, *stream), ncclSuccess);
    }
    ASSERT_EQ(softgpu::enqueue(failing, [] { return cudaErrorIllegalAddress; }), cudaSuccess);
    while (softgpu::device_usable(0)) usleep(100);
    EXPECT_EQ(cudaStreamSynchronize(hung), cudaErrorIllegalAddress);
    EXPECT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt, ncclSum, comm, hung),
              ncclUnhandledCudaError);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    rank.set(0);
  });
}

// A process that exits while a collective hangs does exit.
TEST(Hangs, DoNotKeepAProcessFromExiting) {
  RankProcesses ranks(2, [](Rank& rank) {
    const ncclComm_t comm = rank.communicator();
    const Buffer buffer(4);
    if (rank.rank == 0) {
      cudaStream_t stream;
      ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
      ASSERT_EQ(ncclAllReduce(buffer.at(), buffer.at(), 1, ncclInt, ncclSum, comm, stream), ncclSuccess);
      usleep(50'000);
    }
    exit(testing::Test::HasFailure() ? 1 : 0);
  });
  ranks.expect_success(0);
  ranks.expect_success(1);
}

// The memory that ranks share has no name, and the socket's name goes with its process.
TEST(Cleanliness, NothingIsLeftOfRanksKilledAtAnyMoment) {
  for (int moment = 0; moment < 20 && !testing::Test::HasFailure(); ++moment) {
    RankProcesses ranks(3, [](Rank& rank) {
      const ncclUniqueId ids[] = {rank.id(0), rank.id(1)};  // the second is never used
      ncclComm_t comm;
      const ncclResult_t made = ncclCommInitRank(&comm, 3, ids[0], rank.rank);
      if (made == ncclRemoteError) pause();  // a rank killed before this one: its own kill follows
      ASSERT_EQ(made, ncclSuccess);
      const std::string maps = contents("/proc/self/maps");
      EXPECT_NE(maps.find("/memfd:softgpu-nccl (deleted)"), std::string::npos);
      EXPECT_EQ(maps.find("/dev/shm"), std::string::npos);
      ASSERT_FALSE(testing::Test::HasFailure());
      rank.set(rank.rank);
      const Stream stream;
      const Buffer buffer(400'000);
      for (;;) {
        ncclAllReduce(buffer.at(), buffer.at(), 100'000, ncclFloat, ncclSum, comm, stream);
        stream.synchronize();
      }
    });
    if (moment == 19) {
      for (int rank = 0; rank < 3; ++rank) ranks.wait_for(rank);
    }
    usleep(moment * 1500);
    for (int rank = 0; rank < 3; ++rank) ranks.signal(rank, SIGKILL);
    for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(WIFSIGNALED(ranks.wait(rank)));
    for (const Shared::Id& id : ranks.shared().ids) {
      EXPECT_FALSE(id.made && somebody_listens(id.value));
    }
  }
}

}  // namespace
