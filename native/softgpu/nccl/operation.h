// One call of a collective, a send or a receive, as plain data.
#pragma once
#include <nccl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "softgpu/runtime/fault.h"

namespace softgpu::nccl {

enum class Kind : uint32_t {
  all_reduce,
  reduce,
  reduce_scatter,
  broadcast,
  all_gather,
  all_to_all,
  gather,
  scatter,
  send,
  receive,
};

inline bool reduces(Kind kind) { return kind <= Kind::reduce_scatter; }
inline bool has_root(Kind kind) {
  return kind == Kind::reduce || kind == Kind::broadcast || kind == Kind::gather || kind == Kind::scatter;
}
inline bool is_point_to_point(Kind kind) { return kind == Kind::send || kind == Kind::receive; }

// ncclSum .. ncclAvg, or pre_multiplied_sum with the scalar that each rank multiplies its own input by.
constexpr ncclRedOp_t pre_multiplied_sum = ncclNumOps;
struct Reduction {
  ncclRedOp_t operation = ncclSum;
  const void* device_scalar = nullptr;  // read when the collective runs; if null, the copy below
  std::array<std::byte, 8> host_scalar{};
};

struct Operation {
  Kind kind{};
  const void* send = nullptr;  // device addresses
  void* receive = nullptr;
  size_t count = 0;  // elements, as the call counts them
  ncclDataType_t type = ncclInt8;
  Reduction reduction{};
  int peer = 0;                  // the root, or the other end of a send or receive
  std::optional<Fault> fault{};  // what was ordered to happen to it
};

// Of an operation, what has to be the same on all ranks. Lies in shared memory.
struct Descriptor {
  uint64_t number;  // the how manyeth collective of its communicator, from 1
  uint64_t count;
  Kind kind;
  uint32_t type;
  uint32_t reduction;
  int32_t peer;
};

// A call that nobody refuses has a type from size_of's list.
size_t size_of(ncclDataType_t type);
const char* name_of(ncclDataType_t type);

Descriptor describe(const Operation& operation, uint64_t number);

// Like NCCL, looks at bytes and not at types where nothing is computed.
bool match(const Descriptor& ours, const Descriptor& theirs);
bool match_transfer(const Descriptor& send, const Descriptor& receive);

// Such as "ncclAllReduce(count 10, float32, sum)".
std::string to_text(const Descriptor& descriptor);

}  // namespace softgpu::nccl
