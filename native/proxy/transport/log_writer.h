// The client's end of the log: any thread appends records; the reader's progress makes room for new ones.
#pragma once
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "proxy/transport/layout.h"

namespace jitckpt::proxy {

class LogWriter {
 public:
  // `go_on` is asked while there is no room: false (the reader is dead) gives up.
  // `outgrown` is told when keeping ends because there is no more room. Memory that nothing has used for some
  // minibatches, or that such a one leaves behind, goes back to the system.
  LogWriter(Log log, std::function<bool()> go_on, std::function<void()> outgrown = [] {});

  // Room for a record. Whoever got it fills content (16-byte aligned) and the header's fields, and commits
  // it; the reader stops there until then. kept: if given, it and what follows is kept (see `keep`), and
  // begins there: where there are enough, in the segment that was freed last. So a minibatch's records lie
  // where those of one shortly before it have lain, in memory that is there, and perhaps still in the caches.
  struct Place {
    RecordHeader* header;  // null: there is no room and never will be
    uint64_t sequence;
    std::byte* content() const { return reinterpret_cast<std::byte*>(header + 1); }
  };
  Place reserve(std::size_t content_bytes, Position* kept = nullptr);
  void commit(const Place& place);
  // Nobody gets room until `go_on`: the number of the newest record stays what it is.
  void stop();
  void go_on();

  // From here on nothing is used again until it is forgotten: a new server can read it again. Returns where
  // that begins. If there is no more room, what has been kept longest is forgotten, up to the next `keep`.
  Position keep();
  void forget_before(const Position& kept);
  void keep_nothing();
  bool keeps() const { return kept_.load(std::memory_order_relaxed) != 0; }
  bool is_kept(uint64_t sequence) const;
  // Number of the first record that may be read again; 0: none may.
  uint64_t kept_from() const { return kept_.load(std::memory_order_relaxed); }
  // Number of the newest record.
  uint64_t newest() const;

  // The most memory that the records have taken at one time.
  std::size_t most_bytes();
  // The memory that they have now, used or not.
  std::size_t bytes();

  // Overwrites the beginning of a record's content, if the record is kept.
  void amend(const Place& place, std::span<const std::byte> content);

  // Records for a new server to read before what is kept from `then` on; returns where they begin. Nothing if
  // there is no room for them, or that is not kept. The old server is dead: nobody reads the log meanwhile.
  struct Apart {
    uint16_t call;
    int32_t device;
    std::vector<std::byte> content;
  };
  std::optional<Position> write_apart(const std::vector<Apart>& records, const Position& then);

  // The longest content of a record.
  std::size_t longest_content() const;

 private:
  struct Used {
    uint32_t segment;
    uint64_t last;  // number of its last record; 0 while it is being filled
  };

  RecordHeader* header_at(std::size_t offset) const;
  Position keep_from_here();
  void forget_oldest();
  void free_apart();
  uint64_t recycle();
  bool take_segment();
  void empty_next();
  void touch();
  void give_back(uint64_t unused_since);
  std::size_t touched_bytes();

  Log log_;
  std::function<bool()> go_on_;
  std::function<void()> outgrown_;
  mutable std::mutex mutex_;
  std::deque<Used> used_;  // the last is being filled
  std::vector<uint32_t> free_;
  std::vector<std::size_t> touched_;  // by segment, up to where it has been written to
  std::vector<uint64_t> freed_;       // by segment: how often something more had been kept by then
  uint64_t keepings_ = 0;             // how often something more was kept
  std::size_t most_bytes_ = 0;
  std::size_t offset_ = 0;
  bool stopped_ = false;
  uint64_t next_ = 1;
  std::vector<uint32_t> apart_;    // the segments of the records apart
  std::deque<uint64_t> keeps_;     // numbers of the records from which on something is kept
  std::atomic<uint64_t> kept_{0};  // the first of them; 0: nothing is
};

}  // namespace jitckpt::proxy
