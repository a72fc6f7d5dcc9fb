// What the environment says of the proxy; docs/how-it-works/proxy.md describes it.
#pragma once
#include <chrono>
#include <cstddef>
#include <string>

#include "proxy/transport/layout.h"

namespace jitckpt::proxy::client {

struct ProxySettings {
  Geometry log;
  std::size_t pinned_bytes;  // most pinned memory at one time
  std::chrono::microseconds spin_time;
  std::chrono::milliseconds hang_time;
  std::string control;  // the agent's socket; empty: none
  bool spare_server;    // whether one waits to take the server's place
};

// Throws std::runtime_error with a sentence for a value that makes no sense.
ProxySettings read_settings();

}  // namespace jitckpt::proxy::client
