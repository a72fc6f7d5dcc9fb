// The state that stays on the device is copied to the host before a call that may write to it, outside of its
// optimizer step: a replay makes that call again, on what there was before.
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "proxy/client/connection.h"
#include "proxy/client/requests.h"

namespace jitckpt::proxy::client {
namespace {

constexpr std::size_t most_looks = 4096;  // of one minibatch

}  // namespace

uint64_t bytes_of_places(std::span<const jitckpt_proxy_place> places) {
  return std::accumulate(places.begin(), places.end(), uint64_t{0},
                         [](uint64_t sum, const auto& one) { return sum + one.bytes; });
}

void Connection::watch_state(std::span<const jitckpt_proxy_place> memory) {
  std::lock_guard lock(still_mutex_);
  watch_.watch_storages(memory);
}

// An average of the weights that takes their place for an evaluation comes so.
void Connection::writes(uint64_t address, uint64_t bytes) {
  std::lock_guard lock(still_mutex_);
  const auto found = std::ranges::upper_bound(
      still_, address, {}, [](const jitckpt_proxy_place& place) { return place.address + place.bytes; });
  if (found == still_.end() || found->address >= address + bytes) return;
  save_state();
}

// The lock is held until the copy is in the log: calls of other threads may come behind that alone.
std::optional<Connection::Look> Connection::gives(Call call, Bytes arguments, Bytes more) {
  std::lock_guard lock(still_mutex_);
  const auto doubt = watch_.doubts(arguments, more);
  if (!doubt) return std::nullopt;
  save_state();
  // What is uploaded writes nothing itself: who gets the addresses from there comes later, and says nothing.
  if (call == Call::copy_from_host) return std::nullopt;
  if (saved_.empty() || looked_.size() == most_looks || looked_.contains(doubt->way)) return std::nullopt;
  wire::Found* const found = found_ + looked_.size();
  looked_[doubt->way] = found;
  Look look{found, {}};
  for (const Extent& extent : doubt->extents) {
    auto range = std::ranges::upper_bound(saved_, extent.begin, {},
                                          [](const wire::Range& one) { return memory_of(one).end; });
    for (; range != saved_.end() && range->from < extent.end; ++range) look.ranges.push_back(*range);
  }
  return look;
}

std::vector<wire::Range> Connection::ranges_of(const std::vector<jitckpt_proxy_place>& places, uint64_t to) {
  const std::vector<Allocation> allocations = objects_.allocations();
  std::vector<wire::Range> ranges;
  for (const jitckpt_proxy_place& place : places) {
    const auto behind = std::ranges::upper_bound(allocations, place.address, {},
                                                 [](const Allocation& one) { return one.extent().end; });
    const bool found = behind != allocations.end() && behind->address <= place.address;
    ranges.push_back({place.address, to, place.bytes, found ? behind->device : 0});
    to += place.bytes;
  }
  return ranges;
}

void Connection::save_state() {
  if (!state_is_still_) return;
  state_was_written_ = true;
  if (saves_ == still_state_) return;
  saves_ = still_state_;
  looked_.clear();
  saved_.clear();
  const uint64_t bytes = bytes_of_places(still_);
  auto* const memory = static_cast<std::byte*>(pinned_.allocate(bytes + most_looks * sizeof(wire::Found)));
  if (!memory) {
    state_changed();  // nothing leads back to before this call
    return;
  }
  found_ = reinterpret_cast<wire::Found*>(memory + bytes);
  std::fill_n(found_, most_looks, wire::Found::different);
  saved_ = ranges_of(still_as_told_, reinterpret_cast<uint64_t>(memory));
  std::ranges::sort(saved_, {}, &wire::Range::from);
  // Before the record is in the log: from when the server comes to it the device does not hold the state.
  hold_.when_free([&] {
    std::lock_guard lock(mutex_);
    images_.back().saved = memory;
    images_.back().saved_bytes = bytes;
  });
  note_image_bytes(bytes);
  tell<cudaError_t>(Call::save_state, wire::save_state{still_state_, saved_.size()},
                    std::as_bytes(std::span(saved_)));
}

// With mutex_ held.
std::optional<control::HostCopy> Connection::saved_state(const Image& image) const {
  if (!image.saved || log_.control().state_saved < image.state) return std::nullopt;
  const auto offset = static_cast<uint64_t>(static_cast<std::byte*>(image.saved) - pinned_.begin());
  return control::HostCopy{control::rank_of_process(), getpid(),    pinned_.file().descriptor(), offset,
                           image.saved_bytes,          image.digest};
}

bool Connection::state_was_changed() {
  std::lock_guard lock(still_mutex_);
  if (!state_was_written_) return false;
  if (saves_ != still_state_ || saved_.empty()) return true;
  wire::compare_state_answer answer{};
  const auto result = ask<cudaError_t>(Call::compare_state, wire::compare_state{saved_.size()}, answer,
                                       std::as_bytes(std::span(saved_)));
  if (result != cudaSuccess || answer.known == 0) return true;
  for (const auto& [way, found] : looked_)
    if (*found == wire::Found::same) watch_.trust(way);
  looked_.clear();
  state_was_written_ = answer.same == 0;
  return state_was_written_;
}

}  // namespace jitckpt::proxy::client
