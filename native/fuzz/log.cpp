// The log's memory may hold anything: the reader ends, or says which record is damaged.
#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "proxy/transport/log_reader.h"

namespace {

using namespace jitckpt::proxy;

constexpr Geometry geometry{4096, 3};
constexpr std::size_t segments_bytes = geometry.segment_bytes * geometry.segment_count;

// Zero but for what an input writes, and that is taken away behind it.
std::byte* memory() {
  static std::byte* const begin = static_cast<std::byte*>(mmap(
      nullptr, geometry.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return begin;
}

// What the log says of itself, where it begins, and then its segments, with what is left of the input.
struct Head {
  uint64_t magic, segment_bytes, segment_count;
  Position start;
  uint16_t second_segment;  // where in the rest it begins
};

void read(const Head& head, const uint8_t* rest, std::size_t bytes) {
  auto& control = *reinterpret_cast<ControlBlock*>(memory());
  // As it should be where the input says nothing, else nothing else is ever looked at.
  control.magic = log_magic ^ head.magic;
  control.segment_bytes = geometry.segment_bytes ^ head.segment_bytes;
  control.segment_count = geometry.segment_count ^ head.segment_count;
  control.start = {head.start.segment, head.start.offset, head.start.sequence + 1};
  const Geometry read = read_geometry(memory(), geometry.bytes());
  const Log log(memory(), read);
  const std::size_t first = std::min<std::size_t>({head.second_segment, bytes, read.segment_bytes});
  std::memcpy(log.segment(0), rest, first);
  if (read.segment_count > 1)
    std::memcpy(log.segment(1), rest + first, std::min(bytes - first, segments_bytes - read.segment_bytes));
  LogReader reader(log, std::chrono::microseconds(1), [] { return false; });
  // Behind each other, so there are no more than the memory has room for.
  for (std::size_t records = 0; const auto record = reader.next(); ++records) {
    const std::byte* const end = memory() + geometry.bytes();
    if (records > geometry.bytes() / sizeof(RecordHeader) || record->content < log.segment(0) ||
        record->content + record->bytes > end || record->slot >= slot_count)
      std::abort();
    reader.done();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  Head head{};
  if (size < sizeof head) return 0;
  std::memcpy(&head, data, sizeof head);
  std::memset(memory() + Geometry::segments_begin, 0, segments_bytes);
  try {
    read(head, data + sizeof head, size - sizeof head);
  } catch (const DamagedLog&) {
  }
  return 0;
}
