// A thread of the program, as the proxy knows it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "communicator_table.h"
#include "log_writer.h"

namespace jitckpt::proxy::client {

struct Thread {
  int device = 0;                 // that cudaSetDevice chose
  std::size_t slot = slot_count;  // where it waits for answers; slot_count: none yet

  bool has_waited = false;              // for the device
  uint64_t answers = 0;                 // that it has waited for
  LogWriter::Place newest{nullptr, 0};  // of its newest call

  // Between ncclGroupStart and the ncclGroupEnd that belongs to it.
  int group_depth = 0;
  uint32_t grouped_calls = 0;
  std::vector<std::byte> group;
  std::vector<Exchange> exchanges;

  ~Thread();
};

Thread& this_thread();

}  // namespace jitckpt::proxy::client
