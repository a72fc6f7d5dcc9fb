// What the pieces of several shards are together: their XOR, which stands for any one of them that is lost.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "memory_tier/window.h"

namespace jitckpt::memory_tier {

// Each bit of `to` becomes that of the two; they are equally long.
void exclusive_or(std::span<std::byte> to, std::span<const std::byte> with);

// A sum that grows in memory while its pieces come, each from its first chunk to its last one, on several
// threads. Pieces need not be equally long; what lay in memory before is of no account.
class Sum {
 public:
  // Adds a chunk of a piece to those of that number. What is there already is not added twice; what goes
  // beyond `to` is left out. Throws ChunkFailure: stopped after end(), nonsense for a chunk out of turn.
  void add(uint32_t piece, uint64_t number, std::span<const std::byte> chunk, const Window& to);

  // How many chunks of a piece are in it.
  uint64_t added(uint32_t piece);

  // Nothing is written any more once this has returned.
  void end();

 private:
  std::mutex mutex_;
  bool ended_ = false;
  std::map<uint32_t, uint64_t> added_;
  std::vector<uint64_t> there_;  // of each chunk the bytes that are the sum's: what lies behind them is old
};

}  // namespace jitckpt::memory_tier
