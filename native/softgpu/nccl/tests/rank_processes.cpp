#include "softgpu/nccl/tests/rank_processes.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>

namespace {

constexpr auto patience = std::chrono::seconds(120);

template <class Condition>
bool comes_true(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    usleep(500);
  }
  return true;
}

// Devices 0 and 1 of each rank are its own: a communicator takes no two ranks on one device.
void give_devices(int rank, int ranks) {
  const std::string first = std::to_string(2 * rank), second = std::to_string(2 * rank + 1);
  setenv("SOFTGPU_DEVICES", std::to_string(2 * ranks).c_str(), 1);
  setenv("CUDA_VISIBLE_DEVICES", (first + "," + second).c_str(), 1);
}

}  // namespace

int Rank::hosts() {
  const char* number = std::getenv("JITCKPT_TEST_HOSTS");
  return number ? std::atoi(number) : 1;
}

ncclUniqueId Rank::id(int number) {
  Shared::Id& id = shared_.ids[number];
  if (rank == 0) {
    EXPECT_EQ(ncclGetUniqueId(&id.value), ncclSuccess) << ncclGetLastError(nullptr);
    id.made = true;
  }
  EXPECT_TRUE(comes_true([&] { return id.made.load(); })) << "rank 0 makes no unique id";
  return id.value;
}

ncclComm_t Rank::communicator(int number) {
  ncclComm_t made = nullptr;
  EXPECT_EQ(ncclCommInitRank(&made, ranks, id(number), rank), ncclSuccess) << ncclGetLastError(nullptr);
  return made;
}

void Rank::wait_for(int flag) const {
  EXPECT_TRUE(comes_true([&] { return is_set(flag); })) << "nobody sets flag " << flag;
}

RankProcesses::RankProcesses(int ranks, const Body& body) {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  shared_ = new (memory) Shared();
  std::fflush(nullptr);
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const std::string host = "host " + std::to_string(rank % Rank::hosts());
      if (Rank::hosts() > 1) setenv("NCCL_HOSTID", host.c_str(), 1);
      give_devices(rank, ranks);
      Rank self(rank, ranks, *shared_);
      body(self);
      std::fflush(nullptr);
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    EXPECT_GT(pid, 0);
    pids_.push_back(pid);
  }
}

RankProcesses::~RankProcesses() {
  for (const pid_t pid : pids_) {
    if (pid == 0) continue;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  munmap(shared_, sizeof(Shared));
}

void RankProcesses::signal(int rank, int signal) { ASSERT_EQ(kill(pids_[rank], signal), 0); }

int RankProcesses::wait(int rank) {
  int status = -1;
  if (!comes_true([&] { return waitpid(pids_[rank], &status, WNOHANG) == pids_[rank]; })) {
    ADD_FAILURE() << "rank " << rank << " does not end";
    return -1;
  }
  pids_[rank] = 0;
  return status;
}

void RankProcesses::expect_success(int rank) {
  const int status = wait(rank);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
      << "rank " << rank << " ends with wait status " << status;
}

void run_ranks(int ranks, const RankProcesses::Body& body) {
  RankProcesses processes(ranks, body);
  for (int rank = 0; rank < ranks; ++rank) processes.expect_success(rank);
}
