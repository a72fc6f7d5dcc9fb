// A shard's data as they lie in a memfd, seen in this process, and the checksums of their chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "memory_tier/digests.h"

namespace jitckpt::memory_tier {

// A chunk is no longer than that, and a shard than the other: what comes from outside is compared with them.
constexpr uint64_t most_chunk = uint64_t{64} << 20, most_data = uint64_t{1} << 41;

constexpr size_t piece_size = 256 << 10;  // is still in the processor's cache when it is read once more

// Whoever has mapped memory that another process makes smaller dies by a signal: so only memfds are mapped
// that can't shrink (sealed). To map costs as much as to copy; whoever needs the same data again keeps the
// window.
class Window {
 public:
  // The data are cut into chunks of so many bytes, of which the last one is shorter. Throws
  // ChunkFailure(no_memory).
  Window(int descriptor, uint64_t offset, uint64_t size, uint64_t chunk);

  // So many chunks of it, from one on, as a window of their own. Throws ChunkFailure(no_memory) if they are
  // not there.
  Window part(uint64_t first, uint64_t count) const;

  std::span<std::byte> bytes() const { return bytes_; }
  bool is_writable() const { return is_writable_; }  // if the descriptor is
  uint64_t chunk_size() const { return chunk_; }
  uint64_t chunks() const { return bytes_.size() / chunk_ + (bytes_.size() % chunk_ != 0); }
  std::span<std::byte> chunk(uint64_t number) const {
    const uint64_t begin = number * chunk_;
    return bytes_.subspan(begin, std::min<uint64_t>(chunk_, bytes_.size() - begin));
  }

  // Throws ChunkFailure(no_memory) for another number of checksums than of chunks.
  void check(size_t digests) const;

 private:
  uint64_t chunk_;
  bool is_writable_ = false;
  std::shared_ptr<void> mapping_;  // of this window and its parts
  std::span<std::byte> bytes_;
};

std::vector<Digest> digests_of(const Window& window);

// Throws ChunkFailure(damaged) for the first chunk that is not what its checksum says.
void verify(const Window& window, std::span<const Digest> digests);

// Puts the data elsewhere; verifies what has arrived there.
void copy(const Window& window, std::span<const Digest> digests, std::span<std::byte> to);

}  // namespace jitckpt::memory_tier
