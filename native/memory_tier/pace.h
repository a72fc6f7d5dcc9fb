// When how much may be sent, so that the training's own messages find room. One for all that a host sends.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <vector>

namespace jitckpt::memory_tier {

class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  // How many of the bytes that are wanted may go now; none before `when`.
  struct Turn {
    uint64_t bytes;
    Clock::time_point when;
  };

  // Room for so many bytes in every minibatch, in one of its spans in which the network is idle (GEMINI's
  // Algorithm 2), which lasts until `end`. Times are since the minibatch began.
  struct Slot {
    Clock::duration begin, end;
    uint64_t bytes;
  };

  // What the ranks say. began: when the newest minibatch began, on the device; the epoch before the first
  // one. is_awaited: whether the training waits for what is sent. uses_network: whether its own messages are
  // under way; who sends makes way for them.
  struct Signs {
    std::function<Clock::time_point()> began;
    std::function<bool()> is_awaited;
    std::function<bool()> uses_network{};
  };
  void listen(Signs signs);

  // At a constant rate; infinity for as fast as it goes, which is what a new one does.
  // spare: so long it may make way; what it was late with it sends as fast as it goes, as soon as it may.
  void set_rate(double bytes_per_second, Clock::duration spare = {});

  // By a schedule, in order of time, of minibatches that take so long; at the rate where none begins any
  // more. Without slots at the rate alone. Needs signs.
  // bytes_per_second: of the network; who comes late sends what it still takes before the end.
  void set_schedule(std::vector<Slot> slots, Clock::duration minibatch, double bytes_per_second);

  // What is awaited goes as fast as it can, whatever else was said: nobody uses the network meanwhile.
  Turn take(uint64_t wanted, Clock::time_point now);

 private:
  Turn turn(uint64_t wanted, Clock::time_point now);
  Turn at_rate(uint64_t wanted, Clock::time_point now);
  Turn in_slot(uint64_t wanted, Clock::time_point now);
  bool is_in_slots(Clock::time_point now);
  bool makes_way(Clock::time_point now);

  std::mutex mutex_;
  double rate_ = std::numeric_limits<double>::infinity();
  Clock::time_point free_{};  // from then on the rate lets something through
  std::vector<Slot> slots_;
  Clock::duration minibatch_{};
  double network_ = 0;  // bytes per second
  Signs signs_;
  Clock::time_point minibatch_began_{};
  size_t next_ = 0;    // the slot that comes, or is being used
  uint64_t used_ = 0;  // of its bytes
  Clock::duration spare_{};
  bool is_used_ = false;  // the network, by the training
  Clock::time_point used_since_{};
  Clock::time_point looked_{};  // at that
  Clock::duration late_{};      // behind the rate, for having made way
};

}  // namespace jitckpt::memory_tier
