// The thread that drives the optimizer, and whether it has come to a stop.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>

#include "watchdog/threads.h"

namespace jitckpt::interpose {

class StepThread {
 public:
  // The calling thread is it.
  void passes();

  // What it does now counts as stopped if it is still the same call later.
  void device_at_rest();

  // It waits at the gate; or it is in the very device call in which the device came to rest (behind a hung
  // collective, or a queue that is full).
  bool stopped() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<watchdog::Thread> thread_;
  uint64_t call_at_rest_ = 0;  // 0: it was in none
};

}  // namespace jitckpt::interpose
