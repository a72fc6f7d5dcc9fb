// Events of our own, used again and again; without timing, which makes them cheap, if nobody needs that.
#pragma once
#include <cuda_runtime_api.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "watchdog/event.h"

namespace jitckpt::watchdog {

class EventPool {
 public:
  explicit EventPool(unsigned flags = cudaEventDisableTiming) : flags_(flags) {}

  // Records an event on the stream, whose device it is; nothing if the device refuses.
  std::optional<Event> record(cudaStream_t stream, int device);

  void give_back(Event event);

 private:
  const unsigned flags_;
  std::mutex mutex_;
  std::unordered_map<int, std::vector<Event>> free_;  // by device
};

}  // namespace jitckpt::watchdog
