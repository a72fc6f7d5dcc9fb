#include "watchdog/network_profile.h"

namespace jitckpt::watchdog {

std::vector<Event> NetworkProfile::forget() {
  std::vector<Event> events;
  const auto drop_busy = [&](const Minibatch& minibatch) {
    for (const auto& one : minibatch.busy) events.insert(events.end(), {one.begin, one.end});
    for (const auto& [event, mark] : minibatch.points) events.push_back(event);
  };
  for (const Minibatch& minibatch : ended_) {
    events.push_back(minibatch.begin);  // its end is the next one's beginning
    drop_busy(minibatch);
  }
  if (current_) {
    events.push_back(current_->begin);
    drop_busy(*current_);
  } else if (!ended_.empty()) {
    events.push_back(ended_.back().end);
  }
  ended_.clear();
  current_.reset();
  return events;
}

void NetworkProfile::order(uint32_t minibatches, const Recycle& recycle) {
  std::vector<Event> events;
  {
    const std::lock_guard lock(mutex_);
    events = forget();
    wanted_ = minibatches;
  }
  for (const Event event : events) recycle(event);
}

void NetworkProfile::boundary(Event event, const Recycle& recycle) {
  {
    const std::lock_guard lock(mutex_);
    if (wanted_ > 0) {
      if (current_) {
        current_->end = event;
        ended_.push_back(std::move(*current_));
        current_.reset();
        --wanted_;
      }
      if (wanted_ > 0) current_ = Minibatch{event, {}, {}, {}};
      return;
    }
  }
  recycle(event);
}

void NetworkProfile::busy(Event begin, Event end, bool exchange, const Recycle& recycle) {
  {
    const std::lock_guard lock(mutex_);
    if (current_) {
      current_->busy.push_back({begin, end, exchange});
      return;
    }
  }
  recycle(begin);
  recycle(end);
}

void NetworkProfile::point(Event event, Mark mark, const Recycle& recycle) {
  {
    const std::lock_guard lock(mutex_);
    if (current_ && current_->points.size() < most_points) {
      current_->points.emplace_back(event, mark);
      return;
    }
  }
  recycle(event);
}

std::optional<std::vector<Profiled>> NetworkProfile::take(const Finished& finished, const Seconds& seconds,
                                                          const Recycle& recycle) {
  std::deque<Minibatch> minibatches;
  {
    const std::lock_guard lock(mutex_);
    if (wanted_ > 0 || ended_.empty()) return std::nullopt;
    minibatches = ended_;
  }
  // Asked without the lock, as a query may get stuck. Nothing is added any more; who orders anew meanwhile
  // takes part in no other thread's taking.
  for (const Minibatch& minibatch : minibatches) {
    if (!finished(minibatch.end)) return std::nullopt;
    for (const auto& one : minibatch.busy)
      if (!finished(one.end)) return std::nullopt;
    for (const auto& [event, mark] : minibatch.points)
      if (!finished(event)) return std::nullopt;
  }
  std::vector<Profiled> profiled;
  for (const Minibatch& minibatch : minibatches) {
    Profiled one{seconds(minibatch.begin, minibatch.end).value_or(0), {}, {}};
    for (const auto& [begin, end, exchange] : minibatch.busy) {
      const auto from = seconds(minibatch.begin, begin), to = seconds(minibatch.begin, end);
      if (from && to) one.busy.push_back({*from, *to, exchange});
    }
    for (const auto& [event, mark] : minibatch.points)
      if (const auto at = seconds(minibatch.begin, event)) one.points.push_back({*at, mark});
    profiled.push_back(std::move(one));
  }
  order(0, recycle);
  return profiled;
}

}  // namespace jitckpt::watchdog
