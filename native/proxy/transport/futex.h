// Waiting on a word in memory that two processes share.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace jitckpt::proxy {

// Returns when somebody wakes the word, at the latest after the time, at once if it does not have the value,
// or for no reason: the caller looks again.
inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t value, std::chrono::microseconds longest) {
  const timespec time{longest.count() / 1'000'000, longest.count() % 1'000'000 * 1000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Looks a few times before it is worth sleeping: a wake-up costs more than a short call takes.
template <class Predicate>
bool spin(std::chrono::microseconds longest, Predicate done) {
  if (done()) return true;
  const auto deadline = std::chrono::steady_clock::now() + longest;
  do {
    for (int look = 0; look < 16; ++look) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      if (done()) return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace jitckpt::proxy
