// The C functions of jitckpt.h.
#pragma GCC visibility push(default)
#include "interpose/jitckpt.h"
#pragma GCC visibility pop

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "interpose/copies.h"
#include "interpose/entry.h"
#include "interpose/job.h"
#include "interpose/library.h"
#include "interpose/messages.h"
#include "interpose/observers.h"
#include "interpose/run_ahead.h"
#include "real_calls.h"
#include "watchdog/device.h"

using namespace jitckpt;
using namespace jitckpt::interpose;

namespace {

thread_local std::string last_error;

int fail(std::string sentence) {
  last_error = std::move(sentence);
  return -1;
}

std::string problem_of(const jitckpt_config_t& config) {
  if (!config.save) return "jitckpt_start needs a save function.";
  const int given = !!config.gil_check + !!config.gil_release + !!config.gil_acquire + !!config.gil_ensure +
                    !!config.gil_restore;
  if (given != 0 && given != 5) {
    return "jitckpt_start needs all five functions gil_check, gil_release, gil_acquire, gil_ensure and "
           "gil_restore, or "
           "none where there is no Python.";
  }
  return "";
}

void recycle(watchdog::Event event) { library().device.events.give_back(event); }

int add_marker(uint64_t step, void* stream, bool is_end) {
  LibraryState& all = library();
  const auto handle = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (real::cudaStreamIsCapturing(handle, &capture) == cudaSuccess &&
      capture != cudaStreamCaptureStatusNone) {
    return fail("Step " + std::to_string(step) +
                " can't be marked: its stream is capturing a graph. Capture the model, not the optimizer "
                "step's hooks.");
  }
  const int device = all.device.streams.device_of(handle);
  all.device.streams.used_device(device);
  all.step_device = device;
  const auto event = all.device.events.record(handle, device);
  if (!event)
    return fail("The device refused an event for step " + std::to_string(step) + " on the given stream.");
  if (is_end) {
    all.device.markers.end(step, *event);
  } else {
    all.device.markers.begin(step, *event);
  }
  return 0;
}

void recycle_time(watchdog::Event event) { library().device.times.give_back(event); }

// Minibatches begin where a step ends; somebody may want to know when.
void time_boundary(cudaStream_t stream) {
  LibraryState& all = library();
  all.step_stream = stream;
  all.device.in_turn.minibatch_begins();
  if (all.device.network.is_on())
    if (const auto event = all.device.times.record(stream, all.device.streams.device_of(stream)))
      all.device.network.boundary(*event, recycle_time);
  if (uint64_t* const where = all.step_time.load(std::memory_order_acquire)) {
    const auto write = [](void* word) {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      __atomic_store_n(static_cast<uint64_t*>(word), uint64_t(std::chrono::nanoseconds(now).count()),
                       __ATOMIC_RELEASE);
    };
    real::cudaLaunchHostFunc(stream, write, where);
  }
}

int answer(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return 0;
  return fail(std::string("The device refused ") + what + ": " + real::cudaGetErrorString(result) + ".");
}

}  // namespace

int jitckpt_abi(void) { return JITCKPT_ABI; }

const char* jitckpt_last_error(void) { return last_error.c_str(); }

int jitckpt_start(const jitckpt_config_t* config) {
  if (const std::string problem = problem_of(*config); !problem.empty()) return fail(problem);
  LibraryState& all = library();
  const std::lock_guard lock(all.job_mutex);
  if (all.job)
    return fail("jitckpt_start was called before in this process: one process is one rank of one job.");
  set_gil(
      {config->gil_check, config->gil_release, config->gil_acquire, config->gil_ensure, config->gil_restore});
  note_agent(config->agent_fd);
  await_boundary(false);
  run_ahead::allow(config->max_calls_ahead);
  all.job = std::make_shared<Job>(*config, all);
  all.job->start();
  call_mode.fetch_or(job_registered, std::memory_order_release);
  return 0;
}

void jitckpt_stop(void) {
  LibraryState& all = library();
  // While the job is still there: the save reports to the agent.
  if (const auto running = current_job()) running->control().wait_for_save();
  std::shared_ptr<Job> job;
  {
    const std::lock_guard lock(all.job_mutex);
    job.swap(all.job);
  }
  if (!job) return;
  const bool all_ended = job->stop();
  call_mode.fetch_and(~job_registered, std::memory_order_release);
  if (!all_ended) {
    const std::lock_guard lock(all.job_mutex);
    all.stuck.push_back(job);
  }
  note_agent(-1);
}

void jitckpt_set_base(uint64_t step) { library().device.markers.set_base(step, recycle); }

int jitckpt_step_enter(void) {
  const auto job = current_job();
  if (!job) return fail("jitckpt_step_enter was called without a job: call jitckpt_start first.");
  job->wait_for_device();
  const Passage passage(Gate::waits);
  watchdog::this_thread().in_step = true;
  return 0;
}

int jitckpt_step_begin(uint64_t step, void* stream) {
  const auto job = current_job();
  if (!job) return fail("jitckpt_step_begin was called without a job: call jitckpt_start first.");
  job->wait_for_device();
  const Passage passage(Gate::waits);
  library().step_thread.passes();
  copies::before_step(static_cast<cudaStream_t>(stream));
  copies::pass_point(watchdog::Mark::step_begins, static_cast<cudaStream_t>(stream));
  const int result = add_marker(step, stream, false);
  watchdog::this_thread().in_step = result == 0;
  return result;
}

int jitckpt_step_end(uint64_t step, void* stream) {
  if (!current_job()) return fail("jitckpt_step_end was called without a job: call jitckpt_start first.");
  const Passage passage(Gate::waits);
  library().step_thread.passes();
  const int result = add_marker(step, stream, true);
  if (result == 0) time_boundary(static_cast<cudaStream_t>(stream));
  watchdog::this_thread().in_step = false;
  return result;
}

void jitckpt_await_boundary(int waits) { await_boundary(waits != 0); }

void jitckpt_get_progress(jitckpt_progress_t* progress) {
  LibraryState& all = library();
  // A save asks again after it has copied: only a fresh answer says that the device has not gone on.
  if (holding()) all.device.markers.poll(watchdog::finished, recycle);
  const watchdog::StepProgress steps = all.device.markers.progress();
  *progress = {steps.host_begun, steps.host_ended, steps.device_begun,       steps.device_ended,
               steps.queued,     holding(),        all.step_thread.stopped()};
}

int jitckpt_write_word(uint64_t* registered_host, uint64_t value, void* stream) {
  const Passage passage(Gate::waits);
  return answer(copies::enqueue_word(registered_host, value, static_cast<cudaStream_t>(stream)),
                "the write of a word");
}

int jitckpt_write_area(uint64_t* words, uint64_t value, void* target, const void* device_source, size_t bytes,
                       void* stream) {
  const Passage passage(Gate::waits);
  const auto on_stream = static_cast<cudaStream_t>(stream);
  cudaError_t result = copies::enqueue_word(words, value, on_stream);
  if (result == cudaSuccess && bytes > 0)
    result = real::cudaMemcpyAsync(target, device_source, bytes, cudaMemcpyDeviceToHost, on_stream);
  if (result == cudaSuccess) result = copies::enqueue_word(words + 1, value, on_stream);
  return answer(result, "a copy of this rank's own state");
}

int jitckpt_copy_in_turn(const jitckpt_piece_t* pieces, size_t count, uint64_t* done, uint64_t value,
                         void* stream) {
  const Passage passage(Gate::waits);
  const auto on_stream = static_cast<cudaStream_t>(stream);
  std::vector<watchdog::CopyPiece> in_turn;
  for (const jitckpt_piece_t* one = pieces; one != pieces + count; ++one)
    in_turn.push_back({one->point, one->target, one->source, one->bytes});
  const int device = library().device.streams.device_of(on_stream);
  if (copies::begin(std::move(in_turn), {on_stream, device, done, value})) return 0;
  return fail("The device refused a copy of a snapshot.");
}

int64_t jitckpt_copy_rest(void) {
  const long left = copies::put_rest();
  if (left < 0) return fail("The device refused a copy of a snapshot.");
  return left;
}

void jitckpt_copy_no_more(void) { library().device.in_turn.drop(); }

int jitckpt_stream_waits(void* stream, void* other) {
  const Passage passage(Gate::waits);
  return answer(copies::wait_for(static_cast<cudaStream_t>(stream), static_cast<cudaStream_t>(other)),
                "to have a stream wait for another");
}

int jitckpt_report(const char* json, size_t length) {
  const auto job = current_job();
  if (!job || !job->control().agent().connected()) return fail("There is no agent to report to.");
  if (job->control().agent().send({json, length})) return 0;
  return fail("The agent did not take a report of " + std::to_string(length) + " bytes.");
}

int jitckpt_collectives(char* json, size_t capacity) {
  LibraryState& all = library();
  const auto in_flight = all.device.watches.in_flight(all.device.clock.now());
  const std::string text = messages::collectives(in_flight, in_flight.size());
  if (capacity > 0) {
    const size_t fits = std::min(text.size(), capacity - 1);
    std::memcpy(json, text.data(), fits);
    json[fits] = '\0';
  }
  return static_cast<int>(text.size() + 1);
}

void jitckpt_profile_network(uint32_t minibatches) {
  library().device.in_turn.count_from_now();
  library().device.network.order(minibatches, recycle_time);
}

size_t jitckpt_network_profile(double* numbers, size_t capacity) {
  static std::mutex mutex;
  static std::vector<double> known;  // that was too much for whoever has asked
  const std::lock_guard lock(mutex);
  if (known.empty()) {
    const auto profiled =
        library().device.network.take(watchdog::finished, watchdog::seconds_between, recycle_time);
    if (!profiled) return 0;
    for (const watchdog::Profiled& one : *profiled) {
      known.push_back(one.seconds);
      known.push_back(double(one.busy.size()));
      for (const watchdog::Busy& busy : one.busy)
        known.insert(known.end(), {busy.begin, busy.end, double(busy.exchange)});
      known.push_back(double(one.points.size()));
      for (const watchdog::Passed& point : one.points)
        known.insert(known.end(), {point.at, double(point.mark)});
    }
  }
  const size_t count = known.size();
  if (count > capacity) return count;
  std::copy(known.begin(), known.end(), numbers);
  known.clear();
  return count;
}

void jitckpt_tell_step_time(uint64_t* where) { library().step_time.store(where, std::memory_order_release); }

void jitckpt_tell_network_use(const uint64_t* wanted, uint64_t* used, const uint64_t* ends) {
  using namespace std::chrono_literals;
  constexpr auto look_every = 1ms, ask_every = 5ms;
  watchdog::NetworkUse& use = library().device.use;
  const auto is = [](const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE) != 0; };
  const auto say = [used](uint64_t is_used) { __atomic_store_n(used, is_used, __ATOMIC_RELEASE); };
  while (!is(ends)) {
    if (is(wanted)) {
      use.want(true, recycle_time);
      say(use.look(watchdog::finished, recycle_time));
    } else if (use.is_wanted()) {
      use.want(false, recycle_time);
      say(0);
    }
    std::this_thread::sleep_for(use.is_wanted() ? look_every : ask_every);
  }
  use.want(false, recycle_time);
  say(0);
}

void jitckpt_resume(void) {
  if (const auto job = current_job()) job->control().resume();
}

void jitckpt_arm_fault(int signal_number) { observe::arm_fault(signal_number); }
