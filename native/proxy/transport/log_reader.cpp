#include "log_reader.h"

#include <cstring>
#include <string>

#include "futex.h"

namespace jitckpt::proxy {
namespace {

// Where cores are scarce, a reader that is woken takes the core from who writes, and soon has nothing to read
// again. So it sleeps first until somebody waits for an answer, or there are many records. If there are none
// for that long, the next one wakes it: then the device has nothing to do.
constexpr uint64_t nap_records = 1000;
constexpr auto nap = std::chrono::milliseconds(4);
constexpr auto longest_sleep = std::chrono::milliseconds(100);

}  // namespace

Geometry read_geometry(const std::byte* begin, std::size_t bytes) {
  if (bytes < Geometry::segments_begin)
    throw DamagedLog("The log's memory has " + std::to_string(bytes) + " bytes, less than its beginning.");
  const auto& control = *reinterpret_cast<const Control*>(begin);
  if (control.magic != log_magic)
    throw DamagedLog("The memory that the client has passed holds no log of the device proxy.");
  const Geometry geometry{control.segment_bytes, control.segment_count};
  const std::size_t rest = bytes - Geometry::segments_begin;
  if (geometry.segment_count == 0 || geometry.segment_bytes % record_alignment != 0 ||
      geometry.segment_bytes < 4096 || geometry.segment_bytes > UINT32_MAX ||
      geometry.segment_count != rest / geometry.segment_bytes || rest % geometry.segment_bytes != 0) {
    throw DamagedLog("The log says that it has " + std::to_string(geometry.segment_count) + " segments of " +
                     std::to_string(geometry.segment_bytes) + " bytes, and its memory has " +
                     std::to_string(rest) + " bytes for them.");
  }
  return geometry;
}

LogReader::LogReader(Log log, std::chrono::microseconds spin_time, std::function<bool()> go_on)
    : log_(log), spin_time_(spin_time), go_on_(std::move(go_on)), segment_(0), offset_(0), expected_(1) {
  go_to(log.control().start);
}

void LogReader::go_to(const Position& position) {
  if (position.segment >= log_.geometry().segment_count || position.offset % record_alignment != 0)
    damaged("goes on at a place that can't be");
  segment_ = position.segment;
  offset_ = position.offset;
  expected_ = position.sequence;
}

void LogReader::damaged(const char* why) const {
  throw DamagedLog("Record " + std::to_string(expected_) + " of the log (segment " +
                   std::to_string(segment_) + ", byte " + std::to_string(offset_) + ") " + why + ".");
}

bool LogReader::wait_for(const RecordHeader& header) {
  const auto written = [&] { return header.sequence.load(std::memory_order_seq_cst) == expected_; };
  std::atomic<uint32_t>& sleeps = log_.control().reader_woken_by;
  for (bool naps = spin_time_.count() == 0; !spin(spin_time_, written); naps = false) {
    const uint32_t by = woken_by(naps ? expected_ + nap_records - 1 : expected_);
    sleeps.store(by, std::memory_order_seq_cst);
    if (!written()) futex_wait(sleeps, by, naps ? nap : longest_sleep);
    sleeps.store(awake, std::memory_order_relaxed);
    if (!written() && !go_on_()) return false;
  }
  return true;
}

std::optional<Record> LogReader::next() {
  for (;;) {
    if (offset_ + sizeof(RecordHeader) > log_.geometry().segment_bytes)
      damaged("would begin behind the end of its segment");
    const std::size_t room = log_.geometry().segment_bytes - offset_;
    const auto& header = *reinterpret_cast<const RecordHeader*>(log_.segment(segment_) + offset_);
    if (!wait_for(header)) return std::nullopt;
    const std::size_t bytes = header.bytes;
    if (bytes < sizeof header || bytes % record_alignment != 0 || bytes > room)
      damaged("has a length that can't be");
    const auto* const content = reinterpret_cast<const std::byte*>(&header + 1);
    if (header.call != continues) {
      if (header.slot >= slot_count) damaged("comes from a thread that can't be");
      const Record record{expected_,     header.call, header.slot,          header.device,
                          header.answer, content,     bytes - sizeof header};
      offset_ += bytes;
      ++expected_;
      return record;
    }
    Position next;
    if (bytes != sizeof header + sizeof next) damaged("has a length that can't be");
    std::memcpy(&next, content, sizeof next);
    if (next.segment == segment_) damaged("goes on at a place that can't be");
    go_to(next);
    done();
  }
}

void LogReader::done() {
  if (expected_ < first_apart) log_.control().read.store(expected_ - 1, std::memory_order_release);
}

}  // namespace jitckpt::proxy
