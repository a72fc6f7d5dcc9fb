// Virtual handles and what they stand for here.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "proxy/server/failure.h"

namespace jitckpt::proxy {

template <class Handle>
class Handles {
 public:
  // named: numbers below it stand for themselves, as the default streams do.
  Handles(const char* what, int32_t unknown, uint64_t named)
      : what_(what), unknown_(unknown), named_(named) {}

  // Throws CallFailure.
  Handle find(uint64_t number) {
    if (number < named_) {
      if constexpr (std::is_enum_v<Handle>)
        return static_cast<Handle>(number);
      else
        return reinterpret_cast<Handle>(number);
    }
    std::lock_guard lock(mutex_);
    const auto found = handles_.find(number);
    if (found == handles_.end())
      throw CallFailure(unknown_, std::string("there is no such ") + what_ + " (any more)");
    return found->second;
  }
  void add(uint64_t number, Handle handle) {
    std::lock_guard lock(mutex_);
    handles_[number] = handle;
  }
  std::vector<Handle> all() {
    std::lock_guard lock(mutex_);
    std::vector<Handle> found;
    for (const auto& [number, handle] : handles_) found.push_back(handle);
    return found;
  }
  void remove(uint64_t number) {
    std::lock_guard lock(mutex_);
    handles_.erase(number);
  }
  // Leaves none.
  std::vector<Handle> take() {
    std::vector<Handle> found = all();
    std::lock_guard lock(mutex_);
    handles_.clear();
    return found;
  }

 private:
  const char* what_;
  int32_t unknown_;
  uint64_t named_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Handle> handles_;
};

// Memory that has been made here.
class MadeMemory {
 public:
  struct Piece {
    uint64_t bytes;
    int32_t device;
  };
  using Pieces = std::map<uint64_t, Piece>;

  void add(uint64_t address, const Piece& piece) {
    std::lock_guard lock(mutex_);
    pieces_[address] = piece;
  }
  // How long it was; 0 if there is none.
  uint64_t remove(uint64_t address) {
    std::lock_guard lock(mutex_);
    const auto piece = pieces_.extract(address);
    return piece ? piece.mapped().bytes : 0;
  }
  Pieces all() {
    std::lock_guard lock(mutex_);
    return pieces_;
  }
  // Of what lies in one piece.
  std::optional<int32_t> device_of(uint64_t address, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    auto piece = pieces_.upper_bound(address);
    if (piece == pieces_.begin()) return std::nullopt;
    --piece;
    if (address + bytes > piece->first + piece->second.bytes) return std::nullopt;
    return piece->second.device;
  }

 private:
  std::mutex mutex_;
  Pieces pieces_;
};

}  // namespace jitckpt::proxy
