#include "proxy/transport/log_reader.h"

#include <cstring>
#include <string>

#include "proxy/transport/futex.h"

namespace jitckpt::proxy {

using namespace std::chrono_literals;

namespace {

constexpr auto longest_sleep = 100ms;

}  // namespace

Sleep next_sleep(bool spins, int slept) {
  constexpr uint64_t many_records = 1000;
  const Sleep nap{spins ? std::chrono::microseconds(50us) : 4ms, many_records};
  const int naps = spins ? 20 : 1;
  return slept < naps ? nap : Sleep{longest_sleep, 1};
}

Geometry read_geometry(const std::byte* begin, std::size_t bytes) {
  if (bytes < Geometry::segments_begin)
    throw DamagedLog("The log's memory has " + std::to_string(bytes) + " bytes, less than its beginning.");
  const auto& control = *reinterpret_cast<const ControlBlock*>(begin);
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
  if (spin(spin_time_, written)) return true;
  std::atomic<uint32_t>& sleeps = log_.control().reader_woken_by;
  for (int slept = 0; !written(); ++slept) {
    const Sleep sleep = next_sleep(spin_time_.count() > 0, slept);
    const uint32_t by = woken_by(expected_ + sleep.records - 1);
    sleeps.store(by, std::memory_order_seq_cst);
    if (!written()) futex_wait(sleeps, by, sleep.longest);
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
    // Numbers grow, but for the way back from the records apart: who follows them comes to an end.
    const bool goes_back = expected_ >= first_apart && next.sequence < first_apart;
    if (next.segment == segment_ || (next.sequence != expected_ + 1 && !goes_back))
      damaged("goes on at a place that can't be");
    go_to(next);
    done();
  }
}

void LogReader::done() {
  if (expected_ < first_apart) log_.control().read.store(expected_ - 1, std::memory_order_release);
}

}  // namespace jitckpt::proxy
