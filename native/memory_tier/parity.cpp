#include "memory_tier/parity.h"

#include <algorithm>
#include <cstring>

#include "memory_tier/failure.h"

namespace jitckpt::memory_tier {

// The compiler makes vectors of it: memory is slower than any of them.
void exclusive_or(std::span<std::byte> to, std::span<const std::byte> with) {
  std::byte* const target = to.data();
  const std::byte* const source = with.data();
  const size_t size = to.size();
  for (size_t at = 0; at < size; ++at) target[at] ^= source[at];
}

void Sum::add(uint32_t piece, uint64_t number, std::span<const std::byte> chunk, const Window& to) {
  const std::lock_guard lock(mutex_);
  if (ended_) throw ChunkFailure(Reason::stopped, "another sum is made in its place");
  uint64_t& added = added_[piece];
  if (number < added) return;
  if (number > added || number >= to.chunks())
    throw ChunkFailure(Reason::nonsense, "a chunk came out of turn");
  if (!to.is_writable()) throw ChunkFailure(Reason::no_memory, "it can only be read");
  const std::span<std::byte> target = to.chunk(number);
  if (there_.size() <= number) there_.resize(number + 1);
  const size_t size = std::min(chunk.size(), target.size()), both = std::min<size_t>(there_[number], size);
  exclusive_or(target.first(both), chunk.first(both));
  if (size > both) std::memcpy(target.data() + both, chunk.data() + both, size - both);
  there_[number] = std::max<uint64_t>(there_[number], size);
  ++added;
}

uint64_t Sum::added(uint32_t piece) {
  const std::lock_guard lock(mutex_);
  return added_[piece];
}

void Sum::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
}

}  // namespace jitckpt::memory_tier
