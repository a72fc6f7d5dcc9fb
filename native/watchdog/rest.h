// When is the device at rest? A pure decision over what a poller saw.
//
// A save must not begin while the device still works its way to the hung collective: it might be inside the
// optimizer step, or about to pass an all-reduce that a rank fed before it died.
#pragma once
#include <cstdint>
#include <optional>

namespace jitckpt::watchdog {

struct Observation {
  bool idle = false;         // no stream has work
  bool inside_step = false;  // the device has begun an optimizer step and not ended it
  uint64_t signature = 0;    // changes whenever the device gets anything done that can be seen
};

enum class RestOutcome { idle, settled, bound };

class RestDecision {
 public:
  // settle: at rest when nothing has changed for so long; bound: then go on in any case. Seconds.
  RestDecision(double now, double settle, double bound)
      : settle_(settle), begun_(now), changed_(now), bound_(bound) {}

  // What is known now; nothing while the poller has not answered since the gate closed (it may be stuck).
  std::optional<RestOutcome> look(double now, const std::optional<Observation>& seen);

 private:
  double settle_, begun_, changed_, bound_;
  std::optional<uint64_t> signature_;
  int idle_looks_ = 0;
};

const char* name(RestOutcome outcome);

}  // namespace jitckpt::watchdog
