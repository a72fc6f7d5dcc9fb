#include "copy_flags.h"

namespace jitckpt::proxy::client {
namespace {

constexpr uint64_t not_known_yet = ~uint64_t{0};

}  // namespace

std::optional<uint32_t> CopyFlags::take(uint64_t kept_from) {
  std::lock_guard lock(mutex_);
  // By turns, so that the oldest is looked at.
  const auto next = static_cast<uint32_t>((newest_ + 1) % copy_flag_count);
  if (records_[next] >= (kept_from == 0 ? not_known_yet : kept_from)) return std::nullopt;
  newest_ = next;
  records_[next] = not_known_yet;
  log_.control().copied[next] = 0;
  return next;
}

void CopyFlags::give(uint32_t flag, uint64_t record) {
  std::lock_guard lock(mutex_);
  records_[flag] = record;
}

void CopyFlags::forget_what_was_set_free() {
  Control& control = log_.control();
  if (control.stopped.exchange(0) == 0) return;
  // Only so: the program may have begun to use a flag anew.
  for (std::size_t flag = 0; flag < copy_flag_count; ++flag) {
    if (control.copied_before[flag].load(std::memory_order_relaxed) == 0) control.copied[flag] = 0;
  }
}

}  // namespace jitckpt::proxy::client
