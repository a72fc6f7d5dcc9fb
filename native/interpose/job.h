// A registered job: from jitckpt_start to jitckpt_stop.
#pragma once
#include <memory>

#include "interpose/control.h"
#include "interpose/jitckpt.h"
#include "interpose/library.h"
#include "watchdog/poller.h"

namespace jitckpt::interpose {

class Job {
 public:
  Job(const jitckpt_config_t& config, LibraryState& library);
  void start();
  // False if a thread of the job is stuck in a device call: the job must not be destroyed.
  bool stop();

  // A call that moves data between ranks has failed. Where a save is to be expected for it, it comes before
  // the application hears of the error: returns when the save is over, or none was ordered.
  void call_failed(const char* name, ncclResult_t result);

  // A communicator has an asynchronous error. True if the application should not know of it (yet).
  bool communicator_failed(ncclComm_t communicator, ncclResult_t result);

  // Waits while the host is too many steps ahead of the device.
  void wait_for_device();

  Control& control() { return control_; }

 private:
  const uint32_t max_ahead_;
  LibraryState& library_;
  watchdog::Poller poller_;
  Control control_;
};

}  // namespace jitckpt::interpose
