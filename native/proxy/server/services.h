// What the server can do, by number of the call.
#pragma once
#include "proxy/failures.h"
#include "proxy/wire.h"
#include "proxy_services.h"

namespace jitckpt::proxy {

enum class Runs : uint8_t { tells, asks, waits };  // as in calls.toml

struct Service {
  const char* name;
  Runs runs;
  Library library;
  int32_t (*serve)(Request& request);
};

extern const Service services[];  // Call::count of them

}  // namespace jitckpt::proxy
