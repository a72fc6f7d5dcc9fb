#include "proxy/client/pinned_reads.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>

namespace jitckpt::proxy::client {
namespace {

constexpr std::size_t alignment = 16;
// More rooms than in the minibatches before are left over from an unusual one.
constexpr std::size_t spare_rooms = 8;

}  // namespace

bool PinnedReads::has_room() {
  if (!used_.empty() && used_.back().used < room_bytes_) return true;
  std::byte* begin = nullptr;
  if (!free_.empty()) {  // the newest, which may be in the caches still
    begin = free_.back();
    free_.pop_back();
  } else if (used_.size() < most_rooms_) {
    begin = static_cast<std::byte*>(memory_.allocate(room_bytes_));
  }
  if (begin) used_.push_back({begin});
  rooms_made_ = std::max(rooms_made_, used_.size() + free_.size());
  return begin != nullptr;
}

PinnedReads::Place PinnedReads::place(std::size_t bytes, uint32_t flag) {
  Room& room = used_.back();
  const Place taken{room.begin + room.used, room.begin, std::min(bytes, room_bytes_ - room.used), flag};
  room.used = std::min(room_bytes_, (room.used + taken.bytes + alignment - 1) / alignment * alignment);
  ++room.open;
  return taken;
}

void PinnedReads::end_place(const Place& place, uint64_t record) {
  Room& room = *std::ranges::find(used_, place.room, &Room::begin);
  --room.open;
  room.newest = std::max(room.newest, record);
}

std::optional<PinnedReads::Place> PinnedReads::take(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  if (!has_room()) return std::nullopt;
  const auto flag = flags_.take();
  return flag ? std::optional(place(bytes, *flag)) : std::nullopt;
}

void PinnedReads::give(const Place& place, const void* from, uint64_t record) {
  flags_.give(place.flag, record);
  std::lock_guard lock(mutex_);
  end_place(place, record);
  if (record != 0)
    reads_.push_back({record, const_cast<std::byte*>(static_cast<const std::byte*>(from)), place.kept,
                      place.bytes, place.flag});
}

std::optional<PinnedReads::Place> PinnedReads::take_room(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  return has_room() ? std::optional(place(bytes, no_copy_flag)) : std::nullopt;
}

void PinnedReads::give_room(const Place& place, uint64_t record) {
  std::lock_guard lock(mutex_);
  end_place(place, record);
}

void PinnedReads::forget_before(uint64_t record) {
  std::lock_guard lock(mutex_);
  while (!reads_.empty() && reads_.front().record < record) reads_.pop_front();
  std::erase_if(used_, [&](Room& room) {
    const bool over = room.open == 0 && room.newest < record;
    if (over) free_.push_back(room.begin);
    return over;
  });
}

void PinnedReads::put_back() {
  std::lock_guard lock(mutex_);
  std::vector<Read> again;
  std::ranges::copy_if(reads_, std::back_inserter(again),
                       [this](const Read& read) { return flags_.is_since_freeze(read.flag); });
  // The oldest last, so that its is what is there.
  std::ranges::sort(again, std::greater(), &Read::record);
  for (const Read& read : again) std::memcpy(read.from, read.kept, read.bytes);
}

std::size_t PinnedReads::most_bytes() const {
  std::lock_guard lock(mutex_);
  return rooms_made_ * room_bytes_;
}

}  // namespace jitckpt::proxy::client
