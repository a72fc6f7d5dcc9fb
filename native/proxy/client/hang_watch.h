// Finds threads of the program that wait for one answer for too long, and replays that stand still.
#pragma once
#include <chrono>
#include <cstdint>
#include <map>

#include "proxy/transport/layout.h"

namespace jitckpt::proxy::client {

class HangWatch {
 public:
  using Clock = std::chrono::steady_clock;

  explicit HangWatch(const Log& log) : log_(log) {}

  // For how long some thread has waited at least, as far as the looks before this one can say.
  Clock::duration longest_wait(Clock::time_point now);
  // What was seen does not count: the host was held since.
  void forget() { waiting_.clear(); }

 private:
  struct Wait {
    uint32_t question;
    Clock::time_point since;
  };
  Log log_;
  std::map<std::size_t, Wait> waiting_;  // by slot
};

// A replay in which nothing fails, but the server makes no progress: a collective of it never ends.
class ReplayWatch {
 public:
  using Clock = std::chrono::steady_clock;

  void begin(Clock::time_point now) { began_ = moved_ = now; }

  // meets_others: the server is past what it does alone, which may take any time. read: the newest call that
  // it is done with. minibatch: how long one took at most, of those whose calls are made again. tries:
  // recoveries since the last minibatch, this one included; each gets twice the time, since the device may
  // only be slow. longest: that an answer may take.
  bool stands_still(bool meets_others, uint64_t read, Clock::duration minibatch, int tries,
                    Clock::duration longest, Clock::time_point now);

 private:
  Clock::time_point began_, moved_;
  uint64_t read_ = 0;
};

}  // namespace jitckpt::proxy::client
