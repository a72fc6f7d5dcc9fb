#include "watchdog/threads.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace jitckpt::watchdog {

thread_local constinit Thread* current_thread = nullptr;

namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<Thread>> threads;
};

// Never destroyed: threads may end after the process began to exit.
std::atomic<Registry*> registry_pointer{nullptr};

Registry& registry() {
  Registry* found = registry_pointer.load(std::memory_order_acquire);
  if (found) return *found;
  auto* made = new Registry;
  if (registry_pointer.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *found;
}

struct Membership {
  std::shared_ptr<Thread> thread;
  ~Membership() {
    current_thread = nullptr;
    if (!thread) return;
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    std::erase(all.threads, thread);
  }
};

thread_local Membership membership;

}  // namespace

Thread& add_current_thread() {
  membership.thread = std::make_shared<Thread>(static_cast<pid_t>(syscall(SYS_gettid)));
  current_thread = membership.thread.get();
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.threads.push_back(membership.thread);
  return *current_thread;
}

std::shared_ptr<Thread> share_this_thread() {
  this_thread();
  return membership.thread;
}

void for_each_thread(const std::function<void(const Thread&)>& look) {
  std::vector<std::shared_ptr<Thread>> threads;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    threads = all.threads;
  }
  for (const auto& thread : threads) look(*thread);
}

void forget_threads() {
  registry_pointer.store(nullptr,
                         std::memory_order_release);  // its lock may be held by a thread that is not here
  current_thread = nullptr;
}

}  // namespace jitckpt::watchdog
