// A number for what bytes hold, for comparing what was computed twice. Not for telling enemies' bytes apart.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

namespace jitckpt::proxy {

// Never 0.
inline uint64_t digest_of(std::span<const std::byte> bytes) {
  uint64_t digest = 0x9e37'79b9'7f4a'7c15 ^ bytes.size();
  for (std::size_t done = 0; done < bytes.size(); done += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + done, std::min(sizeof word, bytes.size() - done));
    digest = (digest ^ word) * 0xff51'afd7'ed55'8ccd;
    digest ^= digest >> 32;
  }
  return digest == 0 ? 1 : digest;
}

}  // namespace jitckpt::proxy
