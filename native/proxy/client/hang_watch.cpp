#include "proxy/client/hang_watch.h"

#include <algorithm>

namespace jitckpt::proxy::client {
namespace {

// The calls are there already, so they take the device no longer than the first time; unless others use it
// too. And another rank may take so many times longer for what it does alone.
constexpr int leniency = 10;
constexpr std::chrono::seconds least_patience(15);

}  // namespace

bool ReplayWatch::stands_still(bool meets_others, uint64_t read, Clock::duration minibatch, int tries,
                               Clock::duration longest, Clock::time_point now) {
  if (!meets_others || read != read_) moved_ = now;
  read_ = read;
  const auto usual =
      std::max<Clock::duration>(leniency * std::max(minibatch, moved_ - began_), least_patience);
  return now - moved_ >= std::min<Clock::duration>(usual * (1 << std::clamp(tries - 1, 0, 10)), longest);
}

HangWatch::Clock::duration HangWatch::longest_wait(Clock::time_point now) {
  Clock::duration longest{0};
  for (std::size_t index = 0; index < slot_count; ++index) {
    const Slot& slot = log_.slot(index);
    const uint32_t question = slot.asked;
    if (slot.waits != Waits::yes || slot.answered == question) {
      waiting_.erase(index);
      continue;
    }
    Wait& wait = waiting_.try_emplace(index, Wait{question, now}).first->second;
    if (wait.question != question) wait = {question, now};
    longest = std::max(longest, now - wait.since);
  }
  return longest;
}

}  // namespace jitckpt::proxy::client
