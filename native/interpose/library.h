// What the library keeps, in one place, so that a forked child can leave all of it behind.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "interpose/communicators.h"
#include "interpose/step_thread.h"
#include "watchdog/poller.h"

namespace jitckpt::interpose {

class Job;

struct LibraryState {
  watchdog::DeviceWork device;
  Communicators communicators;
  StepThread step_thread;
  std::atomic<uint64_t*> step_time{nullptr};       // see jitckpt_tell_step_time
  std::atomic<cudaStream_t> step_stream{nullptr};  // where the last step has ended
  std::atomic<int> step_device{-1};                // where the last step was marked; -1 before the first

  std::mutex job_mutex;
  std::shared_ptr<Job> job;                 // from jitckpt_start to jitckpt_stop
  std::vector<std::shared_ptr<Job>> stuck;  // stopped, but for a thread that does not come back
};

// Made at the first call that needs it; never destroyed, because calls come until the very end of the
// process.
LibraryState& library();

// The descriptor that a forked child closes.
void note_agent(int descriptor);

// The registered job, or nothing.
std::shared_ptr<Job> current_job();

}  // namespace jitckpt::interpose
