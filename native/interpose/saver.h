// The thread that runs the save function.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <memory>
#include <string>

#include "watchdog/gil.h"

namespace jitckpt::interpose {

class Saver {
 public:
  using Save = int (*)(const char* order);

  // Starts the save. device: the one that the job works on, -1 if it is not known.
  static std::shared_ptr<Saver> start(Save save, std::string order, const watchdog::Gil& gil, int device);

  bool entered() const { return entered_; }  // it has the GIL
  bool done() const { return done_; }
  int result() const { return result_; }  // of the save function, once done
  pid_t thread_id() const { return thread_id_; }

 private:
  void run(Save save, const std::string& order, const watchdog::Gil& gil, int device);

  std::atomic<bool> entered_{false}, done_{false};
  std::atomic<int> result_{-1};
  std::atomic<pid_t> thread_id_{0};
};

}  // namespace jitckpt::interpose
