#include "watchdog/network_use.h"

#include <vector>

namespace jitckpt::watchdog {

void NetworkUse::want(bool wanted, const Recycle& recycle) {
  std::map<const void*, std::deque<Collective>> forgotten;
  {
    const std::lock_guard lock(mutex_);
    wanted_ = wanted;
    if (wanted) return;
    streams_.swap(forgotten);
  }
  for (const auto& [stream, collectives] : forgotten)
    for (const auto& [begin, end] : collectives) {
      recycle(begin);
      recycle(end);
    }
}

void NetworkUse::add(const void* stream, Event begin, Event end, const Recycle& recycle) {
  {
    const std::lock_guard lock(mutex_);
    if (wanted_) {
      std::deque<Collective>& queue = streams_[stream];
      if (queue.size() < most_queued) {
        queue.emplace_back(begin, end);
        return;
      }
    }
  }
  recycle(begin);
  recycle(end);
}

bool NetworkUse::look(const Finished& finished, const Recycle& recycle) {
  std::vector<const void*> streams;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [stream, collectives] : streams_) streams.push_back(stream);
  }
  bool is_used = false;
  for (const void* const stream : streams) {
    while (true) {
      Collective oldest;
      {
        const std::lock_guard lock(mutex_);
        const auto queue = streams_.find(stream);
        if (queue == streams_.end()) break;
        if (queue->second.empty()) {
          streams_.erase(queue);
          break;
        }
        oldest = queue->second.front();
      }
      // Asked without the lock, as a query may get stuck; only this thread takes anything away.
      if (!finished(oldest.second)) {
        is_used = is_used || finished(oldest.first);
        break;
      }
      {
        const std::lock_guard lock(mutex_);
        streams_[stream].pop_front();
      }
      recycle(oldest.first);
      recycle(oldest.second);
    }
  }
  return is_used;
}

}  // namespace jitckpt::watchdog
