#include "proxy/transport/log_writer.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "proxy/transport/futex.h"

namespace jitckpt::proxy {
namespace {

constexpr std::size_t continuation_bytes = sizeof(RecordHeader) + sizeof(Position);
// What a segment may hold when something more is kept, before that begins in another one.
constexpr std::size_t short_stretch = 64 * 1024;
// After so many minibatches in which a segment was not used it need not be there.
constexpr uint64_t unused_minibatches = 8;
constexpr std::size_t page_bytes = 4096;

std::size_t record_bytes(std::size_t content_bytes) {
  return (sizeof(RecordHeader) + content_bytes + record_alignment - 1) / record_alignment * record_alignment;
}

}  // namespace

LogWriter::LogWriter(Log log, std::function<bool()> go_on, std::function<void()> outgrown)
    : log_(log), go_on_(std::move(go_on)), outgrown_(std::move(outgrown)) {
  // The lowest numbers are used first, and again and again: what is never needed costs no memory.
  for (std::size_t segment = log.geometry().segment_count; segment-- > 1;)
    free_.push_back(static_cast<uint32_t>(segment));
  used_.push_back({0, 0});
  touched_.resize(log.geometry().segment_count);
  freed_.resize(log.geometry().segment_count);
}

std::size_t LogWriter::longest_content() const {
  return log_.geometry().segment_bytes - continuation_bytes - sizeof(RecordHeader);
}

RecordHeader* LogWriter::header_at(std::size_t offset) const {
  return reinterpret_cast<RecordHeader*>(log_.segment(used_.back().segment) + offset);
}

LogWriter::Place LogWriter::reserve(std::size_t content_bytes, Position* kept) {
  const std::size_t bytes = record_bytes(content_bytes);
  if (content_bytes > longest_content()) return {nullptr, 0};
  std::unique_lock lock(mutex_);
  while (stopped_ ||
         (offset_ + bytes + continuation_bytes > log_.geometry().segment_bytes && !take_segment())) {
    // Without the lock: whoever puts a new reader in place needs it.
    lock.unlock();
    if (!go_on_()) return {nullptr, 0};
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
  }
  if (kept && offset_ > short_stretch && free_.size() > log_.geometry().segment_count / 2) take_segment();
  if (kept) *kept = keep_from_here();
  RecordHeader* const header = header_at(offset_);
  header->bytes = static_cast<uint32_t>(bytes);
  offset_ += bytes;
  empty_next();
  return {header, next_++};
}

void LogWriter::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
}

void LogWriter::go_on() {
  std::lock_guard lock(mutex_);
  stopped_ = false;
}

void LogWriter::free_apart() {
  free_.insert(free_.end(), apart_.begin(), apart_.end());
  apart_.clear();
}

// Frees what is read and not kept; returns the number of the newest record that is read.
uint64_t LogWriter::recycle() {
  const uint64_t read = log_.control().read.load(std::memory_order_acquire);
  const uint64_t kept = kept_;
  const uint64_t needless = kept == 0 ? read : std::min(read, kept - 1);
  if (read != 0) free_apart();  // the reader has come to what follows them
  while (used_.size() > 1 && used_.front().last <= needless) {
    free_.push_back(used_.front().segment);
    freed_[used_.front().segment] = keepings_;
    used_.pop_front();
  }
  return read;
}

// Ends the segment that is being filled, and begins the next one; false if there is none.
bool LogWriter::take_segment() {
  const uint64_t read = recycle();
  // While something is kept one segment stays free, for the records apart.
  while (keeps() && free_.size() <= 1) {
    const uint64_t needed = used_.size() > 1 ? used_.front().last : next_ - 1;
    if (read < needed) return false;
    forget_oldest();
    recycle();
    if (keeps()) continue;
    give_back(keepings_);
    outgrown_();
  }
  if (free_.empty()) return false;
  RecordHeader* const header = header_at(offset_);
  const Position next{free_.back(), 0, next_ + 1};
  header->bytes = continuation_bytes;
  header->call = continues;
  header->answer = 0;
  std::memcpy(Place{header, next_}.content(), &next, sizeof next);
  used_.back().last = next_;
  const Place end{header, next_++};
  touch();
  used_.push_back({free_.back(), 0});
  free_.pop_back();
  offset_ = 0;
  empty_next();
  commit(end);
  return true;
}

// Where the next record will be there may be anything by now, also its number. The reader looks there as soon
// as it has seen the record before, so this comes before that is committed.
void LogWriter::empty_next() { header_at(offset_)->sequence.store(0, std::memory_order_relaxed); }

void LogWriter::commit(const Place& place) {
  const bool is_awaited = place.header->answer != 0;
  // Sequentially consistent, as the reader's store and look are: one of the two sees what the other has done.
  place.header->sequence.store(place.sequence, std::memory_order_seq_cst);
  std::atomic<uint32_t>& sleeps = log_.control().reader_woken_by;
  const uint32_t by = sleeps.load(std::memory_order_seq_cst);
  if (by != awake && (is_awaited || wakes(place.sequence, by))) [[unlikely]] {
    sleeps.store(awake, std::memory_order_relaxed);
    futex_wake_all(sleeps);
  }
}

Position LogWriter::keep() {
  std::lock_guard lock(mutex_);
  return keep_from_here();
}

Position LogWriter::keep_from_here() {
  if (++keepings_ > unused_minibatches) give_back(keepings_ - unused_minibatches);
  keeps_.push_back(next_);
  kept_ = keeps_.front();
  return {used_.back().segment, static_cast<uint32_t>(offset_), next_};
}

void LogWriter::forget_oldest() {
  keeps_.pop_front();
  kept_ = keeps_.empty() ? 0 : keeps_.front();
}

void LogWriter::forget_before(const Position& kept) {
  std::lock_guard lock(mutex_);
  while (!keeps_.empty() && keeps_.front() < kept.sequence) forget_oldest();
}

void LogWriter::keep_nothing() {
  std::lock_guard lock(mutex_);
  keeps_.clear();
  kept_ = 0;
}

uint64_t LogWriter::newest() const {
  std::lock_guard lock(mutex_);
  return next_ - 1;
}

std::size_t LogWriter::touched_bytes() {
  touch();
  const std::size_t bytes = std::accumulate(touched_.begin(), touched_.end(), std::size_t{0});
  most_bytes_ = std::max(most_bytes_, bytes);
  return bytes;
}

std::size_t LogWriter::bytes() {
  std::lock_guard lock(mutex_);
  return touched_bytes();
}

std::size_t LogWriter::most_bytes() {
  std::lock_guard lock(mutex_);
  touched_bytes();
  return most_bytes_;
}

// Both processes have the memory mapped: where it is used again, it is there again.
void LogWriter::give_back(uint64_t unused_since) {
  touched_bytes();
  for (const uint32_t segment : free_) {
    if (touched_[segment] == 0 || freed_[segment] > unused_since) continue;
    const auto begin = reinterpret_cast<uintptr_t>(log_.segment(segment));
    const uintptr_t first = (begin + page_bytes - 1) / page_bytes * page_bytes;
    const uintptr_t end = (begin + log_.geometry().segment_bytes) / page_bytes * page_bytes;
    if (first < end && madvise(reinterpret_cast<void*>(first), end - first, MADV_REMOVE) == 0)
      touched_[segment] = 0;
  }
}

void LogWriter::touch() {
  std::size_t& touched = touched_[used_.back().segment];
  const std::size_t end = offset_ + sizeof(RecordHeader) + continuation_bytes;
  touched = std::max(touched, std::min(end, log_.geometry().segment_bytes));
}

bool LogWriter::is_kept(uint64_t sequence) const {
  const uint64_t kept = kept_;
  return kept != 0 && sequence >= kept;
}

void LogWriter::amend(const Place& place, std::span<const std::byte> content) {
  std::lock_guard lock(mutex_);
  if (is_kept(place.sequence)) std::memcpy(place.content(), content.data(), content.size());
}

std::optional<Position> LogWriter::write_apart(const std::vector<Apart>& records, const Position& then) {
  std::lock_guard lock(mutex_);
  if (!is_kept(then.sequence)) return std::nullopt;
  recycle();
  free_apart();  // the last server's
  log_.control().read = 0;
  uint64_t sequence = first_apart;
  std::optional<Position> start;
  std::byte* segment = nullptr;
  std::size_t offset = 0;
  const auto append = [&](uint16_t call, int32_t device, std::span<const std::byte> content) {
    auto* const header = reinterpret_cast<RecordHeader*>(segment + offset);
    header->bytes = static_cast<uint32_t>(record_bytes(content.size()));
    header->call = call;
    header->slot = 0;
    header->device = device;
    header->answer = 0;
    std::ranges::copy(content, Place{header, sequence}.content());
    header->sequence.store(sequence++, std::memory_order_release);
    offset += header->bytes;
  };
  const auto go_to = [&](const Position& next) { append(continues, 0, std::as_bytes(std::span(&next, 1))); };
  for (const Apart& record : records) {
    if (record.content.size() > longest_content()) return std::nullopt;
    const std::size_t end = offset + record_bytes(record.content.size()) + continuation_bytes;
    if (!segment || end > log_.geometry().segment_bytes) {
      if (free_.empty()) return std::nullopt;
      const uint32_t taken = free_.back();
      free_.pop_back();
      apart_.push_back(taken);
      if (segment) go_to({taken, 0, sequence + 1});
      if (!start) start = Position{taken, 0, sequence};
      segment = log_.segment(taken);
      offset = 0;
    }
    append(record.call, record.device, record.content);
  }
  if (!start) return then;
  go_to(then);
  return start;
}

}  // namespace jitckpt::proxy
