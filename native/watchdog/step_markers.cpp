#include "watchdog/step_markers.h"

namespace jitckpt::watchdog {

void StepMarkers::set_base(uint64_t step, const Recycle& recycle) {
  std::deque<Marker> dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped.swap(markers_);
    progress_ = {step, step, step, step, 0};
  }
  for (const auto& marker : dropped) recycle(marker.event);
}

void StepMarkers::add(Marker marker) {
  const std::lock_guard lock(mutex_);
  marker.id = next_id_++;
  (marker.is_end ? progress_.host_ended : progress_.host_begun) = marker.step;
  markers_.push_back(marker);
  progress_.queued = markers_.size();
}

bool StepMarkers::poll(const Finished& finished, const Recycle& recycle) {
  bool moved = false;
  for (;;) {
    Marker oldest;
    {
      const std::lock_guard lock(mutex_);
      if (markers_.empty()) return moved;
      oldest = markers_.front();
    }
    if (!finished(oldest.event)) return moved;
    {
      const std::lock_guard lock(mutex_);
      // Somebody else saw it finish first: the event may already stand for a later marker.
      if (markers_.empty() || markers_.front().id != oldest.id) continue;
      markers_.pop_front();
      (oldest.is_end ? progress_.device_ended : progress_.device_begun) = oldest.step;
      progress_.queued = markers_.size();
    }
    recycle(oldest.event);
    moved = true;
  }
}

StepProgress StepMarkers::progress() const {
  const std::lock_guard lock(mutex_);
  return progress_;
}

uint64_t StepMarkers::steps_ahead() const {
  const std::lock_guard lock(mutex_);
  return progress_.host_begun > progress_.device_ended ? progress_.host_begun - progress_.device_ended : 0;
}

}  // namespace jitckpt::watchdog
