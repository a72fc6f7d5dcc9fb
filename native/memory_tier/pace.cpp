#include "memory_tier/pace.h"

#include <algorithm>
#include <cmath>

namespace jitckpt::memory_tier {
namespace {

constexpr uint64_t least_piece = 16 << 10;
constexpr double piece_seconds = 0.01;  // what goes at a time at a constant rate takes so long

// However low the rate is: the other side is not to take the sender for dead.
constexpr std::chrono::seconds longest_wait{1};

Pace::Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Pace::Clock::duration>(std::chrono::duration<double>(count));
}

}  // namespace

void Pace::set_rate(double bytes_per_second) {
  const std::lock_guard lock(mutex_);
  rate_ = bytes_per_second;
}

Pace::Turn Pace::take(uint64_t wanted, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (!std::isfinite(rate_)) return {wanted, now};
  if (now < free_) return {0, free_};
  const auto piece = std::max(least_piece, static_cast<uint64_t>(rate_ * piece_seconds));
  const uint64_t bytes = std::min(wanted, piece);
  // Who comes a little late, as the scheduler wakes it, makes up for that, and for no more.
  free_ = std::max(free_, now - seconds(piece_seconds)) +
          std::min<Clock::duration>(seconds(static_cast<double>(bytes) / rate_), longest_wait);
  return {bytes, now};
}

}  // namespace jitckpt::memory_tier
