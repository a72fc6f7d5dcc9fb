#include "interpose/job.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "device_api/results.h"
#include "interpose/gate.h"

namespace jitckpt::interpose {
namespace {

// A save beside the training begins when the poller has seen its step end.
constexpr std::chrono::milliseconds longest_poll(100);

}  // namespace

Job::Job(const jitckpt_config_t& config, LibraryState& library)
    : max_ahead_(config.max_ahead),
      library_(library),
      poller_(library.device, std::min(Control::look_every(config), longest_poll)),
      control_(config, library, poller_) {}

void Job::start() {
  poller_.start();
  control_.start();
}

bool Job::stop() {
  control_.stop();
  return poller_.stop();
}

void Job::call_failed(const char* name, ncclResult_t result) {
  if (!is_of_the_machine(result)) return;
  control_.nccl_failed(name, result);
  watchdog::Thread& thread = watchdog::this_thread();
  watchdog::without_gil(gil(), [this] {
    while (!holding() && control_.save_expected()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  if (holding()) wait_at_gate(thread);
}

bool Job::communicator_failed(ncclComm_t communicator, ncclResult_t result) {
  if (library_.communicators.failed(communicator)) control_.nccl_failed("ncclCommGetAsyncError", result);
  return control_.save_expected();
}

void Job::wait_for_device() {
  if (max_ahead_ == 0 ||
      library_.device.markers.steps_ahead() < watchdog::steps_ahead_allowed({}, max_ahead_))
    return;
  const uint64_t allowed = watchdog::steps_ahead_allowed(poller_.step_seconds(), max_ahead_);
  uint64_t most = allowed - 1;
  while (!holding()) {
    const uint32_t seen = poller_.progress();
    if (library_.device.markers.steps_ahead() <= most || holding()) return;
    // Who has had to wait goes on with several steps in one go, which find their code in the caches.
    most = allowed / 2;
    watchdog::without_gil(gil(), [&] {
      // The device may be further than the poller has seen, which looks rarely.
      if (!poller_.look_at_markers()) poller_.wait_for_progress(seen);
    });
  }
}

}  // namespace jitckpt::interpose
