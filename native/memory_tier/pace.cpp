#include "memory_tier/pace.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace jitckpt::memory_tier {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t least_piece = 16 << 10;
constexpr double piece_seconds = 0.01;  // what goes at a time at a constant rate takes so long

// However low the rate is: the other side is not to take the sender for dead.
constexpr std::chrono::seconds longest_wait{1};

// When nobody knows when the next minibatch begins.
constexpr Pace::Clock::duration look_again = 200us;

// While it makes way: whether the network is still used.
constexpr Pace::Clock::duration look_at_network = 500us;

// While it waits for its turn: whether it has come to be awaited.
constexpr Pace::Clock::duration look_at_signs = 5ms;

// A minibatch that takes so many times its usual time is none: there is an evaluation, or a pause.
constexpr int no_minibatch = 2;

Pace::Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Pace::Clock::duration>(std::chrono::duration<double>(count));
}

}  // namespace

void Pace::set_rate(double bytes_per_second, Clock::duration spare) {
  const std::lock_guard lock(mutex_);
  rate_ = bytes_per_second;
  spare_ = spare;
  late_ = {};
}

void Pace::listen(Signs signs) {
  const std::lock_guard lock(mutex_);
  signs_ = std::move(signs);
}

void Pace::set_schedule(std::vector<Slot> slots, Clock::duration minibatch, double bytes_per_second) {
  const std::lock_guard lock(mutex_);
  slots_ = std::move(slots);
  minibatch_ = minibatch;
  network_ = bytes_per_second;
  minibatch_began_ = {};
}

Pace::Turn Pace::take(uint64_t wanted, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (!signs_.is_awaited) return turn(wanted, now);
  if (signs_.is_awaited()) return {wanted, now};
  if (makes_way(now)) return {0, now + look_at_network};
  const Turn found = turn(wanted, now);
  return {found.bytes, std::min(found.when, now + look_at_signs)};
}

// Nobody makes way for a collective that takes too long: the other side is not to take the sender for dead,
// and a rank that is killed in one has no word any more.
bool Pace::makes_way(Clock::time_point now) {
  const bool was_used = std::exchange(is_used_, signs_.uses_network && signs_.uses_network());
  Clock::time_point looked = std::exchange(looked_, now);
  if (!is_used_) return false;
  if (!was_used) used_since_ = looked = now;
  if (now - used_since_ > longest_wait) return false;
  if (is_in_slots(now)) return true;
  if (!std::isfinite(rate_) || late_ >= spare_) return false;
  late_ += now - looked;
  return true;
}

bool Pace::is_in_slots(Clock::time_point now) {
  if (slots_.empty() || !signs_.began) return false;
  const Clock::time_point began = signs_.began();
  if (began != minibatch_began_) {
    minibatch_began_ = began;
    next_ = 0;
    used_ = 0;
  }
  // Longer than that the other side is not to be kept waiting either.
  return now - began < std::min<Clock::duration>(no_minibatch * minibatch_, longest_wait + minibatch_);
}

Pace::Turn Pace::turn(uint64_t wanted, Clock::time_point now) {
  return is_in_slots(now) ? in_slot(wanted, now) : at_rate(wanted, now);
}

Pace::Turn Pace::in_slot(uint64_t wanted, Clock::time_point now) {
  const Clock::duration at = now - minibatch_began_;
  const auto room = [&](const Slot& slot) {
    const std::chrono::duration<double> left = slot.end - std::max(at, slot.begin);
    const double fits = std::clamp(left.count() * network_, 0.0, double(slot.bytes));
    return std::min(static_cast<uint64_t>(fits), slot.bytes - used_);
  };
  while (next_ < slots_.size() && room(slots_[next_]) == 0) {
    ++next_;
    used_ = 0;
  }
  if (next_ == slots_.size()) return {0, std::max(minibatch_began_ + minibatch_, now + look_again)};
  const Slot& slot = slots_[next_];
  if (at < slot.begin) return {0, minibatch_began_ + slot.begin};
  const uint64_t bytes = std::min(wanted, room(slot));
  used_ += bytes;
  return {bytes, now};
}

Pace::Turn Pace::at_rate(uint64_t wanted, Clock::time_point now) {
  if (!std::isfinite(rate_)) return {wanted, now};
  const auto piece = std::max(least_piece, static_cast<uint64_t>(rate_ * piece_seconds));
  const uint64_t bytes = std::min(wanted, piece);
  if (const auto takes = seconds(static_cast<double>(bytes) / rate_); late_ > takes / 2 && !is_used_) {
    late_ -= std::min(late_, takes);
    return {bytes, now};
  }
  if (now < free_) return {0, free_};
  // Who comes a little late, as the scheduler wakes it, makes up for that, and for no more.
  free_ = std::max(free_, now - seconds(piece_seconds)) +
          std::min<Clock::duration>(seconds(static_cast<double>(bytes) / rate_), longest_wait);
  return {bytes, now};
}

}  // namespace jitckpt::memory_tier
