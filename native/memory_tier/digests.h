// The checksum of a chunk: xxh3 of 128 bits, as Python's xxhash gives it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace jitckpt::memory_tier {

using Digest = std::array<uint8_t, 16>;

// How one instruction set does it. state: made by create().
struct DigestCalls {
  void* (*create)();
  void (*free)(void* state);
  void (*reset)(void* state);
  void (*add)(void* state, const void* data, size_t size);
  void (*finish)(const void* state, uint8_t* digest);
  void (*at_once)(const void* data, size_t size, uint8_t* digest);
};

// Of what lies in one piece.
Digest digest_of(std::span<const std::byte> data);

// Reads a chunk piece by piece, so that each is in the processor's cache when it is read.
class Digester {
 public:
  Digester();
  void add(std::span<const std::byte> piece) { calls_.add(state_.get(), piece.data(), piece.size()); }
  // Of all that was added; then begins anew.
  Digest finish();

 private:
  const DigestCalls& calls_;
  std::unique_ptr<void, void (*)(void*)> state_;
};

}  // namespace jitckpt::memory_tier
