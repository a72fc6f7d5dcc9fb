// When in a minibatch the job's own collectives are on the network, and when the training's stream comes to
// them and waits, by the device's clock: for some minibatches, on order. What lies between collectives is
// free for others (GEMINI's idle spans); where the stream waits the device is idle (REFT's bubbles).
//
// Pure bookkeeping: who asks the device, and what its events say, comes from outside. The events have times,
// so they are not those of the watch list, which are asked in every step and are to be cheap.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "watchdog/event.h"

namespace jitckpt::watchdog {

// Seconds since the minibatch began, as the device came to it.
struct Busy {
  double begin = 0, end = 0;
  bool exchange = false;  // sends and receives alone, of which one may wait long for the other side
};

// What the training's stream comes to in a minibatch; see network.py, which has the same numbers.
enum class Mark { collective, wait_begins, wait_ends, step_begins };

struct Passed {
  double at = 0;
  Mark mark = Mark::collective;
};

struct Profiled {
  double seconds = 0;  // that the minibatch took
  std::vector<Busy> busy;
  std::vector<Passed> points;
};

class NetworkProfile {
 public:
  using Finished = std::function<bool(Event)>;
  using Seconds = std::function<std::optional<double>(Event from, Event to)>;
  using Recycle = std::function<void(Event)>;

  static constexpr size_t most_points = 1024;  // of a minibatch; of more, nobody hears

  // Profiles so many minibatches from the next one on; what was profiled before is forgotten.
  void order(uint32_t minibatches, const Recycle& recycle);

  // Whether events are wanted; cheap.
  bool is_on() const { return wanted_.load(std::memory_order_relaxed) > 0; }

  // One minibatch ends here, and the next begins. Gives the event back if it is of no use.
  void boundary(Event event, const Recycle& recycle);

  // A collective was between these two.
  void busy(Event begin, Event end, bool exchange, const Recycle& recycle);

  // The training's stream comes here.
  void point(Event event, Mark mark, const Recycle& recycle);

  // What was ordered, once the device has come past all of it.
  std::optional<std::vector<Profiled>> take(const Finished& finished, const Seconds& seconds,
                                            const Recycle& recycle);

 private:
  struct Minibatch {
    Event begin, end;
    struct Collective {
      Event begin, end;
      bool exchange;
    };
    std::vector<Collective> busy;
    std::vector<std::pair<Event, Mark>> points;
  };
  std::vector<Event> forget();

  std::mutex mutex_;
  std::atomic<uint32_t> wanted_{0};  // minibatches that are still to come to their end
  std::optional<Minibatch> current_;
  std::deque<Minibatch> ended_;
};

}  // namespace jitckpt::watchdog
