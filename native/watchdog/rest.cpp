#include "watchdog/rest.h"

namespace jitckpt::watchdog {

std::optional<RestOutcome> RestDecision::look(double now, const std::optional<Observation>& seen) {
  if (seen) {
    // Twice, because a call that passed the gate just before it closed may reach its stream only now.
    idle_looks_ = seen->idle && !seen->inside_step ? idle_looks_ + 1 : 0;
    if (idle_looks_ >= 2) return RestOutcome::idle;
    if (signature_ != seen->signature) {
      signature_ = seen->signature;
      changed_ = now;
    }
  }
  if (now - changed_ >= settle_ && !(seen && seen->inside_step)) return RestOutcome::settled;
  if (now - begun_ >= bound_) return RestOutcome::bound;
  return std::nullopt;
}

const char* name(RestOutcome outcome) {
  switch (outcome) {
    case RestOutcome::idle:
      return "idle";
    case RestOutcome::settled:
      return "settled";
    default:
      return "bound";
  }
}

}  // namespace jitckpt::watchdog
