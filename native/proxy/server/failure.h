// How serving a call fails before the library is asked.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace jitckpt::proxy {

struct CallFailure : std::runtime_error {
  CallFailure(int32_t result, const std::string& text) : std::runtime_error(text), result(result) {}
  int32_t result;
};

// A call that is made again has not done what it did before: nothing that follows would be right.
struct Different : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace jitckpt::proxy
