// How serving a call fails before the library is asked.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace jitckpt::proxy {

struct Failure : std::runtime_error {
  Failure(int32_t result, const std::string& text) : std::runtime_error(text), result(result) {}
  int32_t result;
};

}  // namespace jitckpt::proxy
