#include "proxy/client/free_memory.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "proxy/client/connection.h"
#include "proxy/client/jitckpt_proxy.h"

namespace jitckpt::proxy::client {
namespace {

constexpr uint64_t short_gap = 16 * 1024;  // takes no longer to be copied than another copy to be begun
constexpr std::size_t most_said = 4096;    // before it is put together, asked for or not

uint64_t hash(const Extent& extent) {
  return ((extent.begin ^ extent.end << 20) * 0x9e37'79b9'7f4a'7c15) >> 32;
}

}  // namespace

Extents::Extents(std::vector<Extent> all) : all_(std::move(all)) {
  std::erase_if(all_, [](const Extent& one) { return one.begin >= one.end; });
  std::ranges::sort(all_, {}, &Extent::begin);
  std::size_t count = 0;
  for (const Extent& one : all_) {
    if (count > 0 && all_[count - 1].end >= one.begin)
      all_[count - 1].end = std::max(all_[count - 1].end, one.end);
    else
      all_[count++] = one;
  }
  all_.resize(count);
}

void Extents::add(const Extent& extent) {
  if (extent.begin >= extent.end) return;
  const auto first = std::ranges::lower_bound(all_, extent.begin, {}, &Extent::end);
  const auto last = std::ranges::upper_bound(first, all_.end(), extent.end, {}, &Extent::begin);
  if (first == last) {
    all_.insert(first, extent);
    return;
  }
  *first = {std::min(first->begin, extent.begin), std::max(std::prev(last)->end, extent.end)};
  all_.erase(std::next(first), last);
}

void Extents::remove(const Extent& extent) {
  if (extent.begin >= extent.end) return;
  const auto first = std::ranges::upper_bound(all_, extent.begin, {}, &Extent::end);
  const auto last = std::ranges::lower_bound(first, all_.end(), extent.end, {}, &Extent::begin);
  if (first == last) return;
  const Extent before{first->begin, extent.begin}, behind{extent.end, std::prev(last)->end};
  auto place = all_.erase(first, last);
  if (behind.begin < behind.end) place = all_.insert(place, behind);
  if (before.begin < before.end) all_.insert(place, before);
}

void FreeMemory::note(const Said& said) {
  said_.push_back(said);
  if (said_.size() == most_said) put_together();
}

// A minibatch gives out and takes back the same blocks again and again: of each only the last word counts,
// whatever was said of others in between.
void FreeMemory::put_together() {
  last_.assign(std::bit_ceil(2 * said_.size() + 1), 0);  // by hash, where in what was said, counted from 1
  const std::size_t mask = last_.size() - 1;
  for (std::size_t i = said_.size(); i > 0; --i) {
    Extent& extent = said_[i - 1].extent;
    std::size_t place = hash(extent) & mask;
    while (last_[place] != 0 && said_[last_[place] - 1].extent != extent) place = (place + 1) & mask;
    if (last_[place] == 0)
      last_[place] = static_cast<uint16_t>(i);
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
