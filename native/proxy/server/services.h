// What the server can do, by number of the call.
#pragma once
#include "failures.h"
#include "proxy_services.h"
#include "wire.h"

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
