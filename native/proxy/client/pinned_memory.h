// Pinned host memory: one file that client and server map at the same address, handed out in pieces. A copy
// to or from it is made by the server alone.
#pragma once
#include <map>
#include <mutex>

#include "proxy/transport/shared_file.h"

namespace jitckpt::proxy::client {

class PinnedMemory {
 public:
  // Throws std::system_error.
  explicit PinnedMemory(std::size_t bytes);

  const SharedFile& file() const { return file_; }
  std::byte* begin() const { return mapping_.begin(); }
  bool holds(const void* pointer) const { return mapping_.holds(pointer); }

  // Whole pages; null if there is none left.
  void* allocate(std::size_t bytes);
  // How long the piece that begins there is; 0: none does.
  std::size_t length(const void* pointer);
  void release(void* pointer);

 private:
  SharedFile file_;
  Mapping mapping_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> taken_;  // offset -> bytes
};

}  // namespace jitckpt::proxy::client
