#include "proxy/client/pinned_memory.h"

#include <fcntl.h>

#include <cstdint>

namespace jitckpt::proxy::client {
namespace {

// Far from where Linux puts programs, libraries and stacks, so that a server of any kind has it free. The
// thread sanitizer keeps that for itself.
#ifdef __SANITIZE_THREAD__
constexpr uintptr_t address = 0x7f00'0000'0000;
#else
constexpr uintptr_t address = 0x3000'0000'0000;
#endif

std::size_t whole_pages(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

PinnedMemory::PinnedMemory(std::size_t bytes)
    : file_("jitckpt-pinned", bytes), mapping_(file_, reinterpret_cast<void*>(address)) {}

void* PinnedMemory::allocate(std::size_t bytes) {
  if (bytes > file_.bytes()) return nullptr;
  const std::size_t length = whole_pages(bytes);
  std::lock_guard lock(mutex_);
  std::size_t begin = 0;  // of the first gap that is long enough
  for (const auto& [offset, taken] : taken_) {
    if (offset - begin >= length) break;
    begin = offset + taken;
  }
  if (length > file_.bytes() - begin) return nullptr;
  taken_[begin] = length;
  return mapping_.begin() + begin;
}

std::size_t PinnedMemory::length(const void* pointer) {
  std::lock_guard lock(mutex_);
  const auto piece = taken_.find(static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - begin()));
  return piece == taken_.end() ? 0 : piece->second;
}

void PinnedMemory::release(void* pointer) {
  std::lock_guard lock(mutex_);
  const auto piece = taken_.find(static_cast<std::size_t>(static_cast<std::byte*>(pointer) - begin()));
  if (piece == taken_.end()) return;
  // Where this fails the memory is merely kept until the piece is used again.
  fallocate(file_.descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(piece->first),
            static_cast<off_t>(piece->second));
  taken_.erase(piece);
}

}  // namespace jitckpt::proxy::client
