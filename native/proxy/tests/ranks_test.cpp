// Jobs of several ranks, whose servers die at any call: each rank's program ends as if nothing had been.
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "proxy/client/jitckpt_proxy.h"
#include "proxy/tests/ranks_job.h"

namespace {

// One rank of a job that trains: every minibatch has collectives, a split and a communicator of its own, and
// lets the host decide by what the device says.
class Rank {
 public:
  Rank()
      : rank_(on_own_device(number_of("RANK"))),
        ranks_(number_of("WORLD_SIZE")),
        store_(std::getenv("PROXY_TEST_STORE")),
        state_(64, 5 + rank_),
        sum_(64) {
    ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    ok(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    ok(cudaMallocHost(reinterpret_cast<void**>(&pinned_), 4096));
    world_ = meet(store_, "world");
    ok(ncclCommSplit(world_, rank_ / 2, -rank_, &pair_, nullptr));
    ncclComm_t for_a_time = nullptr;
    ok(ncclCommSplit(world_, rank_ % 2, 0, &for_a_time, nullptr));
    ok(ncclCommSplit(for_a_time, 0, 0, &orphan_, nullptr));
    ok(ncclCommDestroy(for_a_time));
  }
  ~Rank() {
    ok(cudaStreamSynchronize(stream_));
    for (const ncclComm_t one : {orphan_, pair_, world_}) ok(ncclCommDestroy(one));
    ok(cudaEventDestroy(event_));
    ok(cudaFreeHost(pinned_));
    ok(cudaStreamDestroy(stream_));
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // Calls are counted; before number `at`, `happens` is called.
  std::vector<int> minibatch(int at = -1, const std::function<void()>& happens = [] {}) {
    int calls = 0;
    const auto call = [&](const std::function<void()>& make) {
      if (calls++ == at) happens();
      make();
    };
    const auto all_reduce = [&](int* from, int* to, ncclComm_t communicator) {
      call([&] { ok(ncclAllReduce(from, to, 4, ncclInt32, ncclSum, communicator, stream_)); });
    };
    std::vector<int> seen, host(64, 3 + rank_);
    int* block = nullptr;
    call([&] { launch_add(state_.get(), rank_ + 1, stream_); });
    all_reduce(state_.get(), sum_.get(), world_);
    call([&] { ok(cudaMalloc(reinterpret_cast<void**>(&block), 256)); });
    call([&] { ok(cudaMemcpyAsync(block, host.data(), 256, cudaMemcpyHostToDevice, stream_)); });
    host.assign(64, -1);
    call([&] { ok(cudaEventRecord(event_, stream_)); });
    call([&] { ok(cudaStreamWaitEvent(nullptr, event_, 0)); });
    ncclUniqueId id{};
    const std::string name = "minibatch-" + std::to_string(++minibatches_);
    if (rank_ == 0) {
      call([&] { ok(ncclGetUniqueId(&id)); });
      store_.set(name, hex(id));
    } else {
      call([&] { ok(cudaStreamSynchronize(stream_)); });
      id = id_of(store_.get(name).c_str());
    }
    ncclComm_t fresh = nullptr, half = nullptr;
    call([&] { ok(ncclCommInitRank(&fresh, ranks_, id, ranks_ - 1 - rank_)); });
    call([&] { ok(ncclCommSplit(world_, rank_ == 0 ? NCCL_SPLIT_NOCOLOR : 1, rank_, &half, nullptr)); });
    all_reduce(sum_.get(), sum_.get() + 8, fresh);
    if (half) all_reduce(sum_.get(), sum_.get() + 16, half);
    all_reduce(sum_.get() + 8, block, pair_);
    all_reduce(block, block + 8, orphan_);
    call([&] {
      ok(ncclGroupStart());
      ok(ncclSend(block, 4, ncclInt32, (rank_ + 1) % ranks_, world_, stream_));
      ok(ncclRecv(block + 16, 4, ncclInt32, (rank_ + ranks_ - 1) % ranks_, world_, stream_));
      ok(ncclGroupEnd());
    });
    int told = 0;
    call([&] { ok(cudaMemcpyAsync(&told, block + 16, sizeof told, cudaMemcpyDeviceToHost, stream_)); });
    call([&] { launch_add(state_.get() + 1, told % 1000, stream_); });
    call([&] { ok(cudaMemcpyAsync(pinned_, block, 256, cudaMemcpyDeviceToHost, stream_)); });
    call([&] { ok(cudaStreamSynchronize(stream_)); });
    // What has been waited for is over, whatever befalls the devices meanwhile.
    for (int query = 0; query < 40; ++query) ok(cudaEventQuery(event_));
    seen.insert(seen.end(), {told, pinned_[0], pinned_[8], pinned_[30]});
    pinned_[0] = minibatches_;  // which no replay may undo
    call([&] { ok(ncclCommDestroy(fresh)); });
    if (half) call([&] { ok(ncclCommDestroy(half)); });
    call([&] { ok(cudaFree(block)); });
    all_reduce(state_.get(), sum_.get() + 32, world_);
    call([&] { launch_add(state_.get() + 2, 1, stream_); });
    // As after the steps of two optimizers, with no word of the other ranks between. No synchronisation here:
    // whoever is first begins the next minibatch.
    call([&] { ok(static_cast<cudaError_t>(jitckpt_proxy_keep())); });
    call([&] { launch_add(state_.get() + 3, 1, stream_); });
    call([&] { ok(static_cast<cudaError_t>(jitckpt_proxy_keep())); });
    calls_ = calls;
    seen.push_back(pinned_[0]);
    return seen;
  }
  // With a copy behind the collective, which must not count if that is aborted: nor does the word behind it,
  // which tells whoever looks at the memory that the copy is there.
  int sum_of_all() {
    uint64_t& word = *reinterpret_cast<uint64_t*>(pinned_ + 200);
    const uint64_t value = ++sums_;  // each has its own: a replay writes the last one's again
    std::atomic<bool> over{false};
    int read = 0;
    std::thread reader([&] {
      while (__atomic_load_n(&word, __ATOMIC_ACQUIRE) != value && !over)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      read = pinned_[100];
    });
    launch_add(state_.get() + 2, 1, stream_);
    ok(ncclAllReduce(state_.get(), sum_.get() + 48, 4, ncclInt32, ncclSum, world_, stream_));
    ok(cudaMemcpyAsync(pinned_ + 100, sum_.get() + 48, sizeof(int), cudaMemcpyDeviceToHost, stream_));
    ok(static_cast<cudaError_t>(jitckpt_proxy_write_word(&word, value, stream_)));
    ok(cudaStreamSynchronize(stream_));
    EXPECT_EQ(__atomic_load_n(&word, __ATOMIC_ACQUIRE), value);
    over = true;
    reader.join();
    EXPECT_EQ(read, pinned_[100]);
    return pinned_[100];
  }
  // One that nobody waits for, and that changes nothing.
  void make_a_call() { launch_add(state_.get(), 0, stream_); }
  int calls() const { return calls_; }
  std::vector<int> end() const {
    auto values = state_.read(stream_);
    values.resize(4);
    const auto sums = sum_.read(stream_);
    values.insert(values.end(), sums.begin(), sums.begin() + 40);
    return values;
  }

  // A rank that has ended can't take part in a recovery any more.
  void wait_for_all() const {
    store_.set("over-" + std::to_string(rank_), "");
    for (int rank = 0; rank < ranks_; ++rank) store_.get("over-" + std::to_string(rank));
  }
  int rank() const { return rank_; }
  ncclComm_t world() const { return world_; }
  cudaEvent_t event() const { return event_; }
  cudaStream_t stream() const { return stream_; }
  const Store& store() const { return store_; }

 private:
  static int on_own_device(int rank) {
    ok(cudaSetDevice(rank));
    return rank;
  }

  int rank_, ranks_;
  Store store_;
  int minibatches_ = 0, calls_ = 0;
  uint64_t sums_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
  int* pinned_ = nullptr;
  const DeviceInts state_, sum_;
  ncclComm_t world_ = nullptr, pair_ = nullptr, orphan_ = nullptr;
};

// PROXY_TEST_FAULT: what happens in every minibatch, from PROXY_TEST_FIRST to PROXY_TEST_LAST.
TEST(Alone, TrainsAsARank) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  {
    const std::string fault = std::getenv("PROXY_TEST_FAULT") ? std::getenv("PROXY_TEST_FAULT") : "";
    Rank rank;
    const Watchdog watchdog(rank.world(), rank.event());
    const int first = number_of("PROXY_TEST_FIRST"), last = number_of("PROXY_TEST_LAST");
    for (int minibatch = first; minibatch < last; ++minibatch) {
      // One rank after the other, then two at once, before each call.
      const int choices = number_of("WORLD_SIZE") + 1, who = minibatch % choices, call = minibatch / choices;
      const bool here = who == rank.rank() || (who == choices - 1 && rank.rank() < 2);
      print("numbers", rank.minibatch(here && !fault.empty() ? call : -1, [&] {
        if (fault == "kill")
          kill_server();
        else
          order_fault(fault);
      }));
    }
    print("end", rank.end());
    std::printf("calls %d\n", rank.calls());
    rank.wait_for_all();
  }
  std::fflush(stdout);
}

// One failure of rank 0, while no communicator is made or ended.
TEST(Alone, SaysWhoseServerStays) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  {
    Rank rank;
    const Watchdog watchdog(rank.world(), rank.event());
    const std::string own = std::to_string(rank.rank()), other = std::to_string(1 - rank.rank());
    const std::string fault = std::getenv("PROXY_TEST_FAULT") ? std::getenv("PROXY_TEST_FAULT") : "";
    print("numbers", rank.minibatch());
    ok(cudaStreamSynchronize(rank.stream()));
    const pid_t server = jitckpt_proxy_server();
    rank.store().set("there-" + own, "");
    rank.store().get("there-" + other);
    if (fault == "kill" && rank.rank() == 0)
      kill_server();
    else if (!fault.empty() && rank.rank() == 0)
      order_fault(fault);
    print("sum", {rank.sum_of_all()});
    print("numbers", rank.minibatch());
    print("end", rank.end());
    std::printf("server %s\n", jitckpt_proxy_server() == server ? "stays" : "is new");
    rank.wait_for_all();
  }
  std::fflush(stdout);
}

// Its server's spare, once there is one.
pid_t find_spare() {
  for (;;) {
    for (const pid_t server : find_servers()) {
      if (server != jitckpt_proxy_server()) return server;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Rank 0's server is killed twice: once there is a spare, and once that has been killed too.
TEST(Alone, LosesItsServerAndItsSpare) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  {
    Rank rank;
    const bool spares = std::getenv("JITCKPT_PROXY_SPARE") != nullptr, fails = spares && rank.rank() == 0;
    print("numbers", rank.minibatch());
    for (const bool spare_dies : {false, true}) {
      print("numbers", rank.minibatch());
      if (fails) {
        const pid_t spare = find_spare();
        if (spare_dies) kill(spare, SIGKILL);
        kill_server();
        print("sum", {rank.sum_of_all()});
        EXPECT_EQ(jitckpt_proxy_server() == spare, !spare_dies);
      } else {
        print("sum", {rank.sum_of_all()});
      }
    }
    print("numbers", rank.minibatch());
    if (spares) {
      find_spare();
      for (const pid_t server : find_servers()) std::printf("server %d\n", server);
    }
    std::fflush(stdout);
    ok(cudaStreamSynchronize(rank.stream()));  // the other's device may need this one until then
    rank.wait_for_all();
    if (spares && rank.rank() == 1) _exit(0);  // without a word to anyone
  }
}

// Rank 0 passes on to rank 1 what it has got with rank 2: through another communicator, which its server ends
// some time after the first, or after the second of those two.
TEST(Alone, PassesOnWhatItGets) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  const int rank = number_of("RANK");
  const Store store(std::getenv("PROXY_TEST_STORE"));
  ok(cudaSetDevice(rank));
  const ncclComm_t world = meet(store, "world");
  ncclComm_t passing_on = nullptr, getting[2]{}, idle = nullptr;
  const auto make = [&](ncclComm_t& communicator, int without, int idle_ones) {
    ok(ncclCommSplit(world, rank == without ? NCCL_SPLIT_NOCOLOR : 0, rank, &communicator, nullptr));
    for (int more = 0; more < idle_ones; ++more) ok(ncclCommSplit(world, 0, rank, &idle, nullptr));
  };
  make(getting[0], 1, 30);
  make(passing_on, 2, 30);
  make(getting[1], 1, 0);
  {
    const OwnStream stream;
    const DeviceInts state(1, rank), sum(1);
    cudaEvent_t event = nullptr;
    ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    const Watchdog watchdog(world, event);
    for (int minibatch = 0; minibatch < 8; ++minibatch) {
      launch_add(state.get(), 10, stream);
      ok(cudaStreamSynchronize(stream));
      if (rank == 0 && minibatch >= 4 && std::getenv("PROXY_TEST_FAULT"))
        order_fault("kind=collective-error");
      if (rank != 1)
        ok(ncclAllReduce(state.get(), sum.get(), 1, ncclInt32, ncclSum, getting[minibatch % 2], stream));
      if (rank == 0) ok(ncclSend(sum.get(), 1, ncclInt32, 1, passing_on, stream));
      if (rank == 1) {
        ok(ncclRecv(sum.get(), 1, ncclInt32, 0, passing_on, stream));
        print("number", sum.read(stream));
      }
      ok(static_cast<cudaError_t>(jitckpt_proxy_keep()));
    }
    print("end", sum.read(stream));
    ok(cudaStreamSynchronize(stream));
    store.set("over-" + std::to_string(rank), "");
    for (int one = 0; one < 3; ++one) store.get("over-" + std::to_string(one));
  }
  std::fflush(stdout);
}

// Learns as jitckpt/decisions/transparent/validation.py does. Returns what the minibatch needs, in blocks.
uint64_t validate(const std::function<void()>& happens) {
  jitckpt_proxy_memory memory{};
  ok(static_cast<cudaError_t>(jitckpt_proxy_check(&memory)));
  happens();
  int heard = jitckpt_proxy_validate(5, 0, "", "", "");
  while (heard == jitckpt_proxy_overwritten || heard == jitckpt_proxy_put_back ||
         heard == jitckpt_proxy_unknown) {
    // A failure just before it waited: nothing has been compared yet, and the others wait.
    if (heard == jitckpt_proxy_unknown) {
      heard = jitckpt_proxy_validate(5, 0, "", "", "");
      continue;
    }
    bool learns = false;
    for (uint64_t block = 0; block < memory.block_count; ++block) {
      if (memory.kept[block] != 0 || memory.changed[block] == 0) continue;
      if (heard == jitckpt_proxy_put_back || memory.found[block] != 2) continue;
      memory.kept[block] = 1;
      learns = true;
    }
    uint64_t needed = 0;
    for (uint64_t block = 0; block < memory.block_count; ++block) needed += memory.kept[block];
    heard = jitckpt_proxy_validate(5, learns ? 1 : 2, "", "", "");
    if (heard == jitckpt_proxy_valid) return needed;
  }
  ADD_FAILURE() << "the validation came to " << heard;
  return 0;
}

TEST(Alone, Validates) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  {
    const std::string fault = std::getenv("PROXY_TEST_FAULT") ? std::getenv("PROXY_TEST_FAULT") : "";
    Rank rank;
    std::optional<Watchdog> watchdog;
    if (fault != "unseen") watchdog.emplace(rank.world(), rank.event());
    for (int minibatch = 0; minibatch < 3; ++minibatch) {
      print("numbers", rank.minibatch());
      print("sum", {rank.sum_of_all()});
      if (fault.empty()) continue;
      const uint64_t needed = validate([&] {
        const bool here = rank.rank() == minibatch % 2;
        if (fault == "kill" && here) kill_server();
        if (fault == "unseen" && here) {
          order_fault("kind=sticky");
          rank.make_a_call();
        } else if (fault == "unseen") {  // it comes once that has been recovered from
          Store(std::getenv("PROXY_TEST_RECOVERED")).get("recovered");
        }
      });
      std::printf("needed %lu\n", needed);
    }
    print("end", rank.end());
    rank.wait_for_all();
  }
  std::fflush(stdout);
}

TEST(Alone, HasAnErrorOfItsOwn) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  const int number = number_of("RANK");
  Rank rank;
  print("numbers", rank.minibatch());
  if (number == 1) {
    ok(cudaLaunchKernel(kernels::fail(), dim3(1), dim3(1), nullptr, 0, rank.stream()));
    const cudaError_t error = cudaStreamSynchronize(rank.stream());
    std::printf("seen error %d: %s\n", error, cudaGetErrorString(error));
    rank.store().set("over", "");
  } else {
    rank.store().get("over");
    print("end", rank.end());
  }
  std::fflush(stdout);
  std::_Exit(testing::Test::HasFailure() ? 1 : 0);  // the device of one is broken
}

TEST(Alone, IsGivenUp) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  Rank rank;
  rank.minibatch();
  ok(cudaStreamSynchronize(rank.stream()));  // else the other waits for this rank's part in a collective
  rank.wait_for_all();
  if (number_of("RANK") == 0) kill_server();
  const cudaError_t error = cudaStreamSynchronize(rank.stream());
  std::printf("seen error %d: %s\n", error, cudaGetErrorString(error));
  cudaError_t kept = cudaSuccess;  // the other rank hears of it a little later
  while (kept == cudaSuccess) kept = static_cast<cudaError_t>(jitckpt_proxy_keep());
  std::printf("seen keep %d: %s\n", kept, cudaGetErrorString(kept));
  std::fflush(stdout);
  std::_Exit(testing::Test::HasFailure() ? 1 : 0);
}

std::vector<std::string> minibatches(int first, int last) {
  return {"PROXY_TEST_FIRST=" + std::to_string(first), "PROXY_TEST_LAST=" + std::to_string(last)};
}

void expect_recovered(
    int ranks, int first, int last, const std::string& fault,
    const std::function<void(Coordinator&)>& prepare = [](Coordinator&) {},
    const std::vector<std::string>& settings = {}) {
  Job undisturbed(ranks), job(ranks);
  auto variables = minibatches(first, last);
  undisturbed.run("Alone.TrainsAsARank", variables);
  EXPECT_TRUE(undisturbed.coordinator.recoveries().empty());
  variables.push_back("PROXY_TEST_FAULT='" + fault + "'");
  variables.insert(variables.end(), settings.begin(), settings.end());
  prepare(job.coordinator);
  job.run("Alone.TrainsAsARank", variables);
  EXPECT_EQ(job.seen(), undisturbed.seen());
  EXPECT_EQ(undisturbed.seen().size(), static_cast<std::size_t>(ranks * (last - first + 1)));
  EXPECT_EQ(job.coordinator.complaint(), "");
  EXPECT_GT(job.coordinator.compared().first, 0);
  EXPECT_GT(job.coordinator.compared().second, 0);
  const auto recoveries = job.coordinator.recoveries();
  EXPECT_GE(recoveries.size(), static_cast<std::size_t>(last - first));
  if (testing::Test::HasFailure())
    std::printf("%s\n%s\n", job.outputs[0].output.c_str(), job.outputs[1].output.c_str());
}

// What the program sees is the same; all ranks' servers stay, but those that are killed meanwhile.
TEST(Ranks, ValidateTheirMinibatches) {
  Job undisturbed(2), calm(2), killed(2);
  undisturbed.run("Alone.Validates");
  EXPECT_TRUE(undisturbed.coordinator.recoveries().empty());
  calm.run("Alone.Validates", {"PROXY_TEST_FAULT=none"});
  killed.run("Alone.Validates", {"PROXY_TEST_FAULT=kill"});
  EXPECT_EQ(undisturbed.seen().size(), 2u * 7);
  for (const Job* const job : {&calm, &killed}) {
    EXPECT_EQ(job->seen(), undisturbed.seen());
    EXPECT_EQ(job->coordinator.complaint(), "");
  }
  for (const Ended& ended : calm.outputs) {
    // What the kernels add to, and the sums that follow from it.
    EXPECT_NE(ended.output.find("needed 2\n"), std::string::npos) << ended.output;
  }
  for (const Coordinator::Recovery& recovery : calm.coordinator.recoveries()) {
    EXPECT_TRUE(recovery.validates);
    EXPECT_EQ(recovery.stayed.size(), 2u);
  }
  EXPECT_GE(killed.coordinator.recoveries().size(), 3u);
}

// The others can't come to where it waits for them, and none of its calls tells it.
TEST(Ranks, ADeviceThatBreaksWhileItsProgramWaitsForOthersIsSeen) {
  Job undisturbed(2), job(2);
  undisturbed.run("Alone.Validates");
  const std::string folder = temporary_folder("jitckpt-recovered-");
  std::atomic<bool> over{false};
  std::thread tells([&] {
    while (!over && job.coordinator.recoveries().empty())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Store(folder).set("recovered", "");
  });
  job.run("Alone.Validates",
          {"PROXY_TEST_FAULT=unseen", "PROXY_TEST_RECOVERED=" + folder, "JITCKPT_HANG_TIMEOUT=1000"});
  over = true;
  tells.join();
  std::filesystem::remove_all(folder);
  EXPECT_EQ(job.seen(), undisturbed.seen());
  EXPECT_EQ(job.coordinator.complaint(), "");
  EXPECT_GE(job.coordinator.recoveries().size(), 3u);
}

// Runs Alone.SaysWhoseServerStays, and returns the ranks whose servers are the same in the end.
std::set<int> who_stays(
    const std::string& fault, const std::function<void(Coordinator&)>& prepare = [](Coordinator&) {}) {
  static const std::vector<std::string> undisturbed = [] {
    Job job(2);
    job.run("Alone.SaysWhoseServerStays");
    EXPECT_TRUE(job.coordinator.recoveries().empty());
    return job.seen();
  }();
  Job job(2);
  prepare(job.coordinator);
  job.run("Alone.SaysWhoseServerStays", {"PROXY_TEST_FAULT='" + fault + "'"});
  EXPECT_EQ(job.seen(), undisturbed);
  EXPECT_EQ(job.coordinator.complaint(), "");
  EXPECT_GE(job.coordinator.recoveries().size(), 1u);
  std::set<int> stay;
  for (int rank = 0; rank < 2; ++rank) {
    const std::string& said = job.outputs[static_cast<std::size_t>(rank)].output;
    if (said.find("\nserver stays") != std::string::npos) stay.insert(rank);
  }
  return stay;
}

TEST(Ranks, OnlyServersThatMayBeAtFaultAreReplaced) {
  EXPECT_EQ(who_stays("kind=collective-error"), (std::set<int>{0, 1}));
  EXPECT_EQ(who_stays("kind=collective-error result=system"), std::set<int>{1});
  EXPECT_EQ(who_stays("kind=sticky"), std::set<int>{1});
  EXPECT_EQ(who_stays("kill"), std::set<int>{1});
}

// Its device may hold all that is left of a state.
TEST(Ranks, AServerOutlivesAnotherThatDiesInTheReplay) {
  Job job(2);
  int killed = 0;
  job.coordinator.before_replay = [&killed](int rank, pid_t worker) {
    if (rank == 0 && killed++ == 0) kill(find_server(worker), SIGKILL);
    // The other fails to meet it, before anybody has heard of its death.
    if (rank == 1 && killed == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  };
  job.run("Alone.SaysWhoseServerStays", {"PROXY_TEST_FAULT='kill'"});
  EXPECT_EQ(job.coordinator.complaint(), "");
  EXPECT_GE(killed, 2);
  const std::string& said = job.outputs[1].output;
  EXPECT_EQ(said.find("had succeeded before"), std::string::npos) << said;
  EXPECT_EQ(said.find("ended with status"), std::string::npos) << said;
}

TEST(Ranks, ASpareTakesAServersPlaceAndEndsWithItsProgram) {
  Job undisturbed(2), job(2);
  undisturbed.run("Alone.LosesItsServerAndItsSpare");
  job.run("Alone.LosesItsServerAndItsSpare", {"JITCKPT_PROXY_SPARE=1"});
  EXPECT_EQ(job.seen(), undisturbed.seen());
  EXPECT_EQ(job.coordinator.complaint(), "");
  EXPECT_GE(job.coordinator.recoveries().size(), 2u);
  int servers = 0;
  for (const Ended& ended : job.outputs) {
    std::istringstream lines(ended.output);
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("server ", 0) != 0) continue;
      ++servers;
      EXPECT_TRUE(ends(std::atoi(line.c_str() + 7))) << line;
    }
  }
  EXPECT_EQ(servers, 4);
}

// Rank 0's server ends its communicators, and its device goes on with what the failed one has left, while
// rank 1, which is told later, still waits for that.
TEST(Ranks, WhatComesOfAnEndedCommunicatorReachesNobody) {
  Job undisturbed(3), job(3);
  undisturbed.run("Alone.PassesOnWhatItGets");
  EXPECT_EQ(undisturbed.seen().size(), 8u + 3u);
  job.coordinator.before_restart = [](int rank, pid_t) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  };
  job.run("Alone.PassesOnWhatItGets", {"PROXY_TEST_FAULT=yes"});
  EXPECT_EQ(job.seen(), undisturbed.seen());
  EXPECT_EQ(job.coordinator.complaint(), "");
  EXPECT_GE(job.coordinator.recoveries().size(), 4u);
}

TEST(Ranks, AServerThatDoesNotComeToRestIsReplaced) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    bool sent = false;
    const auto stay = who_stays("kind=collective-error", [&](Coordinator& coordinator) {
      coordinator.before_restart = [&](int rank, pid_t worker) {
        if (rank == 0 && !std::exchange(sent, true)) kill(find_server(worker), signal);
      };
    });
    EXPECT_EQ(stay, std::set<int>{1});
    EXPECT_TRUE(sent);
  }
}

TEST(Ranks, ServersThatDieAtAnyCallAreReplaced) { expect_recovered(2, 0, 3 * 24, "kill"); }

TEST(Ranks, FourComeBackTogether) { expect_recovered(4, 5 * 7, 5 * 10, "kill"); }

TEST(Ranks, ServersThatDieInTheReplayAreReplacedAgain) {
  std::mt19937 random(11);
  int killed = 0;
  expect_recovered(2, 3 * 5, 3 * 9, "kill", [&](Coordinator& coordinator) {
    coordinator.before_replay = [&](int rank, pid_t worker) {
      if (rank != 0 || killed++ % 2 == 1) return;
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));
      kill(find_server(worker), SIGKILL);
    };
  });
  EXPECT_GE(killed, 20);
}

// Of the communicator that the watchdog asks for.
TEST(Ranks, AnErrorOfNcclIsRecoveredFrom) {
  expect_recovered(2, 0, 3 * 2, "kind=collective-error");
  expect_recovered(2, 0, 3, "kind=collective-error result=system");
}

// Nothing fails, there is only no answer any more; also before there is any image to go back to.
TEST(Ranks, AHangIsRecoveredFrom) {
  const auto nothing = [](Coordinator&) {};
  expect_recovered(2, 1, 6, "kind=collective-hang", nothing, {"JITCKPT_HANG_TIMEOUT=0.3"});
  expect_recovered(2, 1, 5, "kind=network-cut", nothing, {"JITCKPT_HANG_TIMEOUT=0.3"});
}

TEST(Ranks, ABrokenDeviceIsReplaced) {
  expect_recovered(2, 3 * 3, 3 * 5, "kind=sticky");
  expect_recovered(2, 3 * 9, 3 * 10, "kind=device-lost at=collective");
}

TEST(Ranks, AProgramsOwnErrorIsTheProgramsAgain) {
  Job job(2);
  job.run("Alone.HasAnErrorOfItsOwn");
  const std::string said = job.outputs[1].output;
  EXPECT_NE(said.find("seen error 700: an illegal memory access was encountered"), std::string::npos) << said;
  const auto recoveries = job.coordinator.recoveries();
  ASSERT_GE(recoveries.size(), 2u);
  EXPECT_EQ(recoveries.back().delivered, 1);
  EXPECT_EQ(recoveries.front().delivered, 0);
}

// The server dies instead of giving the error: that is no error of the program's, and has to be mended first.
TEST(Ranks, AServerThatDiesWithAnErrorForTheProgramIsReplaced) {
  Job job(2);
  std::atomic<int> killed{0};
  job.coordinator.before_delivery = [&](pid_t worker) {
    if (killed++ == 0) kill(find_server(worker), SIGKILL);
  };
  job.run("Alone.HasAnErrorOfItsOwn");
  const std::string said = job.outputs[1].output;
  EXPECT_NE(said.find("seen error 700: an illegal memory access was encountered"), std::string::npos) << said;
  EXPECT_EQ(killed, 2);
}

// Before it is held, or when it has been, and its server answers nobody.
TEST(Ranks, WhoIsGivenUpIsTold) {
  for (const bool once_held : {false, true}) {
    Job job(2);
    (once_held ? job.coordinator.gives_up_held : job.coordinator.gives_up) = true;
    job.run("Alone.IsGivenUp");
    const std::string killed = job.outputs[0].output, other = job.outputs[1].output;
    EXPECT_NE(killed.find("was ended by Killed, and a test wants it so"), std::string::npos) << killed;
    EXPECT_NE(killed.find("seen keep 801"), std::string::npos) << killed;
    EXPECT_NE(other.find("seen error 0"), std::string::npos) << other;
    EXPECT_NE(other.find("device back: a test wants it so"), std::string::npos) << other;
  }
}

TEST(Ranks, AnAgentThatCantBeUnderstoodIsLeft) {
  std::mt19937 random(3);
  for (const std::size_t length : {1, 30, 500}) {
    Job job(2);
    for (std::size_t byte = 0; byte < length; ++byte)
      job.coordinator.instead.push_back(static_cast<std::byte>(random()));
    job.run("Alone.IsGivenUp");
    for (const Ended& ended : job.outputs)
      EXPECT_NE(ended.output.find("has sent what can't be understood"), std::string::npos) << ended.output;
  }
}

}  // namespace
