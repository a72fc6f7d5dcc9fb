// Threads of the client that wait for a stream. The device answers them itself when it comes by: another
// thread that waited for it would have to be woken up twice.
#pragma once
#include <cuda_runtime_api.h>

#include <list>
#include <mutex>
#include <vector>

#include "proxy/transport/log_reader.h"

namespace jitckpt::proxy {

class Server;

class StreamWaits {
 public:
  explicit StreamWaits(Server& server) : server_(server) {}
  StreamWaits(const StreamWaits&) = delete;
  StreamWaits& operator=(const StreamWaits&) = delete;

  // By the reader, of a cudaStreamSynchronize. False if the device does not take it: then the call itself
  // says why.
  bool add(const Record& record, cudaStream_t stream);
  // A device that has failed does not come by. Takes the waits for its streams: the calls have to be made
  // after all.
  std::vector<Record> take_failed();

 private:
  struct Wait {
    StreamWaits& all;
    Record record;
    std::vector<std::byte> content;  // of the record
    bool taken = false;
  };
  static void come_by(void* wait);
  void remove(const Wait* wait);

  Server& server_;
  std::mutex mutex_;
  std::list<Wait> waits_;
};

}  // namespace jitckpt::proxy
