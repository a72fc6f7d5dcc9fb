#include "settings.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "spin.h"

namespace jitckpt::proxy::client {
namespace {

std::size_t read_number(const char* variable, std::size_t otherwise, std::size_t least, std::size_t most) {
  const char* const text = std::getenv(variable);
  if (!text) return otherwise;
  std::size_t number = 0;
  const char* const end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, number);
  if (error != std::errc() || stop != end || number < least || number > most) {
    throw std::runtime_error(std::string(variable) + " is '" + text + "': set it to a whole number from " +
                             std::to_string(least) + " to " + std::to_string(most) + ".");
  }
  return number;
}

std::chrono::milliseconds read_seconds(const char* variable, double otherwise) {
  const char* const text = std::getenv(variable);
  double seconds = otherwise;
  if (text) {
    const char* const end = text + std::strlen(text);
    const auto [stop, error] = std::from_chars(text, end, seconds);
    if (error != std::errc() || stop != end || !(seconds >= 0.001 && seconds <= 1e9))
      throw std::runtime_error(std::string(variable) + " is '" + text +
                               "': set it to a number of seconds from 0.001 to 1000000000.");
  }
  return std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
}

}  // namespace

Settings read_settings() {
  constexpr std::size_t kibibyte = 1024, mebibyte = 1024 * kibibyte, gibibyte = 1024 * mebibyte;
  const std::size_t segment =
      read_number("JITCKPT_PROXY_SEGMENT_BYTES", 4 * mebibyte, 256 * kibibyte, gibibyte) / 4096 * 4096;
  const std::size_t log = read_number("JITCKPT_PROXY_LOG_BYTES", gibibyte, 2 * segment, 1024 * gibibyte);
  const char* const control = std::getenv("JITCKPT_PROXY_CONTROL");
  return {
      .log = {segment, log / segment},
      .pinned_bytes =
          read_number("JITCKPT_PROXY_PINNED_BYTES", 64 * gibibyte, mebibyte, 1024 * gibibyte) / 4096 * 4096,
      .spin_time = std::chrono::microseconds(
          read_number("JITCKPT_PROXY_SPIN_US", usual_spin_time().count(), 0, 1'000'000)),
      .hang_time = read_seconds("JITCKPT_HANG_TIMEOUT", 60),
      .control = control ? control : "",
      .spare_server = read_number("JITCKPT_PROXY_SPARE", 0, 0, 1) == 1};
}

}  // namespace jitckpt::proxy::client
