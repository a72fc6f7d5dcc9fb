#include "watchdog/pieces_in_turn.h"

#include <limits>
#include <utility>

namespace jitckpt::watchdog {

void PiecesInTurn::minibatch_begins() {
  const std::lock_guard lock(mutex_);
  passed_ = 0;
}

void PiecesInTurn::pass_point(const Device& device) {
  const std::lock_guard lock(mutex_);
  ++passed_;
  if (next_ == pieces_.size() || pieces_[next_].point > passed_) return;
  device.await_point();
  put_up_to(passed_, device);
}

bool PiecesInTurn::begin(std::vector<CopyPiece> pieces, const Device& device) {
  const std::lock_guard lock(mutex_);
  counts_ = is_open_ = true;
  pieces_ = std::move(pieces);
  next_ = 0;
  was_refused_ = false;
  if (pieces_.empty()) {
    was_refused_ = !device.end();
  } else {
    put_up_to(passed_, device);
  }
  return !was_refused_;
}

long PiecesInTurn::put_rest(const Device& device) {
  const std::lock_guard lock(mutex_);
  is_open_ = false;
  const auto left = static_cast<long>(pieces_.size() - next_);
  put_up_to(std::numeric_limits<uint64_t>::max(), device);
  return was_refused_ ? -1 : left;
}

void PiecesInTurn::drop() {
  const std::lock_guard lock(mutex_);
  is_open_ = false;
  drop_unlocked();
}

void PiecesInTurn::put_up_to(uint64_t point, const Device& device) {
  if (next_ == pieces_.size()) return;
  while (next_ < pieces_.size() && pieces_[next_].point <= point) {
    if (!device.put(pieces_[next_])) {
      was_refused_ = true;
      drop_unlocked();
      return;
    }
    ++next_;
  }
  if (next_ == pieces_.size()) was_refused_ = !device.end();
}

void PiecesInTurn::drop_unlocked() {
  pieces_.clear();
  next_ = 0;
}

}  // namespace jitckpt::watchdog
