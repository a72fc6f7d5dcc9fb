#include "softgpu/runtime/settings.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "softgpu/runtime/error.h"

namespace softgpu {
namespace {

std::size_t read_number(const char* variable, std::size_t otherwise, std::size_t least, std::size_t most) {
  const char* text = std::getenv(variable);
  if (!text) return otherwise;
  std::size_t number = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, number);
  if (error != std::errc() || stop != end || number < least || number > most) {
    throw CudaFailure{cudaErrorNoDevice, std::string(variable) + " is '" + text +
                                             "'; set it to a whole number from " + std::to_string(least) +
                                             " to " + std::to_string(most)};
  }
  return number;
}

}  // namespace

std::vector<int> visible_devices(int device_count, const char* list) {
  std::vector<int> visible;
  std::string_view rest = list;
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view entry = rest.substr(0, comma);
    int device = -1;
    const auto [stop, error] = std::from_chars(entry.data(), entry.data() + entry.size(), device);
    if (error != std::errc() || stop != entry.data() + entry.size() || device < 0 || device >= device_count)
      break;
    if (std::find(visible.begin(), visible.end(), device) != visible.end()) return {};
    visible.push_back(device);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return visible;
}

MachineSettings read_settings() {
  constexpr std::size_t mebibyte = std::size_t{1} << 20;
  MachineSettings settings;
  const int device_count = static_cast<int>(read_number("SOFTGPU_DEVICES", 2, 0, 64));
  settings.memory = read_number("SOFTGPU_MEMORY", 16384 * mebibyte, mebibyte, (1u << 20) * mebibyte);
  settings.launch_trace = read_number("SOFTGPU_LAUNCH_TRACE", 0, 0, 1) == 1;
  settings.launch_blocking = read_number("CUDA_LAUNCH_BLOCKING", 0, 0, 1) == 1;
  if (const char* list = std::getenv("CUDA_VISIBLE_DEVICES")) {
    settings.devices = visible_devices(device_count, list);
  } else {
    for (int device = 0; device < device_count; ++device) settings.devices.push_back(device);
  }
  return settings;
}

}  // namespace softgpu
