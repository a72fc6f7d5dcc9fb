// What lies where in the memory that client and server share:
//
//     ControlBlock | Slot[slot_count] | segments
//
// A segment is a row of records, each a header and its content. Records have numbers, from 1, without a gap.
// The number is written last, so a record whose number is the expected one is whole. Behind the newest record
// there is 0 in its place: recycled memory may hold anything. The last record of a segment says which segment
// goes on.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace jitckpt::proxy {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

constexpr uint64_t log_magic = 0x31474f4c4b50434aull;  // "JCPKLOG1" as little-endian bytes
constexpr std::size_t slot_count = 256;                // threads of the client at one time
constexpr std::size_t answer_bytes = 8 * 1024;         // the longest answer
constexpr std::size_t staging_bytes = 256 * 1024;      // host memory of one piece of a copy
constexpr std::size_t record_alignment = 16;

struct alignas(record_alignment) RecordHeader {
  std::atomic<uint64_t> sequence;
  uint32_t bytes;   // of header and content, a multiple of record_alignment
  uint16_t call;    // which one, or `continues`
  uint16_t slot;    // of the thread that called
  int32_t device;   // that this thread has chosen
  uint32_t answer;  // under which number it waits for the answer; 0: it does not
};

// The content is the Position of the next record.
constexpr uint16_t continues = 0xffff;

// Where a record lies, and its number.
struct Position {
  uint32_t segment, offset;
  uint64_t sequence;
};

// Records that bring a new server to the state at the beginning of a minibatch have numbers of their own,
// from here on: they stand apart, and the last of them leads back.
constexpr uint64_t first_apart = uint64_t{1} << 63;

// Which record wakes a reader that sleeps: the lower half of its number; 0: the reader is awake. Of the later
// ones each does, and any with an answer.
constexpr uint32_t awake = 0;
constexpr uint32_t woken_by(uint64_t sequence) {
  const auto half = static_cast<uint32_t>(sequence);
  return half == awake ? half - 1 : half;
}
constexpr bool wakes(uint64_t sequence, uint32_t woken_by) {
  return static_cast<int32_t>(static_cast<uint32_t>(sequence) - woken_by) >= 0;
}

// Whose calls are carried (failures.h).
constexpr std::size_t library_count = 3;

// The newest failure of a call that nobody waited for.
struct AsynchronousError {
  std::atomic<uint32_t> origin;  // slot of the thread that called, plus 1; 0: no failure
  int32_t result;
  char text[500];
};

// Copies into pinned memory that are watched at one time.
constexpr std::size_t copy_flag_count = 64 * 1024;
constexpr uint32_t no_copy_flag = ~uint32_t{0};

// What becomes of images that are not begun yet. frozen: nothing counts that the device does from here on,
// and one of the images that there are is needed, so the server waits for what it is told.
enum class Images : uint32_t { made, frozen, unwanted };

// What a new server makes before the calls of the log, in this order.
enum class Made : uint32_t { handles, image, communicators };
constexpr std::size_t made_count = 3;

struct ControlBlock {
  uint64_t magic, table_hash, segment_bytes, segment_count;
  uint64_t pinned_address;  // where both map the pinned memory
  alignas(64) std::atomic<uint32_t> reader_woken_by;
  Position start;                          // of the record that a server reads first
  uint64_t replay_end;                     // number of the last record that an earlier server may have read
  alignas(64) std::atomic<uint64_t> read;  // number of the newest record that the reader is done with
  alignas(64) AsynchronousError errors[library_count];  // by library
  std::atomic<uint32_t>
      collective_failed;  // 1: ask the server which, and how; so it is a moment later at most
  // Of the images: copies of the device's memory, which the server makes one after the other, each over the
  // last but one. The newest that it has begun, and the newest that is whole.
  alignas(64) std::atomic<uint64_t> image_begun, image_whole;
  std::atomic<Images> images;
  // Of the optimizer steps in which the state stays on the device: the newest that the device could begin,
  // and that it has begun; the newest whose calls are all in the log, and that waits for an answer or for
  // room, so that they never will be. recovery: number of the newest that has led to a replay.
  alignas(64) std::atomic<uint64_t> step_ready, step_begun;
  std::atomic<uint64_t> step_written, step_open, recovery;
  std::atomic<uint64_t> state_saved;  // the newest of which the host has a copy, made before a call
  // When the newest server had made them: nanoseconds of CLOCK_MONOTONIC.
  std::atomic<int64_t> made_at[made_count];
  // Of the checks: the newest whose copy is whole, and the newest that this server has compared.
  std::atomic<uint64_t> check_made, check_compared;
  // Answers that differ in a replay from what the program was given; whether they are looked at: not where
  // memory was overwritten before.
  std::atomic<uint64_t> different_answers;
  std::atomic<uint32_t> compares_answers;
  std::atomic<uint8_t> filled_with;  // what was free, before the calls were made again for a check
  alignas(4096) std::atomic<uint8_t> copied[copy_flag_count];  // 1: the device is through; it says so itself
};

// Whether the client's thread waits in its slot. `again`: a new server answers, what the old one has is void.
enum class Waits : uint32_t { no, yes, again };

// Where a thread of the client waits for its answers.
struct Slot {
  std::atomic<uint32_t> taken;
  std::atomic<uint32_t> asked;                 // number of the newest question; only the client uses it
  std::atomic<Waits> waits;                    // the same
  alignas(64) std::atomic<uint32_t> answered;  // number of the newest answer
  std::atomic<uint32_t> sleeps;
  int32_t result;
  uint32_t bytes;  // of the content
  char text[1024];
  alignas(64) std::byte content[answer_bytes];
  alignas(64) std::byte staging[staging_bytes];
};

struct Geometry {
  std::size_t segment_bytes, segment_count;

  static constexpr std::size_t slots_begin = (sizeof(ControlBlock) + 4095) / 4096 * 4096;
  static constexpr std::size_t segments_begin =
      (slots_begin + slot_count * sizeof(Slot) + 4095) / 4096 * 4096;
  std::size_t bytes() const { return segments_begin + segment_bytes * segment_count; }
};

// The shared memory with its parts.
class Log {
 public:
  Log(std::byte* begin, Geometry geometry) : begin_(begin), geometry_(geometry) {}

  ControlBlock& control() const { return *reinterpret_cast<ControlBlock*>(begin_); }
  Slot& slot(std::size_t index) const {
    return reinterpret_cast<Slot*>(begin_ + Geometry::slots_begin)[index];
  }
  std::byte* segment(std::size_t index) const {
    return begin_ + Geometry::segments_begin + index * geometry_.segment_bytes;
  }
  const Geometry& geometry() const { return geometry_; }

 private:
  std::byte* begin_;
  Geometry geometry_;
};

}  // namespace jitckpt::proxy
