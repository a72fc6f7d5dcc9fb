#include "proxy/transport/answer.h"

#include <algorithm>
#include <cstring>

#include "proxy/transport/futex.h"

namespace jitckpt::proxy {

std::size_t take_slot(const Log& log) {
  for (std::size_t index = 0; index < slot_count; ++index) {
    uint32_t none = 0;
    if (log.slot(index).taken.compare_exchange_strong(none, 1)) return index;
  }
  return slot_count;
}

uint32_t begin_question(Slot& slot) {
  // Numbers go on where a thread that had the slot before has left them, without 0.
  const uint32_t number = std::max(slot.asked.load(std::memory_order_relaxed) + 1, uint32_t{1});
  slot.asked.store(number, std::memory_order_relaxed);
  slot.waits.store(Waits::yes, std::memory_order_release);
  return number;
}

bool end_question(Slot& slot) {
  Waits waits = Waits::yes;
  if (slot.waits.compare_exchange_strong(waits, Waits::no)) return true;
  slot.waits = Waits::yes;
  return false;
}

void void_answers(const Log& log) {
  for (std::size_t index = 0; index < slot_count; ++index) {
    Slot& slot = log.slot(index);
    if (slot.waits == Waits::no) continue;
    // First the answer: who has seen `again` must not find it any more. If the thread takes it just before
    // that, the new server answers once more, to nobody.
    if (const uint32_t asked = slot.asked; slot.answered == asked) slot.answered = asked - 1;
    Waits waits = Waits::yes;
    slot.waits.compare_exchange_strong(waits, Waits::again);
    futex_wake_all(slot.answered);
  }
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
