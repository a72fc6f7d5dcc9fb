// The JITCKPT_* variables that C++ reads. Their names, defaults and limits are those of
// jitckpt/wire/environment.py.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace jitckpt::environment {

struct Text {
  const char* name;
};

// A whole number. otherwise: where it is not set.
struct Number {
  const char* name;
  uint64_t otherwise, least, most;
};

struct Seconds {
  const char* name;
  double otherwise, least, most;
};

}  // namespace jitckpt::environment

#include "environment_table.h"  // needs the types above

namespace jitckpt::environment {

// Null where it is not set, or empty.
inline const char* read(const Text& variable) {
  const char* const text = std::getenv(variable.name);
  return text && *text ? text : nullptr;
}

// Throws a sentence for what can't be meant.
template <typename T, typename Variable>
T read_within(const Variable& variable, const char* kind) {
  const char* const text = read(Text{variable.name});
  if (!text) return variable.otherwise;
  T value{};
  const char* const end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error != std::errc() || stop != end || !(value >= variable.least && value <= variable.most)) {
    const auto shown = [](auto number) {
      std::string digits = std::to_string(number);
      if (digits.find('.') != std::string::npos) digits.erase(digits.find_last_not_of('0') + 1);
      if (digits.ends_with('.')) digits.pop_back();
      return digits;
    };
    throw std::runtime_error(std::string(variable.name) + " is '" + text + "': set it to " + kind + " from " +
                             shown(variable.least) + " to " + shown(variable.most) + ".");
  }
  return value;
}

inline uint64_t read(const Number& variable) { return read_within<uint64_t>(variable, "a whole number"); }

inline uint64_t read(Number variable, uint64_t otherwise) {
  variable.otherwise = otherwise;
  return read(variable);
}

inline double read(const Seconds& variable) { return read_within<double>(variable, "a number of seconds"); }

}  // namespace jitckpt::environment
