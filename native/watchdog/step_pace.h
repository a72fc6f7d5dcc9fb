// How long the device takes for an optimizer step, by what somebody who looks now and then has seen of it.
//
// Pure bookkeeping: what time it is comes from outside.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

namespace jitckpt::watchdog {

class StepPace {
 public:
  // The device was seen to have ended this step. now: seconds of any monotonic clock.
  void ended(uint64_t step, double now) {
    if (last_ && step == last_->first) return;
    if (last_ && step < last_->first) last_.reset();  // the steps are counted anew
    if (last_) {
      before_ = latest_;
      latest_ = (now - last_->second) / double(step - last_->first);
    }
    last_ = {step, now};
  }

  // Seconds of a step; nothing before two have ended. The lesser of the last two, because one may have waited
  // for an evaluation.
  std::optional<double> seconds() const {
    return latest_ && before_ ? std::min(*latest_, *before_) : latest_;
  }

 private:
  std::optional<std::pair<uint64_t, double>> last_;
  std::optional<double> latest_, before_;
};

// How many steps the host may be ahead of the device, if memory is there for `most`: eight, and more while
// all of them are no more than two seconds of the device's work. Each time the host has had to wait it finds
// the caches cold; but a save before a preemption waits for all steps that the host has begun. pace: seconds
// of a step, if known.
inline uint64_t steps_ahead_allowed(std::optional<double> pace, uint64_t most) {
  constexpr uint64_t always = 8;
  constexpr double seconds = 2;
  if (most <= always || !pace) return std::min(most, always);
  const double fit = seconds / std::max(*pace, 1e-9);
  return fit >= double(most) ? most : std::max(always, static_cast<uint64_t>(fit));
}

}  // namespace jitckpt::watchdog
