// When how much may be sent, so that the training's own messages find room. One for all that a host sends.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <mutex>

namespace jitckpt::memory_tier {

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

  Turn take(uint64_t wanted, Clock::time_point now);

 private:
  std::mutex mutex_;
  double rate_ = std::numeric_limits<double>::infinity();
  Clock::time_point free_{};  // from then on the rate lets something through
};

}  // namespace jitckpt::memory_tier
