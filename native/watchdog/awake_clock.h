// A clock that stands still while the process does (SIGSTOP, a debugger): a time-out that passed while nobody
// could look is no hang.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>

namespace jitckpt::watchdog {

class AwakeClock {
 public:
  // One thread ticks, at least every half second while it runs. steady: seconds of any monotonic clock.
  void tick(double steady) {
    const double passed = std::clamp(steady - last_, 0.0, 1.0);
    last_ = steady;
    now_.store(now_.load(std::memory_order_relaxed) + passed, std::memory_order_relaxed);
  }

  // Seconds awake, as of the last tick.
  double now() const { return now_.load(std::memory_order_relaxed); }

 private:
  double last_ = 0;
  std::atomic<double> now_{0};
};

inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace jitckpt::watchdog
