// Copies of a snapshot that are put on their stream as the host comes to certain points of the minibatch,
// each to begin as the device comes there (REFT's HAS).
//
// Points are numbered from 1 in each minibatch, as Mark has them; 0 is its beginning. Pure bookkeeping: what
// reaches the device comes from outside. All of it is done under one lock, so that pieces come in order.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace jitckpt::watchdog {

struct CopyPiece {
  uint64_t point;
  void* target;
  const void* source;
  size_t bytes;
};

class PiecesInTurn {
 public:
  struct Device {
    std::function<void()> await_point;  // what comes next on the copies' stream begins no earlier
    std::function<bool(const CopyPiece&)> put;
    std::function<bool()> end;  // the last piece is put
  };

  // Whether points are counted: from the first time on that somebody wants to know of them; cheap.
  bool counts() const { return counts_.load(std::memory_order_relaxed); }
  void count_from_now() { counts_ = true; }

  void minibatch_begins();

  // The training comes to another point.
  void pass_point(const Device& device);

  // From now on these, in the order of their points. Those whose points are over are put at once; what was
  // still to come of others is dropped. False if the device refuses one.
  bool begin(std::vector<CopyPiece> pieces, const Device& device);

  // Puts what is still to come; how many pieces that is, or -1 if the device has refused one since `begin`.
  long put_rest(const Device& device);

  // Drops what is still to come.
  void drop();

  // Whether `begin` was called and neither put_rest nor drop since.
  bool is_open() const { return is_open_.load(std::memory_order_acquire); }

 private:
  void put_up_to(uint64_t point, const Device& device);
  void drop_unlocked();

  std::mutex mutex_;
  std::atomic<bool> counts_{false}, is_open_{false};
  uint64_t passed_ = 0;  // points of this minibatch
  std::vector<CopyPiece> pieces_;
  size_t next_ = 0;
  bool was_refused_ = false;
};

}  // namespace jitckpt::watchdog
