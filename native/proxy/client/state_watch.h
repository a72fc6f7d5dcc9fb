// Which calls are given memory of the state between two optimizer steps, where it stays on the device: by the
// addresses in their records, whoever makes them. An address does not tell who reads there from who writes.
// So a call that was never seen before may write; one that is made in the same way as another, after which
// the state was looked at and had not changed, is trusted.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "proxy/client/free_memory.h"
#include "proxy/client/jitckpt_proxy.h"

namespace jitckpt::proxy::client {

class StateWatch {
 public:
  // The state's places; the storages that they lie in, which may begin before them (all calls name those, or
  // places in them); and the memory of the device.
  void watch(std::span<const jitckpt_proxy_place> places, const std::vector<Allocation>& device);
  void watch_storages(std::span<const jitckpt_proxy_place> storages);

  // What a call with this content may write to, as far as is known; nothing if it is given none of it, or is
  // trusted. The parts are of whole words of 8 bytes, but for the last.
  struct Doubt {
    uint64_t way = 0;             // in which the call is made, told by all in its content that is no address
    std::vector<Extent> extents;  // storages
  };
  std::optional<Doubt> doubts(std::span<const std::byte> arguments, std::span<const std::byte> more);
  void trust(uint64_t way);
  std::size_t trusted() const { return trusted_.size(); }

 private:
  std::vector<Extent> storages_, state_, device_;  // in order; they don't overlap
  std::vector<jitckpt_proxy_place> places_;        // in state_
  std::vector<uint64_t> words_;                    // of the call that is looked at, without its addresses
  std::unordered_set<uint64_t> trusted_;
};

}  // namespace jitckpt::proxy::client
