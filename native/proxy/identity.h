// By what processes know a communicator, whatever ids it has had: both sides compute it.
#pragma once
#include <nccl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <span>

namespace jitckpt::proxy {

using Key = std::array<uint8_t, 16>;
constexpr Key no_key{};

// FNV-1a (Fowler, Noll and Vo) from two starting values. It tells ids apart that NCCL has drawn at random.
inline Key digest(std::span<const std::byte> bytes) {
  uint64_t halves[2] = {0xcbf29ce484222325u, 0x6c62272e07bb0142u};
  for (uint64_t& half : halves) {
    for (const std::byte byte : bytes) half = (half ^ static_cast<uint64_t>(byte)) * 0x100000001b3u;
  }
  Key key;
  std::memcpy(key.data(), halves, key.size());
  return key;
}

inline Key key_of(const ncclUniqueId& id) { return digest(std::as_bytes(std::span(&id, 1))); }

// Of what a communicator's split number so and so has made for a color: the same on all its members.
inline Key key_of_split(const Key& parent, uint32_t split, int32_t color) {
  struct {
    Key parent;
    uint32_t split;
    int32_t color;
  } const all{parent, split, color};
  return digest(std::as_bytes(std::span(&all, 1)));
}

}  // namespace jitckpt::proxy
