#include "interpose/gate.h"

#include <dirent.h>
#include <sys/types.h>

#include <cstdlib>
#include <mutex>
#include <unordered_set>

#include "watchdog/futex.h"

namespace jitckpt::interpose {

using watchdog::Thread;
using watchdog::ThreadState;

constinit std::atomic<uint32_t> call_mode{0};

namespace {

watchdog::Gil the_gil;

struct HostThreads {
  std::mutex mutex;
  std::unordered_set<pid_t> ids;
};
// Never destroyed: threads may pass here after the process began to exit.
HostThreads& host_threads() {
  static auto* const threads = new HostThreads;
  return *threads;
}
std::atomic<bool> steps_pass{true};
std::atomic<bool> boundary_awaited{false};
std::atomic<uint64_t> save_count{0};
std::atomic<uint64_t> running_save{0};  // its number, from 1

}  // namespace

void set_gil(const watchdog::Gil& gil) { the_gil = gil; }
const watchdog::Gil& gil() { return the_gil; }

void close_gate() {
  steps_pass.store(true, std::memory_order_relaxed);
  call_mode.fetch_or(gate_closed, std::memory_order_release);
}

bool passes_to_end_its_step(const Thread& thread) {
  // A backward pass that is still to come before the boundary runs on a thread of its own.
  const bool goes_on = thread.in_step || boundary_awaited.load(std::memory_order_relaxed);
  return goes_on && steps_pass.load(std::memory_order_relaxed);
}

void await_boundary(bool waits) { boundary_awaited.store(waits, std::memory_order_relaxed); }

void hold_steps_as_well() { steps_pass.store(false, std::memory_order_relaxed); }

void open_gate() {
  call_mode.fetch_and(~gate_closed, std::memory_order_release);
  watchdog::futex_wake_all(call_mode);
}

void wait_until_open() {
  for (;;) {
    const uint32_t mode = call_mode.load(std::memory_order_acquire);
    if (!(mode & gate_closed)) return;
    watchdog::futex_wait(call_mode, mode);
  }
}

void wait_at_gate(Thread& thread) {
  const ThreadState before = thread.state.exchange(ThreadState::parked, std::memory_order_acq_rel);
  // The gate may close again while this thread waits for the GIL.
  while (holding()) watchdog::without_gil(the_gil, wait_until_open);
  thread.state.store(before, std::memory_order_release);
}

void begin_save() {
  HostThreads& threads = host_threads();
  const std::lock_guard lock(threads.mutex);
  threads.ids.clear();
  if (DIR* const tasks = opendir("/proc/self/task")) {
    while (const dirent* entry = readdir(tasks))
      threads.ids.insert(static_cast<pid_t>(std::atoi(entry->d_name)));
    closedir(tasks);
  }
  running_save.store(++save_count, std::memory_order_release);
}

void leave_saves_behind() { running_save.store(0); }

void end_save() { running_save.store(0, std::memory_order_release); }

bool works_for_save(Thread& thread) {
  if (thread.saves) return true;
  const uint64_t save = running_save.load(std::memory_order_acquire);
  if (save == 0) return false;
  if (thread.judged_in_save != save) {
    HostThreads& threads = host_threads();
    const std::lock_guard lock(threads.mutex);
    thread.born_in_save = !threads.ids.contains(thread.id);
    thread.judged_in_save = save;
  }
  return thread.born_in_save;
}

bool in_save() { return works_for_save(watchdog::this_thread()); }

}  // namespace jitckpt::interpose
