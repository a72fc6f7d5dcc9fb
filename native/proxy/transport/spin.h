// How long either side looks for news before it sleeps, unless it is told (JITCKPT_PROXY_SPIN_US).
#pragma once
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

namespace jitckpt::proxy {

// A rank's program and its server are two that want to run. With fewer cores than that for each rank of this
// host, who looks takes the core from whom it waits for.
inline std::chrono::microseconds usual_spin_time(int cores, int ranks) {
  return std::chrono::microseconds(cores >= 2 * std::max(ranks, 1) ? 20 : 0);
}

inline std::chrono::microseconds usual_spin_time() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return usual_spin_time(1, 1);
  const char* const ranks = std::getenv("LOCAL_WORLD_SIZE");  // as torchrun and jitckpt run set it
  return usual_spin_time(CPU_COUNT(&cores), ranks ? std::atoi(ranks) : 1);
}

}  // namespace jitckpt::proxy
