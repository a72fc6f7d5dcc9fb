// How long either side looks for news before it sleeps, unless it is told (JITCKPT_PROXY_SPIN_US).
#pragma once
#include <chrono>
#include <cstddef>

#include "proxy/transport/cores.h"

namespace jitckpt::proxy {

// Where cores are scarce, who looks takes the core from whom it waits for.
inline std::chrono::microseconds usual_spin_time(std::size_t cores, int ranks) {
  return std::chrono::microseconds(are_scarce(cores, ranks) ? 0 : 20);
}

inline std::chrono::microseconds usual_spin_time() {
  return usual_spin_time(allowed_cores().size(), ranks_here());
}

}  // namespace jitckpt::proxy
