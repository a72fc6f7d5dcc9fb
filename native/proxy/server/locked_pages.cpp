#include "proxy/server/locked_pages.h"

#include <iterator>

#include "real_calls.h"

namespace jitckpt::proxy {

bool LockedPages::lock(uint64_t address, uint64_t bytes) {
  {
    std::lock_guard lock(mutex_);
    const auto piece = pieces_.find(address);
    if (bytes == 0 || (piece != pieces_.end() && piece->second == bytes)) return true;
  }
  give_way(address, bytes);
  std::lock_guard lock(mutex_);
  if (real::cudaHostRegister(reinterpret_cast<void*>(address), bytes, cudaHostRegisterPortable) !=
      cudaSuccess) {
    real::cudaGetLastError();
    return false;
  }
  pieces_[address] = bytes;
  return true;
}

void LockedPages::give_way(uint64_t address, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    const bool overlaps = piece->first - address < bytes || address - piece->first < piece->second;
    if (overlaps && real::cudaHostUnregister(reinterpret_cast<void*>(piece->first)) != cudaSuccess)
      real::cudaGetLastError();
    piece = overlaps ? pieces_.erase(piece) : std::next(piece);
  }
}

}  // namespace jitckpt::proxy
