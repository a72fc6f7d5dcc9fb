// The client's end of the log: any thread appends records; the reader's progress makes room for new ones.
#pragma once
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "layout.h"

namespace jitckpt::proxy {

class LogWriter {
 public:
  // `go_on` is asked while there is no room: false (the reader is dead) gives up.
  LogWriter(Log log, std::function<bool()> go_on);

  // Room for a record. Whoever got it fills content (16-byte aligned) and the header's fields, and commits
  // it; the reader stops there until then.
  struct Place {
    RecordHeader* header;  // null: there is no room and never will be
    uint64_t sequence;
    std::byte* content() const { return reinterpret_cast<std::byte*>(header + 1); }
  };
  Place reserve(std::size_t content_bytes);
  void commit(const Place& place);

  // The longest content of a record.
  std::size_t longest_content() const;

 private:
  struct Used {
    uint32_t segment;
    uint64_t last;  // number of its last record; 0 while it is being filled
  };

  RecordHeader* header_at(std::size_t offset) const;
  bool take_segment();

  Log log_;
  std::function<bool()> go_on_;
  std::mutex mutex_;
  std::deque<Used> used_;  // the last is being filled
  std::vector<uint32_t> free_;
  std::size_t offset_ = 0;
  uint64_t next_ = 1;
};

}  // namespace jitckpt::proxy
