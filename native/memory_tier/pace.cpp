#include "memory_tier/pace.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace jitckpt::memory_tier {
namespace {

constexpr uint64_t least_piece = 16 << 10;
constexpr double piece_seconds = 0.01;  // what goes at a time at a constant rate takes so long

// Without a beginning of a minibatch for so long (an evaluation, say) there is nothing to wait for. It is also
// what keeps the other side from taking a sender for dead.
constexpr std::chrono::seconds longest_wait{1};

Pace::Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Pace::Clock::duration>(std::chrono::duration<double>(count));
}

}  // namespace

void Pace::set_rate(double bytes_per_second) {
  const std::lock_guard lock(mutex_);
  rate_ = bytes_per_second;
  plan_.clear();
}

void Pace::set_plan(std::vector<Send> sends) {
  const std::lock_guard lock(mutex_);
  plan_ = std::move(sends);
  next_ = plan_.size();  // from the next minibatch on
  sent_ = 0;
}

void Pace::minibatch_begins(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  begun_ = now;
  next_ = 0;
  sent_ = 0;
}

Pace::Turn Pace::take(uint64_t wanted, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (!plan_.empty()) {
    while (next_ < plan_.size() && sent_ >= plan_[next_].bytes) {
      ++next_;
      sent_ = 0;
    }
    const bool is_over = next_ == plan_.size();
    const auto patient_until = std::max(last_, begun_) + longest_wait;
    const auto when = is_over ? patient_until : std::min(begun_ + seconds(plan_[next_].seconds), patient_until);
    if (now < when) return {0, std::min(when, now + seconds(piece_seconds))};  // a minibatch may begin meanwhile
    const uint64_t bytes = is_over ? std::min(wanted, least_piece) : std::min(wanted, plan_[next_].bytes - sent_);
    sent_ += bytes;
    last_ = now;
    return {bytes, now};
  }
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
