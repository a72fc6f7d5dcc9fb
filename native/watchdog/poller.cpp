#include "poller.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "device.h"
#include "futex.h"
#include "own_thread.h"

namespace jitckpt::watchdog {
namespace {

using namespace std::chrono_literals;

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
  if (waiting_.fetch_add(1) == 0) {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  futex_wait(progress_, seen);
  waiting_.fetch_sub(1);
}

void Poller::interrupt() {
  progress_.fetch_add(1, std::memory_order_release);
  futex_wake_all(progress_);
}

std::chrono::microseconds Poller::pause(bool closely) const {
  // Whoever waits is several steps ahead of the device; looks more often than this would slow its host down.
  if (waiting_.load() > 0 || closely) return 2ms;
  return work_.watches.empty() && work_.markers.progress().queued == 0 ? 100ms : 20ms;
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
    if (!stopping_ && order == order_) changed_.wait_for(lock, pause(closely));
  }
  ended_ = true;
  changed_.notify_all();
}

void Poller::look(bool closely) {
  const uint64_t order = [this] {
    const std::lock_guard lock(mutex_);
    return order_;
  }();
  const auto streams = work_.streams.all();
  // Not before the application uses the device: we would initialise it.
  if (!streams.empty()) {
    use_device(streams.front().device);
    leave_captures_alone();
  }
  const auto recycle = [this](Event event) { work_.events.give_back(event); };
  work_.watches.poll(finished, recycle, [this] { return work_.clock.now(); });
  if (work_.markers.poll(finished, recycle)) interrupt();
  if (!closely) return;

  Observation seen;
  seen.idle = true;
  seen.signature = work_.watches.finished();
  for (const auto& stream : streams) {
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
