// Finds threads of the program that wait for one answer for too long.
#pragma once
#include <chrono>
#include <cstdint>
#include <map>

#include "layout.h"

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

}  // namespace jitckpt::proxy::client
