// Host memory that this process has page-locked by itself, so that copies of the device's memory to it return
// at once: one to other memory waits for all that is on its stream, for ever behind a collective that hangs.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>

namespace jitckpt::proxy {

class LockedPages {
 public:
  // False if the system has no more of them; the memory can be used all the same.
  bool lock(uint64_t address, uint64_t bytes);
  // Somebody else locks this memory: it has been given back since.
  void give_way(uint64_t address, uint64_t bytes);
  void unlock_all() { give_way(0, UINT64_MAX); }

 private:
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> pieces_;  // address -> bytes
};

}  // namespace jitckpt::proxy
