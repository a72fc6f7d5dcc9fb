#include "proxy/client/state_watch.h"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace jitckpt::proxy::client {
namespace {

constexpr uint64_t of_state = 1, of_device = 2,
                   of_host = 3;  // stand for addresses, which are no such numbers
constexpr std::size_t most_trusted = 256 * 1024;

// Where programs have their heap, stacks and libraries. No kernel reads there: such a word is what was left
// where a compiler has filled a structure up, and is another one at each launch.
bool is_of_host(uint64_t word) {
  const uint64_t front = word >> 40;
  return front == 0x55 || front == 0x56 || front == 0x7e || front == 0x7f;
}

std::vector<Extent> joined(std::vector<Extent> all) {
  std::ranges::sort(all, {}, &Extent::begin);
  std::vector<Extent> found;
  for (const Extent& one : all) {
    if (one.begin >= one.end) continue;
    if (!found.empty() && found.back().end > one.begin)
      found.back().end = std::max(found.back().end, one.end);
    else
      found.push_back(one);
  }
  return found;
}

// The one that has the address in it, or the end.
std::vector<Extent>::const_iterator around(const std::vector<Extent>& all, uint64_t address) {
  const auto found = std::ranges::upper_bound(all, address, {}, &Extent::end);
  return found != all.end() && found->begin <= address ? found : all.end();
}

}  // namespace

void StateWatch::watch_storages(std::span<const jitckpt_proxy_place> storages) {
  storages_.clear();
  for (const auto& [address, bytes] : storages) storages_.push_back({address, address + bytes});
  places_.clear();
}

void StateWatch::watch(std::span<const jitckpt_proxy_place> places, const std::vector<Allocation>& device) {
  std::vector<Extent> all(device.size());
  std::ranges::transform(device, all.begin(), &Allocation::extent);
  device_ = joined(std::move(all));
  const auto is_same = [](const jitckpt_proxy_place& one, const jitckpt_proxy_place& other) {
    return one.address == other.address && one.bytes == other.bytes;
  };
  if (std::ranges::equal(places, places_, is_same)) return;
  places_.assign(places.begin(), places.end());
  all = storages_;
  for (const auto& [address, bytes] : places) all.push_back({address, address + bytes});
  state_ = joined(std::move(all));
}

// Most calls are given none of the state, and are done with after one comparison a word, or a few.
std::optional<StateWatch::Doubt> StateWatch::doubts(std::span<const std::byte> arguments,
                                                    std::span<const std::byte> more) {
  if (state_.empty()) return std::nullopt;
  const uint64_t begin = state_.front().begin, bytes = state_.back().end - begin;
  const auto of_state_at = [&](uint64_t word) {
    return word - begin < bytes ? around(state_, word) : state_.end();
  };
  const auto any = [&](std::span<const std::byte> part) {
    for (std::size_t at = 0; at + sizeof(uint64_t) <= part.size(); at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, part.data() + at, sizeof word);
      if (of_state_at(word) != state_.end()) return true;
    }
    return false;
  };
  if (!any(arguments) && !any(more)) return std::nullopt;
  Doubt doubt;
  words_.clear();
  for (const std::span<const std::byte> part : {arguments, more}) {
    for (std::size_t at = 0; at < part.size(); at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, part.data() + at, std::min(sizeof word, part.size() - at));
      if (const auto found = of_state_at(word); found != state_.end()) {
        doubt.extents.push_back(*found);
        word = of_state;
      } else if (around(device_, word) != device_.end()) {
        word = of_device;
      } else if (is_of_host(word)) {
        word = of_host;
      }
      words_.push_back(word);
    }
  }
  const std::string_view text(reinterpret_cast<const char*>(words_.data()), words_.size() * sizeof(uint64_t));
  doubt.way = std::hash<std::string_view>{}(text);
  return trusted_.contains(doubt.way) ? std::nullopt : std::optional(std::move(doubt));
}

void StateWatch::trust(uint64_t way) {
  // A program that never makes the same call twice is to take no memory without end.
  if (trusted_.size() == most_trusted) trusted_.clear();
  trusted_.insert(way);
}

}  // namespace jitckpt::proxy::client
