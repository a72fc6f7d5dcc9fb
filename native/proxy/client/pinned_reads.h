// What copies to the device have read from pinned memory. The device reads it when the stream comes to the
// copy, as CUDA says: an earlier copy may only then have put there what it is to read. And it puts what it
// has read here, from where a replay takes it: the program may have put something else there since.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "proxy/client/copy_flags.h"
#include "proxy/client/pinned_memory.h"

namespace jitckpt::proxy::client {

class PinnedReads {
 public:
  // At most so many rooms of so many bytes.
  PinnedReads(PinnedMemory& memory, CopyFlags& flags, std::size_t room_bytes, std::size_t most_rooms)
      : memory_(memory), flags_(flags), room_bytes_(room_bytes), most_rooms_(most_rooms) {}

  // Where a copy puts so many bytes that it reads, and the flag that says that they are there.
  struct Place {
    std::byte* kept;
    std::byte* room;  // that it lies in
    std::size_t bytes;
    uint32_t flag;
  };
  // For the beginning of a copy, as much as there is room for in one piece; nothing if there is none left.
  std::optional<Place> take(std::size_t bytes);
  // The record of the copy from there; 0: there is none.
  void give(const Place& place, const void* from, uint64_t record);
  // The same memory for something else that lasts as long as its record is needed.
  std::optional<Place> take_room(std::size_t bytes);
  void give_room(const Place& place, uint64_t record);
  // No call before this record is made again, and the device is past them.
  void forget_before(uint64_t record);
  // Pinned memory becomes again what copies had read that do not count (see CopyFlags::freeze): they will
  // read once more, and others that do not count, either, may have written there since. The server is at
  // rest.
  void put_back();

  // The most memory that there has been for it at one time.
  std::size_t most_bytes() const;

 private:
  struct Room {
    std::byte* begin;
    std::size_t used = 0;  // bytes
    std::size_t open = 0;  // places whose records are not known yet
    uint64_t newest = 0;   // record of a copy that has a place here
  };
  struct Read {
    uint64_t record;
    std::byte* from;
    const std::byte* kept;
    std::size_t bytes;
    uint32_t flag;
  };
  bool has_room();
  Place place(std::size_t bytes, uint32_t flag);
  void end_place(const Place& place, uint64_t record);

  PinnedMemory& memory_;
  CopyFlags& flags_;
  const std::size_t room_bytes_, most_rooms_;
  mutable std::mutex mutex_;
  std::deque<Room> used_;  // the last is being filled
  std::vector<std::byte*> free_;
  std::size_t rooms_made_ = 0;  // the most at one time
  std::deque<Read> reads_;      // about in the order of their records
};

}  // namespace jitckpt::proxy::client
