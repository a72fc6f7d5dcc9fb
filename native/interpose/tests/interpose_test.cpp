// The entry points in front of a fake device: what a real one does only when it fails, and many threads at
// once.
#include <cuda.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "interpose/gate.h"
#include "interpose/jitckpt.h"
#include "interpose/tests/fake_device.h"

// Declared by the headers only for code that is compiled with a default stream for each thread.
extern "C" cudaError_t cudaMemcpy_ptds(void*, const void*, size_t, cudaMemcpyKind);

namespace {

using namespace std::chrono_literals;

constexpr double never = 0;

template <typename Condition>
[[nodiscard]] bool comes(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + 30s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

std::function<int(const std::string&)> save_function;
std::atomic<int> saves{0};

int run_save(const char* order) {
  const int result = save_function ? save_function(order) : 0;
  ++saves;
  return result;
}

bool is_held() {
  jitckpt_progress_t progress;
  jitckpt_get_progress(&progress);
  return progress.holding;
}

// A lock that a thread holds until it gives it up, as Python's.
namespace fake_gil {

std::mutex mutex;
thread_local bool held = false;

void acquire(void*) {
  mutex.lock();
  held = true;
}
void* release() {
  held = false;
  mutex.unlock();
  return &mutex;
}
int check() { return held; }
int ensure() {
  acquire(nullptr);
  return 0;
}
void restore(int) { release(); }

}  // namespace fake_gil

class Interpose : public testing::Test {
 protected:
  void SetUp() override {
    fake::reset();
    saves = 0;
    save_function = nullptr;
    static uintptr_t communicators = 0;
    communicator_ = reinterpret_cast<ncclComm_t>(++communicators);
    ASSERT_EQ(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, 0), cudaSuccess);
  }

  void TearDown() override {
    fake::reset();
    EXPECT_TRUE(agent_ < 0 || comes([] { return in_flight() == "[]"; }));
    jitckpt_stop();
    if (agent_ >= 0) close(agent_);
    if (worker_ >= 0) close(worker_);
  }

  void start_job(double hang_timeout = never, bool with_gil = false) {
    int sockets[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
    agent_ = sockets[0];
    worker_ = sockets[1];
    jitckpt_config_t config{};
    config.agent_fd = worker_;
    config.hang_timeout_s = hang_timeout;
    config.settle_s = 0.05;
    config.max_calls_ahead = max_calls_ahead_;
    config.save = run_save;
    if (with_gil) {
      config.gil_check = fake_gil::check;
      config.gil_release = fake_gil::release;
      config.gil_acquire = fake_gil::acquire;
      config.gil_ensure = fake_gil::ensure;
      config.gil_restore = fake_gil::restore;
    }
    ASSERT_EQ(jitckpt_start(&config), 0) << jitckpt_last_error();
  }

  void order(const std::string& message) {
    ASSERT_EQ(send(agent_, message.data(), message.size(), 0), static_cast<ssize_t>(message.size()));
  }
  void order_save() { order(R"({"type":"save","save_id":4,"reason":"a test"})"); }
  void resume() { order(R"({"type":"resume"})"); }

  // The next message of a type, or "".
  std::string hear(const std::string& type, std::chrono::milliseconds patience = 30s) {
    for (;;) {
      pollfd source{agent_, POLLIN, 0};
      if (poll(&source, 1, static_cast<int>(patience.count())) != 1) return "";
      char text[65536];
      const ssize_t length = recv(agent_, text, sizeof text, 0);
      if (length <= 0) return "";
      const std::string message(text, static_cast<size_t>(length));
      if (message.starts_with("{\"type\":\"" + type + "\"")) return message;
    }
  }

  ncclResult_t all_reduce() {
    return ncclAllReduce(nullptr, nullptr, 16, ncclFloat32, ncclSum, communicator_, stream_);
  }

  static std::string in_flight() {
    std::string text(static_cast<size_t>(jitckpt_collectives(nullptr, 0)), '\0');
    jitckpt_collectives(text.data(), text.size());
    text.pop_back();
    return text;
  }

  cudaStream_t stream_ = nullptr;
  ncclComm_t communicator_ = nullptr;
  int agent_ = -1, worker_ = -1;
  uint32_t max_calls_ahead_ = 0;
};

TEST_F(Interpose, without_a_job_everything_passes_and_no_thread_is_started) {
  const auto threads = [] {
    const auto all = std::filesystem::directory_iterator("/proc/self/task");
    return std::distance(begin(all), end(all));
  };
  const auto before = threads();
  fake::set_async_error(ncclRemoteError);
  EXPECT_EQ(all_reduce(), ncclSuccess);
  EXPECT_EQ(cudaMemsetAsync(nullptr, 0, 0, stream_), cudaSuccess);
  ncclResult_t error = ncclSuccess;
  EXPECT_EQ(ncclCommGetAsyncError(communicator_, &error), ncclSuccess);
  EXPECT_EQ(error, ncclRemoteError);
  EXPECT_EQ(threads(), before);
  EXPECT_EQ(fake::count("cudaEventRecord"), 0);
  EXPECT_EQ(in_flight(), "[]");
}

TEST_F(Interpose, start_refuses_what_can_not_work) {
  jitckpt_config_t config{};
  config.agent_fd = -1;
  EXPECT_EQ(jitckpt_start(&config), -1);
  EXPECT_STREQ(jitckpt_last_error(), "jitckpt_start needs a save function.");
  config.save = run_save;
  config.gil_check = [] { return 0; };
  EXPECT_EQ(jitckpt_start(&config), -1);
  EXPECT_NE(std::string(jitckpt_last_error()).find("all five functions"), std::string::npos);
  start_job();
  config.gil_check = nullptr;
  EXPECT_EQ(jitckpt_start(&config), -1);
  EXPECT_NE(std::string(jitckpt_last_error()).find("called before"), std::string::npos);
}

TEST_F(Interpose, steps_without_a_job_are_an_error) {
  EXPECT_EQ(jitckpt_step_begin(1, stream_), -1);
  EXPECT_EQ(jitckpt_step_end(1, stream_), -1);
  EXPECT_EQ(jitckpt_report("{}", 2), -1);
  EXPECT_STREQ(jitckpt_last_error(), "There is no agent to report to.");
}

TEST_F(Interpose, a_hang_is_found_although_every_query_hangs) {
  start_job(0.3);
  fake::hang_queries(true);
  EXPECT_EQ(all_reduce(), ncclSuccess);
  const std::string hang = hear("hang");
  EXPECT_NE(hang.find(R"("operation":"ncclAllReduce")"), std::string::npos) << hang;
  // And the save is not kept from beginning.
  order_save();
  EXPECT_NE(hear("held").find(R"("rest":"settled")"), std::string::npos);
  EXPECT_TRUE(comes([] { return saves == 1; }));
}

TEST_F(Interpose, nothing_is_recorded_on_a_stream_that_captures) {
  start_job();
  fake::capture(stream_, true);
  EXPECT_EQ(all_reduce(), ncclSuccess);
  EXPECT_EQ(fake::count("cudaEventRecord"), 0);
  EXPECT_EQ(jitckpt_step_begin(1, stream_), -1);
  EXPECT_NE(std::string(jitckpt_last_error()).find("capturing"), std::string::npos);
  fake::capture(stream_, false);
  fake::block(stream_);
  EXPECT_EQ(all_reduce(), ncclSuccess);
  EXPECT_NE(in_flight().find(R"("sequence":2)"), std::string::npos) << "the captured one counts as well";
}

TEST_F(Interpose, collectives_of_a_graph_are_watched_when_it_is_launched) {
  start_job();
  fake::capture(stream_, true);
  EXPECT_EQ(all_reduce(), ncclSuccess);
  EXPECT_EQ(all_reduce(), ncclSuccess);
  fake::capture(stream_, false);
  const auto graph = reinterpret_cast<cudaGraph_t>(stream_);
  cudaGraphExec_t executable = nullptr;
  EXPECT_EQ(cudaGraphInstantiateWithFlags(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(in_flight(), "[]");
  fake::block(stream_);
  EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
  const std::string watched = in_flight();
  EXPECT_NE(watched.find(R"("operation":"ncclAllReduce")"), std::string::npos) << watched;
  EXPECT_NE(watched.find(R"("sequence":4)"), std::string::npos) << "those of the launch count as well";
  EXPECT_EQ(fake::count("cudaEventRecord"), 1);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
  EXPECT_EQ(fake::count("cudaEventRecord"), 1) << "nothing is known of it any more";
}

TEST_F(Interpose, a_communicator_that_does_not_block_is_watched_when_its_call_is_through) {
  start_job();
  fake::block(stream_);
  fake::answer_nccl_calls(ncclInProgress);
  EXPECT_EQ(all_reduce(), ncclInProgress);
  EXPECT_EQ(in_flight(), "[]");
  ncclResult_t error;
  fake::set_async_error(ncclInProgress);
  EXPECT_EQ(ncclCommGetAsyncError(communicator_, &error), ncclSuccess);
  EXPECT_EQ(in_flight(), "[]");
  fake::set_async_error(ncclSuccess);
  EXPECT_EQ(ncclCommGetAsyncError(communicator_, &error), ncclSuccess);
  EXPECT_NE(in_flight().find("ncclAllReduce"), std::string::npos);
}

TEST_F(Interpose, what_a_library_calls_of_itself_counts_once) {
  start_job();
  fake::block(stream_);
  EXPECT_EQ(ncclBcast(nullptr, 16, ncclFloat32, 0, communicator_, stream_), ncclSuccess);
  EXPECT_EQ(fake::count("ncclBroadcast"), 1);
  EXPECT_EQ(fake::count("cudaEventRecord"), 1);
  EXPECT_NE(in_flight().find(R"("sequence":1)"), std::string::npos) << in_flight();
  EXPECT_EQ(in_flight().find(R"("sequence":2)"), std::string::npos) << in_flight();
}

TEST_F(Interpose, a_library_asks_for_errors_inside_of_its_own_calls) {
  start_job();
  fake::answer_nccl_calls(ncclInProgress);
  EXPECT_EQ(all_reduce(), ncclInProgress);
  fake::set_async_error(ncclRemoteError);
  int rank = -1;
  EXPECT_EQ(ncclCommUserRank(communicator_, &rank), ncclSuccess);
  EXPECT_EQ(hear("failure", 100ms), "") << "who has called it hears of it by itself";
}

TEST_F(Interpose, the_applications_errors_stay_its_own) {
  start_job();
  fake::refuse_events(true);
  EXPECT_EQ(all_reduce(), ncclSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "our event was refused, not the application's";
  fake::set_last_error(cudaErrorInvalidValue);
  EXPECT_EQ(all_reduce(), ncclSuccess);
  EXPECT_NE(cudaGetLastError(), cudaSuccess);
}

TEST_F(Interpose, an_asynchronous_error_is_reported_once_and_kept_from_the_application) {
  start_job();
  fake::set_async_error(ncclRemoteError);
  for (int count = 0; count < 3; ++count) {
    ncclResult_t error = ncclRemoteError;
    EXPECT_EQ(ncclCommGetAsyncError(communicator_, &error), ncclSuccess);
    EXPECT_EQ(error, ncclSuccess);
  }
  EXPECT_NE(hear("nccl_error").find("an error of the fake NCCL"), std::string::npos);
  EXPECT_EQ(hear("nccl_error", 100ms), "");
}

TEST_F(Interpose, a_call_that_fails_waits_for_the_save_before_the_application_hears_of_it) {
  start_job();
  std::atomic<bool> returned{false};
  fake::answer_nccl_calls(ncclRemoteError);
  std::thread host([&] {
    EXPECT_EQ(all_reduce(), ncclRemoteError);
    returned = true;
  });
  EXPECT_NE(hear("nccl_error").find(R"("operation":"ncclAllReduce")"), std::string::npos);
  order_save();
  EXPECT_TRUE(comes([] { return saves == 1; }));
  EXPECT_FALSE(returned);
  resume();
  host.join();
}

TEST_F(Interpose, a_result_of_a_newer_NCCL_is_the_machines_fault_as_in_the_proxy) {
  start_job();
  const auto timeout = static_cast<ncclResult_t>(ncclInProgress + 1);  // ncclTimeout of NCCL 2.30
  fake::answer_nccl_calls(timeout);
  std::thread host([&] { EXPECT_EQ(all_reduce(), timeout); });
  EXPECT_NE(hear("nccl_error").find(R"("operation":"ncclAllReduce")"), std::string::npos);
  order_save();
  EXPECT_TRUE(comes([] { return saves == 1; }));
  resume();
  host.join();
}

TEST_F(Interpose, an_asynchronous_error_without_an_agent_saves_and_ends_the_process) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fail_alone = [this] {
    jitckpt_config_t config{};
    config.agent_fd = -1;
    config.settle_s = 0.05;
    config.save = run_save;
    jitckpt_start(&config);
    fake::set_async_error(ncclRemoteError);
    ncclResult_t error;
    ncclCommGetAsyncError(communicator_, &error);
    std::this_thread::sleep_for(60s);
  };
  EXPECT_EXIT(
      fail_alone(), testing::ExitedWithCode(75),
      "ncclCommGetAsyncError failed: an error of the fake NCCL: the state is saved; the process ends");
}

// A host that puts `calls` calls on the stream.
std::thread running_ahead(cudaStream_t stream, int calls, std::atomic<int>& made) {
  return std::thread([=, &made] {
    for (int call = 0; call < calls; ++call) {
      EXPECT_EQ(cudaMemsetAsync(nullptr, 0, 0, stream), cudaSuccess);
      ++made;
    }
  });
}

TEST_F(Interpose, a_host_that_runs_ahead_waits_where_a_save_can_be_made) {
  constexpr int allowed = 64, a_few = 8;
  max_calls_ahead_ = allowed;
  start_job();
  fake::block(stream_);
  std::atomic<int> made{0};
  std::thread host = running_ahead(stream_, 2000, made);
  EXPECT_TRUE(comes([&] { return made >= allowed; }));
  save_function = [](const std::string&) {
    std::atomic<int> of_the_save{0};
    running_ahead(nullptr, 500, of_the_save).join();  // it is not kept from more
    return of_the_save == 500 ? 0 : 1;
  };
  order_save();
  EXPECT_TRUE(comes([] { return saves == 1; }));
  EXPECT_TRUE(is_held());
  EXPECT_LE(made, allowed + a_few);
  resume();
  fake::unblock(stream_);
  host.join();
  EXPECT_EQ(fake::count("cudaMemsetAsync"), 2500);
}

TEST_F(Interpose, kernels_that_are_compiled_as_the_program_runs_are_counted_too) {
  max_calls_ahead_ = 64;
  start_job();
  fake::block(stream_);
  std::atomic<int> made{0};
  std::thread host([&] {
    for (; made < 1000; ++made)
      EXPECT_EQ(cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, stream_, nullptr, nullptr), CUDA_SUCCESS);
  });
  EXPECT_TRUE(comes([&] { return made >= 64; }));
  order_save();
  EXPECT_TRUE(comes([] { return saves == 1; }));
  EXPECT_LT(made, 100);
  resume();
  fake::unblock(stream_);
  host.join();
  EXPECT_EQ(fake::count("cuLaunchKernel"), 1000);
}

TEST_F(Interpose, a_host_runs_as_far_ahead_as_it_likes_where_nothing_is_said) {
  start_job();
  fake::block(stream_);
  std::atomic<int> made{0};
  running_ahead(stream_, 5000, made).join();
  EXPECT_EQ(fake::count("cudaEventRecord"), 0);
}

TEST_F(Interpose, a_host_does_not_wait_for_a_device_that_has_failed) {
  max_calls_ahead_ = 64;
  start_job();
  fake::block(stream_);
  fake::fail_queries(cudaErrorIllegalAddress);
  std::atomic<int> made{0};
  running_ahead(stream_, 5000, made).join();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the next call of the application's tells it";
}

TEST_F(Interpose, calls_that_become_part_of_a_graph_are_not_counted) {
  max_calls_ahead_ = 64;
  start_job();
  fake::block(stream_);
  fake::capture(stream_, true);
  std::atomic<int> made{0};
  running_ahead(stream_, 5000, made).join();
  EXPECT_EQ(fake::count("cudaEventRecord"), 0);
}

TEST_F(Interpose, a_step_is_finished_at_a_closed_gate_but_not_for_ever) {
  using namespace jitckpt::interpose;
  std::atomic<int> calls{0};
  std::atomic<bool> held_too{false};
  close_gate();
  std::thread host([&] {
    jitckpt::watchdog::this_thread().in_step = true;
    EXPECT_EQ(cudaMemsetAsync(nullptr, 0, 0, stream_), cudaSuccess);
    ++calls;
    EXPECT_TRUE(comes([&] { return held_too.load(); }));
    EXPECT_EQ(cudaMemsetAsync(nullptr, 0, 0, stream_), cudaSuccess);
    ++calls;
  });
  EXPECT_TRUE(comes([&] { return calls == 1; }));
  hold_steps_as_well();
  held_too = true;
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(calls, 1);
  open_gate();
  host.join();
  EXPECT_EQ(calls, 2);
}

TEST_F(Interpose, a_callers_mistake_is_no_failed_rank) {
  start_job();
  fake::answer_nccl_calls(ncclInvalidArgument);
  EXPECT_EQ(all_reduce(), ncclInvalidArgument);
  EXPECT_EQ(hear("nccl_error", 50ms), "");
}

TEST_F(Interpose, communicators_are_not_aborted_under_a_save) {
  start_job();
  std::atomic<bool> sees_hold{false};
  std::thread host([&] {
    EXPECT_TRUE(comes(is_held));
    sees_hold = true;
    EXPECT_EQ(ncclCommAbort(communicator_), ncclSuccess);
  });
  order_save();
  EXPECT_TRUE(comes([&] { return saves == 1 && sees_hold; }));
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(fake::count("ncclCommAbort"), 0);
  resume();
  host.join();
  EXPECT_EQ(fake::count("ncclCommAbort"), 1);
}

TEST_F(Interpose, queries_and_events_never_wait) {
  start_job();
  order_save();
  ASSERT_TRUE(comes([] { return saves == 1; }));
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event, 0), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(Interpose, what_is_freed_while_held_is_freed_after_the_resume) {
  start_job();
  order_save();
  ASSERT_TRUE(comes([] { return saves == 1; }));
  EXPECT_EQ(cudaFree(reinterpret_cast<void*>(0x10)), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  EXPECT_EQ(fake::count("cudaFree") + fake::count("cudaStreamDestroy"), 0);
  resume();
  EXPECT_TRUE(comes([] { return fake::count("cudaFree") == 1 && fake::count("cudaStreamDestroy") == 1; }));
}

TEST_F(Interpose, every_way_to_a_stream_leads_to_the_saves_own) {
  start_job();
  fake::block(stream_);
  fake::block(nullptr);
  save_function = [this](const std::string&) {
    char to[4], from[4] = "abc";
    cudaMemcpy(to, from, 4, cudaMemcpyDefault);
    cudaMemcpyAsync(to, from, 4, cudaMemcpyDefault, stream_);
    cudaMemsetAsync(to, 0, 4, nullptr);
    cudaLaunchKernel(nullptr, dim3(1), dim3(1), nullptr, 0, stream_);
    cudaLaunchConfig_t config{};
    config.stream = stream_;
    cudaLaunchKernelExC(&config, nullptr, nullptr);
    cudaStreamSynchronize(stream_);
    cudaDeviceSynchronize();
    cudaEvent_t event = nullptr;
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaStreamWaitEvent(nullptr, event, 0);  // not recorded in the save: it would wait for ever
    cudaEventRecord(event, stream_);
    cudaStreamWaitEvent(nullptr, event, 0);
    std::thread born_in_save([] { cudaMemsetAsync(nullptr, 1, 0, nullptr); });
    born_in_save.join();
    return 0;
  };
  order_save();
  ASSERT_TRUE(comes([] { return saves == 1; }));
  cudaStream_t saves_own = nullptr;
  int on_it = 0;
  for (const fake::Call& call : fake::calls()) {
    if (call.name == "cudaStreamCreateWithPriority") {
      saves_own = call.stream;
    } else {
      EXPECT_EQ(call.stream, saves_own) << call.name;
      ++on_it;
    }
  }
  EXPECT_NE(saves_own, stream_);
  EXPECT_EQ(fake::count("cudaMemcpy"), 0);
  EXPECT_EQ(fake::count("cudaDeviceSynchronize"), 0);
  EXPECT_EQ(on_it, 11);
}

TEST_F(Interpose, the_per_thread_twins_are_replaced_as_well) {
  start_job();
  save_function = [](const std::string&) {
    char to[4], from[4] = "abc";
    return static_cast<int>(cudaMemcpy_ptds(to, from, 4, cudaMemcpyDefault));
  };
  order_save();
  ASSERT_TRUE(comes([] { return saves == 1; }));
  EXPECT_EQ(fake::count("cudaMemcpy_ptds"), 0);
  EXPECT_EQ(fake::count("cudaMemcpyAsync"), 1);
}

TEST_F(Interpose, the_lock_is_had_from_a_thread_that_hangs_in_a_device_call) {
  start_job(never, true);
  fake::block(stream_);
  std::atomic<bool> inside{false};
  std::thread host([&] {
    fake_gil::acquire(nullptr);
    inside = true;
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_TRUE(fake_gil::check()) << "it has its lock again";
    fake_gil::release();
  });
  EXPECT_TRUE(comes([&] { return inside && fake::count("cudaStreamSynchronize") == 1; }));
  order_save();
  EXPECT_TRUE(comes([] { return saves == 1; }));
  resume();
  fake::unblock(stream_);
  host.join();
}

TEST_F(Interpose, the_lock_is_had_from_a_thread_that_hangs_in_foreign_code) {
  start_job(never, true);
  std::atomic<bool> inside{false}, let_go{false};
  std::thread host([&] {
    fake_gil::acquire(nullptr);
    inside = true;
    while (!let_go) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(fake_gil::check());
    fake_gil::release();
  });
  EXPECT_TRUE(comes([&] { return inside.load(); }));
  order_save();
  EXPECT_TRUE(comes([] { return saves == 1; }));
  resume();
  let_go = true;
  host.join();
}

TEST_F(Interpose, a_thread_at_the_gate_has_given_its_lock_up) {
  start_job(never, true);
  std::atomic<bool> inside{false}, sees_hold{false};
  std::thread host([&] {
    fake_gil::acquire(nullptr);
    inside = true;
    EXPECT_TRUE(comes(is_held));
    sees_hold = true;
    EXPECT_EQ(cudaMemsetAsync(nullptr, 0, 0, stream_), cudaSuccess);
    EXPECT_TRUE(fake_gil::check());
    fake_gil::release();
  });
  EXPECT_TRUE(comes([&] { return inside.load(); }));
  order_save();
  EXPECT_TRUE(comes([&] { return saves == 1 && sees_hold; }));
  EXPECT_EQ(fake::count("cudaMemsetAsync"), 0);
  resume();
  host.join();
}

TEST_F(Interpose, two_saves_in_one_hold_then_resume) {
  start_job();
  order_save();
  ASSERT_NE(hear("held"), "");
  order_save();
  ASSERT_NE(hear("held"), "");
  EXPECT_TRUE(comes([] { return saves == 2; }));
  EXPECT_TRUE(is_held());
  resume();
  EXPECT_TRUE(comes([] { return !is_held(); }));
}

TEST_F(Interpose, a_resume_during_the_save_comes_after_it) {
  start_job();
  std::atomic<bool> go_on{false};
  save_function = [&](const std::string&) {
    while (!go_on) std::this_thread::sleep_for(1ms);
    return 0;
  };
  order_save();
  ASSERT_NE(hear("held"), "");
  resume();
  std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(is_held());
  go_on = true;
  EXPECT_TRUE(comes([] { return !is_held(); }));
}

TEST_F(Interpose, a_job_that_stops_lets_everybody_go) {
  start_job();
  std::atomic<bool> sees_hold{false};
  std::thread host([&] {
    EXPECT_TRUE(comes(is_held));
    sees_hold = true;
    EXPECT_EQ(cudaMemsetAsync(nullptr, 0, 0, stream_), cudaSuccess);
  });
  order_save();
  EXPECT_TRUE(comes([&] { return saves == 1 && sees_hold; }));
  jitckpt_stop();
  host.join();
}

TEST_F(Interpose, stopping_does_not_wait_for_a_stuck_query) {
  start_job();
  fake::hang_queries(true);
  EXPECT_EQ(all_reduce(), ncclSuccess);
  EXPECT_TRUE(comes([] { return fake::hanging_queries() == 1; }));
  jitckpt_stop();
  fake::hang_queries(false);  // the thread that was left behind comes back and ends
  EXPECT_TRUE(comes([] { return fake::hanging_queries() == 0; }));
}

TEST_F(Interpose, many_threads_call_while_saves_come_and_go) {
  start_job();
  std::atomic<bool> enough{false};
  std::atomic<long> calls{0};
  std::vector<std::thread> hosts;
  for (int index = 0; index < 4; ++index) {
    hosts.emplace_back([&, index] {
      cudaStream_t own = nullptr;
      cudaStreamCreateWithPriority(&own, cudaStreamNonBlocking, 0);
      uint64_t step = 0;
      while (!enough) {
        cudaMemsetAsync(nullptr, 0, 0, own);
        ncclAllReduce(nullptr, nullptr, 1, ncclInt8, ncclSum, communicator_, own);
        cudaStreamSynchronize(own);
        if (index == 0) {
          ++step;
          EXPECT_EQ(jitckpt_step_begin(step, own), 0);
          cudaLaunchKernel(nullptr, dim3(1), dim3(1), nullptr, 0, own);
          EXPECT_EQ(jitckpt_step_end(step, own), 0);
        }
        ++calls;
      }
      cudaStreamDestroy(own);
    });
  }
  save_function = [&](const std::string&) {
    jitckpt_progress_t progress;
    jitckpt_get_progress(&progress);
    EXPECT_EQ(progress.device_begun, progress.device_ended);
    return 0;
  };
  for (int round = 1; round <= 10; ++round) {
    order_save();
    ASSERT_TRUE(comes([&] { return saves == round; }));
    resume();
    ASSERT_TRUE(comes([] { return !is_held(); }));
    const long before = calls;
    ASSERT_TRUE(comes([&] { return calls > before; }));
  }
  enough = true;
  for (auto& host : hosts) host.join();
}

}  // namespace
