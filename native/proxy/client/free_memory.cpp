#include "free_memory.h"

#include <algorithm>

#include "connection.h"
#include "jitckpt_proxy.h"

namespace jitckpt::proxy::client {
namespace {

constexpr uint64_t short_gap = 16 * 1024;  // takes no longer to be copied than another copy to be begun

}  // namespace

void Extents::add(const Extent& extent) {
  uint64_t begin = extent.begin, end = extent.end;
  if (begin >= end) return;
  auto next = ends_.upper_bound(begin);
  if (next != ends_.begin() && std::prev(next)->second >= begin) {
    --next;
    begin = next->first;
  }
  while (next != ends_.end() && next->first <= end) {
    end = std::max(end, next->second);
    next = ends_.erase(next);
  }
  ends_.emplace_hint(next, begin, end);
}

void Extents::remove(const Extent& extent) {
  for (const Extent& part : inside(extent)) {
    const auto whole = std::prev(ends_.upper_bound(part.begin));
    const uint64_t end = whole->second;
    if (whole->first == part.begin)
      ends_.erase(whole);
    else
      whole->second = part.begin;
    if (end != part.end) ends_.emplace(part.end, end);
  }
}

std::vector<Extent> Extents::inside(const Extent& extent) const {
  std::vector<Extent> parts;
  auto next = ends_.upper_bound(extent.begin);
  if (next != ends_.begin()) --next;
  for (; next != ends_.end() && next->first < extent.end; ++next) {
    const Extent part{std::max(next->first, extent.begin), std::min(next->second, extent.end)};
    if (part.begin < part.end) parts.push_back(part);
  }
  return parts;
}

std::vector<Extent> Extents::outside(const Extent& extent) const {
  std::vector<Extent> parts;
  uint64_t begin = extent.begin;
  for (const Extent& part : inside(extent)) {
    if (begin < part.begin) parts.push_back({begin, part.begin});
    begin = part.end;
  }
  if (begin < extent.end) parts.push_back({begin, extent.end});
  return parts;
}

std::vector<Allocation> FreeMemory::held(std::vector<Allocation> memory, const Extents& left_out) const {
  std::ranges::sort(memory, {}, &Allocation::address);
  std::vector<Allocation> parts;
  for (const Allocation& one : memory) {
    const std::size_t first = parts.size();
    for (const Extent& given_out : extents.outside(one.extent())) {
      for (const Extent& part : left_out.outside(given_out)) {
        if (parts.size() > first && part.begin - parts.back().extent().end <= short_gap)
          parts.back().bytes = part.end - parts.back().address;
        else
          parts.push_back({part.begin, part.end - part.begin, one.device});
      }
    }
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
  free_memory().extents.add({address, address + bytes});
}

void jitckpt_proxy_hold(uint64_t address, uint64_t bytes) {
  if (!Connection::usable()) return;
  const std::lock_guard lock(free_memory().mutex);
  free_memory().extents.remove({address, address + bytes});
}
