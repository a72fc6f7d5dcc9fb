// Parameters and optimizer state that stay on the devices: whatever dies at whatever call, each rank's
// program ends as if nothing had been.
#include <cuda_runtime_api.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>

#include "proxy/client/jitckpt_proxy.h"
#include "proxy/tests/ranks_job.h"

namespace {
thread_local bool holds_python = false;
}

// As Python would say it.
extern "C" __attribute__((visibility("default"))) int PyGILState_Check() { return holds_python; }

namespace {

// One rank of a job of replicas: `weights_` and `moments_` are the same on all of them after each step, and
// change in no other place; `average_` is this rank's own.
class Replica {
 public:
  Replica()
      : rank_(on_own_device(number_of("RANK"))),
        ranks_(number_of("WORLD_SIZE")),
        store_(std::getenv("PROXY_TEST_STORE")) {
    ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    ok(cudaMallocHost(reinterpret_cast<void**>(&pinned_), 4096));
    world_ = meet(store_, "world");
    ok(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    // As validation does it: the first minibatches have images of all.
    for (int minibatch = 0; minibatch < 2; ++minibatch) {
      train({});
      ok(static_cast<cudaError_t>(jitckpt_proxy_keep()));
    }
  }
  ~Replica() {
    ok(cudaStreamSynchronize(stream_));
    ok(ncclCommDestroy(world_));
    ok(cudaEventDestroy(event_));
    ok(cudaFreeHost(pinned_));
    ok(cudaStreamDestroy(stream_));
  }
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  // Calls are counted; before number `at`, `happens` is called.
  std::vector<int> minibatch(int at = -1, const std::function<void()>& happens = [] {}) {
    int calls = 0;
    return train([&] {
      if (calls++ == at) happens();
      calls_ = calls;
    });
  }
  int calls() const { return calls_; }
  std::vector<int> end() const {
    std::vector<int> all;
    for (const DeviceInts* const one : {&weights_, &moments_, &average_, &gradient_, &sum_}) {
      const auto values = one->read(stream_);
      all.insert(all.end(), values.begin(), values.begin() + 24);
    }
    return all;
  }
  int rank() const { return rank_; }
  const Store& store() const { return store_; }
  void wait_for_all() const {
    store_.set("over-" + std::to_string(rank_), "");
    for (int rank = 0; rank < ranks_; ++rank) store_.get("over-" + std::to_string(rank));
  }
  ncclComm_t world() const { return world_; }
  cudaEvent_t event() const { return event_; }
  cudaStream_t stream() const { return stream_; }

 private:
  static int on_own_device(int rank) {
    ok(cudaSetDevice(rank));
    return rank;
  }

  // next: before each call; empty: the state does not stay.
  std::vector<int> train(const std::function<void()>& next) {
    const auto call = [&](const auto& make) {
      if (next) next();
      make();
    };
    ++minibatches_;
    std::vector<int> host(64, minibatches_);
    int* block = nullptr;
    // Outside of the step: for good now and then, each time another number; and in each minibatch for a
    // while.
    const bool changes = changes_outside_ && next, for_good = changes && minibatches_ % 3 == 0;
    if (changes) call([&] { launch_add(moments_.get(), 5, stream_); });
    call([&] { launch_mix(gradient_.get(), weights_.get(), stream_); });
    if (for_good) call([&] { launch_add(weights_.get(), minibatches_, stream_); });
    if (changes) call([&] { launch_mix(gradient_.get(), moments_.get(), stream_); });
    if (uploads_ && next) {
      const std::vector<const int*> addresses(4, weights_.get());
      call([&] {
        if (by_kernel_) {
          launch_upload(uploaded_.get(), weights_.get(), stream_);
        } else {
          ok(cudaMemcpyAsync(uploaded_.get(), addresses.data(), 32, cudaMemcpyHostToDevice, stream_));
        }
      });
    }
    if (changes) call([&] { launch_add(moments_.get(), -5, stream_); });
    call([&] { launch_add(gradient_.get(), rank_ + 1, stream_); });
    call([&] { ok(cudaMalloc(reinterpret_cast<void**>(&block), 256)); });
    call([&] { ok(cudaMemcpyAsync(block, host.data(), 256, cudaMemcpyHostToDevice, stream_)); });
    call([&] { launch_mix(gradient_.get(), block, stream_); });
    call([&] { launch_mix(average_.get(), gradient_.get(), stream_); });
    call([&] { ok(cudaEventRecord(event_, stream_)); });
    call([&] { ok(ncclAllReduce(gradient_.get(), sum_.get(), 4, ncclInt32, ncclSum, world_, stream_)); });
    int told = 0;
    call([&] { ok(cudaMemcpyAsync(&told, average_.get(), sizeof told, cudaMemcpyDeviceToHost, stream_)); });
    call([&] { launch_add(average_.get() + 1, told % 1000, stream_); });
    call([&] { ok(cudaMemcpyAsync(pinned_, sum_.get(), 64, cudaMemcpyDeviceToHost, stream_)); });
    call([&] { ok(cudaStreamSynchronize(stream_)); });
    std::vector<int> seen{told, pinned_[0]};
    pinned_[0] = minibatches_;  // which no replay may undo
    call([&] { ok(cudaFree(block)); });
    call([&] { ok(ncclAllReduce(sum_.get(), sum_.get() + 8, 4, ncclInt32, ncclSum, world_, stream_)); });
    const jitckpt_proxy_place places[] = {{reinterpret_cast<uint64_t>(weights_.get()), 256},
                                          {reinterpret_cast<uint64_t>(moments_.get()), 256}};
    const bool stays = next && jitckpt_proxy_state_stays() == 1;
    if (stays) {
      call([&] {
        const bool given = changes || uploads_ || minibatches_ == newly_given_;
        EXPECT_EQ(jitckpt_proxy_state_was_written(), said_ && given);
        const bool changed = jitckpt_proxy_state_was_changed() == 1;
        EXPECT_EQ(changed, for_good && said_);
        said_ = !for_good;  // else the image is whole, and of what is changed by then
        ok(static_cast<cudaError_t>(jitckpt_proxy_step_begins(places, for_good ? 0 : 2)));
      });
    }
    call([&] { launch_mix(moments_.get(), sum_.get(), stream_); });
    call([&] { launch_mix(weights_.get(), moments_.get(), stream_); });
    call([&] { launch_mix(weights_.get(), sum_.get() + 8, stream_); });
    call([&] { ok(cudaMemcpyAsync(weights_.get() + 8, host.data(), 16, cudaMemcpyHostToDevice, stream_)); });
    call([&] { ok(cudaMemsetAsync(moments_.get() + 16, minibatches_, 16, stream_)); });
    if (stays) call([&] { ok(static_cast<cudaError_t>(jitckpt_proxy_step_ended(places, 2, 77))); });
    if (next && !stays) call([&] { ok(static_cast<cudaError_t>(jitckpt_proxy_keep())); });
    call([&] { launch_mix(average_.get() + 2, weights_.get(), stream_); });
    seen.push_back(pinned_[0]);
    return seen;
  }

  int rank_, ranks_;
  Store store_;
  int minibatches_ = 0, calls_ = 0;
  const bool uploads_ = std::getenv("PROXY_TEST_UPLOADS") != nullptr;
  const bool by_kernel_ = uploads_ && std::getenv("PROXY_TEST_UPLOADS") == std::string_view("by_a_kernel");
  const DeviceInts uploaded_{8};
  const bool changes_outside_ = std::getenv("PROXY_TEST_OUTSIDE") != nullptr;
  bool said_ = false;  // where the state is, after the newest step
  // Kernels get the state for the first time in the minibatch after the first step that says where it is.
  const int newly_given_ = 4;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
  int* pinned_ = nullptr;
  const DeviceInts weights_{64, 5}, moments_{64}, gradient_{64}, sum_{64}, average_{64, 3};
  ncclComm_t world_ = nullptr;
};

// As Alone.TrainsAsARank: in minibatch m before call m / (ranks + 1), one rank after the other, then two.
TEST(Alone, TrainsAsAReplica) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  {
    const std::string fault = std::getenv("PROXY_TEST_FAULT") ? std::getenv("PROXY_TEST_FAULT") : "";
    Replica replica;
    const Watchdog watchdog(replica.world(), replica.event());
    const int first = number_of("PROXY_TEST_FIRST"), last = number_of("PROXY_TEST_LAST");
    const int ranks = number_of("WORLD_SIZE"), choices = ranks == 2 ? 2 : ranks + 1;
    for (int minibatch = first; minibatch < last; ++minibatch) {
      const int who = minibatch % choices, call = minibatch / choices;
      const bool here = !fault.empty() && (who == replica.rank() || (who == ranks && replica.rank() < 2));
      print("numbers", replica.minibatch(here ? call : -1, [&] {
        if (fault == "kill")
          kill_server();
        else
          order_fault(fault);
      }));
    }
    EXPECT_EQ(jitckpt_proxy_state_stays(), 1);
    print("end", replica.end());
    std::printf("calls %d\n", replica.calls());
    replica.wait_for_all();
  }
  std::fflush(stdout);
}

// Rank 0's server dies in the step; rank 1's was ready for it, and does not get as far.
TEST(Alone, HasStillToMakeItsStep) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  {
    const bool fails = std::getenv("PROXY_TEST_FAULT") != nullptr;
    Replica replica;
    const Watchdog watchdog(replica.world(), replica.event());
    const Store& store = replica.store();
    const int begins = 14, all = 22;  // calls: before the step; of a minibatch
    const auto nap = [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
    std::thread wakes;
    print("numbers", replica.minibatch());
    if (replica.rank() == 1) store.set("server", std::to_string(jitckpt_proxy_server()));
    print("numbers", replica.minibatch(begins, [&] {
      if (!fails || replica.rank() == 1) return;
      nap();  // rank 1's server waits for this one
      const pid_t other = std::stoi(store.get("server"));
      kill(other, SIGSTOP);
      wakes = std::thread([other, nap] {
        for (int i = 0; i < 5; ++i) nap();
        kill(other, SIGCONT);
      });
    }));
    EXPECT_EQ(replica.calls(), all);
    nap();  // by now this rank's server is in the step
    if (fails && replica.rank() == 0) kill_server();
    print("numbers", replica.minibatch());
    print("end", replica.end());
    if (wakes.joinable()) wakes.join();
    replica.wait_for_all();
  }
  std::fflush(stdout);
}

TEST(Alone, HasACollectiveInItsStep) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  {
    Replica replica;
    replica.minibatch();
    const DeviceInts given(4, 1), sum(4);
    replica.minibatch(17, [&] {
      ok(ncclAllReduce(given.get(), sum.get(), 4, ncclInt32, ncclSum, replica.world(), replica.stream()));
    });
    EXPECT_EQ(jitckpt_proxy_state_stays(), 1);
    replica.minibatch();
    replica.minibatch();
    EXPECT_EQ(jitckpt_proxy_state_stays(), 0);
    print("sum", sum.read(replica.stream()));
    replica.wait_for_all();
  }
  std::fflush(stdout);
}

// Rank 0 wants the state in images again, and a server dies in one of the minibatches about then.
TEST(Alone, LeavesItsDevice) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  {
    Replica replica;
    const Watchdog watchdog(replica.world(), replica.event());
    const int fails = number_of("PROXY_TEST_FIRST", -1), call = number_of("PROXY_TEST_LAST", -1);
    for (int minibatch = 0; minibatch < 6; ++minibatch) {
      if (minibatch == 1 && replica.rank() == 0) jitckpt_proxy_state_leaves();
      const bool here = minibatch == fails && replica.rank() == call % 2;
      print("numbers", replica.minibatch(here ? call : -1, kill_server));
      EXPECT_EQ(jitckpt_proxy_state_stays(), minibatch < 2);
    }
    print("end", replica.end());
    replica.wait_for_all();
  }
  std::fflush(stdout);
}

// Within the step its thread waits for an answer, or for another thread that does.
TEST(Alone, WaitsWithinItsStep) {
  if (!alone() || !std::getenv("PROXY_TEST_STORE")) GTEST_SKIP() << "only for other tests";
  {
    const bool waits = std::getenv("PROXY_TEST_FAULT") != nullptr;
    Replica replica;
    const int within = 17;  // calls
    const auto wait = [&] { ok(cudaStreamSynchronize(replica.stream())); };
    print("numbers", replica.minibatch(within, [&] {
      if (waits) wait();
    }));
    print("numbers", replica.minibatch(within, [&] {
      if (!waits) return;
      std::thread([&] {
        ok(cudaSetDevice(replica.rank()));
        holds_python = true;
        wait();
      }).join();
    }));
    print("end", replica.end());
    replica.wait_for_all();
  }
  std::fflush(stdout);
}

// Returns how often ranks came to their state in which way: that depends on how far the devices are.
std::map<std::string, int> expect_recovered(
    int ranks, int first, int last, const std::string& fault,
    const std::function<void(Coordinator&)>& prepare = [](Coordinator&) {},
    std::vector<std::string> variables = {}) {
  Job undisturbed(ranks), job(ranks);
  variables.insert(variables.end(),
                   {"PROXY_TEST_FIRST=" + std::to_string(first), "PROXY_TEST_LAST=" + std::to_string(last)});
  undisturbed.run("Alone.TrainsAsAReplica", variables);
  EXPECT_TRUE(undisturbed.coordinator.recoveries().empty());
  variables.push_back("PROXY_TEST_FAULT='" + fault + "'");
  prepare(job.coordinator);
  job.run("Alone.TrainsAsAReplica", variables);
  EXPECT_EQ(job.seen(), undisturbed.seen());
  EXPECT_EQ(undisturbed.seen().size(), static_cast<std::size_t>(ranks * (last - first + 1)));
  EXPECT_EQ(job.coordinator.complaint(), "");
  const auto recoveries = job.coordinator.recoveries();
  EXPECT_GE(recoveries.size(), static_cast<std::size_t>(last - first));
  std::map<std::string, int> ways;
  for (const Coordinator::Recovery& recovery : recoveries) {
    for (const auto& [rank, way] : recovery.ways) ++ways[way];
  }
  if (testing::Test::HasFailure())
    std::printf("%s\n%s\n", job.outputs[0].output.c_str(), job.outputs[1].output.c_str());
  return ways;
}

TEST(State, OfAServerThatDiesAtAnyCallComesFromTheReplica) {
  auto ways = expect_recovered(2, 0, 2 * 21, "kill");
  EXPECT_GE(ways["from a replica"], 15);
  EXPECT_GE(ways["in place"], 8);
}

TEST(State, OfTwoThatDieAtOnceComesFromOneOfTheOthers) {
  auto ways = expect_recovered(4, 5 * 5, 5 * 9, "kill");
  EXPECT_GE(ways["from a replica"], 10);
}

TEST(State, IsBroughtOnByARankThatHasStillToMakeItsStep) {
  Job undisturbed(2), job(2);
  undisturbed.run("Alone.HasStillToMakeItsStep");
  job.run("Alone.HasStillToMakeItsStep", {"PROXY_TEST_FAULT=kill"});
  EXPECT_EQ(job.seen(), undisturbed.seen());
  const auto recoveries = job.coordinator.recoveries();
  ASSERT_EQ(recoveries.size(), 1u);
  EXPECT_EQ(recoveries[0].ways, (std::map<int, std::string>{{0, "from a replica"}, {1, "finish"}}));
}

TEST(State, IsNoHindranceToAStepThatNeedsItsDevice) {
  Job undisturbed(2), job(2);
  undisturbed.run("Alone.WaitsWithinItsStep");
  job.run("Alone.WaitsWithinItsStep", {"PROXY_TEST_FAULT=none"});
  EXPECT_EQ(job.seen(), undisturbed.seen());
  EXPECT_EQ(job.coordinator.complaint(), "");
}

TEST(State, LeavesTheDeviceWhereAStepNeedsOtherRanks) {
  Job job(2);
  job.run("Alone.HasACollectiveInItsStep");
  EXPECT_EQ(job.seen(), (std::vector<std::string>{"seen sum: 2 2 2 2", "seen sum: 2 2 2 2"}));
}

TEST(State, LeavesTheDevicesOfAllRanksInOneStepWhateverDiesMeanwhile) {
  Job undisturbed(2);
  undisturbed.run("Alone.LeavesItsDevice");
  EXPECT_TRUE(undisturbed.coordinator.recoveries().empty());
  std::map<std::string, int> ways;
  for (int minibatch = 1; minibatch < 5; ++minibatch) {
    for (int call = minibatch % 3; call < 22; call += 3) {
      SCOPED_TRACE("minibatch " + std::to_string(minibatch) + " call " + std::to_string(call));
      Job job(2);
      job.run("Alone.LeavesItsDevice",
              {"PROXY_TEST_FIRST=" + std::to_string(minibatch), "PROXY_TEST_LAST=" + std::to_string(call)});
      EXPECT_EQ(job.seen(), undisturbed.seen());
      EXPECT_EQ(job.coordinator.complaint(), "");
      for (const Coordinator::Recovery& recovery : job.coordinator.recoveries()) {
        for (const auto& [rank, way] : recovery.ways) ++ways[way];
      }
    }
  }
  EXPECT_GE(ways["from a replica"], 3);
  EXPECT_GE(ways["image"], 7);
}

// A change is made once, whatever fails in the minibatch that it is in: on the device that has made it, too.
TEST(State, IsChangedOutsideOfItsStepOnceWhateverFails) {
  std::map<std::string, int> ways;
  for (const char* const fault : {"kill", "kind=collective-error", "kind=sticky"}) {
    SCOPED_TRACE(fault);
    const int last = std::string(fault) == "kill" ? 25 : 15;
    for (const auto& [way, count] :
         expect_recovered(2, 0, 2 * last, fault, [](Coordinator&) {}, {"PROXY_TEST_OUTSIDE=1"}))
      ways[way] += count;
  }
  EXPECT_GE(ways["host copy"], 10);
  EXPECT_GE(ways["from a replica"], 5);
}

// Whoever gets them from there may write to the state, in each minibatch.
TEST(State, IsKeptWhereItsAddressesAreUploaded) {
  auto ways = expect_recovered(2, 4, 16, "kill", [](Coordinator&) {}, {"PROXY_TEST_UPLOADS=1"});
  EXPECT_GE(ways["host copy"], 2);
}

TEST(State, IsKeptWhereItsAddressesAreUploadedByAKernel) {
  auto ways = expect_recovered(2, 4, 16, "kill", [](Coordinator&) {}, {"PROXY_TEST_UPLOADS=by_a_kernel"});
  EXPECT_GE(ways["host copy"], 2);
}

TEST(State, StaysWhereACollectiveFails) {
  auto ways = expect_recovered(2, 2 * 4, 2 * 10, "kind=collective-error");
  EXPECT_GE(ways["in place"], 8);
}

TEST(State, GoesThroughTheHostWhereTheDriverIsSuspect) {
  auto ways = expect_recovered(2, 2 * 4, 2 * 10, "kind=collective-error result=system");
  EXPECT_GE(ways["through the host"], 4);
}

TEST(State, OfABrokenDeviceComesFromTheReplica) {
  auto ways = expect_recovered(2, 2 * 3, 2 * 8, "kind=sticky");
  EXPECT_GE(ways["from a replica"], 4);
}

// The taker's server, or the giver's.
TEST(State, IsThereAfterAnotherDeathInTheRecovery) {
  for (const int victim : {0, 1}) {
    std::mt19937 random(5);
    int killed = 0;
    // Rank 0's own server alone: were both to die, nobody would have the state.
    expect_recovered(4, 5 * 3, 5 * 7, "kill", [&](Coordinator& coordinator) {
      coordinator.before_replay = [&](int rank, pid_t worker) {
        if (rank != victim || killed++ % 2 == 1) return;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));
        kill(find_server(worker), SIGKILL);
      };
    });
    EXPECT_GE(killed, 20);
  }
}

}  // namespace
