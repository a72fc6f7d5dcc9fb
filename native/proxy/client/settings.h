// What the environment says of the proxy; docs/how-it-works/proxy.md describes it.
#pragma once
#include <chrono>
#include <cstddef>
#include <string>

#include "layout.h"

namespace jitckpt::proxy::client {

struct Settings {
  Geometry log;                         // JITCKPT_PROXY_SEGMENT_BYTES, JITCKPT_PROXY_LOG_BYTES
  std::size_t pinned_bytes;             // JITCKPT_PROXY_PINNED_BYTES: most pinned memory at one time
  std::chrono::microseconds spin_time;  // JITCKPT_PROXY_SPIN_US
  std::chrono::milliseconds hang_time;  // JITCKPT_HANG_TIMEOUT, in seconds
  std::string control;                  // JITCKPT_PROXY_CONTROL: the agent's socket; empty: none
  bool spare_server;                    // JITCKPT_PROXY_SPARE: whether one waits to take the server's place
};

// Throws std::runtime_error with a sentence for a value that makes no sense.
Settings read_settings();

}  // namespace jitckpt::proxy::client
