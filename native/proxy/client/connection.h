// The process's one server, and the memory that is shared with it.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "errors.h"
#include "log_writer.h"
#include "pinned_memory.h"
#include "server_process.h"
#include "settings.h"

namespace jitckpt::proxy::client {

class Connection {
 public:
  // The one of this process, which the first call starts the server for. Null if there is none (any more):
  // the library's failure is noted then, and is `result`.
  static Connection* get(Library library, int32_t& result);

  // Whether the process may ask for a server at all: false in a forked child and while the process ends.
  static bool usable();

  LogWriter& writer() { return writer_; }
  const Log& log() const { return log_; }
  PinnedMemory& pinned() { return pinned_; }
  std::chrono::microseconds spin_time() const { return settings_.spin_time; }
  pid_t server() const { return server_->id(); }

  // False once the server is dead, or the process ends; asked by threads that wait for it.
  bool go_on();
  // The failure of a call that has no server any more.
  int32_t fail_for_good(Library library);

  explicit Connection(const Settings& settings);

 private:
  Settings settings_;
  SharedFile log_file_;
  Mapping log_mapping_;
  Log log_;
  PinnedMemory pinned_;
  LogWriter writer_;
  std::unique_ptr<ServerProcess> server_;
  std::mutex mutex_;
  std::atomic<bool> dead_{false};
  std::string death_;

  friend void end_connection();
  friend void forget_connection();
};

}  // namespace jitckpt::proxy::client
