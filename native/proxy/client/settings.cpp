#include "proxy/client/settings.h"

#include <stdexcept>
#include <string>

#include "ground/environment.h"
#include "proxy/transport/spin.h"

namespace jitckpt::proxy::client {

ProxySettings read_settings() {
  constexpr std::size_t page = 4096;
  const std::size_t segment = read(environment::proxy_segment_bytes) / page * page;
  const std::size_t log = read(environment::proxy_log_bytes);
  if (log < 2 * segment) {
    throw std::runtime_error(std::string(environment::proxy_log_bytes.name) + " is " + std::to_string(log) +
                             ": set it to at least two segments of " + std::to_string(segment) + " bytes.");
  }
  const char* const control = read(environment::proxy_control);
  return {
      .log = {segment, log / segment},
      .pinned_bytes = read(environment::proxy_pinned_bytes) / page * page,
      .spin_time = std::chrono::microseconds(read(environment::proxy_spin_us, usual_spin_time().count())),
      .hang_time = std::chrono::milliseconds(static_cast<int64_t>(1000 * read(environment::hang_timeout))),
      .control = control ? control : "",
      .spare_server = read(environment::proxy_spare) == 1};
}

}  // namespace jitckpt::proxy::client
