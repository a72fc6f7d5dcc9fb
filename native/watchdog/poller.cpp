#include "watchdog/poller.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "watchdog/device.h"
#include "watchdog/futex.h"
#include "watchdog/own_thread.h"

namespace jitckpt::watchdog {
namespace {

using namespace std::chrono_literals;

// Before the pace of the steps is known: of a job that has just begun, the first step is awaited.
constexpr std::chrono::microseconds first_look_every = 20ms;
constexpr std::chrono::microseconds shortest_pause = 1ms;

// FNV-1a, word by word: enough to see that something changed.
uint64_t mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x100000001b3; }

}  // namespace

void Poller::start() {
  thread_ = own_thread("jitckpt-poller", [this] { loop(); });
}

bool Poller::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  const bool ended = changed_.wait_for(lock, 2s, [this] { return ended_; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
  return ended;
}

void Poller::look_closely(bool closely) {
  const std::lock_guard lock(mutex_);
  closely_ = closely;
  ++order_;
  observation_.reset();
  changed_.notify_all();
}

std::optional<Observation> Poller::observation() const {
  const std::lock_guard lock(mutex_);
  return observation_;
}

void Poller::run(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
}

void Poller::wait_for_progress(uint32_t seen) {
  waiting_.fetch_add(1);
  {
    const std::lock_guard lock(mutex_);
    if (pause(closely_) < pausing_) changed_.notify_all();
  }
  futex_wait(progress_, seen);
  waiting_.fetch_sub(1);
}

std::optional<double> Poller::step_seconds() const {
  const std::lock_guard lock(mutex_);
  return pace_.seconds();
}

void Poller::interrupt() {
  progress_.fetch_add(1, std::memory_order_release);
  futex_wake_all(progress_);
}

std::chrono::microseconds Poller::pause(bool closely) const {
  if (closely) return 2ms;
  const auto step = pace_.seconds();
  if (waiting_.load() == 0) return step ? look_every_ : std::min(look_every_, first_look_every);
  // Whoever waits is steps ahead of the device. With half of them left it has time to enqueue more.
  const double half = step.value_or(0) * double(work_.markers.steps_ahead()) / 2;
  return std::clamp(std::chrono::microseconds(static_cast<int64_t>(half * 1e6)), shortest_pause, look_every_);
}

void Poller::loop() {
  thread_id_ = static_cast<pid_t>(syscall(SYS_gettid));
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const bool closely = closely_;
    std::vector<std::function<void()>> tasks;
    tasks.swap(tasks_);
    const uint64_t order = order_;
    lock.unlock();
    for (const auto& task : tasks) task();
    look(closely);
    lock.lock();
    if (stopping_ || order != order_) continue;
    pausing_ = pause(closely);
    changed_.wait_for(lock, pausing_);
    pausing_ = {};
  }
  ended_ = true;
  changed_.notify_all();
}

bool Poller::look_at_markers() {
  const uint64_t before = work_.markers.progress().device_ended;
  const bool moved = work_.markers.poll(finished, [this](Event event) { work_.events.give_back(event); });
  const uint64_t ended = work_.markers.progress().device_ended;
  if (ended != before) {
    const std::lock_guard lock(mutex_);
    pace_.ended(ended, steady_seconds());
  }
  if (moved) interrupt();
  return moved;
}

void Poller::look(bool closely) {
  const uint64_t order = [this] {
    const std::lock_guard lock(mutex_);
    return order_;
  }();
  // Not before the application uses the device: we would initialise it.
  if (const auto device = work_.streams.any_device(); device && !uses_device_) {
    use_device(*device);
    leave_captures_alone();
    uses_device_ = true;
  }
  work_.watches.poll(
      finished, [this](Event event) { work_.events.give_back(event); }, [this] { return work_.clock.now(); });
  look_at_markers();
  if (!closely) return;

  Observation seen;
  seen.idle = true;
  seen.signature = work_.watches.finished();
  for (const auto& stream : work_.streams.all()) {
    use_device(stream.device);
    const StreamState state = state_of(stream.handle);
    seen.idle = seen.idle && state != StreamState::busy;
    seen.signature = mix(seen.signature, static_cast<uint64_t>(state));
  }
  const StepProgress progress = work_.markers.progress();
  seen.inside_step = progress.device_begun != progress.device_ended;
  seen.signature = mix(mix(seen.signature, progress.device_begun), progress.device_ended);
  const std::lock_guard lock(mutex_);
  if (order == order_) observation_ = seen;
}

}  // namespace jitckpt::watchdog
