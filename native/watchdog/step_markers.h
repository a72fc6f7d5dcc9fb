// How far the device has come in the job's optimizer steps: events that the stream passes before and after
// each.
//
// Pure bookkeeping: who asks the device comes from outside.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#include "watchdog/event.h"

namespace jitckpt::watchdog {

struct StepProgress {
  uint64_t host_begun = 0, host_ended = 0;
  uint64_t device_begun = 0, device_ended = 0;
  uint64_t queued = 0;  // markers unfinished on the device
};

class StepMarkers {
 public:
  using Finished = std::function<bool(Event)>;
  using Recycle = std::function<void(Event)>;

  // Nothing is queued and both sides are at this step.
  void set_base(uint64_t step, const Recycle& recycle);

  void begin(uint64_t step, Event event) { add({0, step, false, event}); }
  void end(uint64_t step, Event event) { add({0, step, true, event}); }

  // Asks for the oldest marker until one is unfinished. Asks without the lock, because a query may get stuck;
  // several threads may ask at once. Says whether anything moved.
  bool poll(const Finished& finished, const Recycle& recycle);

  // All numbers belong to one moment.
  StepProgress progress() const;

  // Steps that the host has begun and the device has not ended.
  uint64_t steps_ahead() const;

 private:
  struct Marker {
    uint64_t id;
    uint64_t step;
    bool is_end;
    Event event;
  };
  void add(Marker marker);

  mutable std::mutex mutex_;
  std::deque<Marker> markers_;
  StepProgress progress_;
  uint64_t next_id_ = 0;
};

}  // namespace jitckpt::watchdog
