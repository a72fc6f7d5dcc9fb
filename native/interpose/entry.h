// What every generated entry point does first.
#pragma once
#include "interpose/gate.h"

namespace jitckpt::interpose {

enum class Gate { waits, ignores };

// One call of the host, from its entry to its return: waits at the gate if that is closed, then marks the
// thread as being inside a device call, which may take for ever on a device that hangs.
class Passage {
 public:
  explicit Passage(Gate gate) {
    if (attentive()) begin(gate);
  }
  ~Passage() {
    if (thread_) thread_->leave_call();
  }
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;

  bool in_save() const { return in_save_; }

 private:
  void begin(Gate gate) {
    watchdog::Thread& thread = watchdog::this_thread();
    if (holding()) [[unlikely]]
      meet_closed_gate(thread, gate);
    thread.enter_call();
    thread_ = &thread;
  }
  void meet_closed_gate(watchdog::Thread& thread, Gate gate);

  watchdog::Thread* thread_ = nullptr;
  bool in_save_ = false;
};

}  // namespace jitckpt::interpose
