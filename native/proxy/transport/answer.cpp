#include "answer.h"

#include <algorithm>
#include <cstring>

#include "futex.h"

namespace jitckpt::proxy {

std::size_t take_slot(const Log& log) {
  for (std::size_t index = 0; index < slot_count; ++index) {
    uint32_t none = 0;
    if (log.slot(index).taken.compare_exchange_strong(none, 1)) return index;
  }
  return slot_count;
}

bool wait_for_answer(Slot& slot, uint32_t number, std::chrono::microseconds spin_time,
                     const std::function<bool()>& go_on) {
  const auto answered = [&] { return slot.answered.load(std::memory_order_seq_cst) == number; };
  while (!spin(spin_time, answered)) {
    slot.sleeps.store(1, std::memory_order_seq_cst);
    if (const uint32_t seen = slot.answered.load(std::memory_order_seq_cst); seen != number)
      futex_wait(slot.answered, seen, std::chrono::milliseconds(50));
    slot.sleeps.store(0, std::memory_order_relaxed);
    if (!answered() && !go_on()) return false;
  }
  return true;
}

void put_text(char* to, std::size_t capacity, std::string_view text) {
  const std::size_t length = std::min(text.size(), capacity - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

void answer(Slot& slot, uint32_t number, int32_t result, std::size_t bytes, std::string_view text) {
  slot.result = result;
  slot.bytes = static_cast<uint32_t>(bytes);
  put_text(slot.text, sizeof slot.text, text);
  slot.answered.store(number, std::memory_order_seq_cst);
  if (slot.sleeps.load(std::memory_order_seq_cst) != 0) futex_wake_all(slot.answered);
}

}  // namespace jitckpt::proxy
