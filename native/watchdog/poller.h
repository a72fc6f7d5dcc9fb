// The thread that asks the device what has finished. Nothing else of ours waits for its answers: a query may
// get stuck behind another thread's cudaDeviceSynchronize, and a hang must be found all the same.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "watchdog/awake_clock.h"
#include "watchdog/event_pool.h"
#include "watchdog/network_profile.h"
#include "watchdog/network_use.h"
#include "watchdog/pieces_in_turn.h"
#include "watchdog/rest.h"
#include "watchdog/step_markers.h"
#include "watchdog/step_pace.h"
#include "watchdog/streams.h"
#include "watchdog/watch_list.h"

namespace jitckpt::watchdog {

// What the library knows of the device's work.
struct DeviceWork {
  Streams streams;
  EventPool events;
  EventPool times{cudaEventDefault};
  WatchList watches;
  NetworkProfile network;
  NetworkUse use;  // of the network, now; not told while it is profiled
  PiecesInTurn in_turn;
  StepMarkers markers;
  AwakeClock clock;
};

class Poller {
 public:
  // look_every: so long work may have finished before this is known, where nobody waits for it. Each look
  // takes a core from the host for some 50 us, most of which is waking up.
  Poller(DeviceWork& work, std::chrono::milliseconds look_every) : work_(work), look_every_(look_every) {}

  void start();
  // False if the thread is stuck in a query: it is then left behind, and must find this object if it ever
  // comes back.
  bool stop();

  // While a save is ordered: look every 2 ms and at all streams.
  void look_closely(bool closely);
  // What was seen since look_closely(true), if the device has answered at all.
  std::optional<Observation> observation() const;

  // Device calls that nobody should wait for.
  void run(std::function<void()> task);

  // Asks the device which step markers it has passed, and tells whoever waits for that; any thread. Says
  // whether it has passed any.
  bool look_at_markers();

  // Seconds that the device takes for a step, once that is known.
  std::optional<double> step_seconds() const;

  // Waits until the device may have passed a step marker, or interrupt() was called. While somebody waits the
  // poller looks again before the device has done half of the steps that it has. seen: of progress(), read
  // before the condition was found wanting.
  uint32_t progress() const { return progress_.load(std::memory_order_acquire); }
  void wait_for_progress(uint32_t seen);
  void interrupt();

  pid_t thread_id() const { return thread_id_; }

 private:
  void loop();
  void look(bool closely);
  std::chrono::microseconds pause(bool closely) const;

  DeviceWork& work_;
  const std::chrono::microseconds look_every_;
  std::thread thread_;
  std::atomic<pid_t> thread_id_{0};
  std::atomic<uint32_t> progress_{0};
  std::atomic<uint32_t> waiting_{0};
  bool uses_device_ = false;  // the poller's thread

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool closely_ = false;
  uint64_t order_ = 0;                    // counts look_closely(true)
  std::chrono::microseconds pausing_{0};  // how long the present pause is to take
  StepPace pace_;
  bool stopping_ = false;
  bool ended_ = false;
  std::optional<Observation> observation_;
  std::vector<std::function<void()>> tasks_;
};

}  // namespace jitckpt::watchdog
