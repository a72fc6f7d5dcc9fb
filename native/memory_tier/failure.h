// Why chunks did not get where they were to go.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace jitckpt::memory_tier {

enum class Reason {
  ended,      // the connection has ended
  silent,     // the other side neither takes nor sends anything
  stopped,    // this side was told to stop
  damaged,    // a chunk is not what its checksum says
  refused,    // the other side says that of a chunk that is right here
  nonsense,   // the other side does not keep to the protocol
  no_memory,  // what is kept here can't be read or written
};

struct ChunkFailure : std::runtime_error {
  ChunkFailure(Reason why, const std::string& text, uint64_t of_chunk = 0)
      : std::runtime_error(text), reason(why), chunk(of_chunk) {}
  Reason reason;
  uint64_t chunk;  // for those that are about one
};

}  // namespace jitckpt::memory_tier
