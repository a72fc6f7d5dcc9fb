#include "watchdog/watch_list.h"

#include <algorithm>
#include <utility>

namespace jitckpt::watchdog {
namespace {

constexpr uint64_t first_lessons = 50;  // collectives until what they took counts: the first are the slowest
constexpr uint64_t learning_period = 1000;  // collectives; those of two periods ago are forgotten
constexpr double leniency = 10;

}  // namespace

void WatchList::arm(void* stream, const Watch& watch, Event event, double now) {
  const std::lock_guard lock(mutex_);
  auto& known = by_handle_[stream];
  if (!known) streams_.push_back(known = std::make_shared<Stream>());
  if (known->entries.empty()) {
    known->oldest_since = now;
    known->named = false;
  }
  known->entries.push_back({next_id_++, watch, event});
}

void WatchList::poll(const Finished& finished, const Recycle& recycle, const std::function<double()>& now) {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    const std::lock_guard lock(mutex_);
    streams = streams_;
  }
  for (const auto& stream : streams) {
    for (;;) {
      Entry oldest;
      {
        const std::lock_guard lock(mutex_);
        if (stream->entries.empty()) break;
        oldest = stream->entries.front();
      }
      if (!finished(oldest.event)) break;
      {
        const std::lock_guard lock(mutex_);
        // Somebody else saw it finish first: the event may already stand for a later watch.
        if (stream->entries.empty() || stream->entries.front().id != oldest.id) continue;
        stream->entries.pop_front();
        const double finished_at = now();
        learn(oldest.watch.in_graph ? 0 : finished_at - stream->oldest_since, oldest.watch.bytes);
        stream->oldest_since = finished_at;
        stream->named = false;
      }
      recycle(oldest.event);
    }
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(streams_, [](const auto& stream) { return stream->entries.empty() && stream->forgotten; });
}

void WatchList::learn(double seconds, uint64_t bytes) {
  if (++finished_ % learning_period == 0) slowest_before_ = std::exchange(slowest_, {});
  if (seconds > slowest_.seconds) slowest_ = {seconds, bytes};
}

double WatchList::limit(const Watch& watch, const Patience& patience) const {
  if (finished_ < first_lessons || watch.in_graph) return patience.ceiling;
  const Slowest& slowest = slowest_.seconds > slowest_before_.seconds ? slowest_ : slowest_before_;
  const double more = double(watch.bytes) / double(std::max<uint64_t>(slowest.bytes, 1));
  return std::clamp(leniency * slowest.seconds * std::max(1.0, more), patience.floor, patience.ceiling);
}

std::optional<InFlight> WatchList::overdue(double now, const Patience& patience) {
  const std::lock_guard lock(mutex_);
  Stream* longest = nullptr;
  for (const auto& stream : streams_) {
    if (stream->entries.empty() || stream->named) continue;
    if (now - stream->oldest_since < limit(stream->entries.front().watch, patience)) continue;
    if (!longest || stream->oldest_since < longest->oldest_since) longest = stream.get();
  }
  if (!longest) return std::nullopt;
  longest->named = true;
  return InFlight{longest->entries.front().watch, now - longest->oldest_since, true};
}

void WatchList::restart_clocks(double now) {
  const std::lock_guard lock(mutex_);
  for (const auto& stream : streams_) {
    stream->oldest_since = now;
    stream->named = false;
  }
}

void WatchList::forget_stream(void* stream) {
  const std::lock_guard lock(mutex_);
  const auto known = by_handle_.find(stream);
  if (known == by_handle_.end()) return;
  known->second->forgotten = true;
  by_handle_.erase(known);
}

std::vector<InFlight> WatchList::in_flight(double now) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<uint64_t, InFlight>> entries;
  for (const auto& stream : streams_) {
    for (const auto& entry : stream->entries) {
      const bool oldest = &entry == &stream->entries.front();
      entries.push_back({entry.id, {entry.watch, oldest ? now - stream->oldest_since : 0, oldest}});
    }
  }
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<InFlight> in_order;
  for (auto& [id, entry] : entries) in_order.push_back(entry);
  return in_order;
}

bool WatchList::empty() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const auto& stream) { return stream->entries.empty(); });
}

uint64_t WatchList::finished() const {
  const std::lock_guard lock(mutex_);
  return finished_;
}

}  // namespace jitckpt::watchdog
