#pragma once

namespace jitckpt::watchdog {

// A device event and the device that it belongs to.
struct Event {
  void* handle = nullptr;
  int device = 0;
};

}  // namespace jitckpt::watchdog
