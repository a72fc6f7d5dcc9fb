// Events without a device: a test says which have finished.
#pragma once
#include <mutex>
#include <set>

#include "watchdog/event.h"

namespace jitckpt::watchdog {

class FakeEvents {
 public:
  static Event event(long number) { return {reinterpret_cast<void*>(number), 0}; }

  void finish(long number) {
    const std::lock_guard lock(mutex_);
    finished_.insert(event(number).handle);
  }
  bool operator()(Event asked) const {
    const std::lock_guard lock(mutex_);
    return finished_.contains(asked.handle);
  }

 private:
  mutable std::mutex mutex_;
  std::set<void*> finished_;
};

}  // namespace jitckpt::watchdog
