// Asynchronous calls that write to pinned memory or read it, and are over: a replay must not write there
// again, over what the program has put there since, nor read that. Each such call has one of
// ControlBlock::copied, as long as its record may be read again.
#pragma once
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "proxy/transport/layout.h"

namespace jitckpt::proxy::client {

class CopyFlags {
 public:
  explicit CopyFlags(const Log& log) : log_(log), records_(copy_flag_count, 0) {}

  // A flag that is cleared; nothing if all are taken.
  std::optional<uint32_t> take();
  // The call's record; 0: there is none, the flag is free.
  void give(uint32_t flag, uint64_t record);
  // No call before this record is made again, and the device is past them.
  void forget_before(uint64_t record);
  // Calls that are over only from here on are not, once the server is at rest: what they copied may come of
  // a communicator that has ended.
  void freeze();
  bool is_since_freeze(uint32_t flag) const;
  void forget_since_freeze();

 private:
  Log log_;
  std::mutex mutex_;
  std::vector<uint64_t> records_;  // by flag
  uint64_t needed_from_ = 0;
  uint32_t newest_ = 0;
  std::vector<uint8_t> frozen_;  // by flag; the control thread's
};

}  // namespace jitckpt::proxy::client
