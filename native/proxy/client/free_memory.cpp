#include "free_memory.h"

#include <algorithm>
#include <array>

#include "connection.h"
#include "jitckpt_proxy.h"

namespace jitckpt::proxy::client {
namespace {

constexpr uint64_t short_gap = 16 * 1024;  // takes no longer to be copied than another copy to be begun
constexpr std::size_t most_said = 4096;    // before it is put together, asked for or not
constexpr std::size_t hashes = 2 * most_said;

std::size_t hash(const Extent& extent) {
  return ((extent.begin ^ extent.end << 20) * 0x9e37'79b9'7f4a'7c15) >> 51;
}
static_assert(hashes == 1ULL << (64 - 51));

}  // namespace

void Extents::add(const Extent& extent) {
  uint64_t begin = extent.begin, end = extent.end;
  if (begin >= end) return;
  auto next = ends_.upper_bound(begin);
  if (next != ends_.begin() && std::prev(next)->second >= begin) {
    --next;
    if (next->second >= end) return;
    begin = next->first;
  }
  while (next != ends_.end() && next->first <= end) {
    end = std::max(end, next->second);
    next = ends_.erase(next);
  }
  ends_.emplace_hint(next, begin, end);
}

void Extents::remove(const Extent& extent) {
  if (extent.begin >= extent.end) return;
  auto next = ends_.upper_bound(extent.begin);
  if (next != ends_.begin()) --next;
  while (next != ends_.end() && next->first < extent.end) {
    const auto [begin, end] = *next;
    if (end <= extent.begin) {
      ++next;
      continue;
    }
    if (begin < extent.begin) {
      next->second = extent.begin;
      ++next;
    } else {
      next = ends_.erase(next);
    }
    if (end > extent.end) ends_.emplace_hint(next, extent.end, end);
  }
}

void FreeMemory::note(const Said& said) {
  said_.push_back(said);
  if (said_.size() == most_said) put_together();
}

// A minibatch gives out and takes back the same blocks again and again: of each only the last word counts,
// whatever was said of others in between.
void FreeMemory::put_together() {
  std::array<uint16_t, hashes> last{};  // by hash, where in what was said, counted from 1
  for (std::size_t i = said_.size(); i > 0; --i) {
    Extent& extent = said_[i - 1].extent;
    std::size_t place = hash(extent);
    while (last[place] != 0 && said_[last[place] - 1].extent != extent) place = (place + 1) % hashes;
    if (last[place] == 0)
      last[place] = static_cast<uint16_t>(i);
    else
      extent.end = extent.begin;
  }
  for (const auto& [extent, free] : said_) free ? extents_.add(extent) : extents_.remove(extent);
  said_.clear();
}

std::vector<Allocation> FreeMemory::held(std::vector<Allocation> memory, const Extents& left_out) {
  put_together();
  std::ranges::sort(memory, {}, &Allocation::address);
  std::vector<Allocation> parts;
  for (const Allocation& one : memory) {
    const std::size_t first = parts.size();
    extents_.outside(one.extent(), [&](const Extent& given_out) {
      left_out.outside(given_out, [&](const Extent& part) {
        if (parts.size() > first && part.begin - parts.back().extent().end <= short_gap)
          parts.back().bytes = part.end - parts.back().address;
        else
          parts.push_back({part.begin, part.end - part.begin, one.device});
      });
    });
  }
  return parts;
}

FreeMemory& free_memory() {
  static FreeMemory& memory = *new FreeMemory;  // threads may go on while the process ends
  return memory;
}

}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy::client;

void jitckpt_proxy_free(uint64_t address, uint64_t bytes) {
  if (!Connection::usable()) return;
  const std::lock_guard lock(free_memory().mutex);
  free_memory().free({address, address + bytes});
}

void jitckpt_proxy_hold(uint64_t address, uint64_t bytes) {
  if (!Connection::usable()) return;
  const std::lock_guard lock(free_memory().mutex);
  free_memory().hold({address, address + bytes});
}
