// One fault on order as plain data, and its text: key=value pairs, as in `--fault` of `jitckpt run`.
#pragma once
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "softgpu/runtime/cudart.h"

namespace softgpu {

enum class FaultKind : std::uint8_t {
  sticky,             // an illegal address: the stream fails, and the device with it
  ecc,                // the same with an uncorrectable memory error
  device_lost,        // the device falls off the bus: everything fails at once
  failed_allocation,  // one cudaMalloc finds no memory
  oom,                // no cudaMalloc finds memory any more
  collective_hang,    // an NCCL call never completes on this rank
  collective_error,   // the same, and the communicator has an asynchronous error
  network_cut,        // no bytes pass between this rank and `peer`
  slow,               // the kernels or the link take `factor` times as long
  heal,               // ends what lasts, and disarms what has not happened yet
};

// What is counted to find the call that a fault waits for.
enum class FaultPoint : std::uint8_t { launch, allocation, collective };

struct Fault {
  static constexpr int every_peer = -1;

  FaultKind kind{};
  FaultPoint point{};
  std::uint64_t call = 0;     // the how manyeth call of that kind from now on; 0: at once
  std::optional<int> rank{};  // the process that it is meant for; none: whoever reads it
  int peer = every_peer;      // a rank of the job, not of a communicator
  bool link = false;          // slow: the link and not the kernels
  double factor = 1;
  bool system_error = false;  // collective_error: ncclSystemError in place of ncclRemoteError
};

// What is wrong with a text: a sentence of one line, without its full stop.
struct FaultSyntax : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The text may be any bytes. Throws FaultSyntax.
Fault parse_fault(std::string_view text);

// Such as "kind=sticky call=3"; parse_fault gives the same fault back.
std::string to_text(const Fault& fault);

// Whether it stays until it is healed, and is not over when it has happened once.
bool lasts(FaultKind kind);

// What CUDA calls the device's failure, for sticky, ecc and device_lost.
cudaError_t error_of(FaultKind kind);

const char* name_of(FaultPoint point);

}  // namespace softgpu
