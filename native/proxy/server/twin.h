// The server's thread for those calls of one thread of the client that may block: while it waits for the
// device, the reader goes on with the calls of all other threads.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "log_reader.h"

namespace jitckpt::proxy {

class Server;

class Twin {
 public:
  explicit Twin(Server& server);
  ~Twin();  // waits until the call that it makes has returned
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  void take_over(const Record& record);

 private:
  struct Call {
    Record record;
    std::vector<std::byte> content;
  };
  void run();

  Server& server_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> calls_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace jitckpt::proxy
