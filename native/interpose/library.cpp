#include "interpose/library.h"

#include <pthread.h>
#include <unistd.h>

#include "interpose/gate.h"
#include "interpose/job.h"
#include "interpose/observers.h"
#include "interpose/termination.h"
#include "watchdog/threads.h"

namespace jitckpt::interpose {
namespace {

std::atomic<LibraryState*> the_library{nullptr};
std::atomic<int> agent_descriptor{-1};

// A forked child (a DataLoader's worker, a subprocess before its exec) has none of our threads and is not the
// job. What was locked by a thread that is not here any more is left behind as it is.
void begin_anew_in_child() {
  the_library.store(nullptr);
  call_mode.store(0);
  leave_saves_behind();
  set_gil({});
  observe::arm_fault(0);
  watchdog::forget_threads();
  termination::release_signal();
  const int descriptor = agent_descriptor.exchange(-1);
  if (descriptor >= 0) close(descriptor);
}

}  // namespace

LibraryState& library() {
  LibraryState* found = the_library.load(std::memory_order_acquire);
  if (found) return *found;
  // Without a lock, which a fork might leave locked for ever.
  auto* const made = new LibraryState;
  if (!the_library.compare_exchange_strong(found, made, std::memory_order_acq_rel)) {
    delete made;
    return *found;
  }
  static std::atomic<bool> fork_watched{false};
  if (!fork_watched.exchange(true)) pthread_atfork(nullptr, nullptr, begin_anew_in_child);
  return *made;
}

std::shared_ptr<Job> current_job() {
  LibraryState& all = library();
  const std::lock_guard lock(all.job_mutex);
  return all.job;
}

void note_agent(int descriptor) { agent_descriptor.store(descriptor); }

}  // namespace jitckpt::interpose
