#include "proxy/client/copy_flags.h"

namespace jitckpt::proxy::client {
namespace {

constexpr uint64_t not_known_yet = ~uint64_t{0};

}  // namespace

std::optional<uint32_t> CopyFlags::take() {
  std::lock_guard lock(mutex_);
  // By turns, so that the oldest is looked at.
  const auto next = static_cast<uint32_t>((newest_ + 1) % copy_flag_count);
  if (records_[next] != 0 && records_[next] >= needed_from_) return std::nullopt;
  newest_ = next;
  records_[next] = not_known_yet;
  log_.control().copied[next] = 0;
  return next;
}

void CopyFlags::give(uint32_t flag, uint64_t record) {
  std::lock_guard lock(mutex_);
  records_[flag] = record;
}

void CopyFlags::forget_before(uint64_t record) {
  std::lock_guard lock(mutex_);
  needed_from_ = record;
}

// A second time only once those of the first are forgotten: what is over since then does not count either.
// The device goes on meanwhile. So the newest call is looked at first: if it is over, so are those that it
// was behind, and they are seen to be.
void CopyFlags::freeze() {
  std::lock_guard lock(mutex_);
  if (!frozen_.empty()) return;
  frozen_.assign(copy_flag_count, 0);
  for (std::size_t before = 0; before < copy_flag_count; ++before) {
    const std::size_t flag = (newest_ + copy_flag_count - before) % copy_flag_count;
    frozen_[flag] = log_.control().copied[flag];
  }
}

bool CopyFlags::is_since_freeze(uint32_t flag) const {
  return !frozen_.empty() && frozen_[flag] == 0 && log_.control().copied[flag] != 0;
}

void CopyFlags::forget_since_freeze() {
  // Only so: the program may have begun to use a flag anew.
  for (std::size_t flag = 0; flag < frozen_.size(); ++flag) {
    if (frozen_[flag] == 0) log_.control().copied[flag] = 0;
  }
  frozen_.clear();
}

}  // namespace jitckpt::proxy::client
