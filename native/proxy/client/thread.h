// A thread of the program, as the proxy knows it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "proxy/client/communicator_table.h"
#include "proxy/transport/log_writer.h"

namespace jitckpt::proxy::client {

// A stream that a thread has waited for: in the records since, of all threads, there is nothing but copies to
// the device by this one whose content is in the log.
class QuietStream {
 public:
  void begin(uint64_t stream, int device, uint64_t record) {
    stream_ = stream;
    device_ = device;
    newest_ = record;
  }
  void go_on(uint64_t stream, int device, uint64_t record) {
    newest_ = is(stream, device, record - 1) ? record : none;
  }
  // newest: number of the newest record of all.
  bool is(uint64_t stream, int device, uint64_t newest) const {
    return newest_ != none && newest_ == newest && stream_ == stream && device_ == device;
  }

 private:
  static constexpr uint64_t none = 0;
  uint64_t stream_ = 0, newest_ = none;
  int device_ = 0;
};

struct ProgramThread {
  int device = 0;                 // that cudaSetDevice chose
  std::size_t slot = slot_count;  // where it waits for answers; slot_count: none yet

  bool has_waited = false;              // for the device
  uint64_t answers = 0;                 // that it has waited for
  LogWriter::Place newest{nullptr, 0};  // of its newest call
  QuietStream quiet;

  // Between ncclGroupStart and the ncclGroupEnd that belongs to it.
  int group_depth = 0;
  uint32_t grouped_calls = 0;
  std::vector<std::byte> group;
  std::vector<CountedCall> exchanges;

  ~ProgramThread();
};

ProgramThread& this_thread();

}  // namespace jitckpt::proxy::client
