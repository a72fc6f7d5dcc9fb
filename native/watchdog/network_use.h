// Whether the device is inside one of the job's own collectives right now, for as long as somebody wants to
// know.
//
// Pure bookkeeping, as network_profile.h. A collective is under way once the device has come to it and until
// it has ended; when it was called says little, as the host is far ahead of the device.
#pragma once
#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "watchdog/event.h"

namespace jitckpt::watchdog {

class NetworkUse {
 public:
  using Finished = std::function<bool(Event)>;
  using Recycle = std::function<void(Event)>;

  static constexpr size_t most_queued = 4096;  // collectives of a stream; of more, nobody hears

  // Once nobody wants to know, what was told is forgotten.
  void want(bool wanted, const Recycle& recycle);

  // Whether events are wanted; cheap.
  bool is_wanted() const { return wanted_.load(std::memory_order_relaxed); }

  // A collective is between these two on a stream.
  void add(const void* stream, Event begin, Event end, const Recycle& recycle);

  // Whether one is under way. By one thread.
  bool look(const Finished& finished, const Recycle& recycle);

 private:
  using Collective = std::pair<Event, Event>;

  std::mutex mutex_;
  std::atomic<bool> wanted_{false};
  std::map<const void*, std::deque<Collective>> streams_;
};

}  // namespace jitckpt::watchdog
