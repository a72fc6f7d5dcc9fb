// The cores that this process may use, and how many ranks share them.
#pragma once
#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <vector>

namespace jitckpt::proxy {

// A rank's program and its server are two that want to run.
inline bool are_scarce(std::size_t cores, int ranks) {
  return cores < 2 * static_cast<std::size_t>(std::max(ranks, 1));
}

// Where cores are scarce, the one of a rank: numbers of cores are given out in turn.
inline std::optional<int> core_of_rank(const std::vector<int>& cores, int ranks, int rank) {
  if (cores.empty() || rank < 0 || !are_scarce(cores.size(), ranks)) return std::nullopt;
  return cores[static_cast<std::size_t>(rank) % cores.size()];
}

// Those of this thread, by number; none where that is unknown.
inline std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  return cores;
}

// Of this host, and which of them this process is, as torchrun and jitckpt run set it.
inline int ranks_here() {
  const char* const ranks = std::getenv("LOCAL_WORLD_SIZE");
  return ranks ? std::atoi(ranks) : 1;
}
inline int rank_here() {
  const char* const rank = std::getenv("LOCAL_RANK");
  return rank ? std::atoi(rank) : 0;
}

}  // namespace jitckpt::proxy
