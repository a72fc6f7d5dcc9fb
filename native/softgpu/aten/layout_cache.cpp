#include "softgpu/aten/layout_cache.h"

#include <cstring>

namespace softgpu::aten {

size_t LayoutCache::Hash::operator()(std::string_view key) const {
  uint64_t hash = key.size() * 0x9e3779b97f4a7c15u;
  while (!key.empty()) {
    uint64_t word = 0;
    const size_t length = std::min(key.size(), sizeof word);
    std::memcpy(&word, key.data(), length);
    hash = (hash ^ word) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
    key.remove_prefix(length);
  }
  return hash;
}

}  // namespace softgpu::aten
