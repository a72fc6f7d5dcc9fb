// Which collectives are in flight, and which of them hangs.
//
// Each watch has an event of its own, recorded on the collective's stream right after the call. The
// application's events would not do: they are pooled, recorded again and destroyed at any time (c10d's event
// cache), so that a handle may answer for another collective; and where the caller's stream is the
// communication stream (FSDP2, asyncOp=false) nobody waits for an event at all. An event of ours is recorded
// once, asked until it has finished, and only then used again, so that nothing the application does with its
// events can change what a watch means.
//
// Pure bookkeeping: who asks the device, and what time it is, comes from outside.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "watchdog/event.h"

namespace jitckpt::watchdog {

// A send or a receive: the number-th, from 1, between this rank and `peer` on one communicator.
struct PointToPoint {
  bool send = false;
  int peer = -1;
  uint64_t number = 0;
};

struct Watch {
  uint64_t communicator = 0;   // the same on all of its ranks (see communicators.h)
  uint64_t sequence = 0;       // of the communicator's collectives, from 1; sends and receives do not count
  const char* operation = "";  // "ncclAllReduce"; of a group, its first
  uint32_t calls = 1;          // how many calls a group had on this stream
  uint64_t bytes = 0;
  std::vector<PointToPoint> exchanges = {};  // none: a collective
  bool in_graph = false;                     // there is other work with it, which may take long
};

// How long a collective may take, in seconds. Where floor < ceiling it is learned: ten times what the slowest
// of late has taken, or more if it moves more bytes.
struct Patience {
  double floor = 0, ceiling = 0;
};

struct InFlight {
  Watch watch;
  double seconds = 0;  // since it became the oldest of its stream; 0 for those behind it
  bool oldest = false;
};

class WatchList {
 public:
  using Finished = std::function<bool(Event)>;
  using Recycle = std::function<void(Event)>;

  void arm(void* stream, const Watch& watch, Event event, double now);

  // Asks for the oldest of each stream until one is unfinished. Asks without the lock: a query may get stuck,
  // and the threads that arm must not. One thread at a time.
  void poll(const Finished& finished, const Recycle& recycle, const std::function<double()>& now);

  // The watch that has been the oldest of its stream, unfinished, for longest, if its patience is over. A
  // watch is named once until clocks are started again.
  std::optional<InFlight> overdue(double now, const Patience& patience);

  // After a pause: everything in flight gets its whole time again.
  void restart_clocks(double now);

  // The handle may come back as another stream; what is in flight on it stays watched.
  void forget_stream(void* stream);

  std::vector<InFlight> in_flight(double now) const;
  uint64_t finished() const;
  bool empty() const;

 private:
  struct Entry {
    uint64_t id;
    Watch watch;
    Event event;
  };
  struct Stream {
    std::deque<Entry> entries;
    double oldest_since = 0;
    bool named = false;      // overdue() has named the oldest
    bool forgotten = false;  // its handle is no longer its own
  };

  struct Slowest {
    double seconds = 0;
    uint64_t bytes = 0;
  };

  void learn(double seconds, uint64_t bytes);
  double limit(const Watch& watch, const Patience& patience) const;

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Stream>> streams_;
  std::unordered_map<void*, std::shared_ptr<Stream>> by_handle_;
  uint64_t next_id_ = 0;
  uint64_t finished_ = 0;
  Slowest slowest_, slowest_before_;  // of this period of `learning_period` collectives, and of the last
};

}  // namespace jitckpt::watchdog
