// Copies into pinned memory that are over: a replay must not make them again, over what the program has put
// there since. Each copy has one of Control::copied, as long as its record may be read again.
#pragma once
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "layout.h"

namespace jitckpt::proxy::client {

class CopyFlags {
 public:
  explicit CopyFlags(const Log& log) : log_(log), records_(copy_flag_count, 0) {}

  // A flag that is cleared; nothing if all are taken. kept_from: number of the first record that may be read
  // again; 0: none may.
  std::optional<uint32_t> take(uint64_t kept_from);
  // The copy's record; 0: there is none, the flag is free.
  void give(uint32_t flag, uint64_t record);
  // Copies that are over only from here on are not, once the server is at rest: what they copied may come of
  // a communicator that has ended.
  void freeze();
  void forget_since_freeze();

 private:
  Log log_;
  std::mutex mutex_;
  std::vector<uint64_t> records_;  // by flag
  uint32_t newest_ = 0;
  std::vector<uint8_t> frozen_;  // by flag; the control thread's
};

}  // namespace jitckpt::proxy::client
