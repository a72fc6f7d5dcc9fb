// When how much may be sent, so that the training's own messages have the network. One for all that a host sends.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

namespace jitckpt::memory_tier {

// What may be sent in one minibatch, from so many seconds after its beginning on.
struct Send {
  double seconds;
  uint64_t bytes;
};

class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  // How many of the bytes that are wanted may go now; none before `when`.
  struct Turn {
    uint64_t bytes;
    Clock::time_point when;
  };

  // At a constant rate; infinity for as fast as it goes, which is what a new one does.
  void set_rate(double bytes_per_second);

  // In the idle spans of each minibatch (GEMINI, Algorithm 2): as these say, in their order.
  void set_plan(std::vector<Send> sends);

  // A minibatch of the training begins; only where there is a plan this changes anything.
  void minibatch_begins(Clock::time_point now);

  Turn take(uint64_t wanted, Clock::time_point now);

 private:
  std::mutex mutex_;
  double rate_ = std::numeric_limits<double>::infinity();
  Clock::time_point free_{};  // from then on the rate lets something through
  std::vector<Send> plan_;
  size_t next_ = 0;    // of the plan
  uint64_t sent_ = 0;  // of that one
  Clock::time_point begun_{}, last_{};
};

}  // namespace jitckpt::memory_tier
