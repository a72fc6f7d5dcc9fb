#include "interpose/run_ahead.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "interpose/gate.h"
#include "interpose/library.h"
#include "watchdog/device.h"

namespace jitckpt::interpose::run_ahead {
namespace {

using namespace std::chrono_literals;

// An event follows every so many calls of a stream, and so many of them may be unfinished.
std::atomic<uint32_t> calls_between{0};
constexpr std::size_t unfinished_events = 16;

class Lead {
 public:
  // Whether it is time for an event.
  bool count(uint32_t between) { return (calls_.fetch_add(1, std::memory_order_relaxed) + 1) % between == 0; }

  // Records an event; returns the oldest one if there are too many by now.
  std::optional<watchdog::Event> mark(cudaStream_t stream) {
    LibraryState& all = library();
    const std::lock_guard lock(mutex_);
    const int device = all.device.streams.device_of(stream);
    if (const auto event = all.device.events.record(stream, device)) marks_.push_back(*event);
    if (marks_.size() <= unfinished_events) return std::nullopt;
    const watchdog::Event oldest = marks_.front();
    marks_.pop_front();
    return oldest;
  }

 private:
  std::atomic<uint32_t> calls_{0};
  std::mutex mutex_;
  std::deque<watchdog::Event> marks_;
};

struct Leads {
  std::mutex mutex;
  std::unordered_map<cudaStream_t, std::unique_ptr<Lead>> by_stream;  // a handle comes again, a lead stays
};
Leads& leads() {
  static auto* const all = new Leads;
  return *all;
}

// The stream of this thread's last call, and its lead.
struct Last {
  cudaStream_t stream = nullptr;
  Lead* lead = nullptr;
};
thread_local constinit Last last [[gnu::tls_model("initial-exec")]];

Lead& lead_of(cudaStream_t stream) {
  if (!last.lead || last.stream != stream) {
    Leads& all = leads();
    const std::lock_guard lock(all.mutex);
    auto& found = all.by_stream[stream];
    if (!found) found = std::make_unique<Lead>();
    last = {stream, found.get()};
  }
  return *last.lead;
}

// With the GIL, if the thread holds it: it would hold it inside of the driver, too (watchdog/gil.h says why
// it is not given up).
void wait_for(watchdog::Event event) {
  watchdog::Thread& thread = watchdog::this_thread();
  for (auto pause = 10us; watchdog::is_pending(event); pause = std::min(2 * pause, 100us)) {
    if (holding() && !passes_to_end_its_step(thread)) {
      wait_at_gate(thread);
    } else {
      std::this_thread::sleep_for(pause);
    }
  }
}

}  // namespace

void allow(uint32_t calls) {
  calls_between = calls == 0 ? 0 : std::max(1u, static_cast<uint32_t>(calls / unfinished_events));
}

void before_call(cudaStream_t stream) {
  const uint32_t between = calls_between.load(std::memory_order_relaxed);
  if (between == 0) return;
  Lead& lead = lead_of(stream);
  if (!lead.count(between)) [[likely]]
    return;
  if (watchdog::is_capturing(stream)) return;  // nothing runs, and an event would become part of the graph
  const auto oldest = lead.mark(stream);
  if (!oldest) return;
  // A library that makes this call inside of another one may hold locks of its own.
  if (watchdog::this_thread().depth <= 1) wait_for(*oldest);
  library().device.events.give_back(*oldest);
}

}  // namespace jitckpt::interpose::run_ahead
