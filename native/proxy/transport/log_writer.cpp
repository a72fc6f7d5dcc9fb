#include "log_writer.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "futex.h"

namespace jitckpt::proxy {
namespace {

constexpr std::size_t continuation_bytes = sizeof(RecordHeader) + sizeof(Continuation);

std::size_t record_bytes(std::size_t content_bytes) {
  return (sizeof(RecordHeader) + content_bytes + record_alignment - 1) / record_alignment * record_alignment;
}

}  // namespace

LogWriter::LogWriter(Log log, std::function<bool()> go_on) : log_(log), go_on_(std::move(go_on)) {
  // The lowest numbers are used first, and again and again: what is never needed costs no memory.
  for (std::size_t segment = log.geometry().segment_count; segment-- > 1;)
    free_.push_back(static_cast<uint32_t>(segment));
  used_.push_back({0, 0});
}

std::size_t LogWriter::longest_content() const {
  return log_.geometry().segment_bytes - continuation_bytes - sizeof(RecordHeader);
}

RecordHeader* LogWriter::header_at(std::size_t offset) const {
  return reinterpret_cast<RecordHeader*>(log_.segment(used_.back().segment) + offset);
}

LogWriter::Place LogWriter::reserve(std::size_t content_bytes) {
  const std::size_t bytes = record_bytes(content_bytes);
  if (content_bytes > longest_content()) return {nullptr, 0};
  std::lock_guard lock(mutex_);
  if (offset_ + bytes + continuation_bytes > log_.geometry().segment_bytes && !take_segment())
    return {nullptr, 0};
  RecordHeader* const header = header_at(offset_);
  header->bytes = static_cast<uint32_t>(bytes);
  offset_ += bytes;
  return {header, next_++};
}

// Ends the segment that is being filled, and begins the next one.
bool LogWriter::take_segment() {
  for (;;) {
    const uint64_t read = log_.control().read.load(std::memory_order_acquire);
    while (used_.size() > 1 && used_.front().last <= read) {
      free_.push_back(used_.front().segment);
      used_.pop_front();
    }
    if (!free_.empty()) break;
    if (!go_on_()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  RecordHeader* const header = header_at(offset_);
  const Continuation continuation{free_.back(), {}};
  header->bytes = continuation_bytes;
  header->call = continues;
  header->answer = 0;
  std::memcpy(Place{header, next_}.content(), &continuation, sizeof continuation);
  used_.back().last = next_;
  commit({header, next_++});
  used_.push_back({free_.back(), 0});
  free_.pop_back();
  offset_ = 0;
  return true;
}

void LogWriter::commit(const Place& place) {
  // Sequentially consistent, as the reader's store and look are: one of the two sees what the other has done.
  place.header->sequence.store(place.sequence, std::memory_order_seq_cst);
  std::atomic<uint32_t>& sleeps = log_.control().reader_sleeps;
  if (sleeps.load(std::memory_order_seq_cst) != 0) [[unlikely]] {
    sleeps.store(0, std::memory_order_relaxed);
    futex_wake_all(sleeps);
  }
}

}  // namespace jitckpt::proxy
