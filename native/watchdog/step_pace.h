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

}  // namespace jitckpt::watchdog
