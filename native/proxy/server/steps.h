// Optimizer steps in which parameters and optimizer state (the places) stay on the device: when they may
// begin, and whether what lies there is the state after one. docs/how-it-works/transparent.md has the rules.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "proxy/transport/log_reader.h"
#include "proxy/transport/together.h"
#include "proxy/wire.h"

namespace jitckpt::proxy {

class Server;

// What stays when a server drops all that it has made.
struct HeldState {
  bool intact = false;  // the places hold the state after step `ended`
  uint64_t ended = 0;
  std::vector<wire::Place> places;
  bool changed =
      false;  // calls behind that step may have written to them; the next step is right all the same

  // A block that holds some of it is gone.
  void lose(uint64_t address, uint64_t bytes);
};

class Steps {
 public:
  explicit Steps(Server& server) : server_(server) {}

  // By the reader, in the log's order. `begin` makes the image, unless it is whole, and waits until all ranks
  // are ready; if the server is stopped before, the step has not begun.
  cudaError_t begin(const wire::begin_step& begins, const std::vector<wire::Range>& image);
  void end(uint64_t step, std::vector<wire::Place> places);
  // A replay begins with a state.
  void restore(const wire::restore_state& state, std::vector<wire::Place> places);

  // Whether the step has begun that is being read; its calls are made even if the server is stopped.
  bool inside() const { return inside_; }
  bool makes(const Record& record) const { return inside_ && record.slot == slot_; }
  // Whether the call belongs to a step that the restored state has behind it.
  bool skips(const Record& record) const;
  // Within that step: what the device holds is what was there behind it.
  bool skips() const { return skips_; }
  // The server was stopped while it was ready for the step.
  bool is_ready_for(uint64_t step) const { return ready_for_ == step && step != 0; }
  // The server has been stopped: from here on it does not get ready, whatever the device still does.
  void stop();
  // That step begins all the same.
  void begin_stopped();

  HeldState held() {
    std::lock_guard lock(mutex_);
    return held_;
  }
  void hold(HeldState held) {
    std::lock_guard lock(mutex_);
    held_ = std::move(held);
  }
  // The state may be written to from here on.
  void change() {
    std::lock_guard lock(mutex_);
    held_.changed = true;
  }
  // Nothing is written to any more.
  void spare() { spares_ = true; }
  // A block of the device's memory is gone.
  void lose(uint64_t address, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    held_.lose(address, bytes);
  }

 private:
  bool is_whole(uint64_t step);
  cudaError_t make_image(const wire::begin_step& begins, const std::vector<wire::Range>& image);
  void image_is_copied();
  bool is_ready(uint64_t step);
  bool may_begin(uint64_t step);
  cudaError_t look_for_failures();
  void load();

  Server& server_;
  std::unique_ptr<Together> together_;
  bool looked_ = false;  // for it
  std::atomic<bool> inside_{false};
  bool skips_ = false, leaves_out_ = false, spares_ = false;
  uint32_t slot_ = 0;  // of the thread that makes the step
  std::atomic<uint64_t> ready_for_{0};
  uint64_t met_ = 0;  // the newest step for which all ranks were ready, as seen here
  // The image that is being copied, and on how many devices still.
  uint64_t image_ = 0;
  std::atomic<std::size_t> devices_left_{0};
  std::set<int32_t> devices_;  // of it
  std::mutex coming_, mutex_;
  HeldState held_;
  wire::restore_state restored_{};  // state 0: none
  uint64_t loaded_ = 0;             // of its places
};

// Copies what the client wants of a device at rest. False if that fails.
bool copy_to_host(const wire::Range* ranges, uint64_t count);

}  // namespace jitckpt::proxy
