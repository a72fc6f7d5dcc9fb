#include "hang_watch.h"

#include <algorithm>

namespace jitckpt::proxy::client {

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
