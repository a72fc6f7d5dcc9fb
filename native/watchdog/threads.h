// What the library knows of the host's threads: whether one is inside a device call of ours, or waits at the
// gate.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace jitckpt::watchdog {

enum class ThreadState : uint32_t { running, in_call, parked };

// Written by its own thread; state and calls are read by others.
struct Thread {
  explicit Thread(pid_t thread_id) : id(thread_id) {}

  const pid_t id;
  std::atomic<ThreadState> state{ThreadState::running};
  std::atomic<uint64_t> calls{0};  // device calls entered so far: tells one long call from many short ones

  int depth = 0;                // a device library may call another one through us
  bool in_step = false;         // between jitckpt_step_begin and jitckpt_step_end
  bool saves = false;           // the saver thread itself
  uint64_t judged_in_save = 0;  // for which save `born_in_save` was found out
  bool born_in_save = false;

  void enter_call() {
    if (depth++ > 0) return;
    calls.store(calls.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    state.store(ThreadState::in_call, std::memory_order_relaxed);
  }
  void leave_call() {
    if (--depth == 0) state.store(ThreadState::running, std::memory_order_relaxed);
  }
};

// The library is preloaded, so its thread-local data is where the loader puts it at once: one instruction to
// reach it.
extern thread_local constinit Thread* current_thread [[gnu::tls_model("initial-exec")]];

// This thread's entry, made at its first call and taken out when the thread ends.
Thread& add_current_thread();
inline Thread& this_thread() { return current_thread ? *current_thread : add_current_thread(); }
std::shared_ptr<Thread> share_this_thread();

void for_each_thread(const std::function<void(const Thread&)>& look);

// In a forked child: only the calling thread is left.
void forget_threads();

}  // namespace jitckpt::watchdog
