// The process's one server, and the memory that is shared with it.
#pragma once
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "log_writer.h"
#include "objects.h"
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
  Objects& objects() { return objects_; }
  pid_t server();
  static pid_t server_of_process();

  // See jitckpt_proxy.h.
  cudaError_t keep(uint64_t state);
  // Number of the first record that the server reads, or has read, of those that threads have written.
  uint64_t replayed_from() const { return replayed_from_; }
  // Gives pinned memory back, as soon as no call will be made again that used it.
  void release_pinned(void* pointer);

  // False once the server is dead and can't be replaced, or the process ends; asked by threads that wait for
  // it.
  bool go_on();
  // The failure of a call that has no server any more.
  int32_t fail_for_good(Library library);

  explicit Connection(const Settings& settings);

 private:
  // The device's memory as it was when a minibatch began.
  struct Copy {
    Allocation allocation;
    void* copy;  // pinned
  };
  using Copies = std::map<uint64_t, Copy>;  // by address
  struct Image {
    uint64_t state;
    Position start;  // of the log that leads on from it
    Copies copies;
  };
  // Pinned memory that the program has freed.
  class Freed {
   public:
    void add(void* pointer, uint64_t freed) {
      std::lock_guard lock(mutex_);
      all_.push_back({pointer, freed});
    }
    // What was freed before the record of this number.
    std::vector<void*> take(uint64_t before);

   private:
    struct Piece {
      void* pointer;
      uint64_t freed;
    };
    std::mutex mutex_;
    std::vector<Piece> all_;
  };

  void forget_images(std::size_t remaining);
  cudaError_t copy_memory();
  bool recover();
  bool replay(const Image& image);

  Settings settings_;
  SharedFile log_file_;
  Mapping log_mapping_;
  Log log_;
  PinnedMemory pinned_;
  LogWriter writer_;
  Objects objects_;
  std::deque<Image> images_;  // the older one first
  Copies next_copies_;        // of the image that is being made
  int recoveries_ = 0;        // of the minibatch
  std::atomic<uint64_t> replayed_from_{0};
  std::unique_ptr<ServerProcess> server_;
  std::mutex mutex_;
  std::atomic<bool> dead_{false};
  std::string death_;
  Freed freed_pinned_;

  friend void end_connection();
  friend void forget_connection();
};

}  // namespace jitckpt::proxy::client
