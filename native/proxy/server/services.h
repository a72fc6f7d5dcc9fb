// What the server can do, by number of the call.
#pragma once
#include "proxy_services.h"
#include "wire.h"

namespace jitckpt::proxy {

enum class Runs : uint8_t { tells, asks, waits };  // as in calls.toml
enum class Library : uint8_t { cudart, nccl };     // in the order of Control::errors

struct Service {
  const char* name;
  Runs runs;
  Library library;
  int32_t (*serve)(Request& request);
};

extern const Service services[];  // Call::count of them

}  // namespace jitckpt::proxy
