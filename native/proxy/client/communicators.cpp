// NCCL's calls that need thought: groups, and what makes communicators.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

#include "proxy/client/capture.h"
#include "proxy/client/connection.h"
#include "proxy/client/requests.h"
#include "proxy/client/thread.h"
#include "proxy_by_hand.h"

namespace jitckpt::proxy::client {

uint64_t element_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

uint64_t ranks_of(ncclComm_t communicator) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::nccl, result);
  return connection ? connection->communicators().ranks_of(number_of(communicator)) : 0;
}

}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

namespace {

ncclResult_t failed(ncclResult_t result, const char* text) {
  return ncclResult_t(fail(Library::nccl, result, text));
}

bool put_text(char* to, std::size_t capacity, const char* from) {
  if (!from || from == reinterpret_cast<const char*>(NCCL_CONFIG_UNDEF_PTR)) return false;
  std::strncpy(to, from, capacity - 1);
  return true;
}

wire::Configuration packed(const ncclConfig_t* configuration) {
  wire::Configuration packed{};
  packed.values = NCCL_CONFIG_INITIALIZER;
  if (!configuration) return packed;
  // A program of another NCCL version has a shorter or longer one; what is in front is the same in all.
  std::memcpy(&packed.values, configuration, std::min(configuration->size, sizeof packed.values));
  packed.given = 1;
  packed.has_communicator_name =
      put_text(packed.communicator_name, sizeof packed.communicator_name, packed.values.commName);
  packed.has_network_name = put_text(packed.network_name, sizeof packed.network_name, packed.values.netName);
  packed.values.commName = packed.values.netName = nullptr;
  return packed;
}

ncclResult_t refuse_in_group() {
  return failed(ncclInvalidUsage,
                "the device proxy makes no communicators between ncclGroupStart and ncclGroupEnd");
}

// The thread's newest question has made it.
void note_communicator(CommunicatorEntry made) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::nccl, result);
  if (!connection) return;
  made.born = this_thread().newest.sequence;
  made.device = this_thread().device;
  connection->communicators().add(made);
}

// While the thread waits for the other ranks of a communicator.
class Awaited {
 public:
  explicit Awaited(const CommunicatorEntry& communicator) : handle_(communicator.handle) {
    int32_t result = 0;
    connection_ = Connection::get(Library::nccl, result);
    if (connection_) connection_->communicators().begin(communicator);
  }
  ~Awaited() {
    if (connection_) connection_->communicators().end_waiting(handle_);
  }
  Awaited(const Awaited&) = delete;
  Awaited& operator=(const Awaited&) = delete;

 private:
  Connection* connection_ = nullptr;
  uint64_t handle_;
};

CommunicatorTable::Split begin_split(uint64_t parent) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::nccl, result);
  return connection ? connection->communicators().begin_split(parent) : CommunicatorTable::Split{no_key, 0};
}

}  // namespace

ncclResult_t ncclGroupStart() {
  ++this_thread().group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  ProgramThread& thread = this_thread();
  if (thread.group_depth == 0) return failed(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart.");
  if (--thread.group_depth > 0) return ncclSuccess;
  if (int32_t captured = 0; capture_group(captured)) return ncclResult_t(captured);
  if (thread.grouped_calls == 0) return ncclSuccess;
  const wire::collective_group arguments{std::exchange(thread.grouped_calls, 0)};
  const auto result = tell<ncclResult_t>(Call::collective_group, arguments, thread.group);
  thread.group.clear();
  const auto exchanges = std::exchange(thread.exchanges, {});
  if (result == ncclSuccess) count(exchanges);
  return result;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (!id) return no_place<ncclResult_t>();
  wire::make_id_answer answer;
  const auto result = ask<ncclResult_t>(Call::make_id, wire::make_id{}, answer, {}, Question::makes_id);
  if (result == ncclSuccess) *id = answer.id;
  return result;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* configuration) {
  if (!made) return no_place<ncclResult_t>();
  if (this_thread().group_depth > 0) return refuse_in_group();
  const uint64_t handle = new_handle();
  const wire::init_communicator arguments{handle, ranks, rank, id, packed(configuration)};
  const CommunicatorEntry communicator{.handle = handle,
                                       .key = key_of(id),
                                       .parent = no_key,
                                       .rank = rank,
                                       .size = ranks,
                                       .configuration = arguments.configuration};
  const Awaited awaited(communicator);
  const auto result = ask<ncclResult_t>(Call::init_communicator, arguments);
  if (result == ncclSuccess) note_communicator(communicator);
  *made = result == ncclSuccess ? reinterpret_cast<ncclComm_t>(handle) : nullptr;
  return result;
}

ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* made,
                           ncclConfig_t* configuration) {
  if (!made) return no_place<ncclResult_t>();
  if (this_thread().group_depth > 0) return refuse_in_group();
  const uint64_t handle = new_handle();
  const wire::split_communicator arguments{number_of(parent), handle, color, key, packed(configuration)};
  wire::split_communicator_answer answer;
  const auto split = begin_split(number_of(parent));
  const auto result = ask<ncclResult_t>(Call::split_communicator, arguments, answer);
  const bool member = result == ncclSuccess && color != NCCL_SPLIT_NOCOLOR;
  if (member) {
    note_communicator({.handle = handle,
                       .key = key_of_split(split.parent, split.number, color),
                       .parent = split.parent,
                       .split = split.number,
                       .color = color,
                       .order = key,
                       .rank = answer.rank,
                       .size = answer.size,
                       .configuration = arguments.configuration});
  }
  *made = member ? reinterpret_cast<ncclComm_t>(handle) : nullptr;
  return result;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* made, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t communicator) {
  if (!made || !scalar) return no_place<ncclResult_t>();
  static std::atomic<int> newest{1 << 30};  // far from NCCL's own, and from the numbers of kernels
  const int reduction = ++newest;
  wire::make_reduction arguments{
      number_of(communicator), static_cast<uint64_t>(reduction), 0, {}, type, residence};
  if (residence == ncclScalarDevice) {
    arguments.device_scalar = reinterpret_cast<uint64_t>(scalar);
  } else {
    std::memcpy(arguments.host_scalar, scalar, element_bytes(type));
  }
  const auto result = ask<ncclResult_t>(Call::make_reduction, arguments);
  if (result != ncclSuccess) return result;
  note_object(arguments.reduction, Call::make_reduction, bytes_of(arguments));
  *made = static_cast<ncclRedOp_t>(reduction);
  return result;
}

ncclResult_t ncclCommRegister(const ncclComm_t communicator, void* buffer, size_t bytes, void** made) {
  if (!made) return no_place<ncclResult_t>();
  const wire::register_buffer arguments{number_of(communicator), new_handle(),
                                        reinterpret_cast<uint64_t>(buffer), bytes};
  const auto result = ask<ncclResult_t>(Call::register_buffer, arguments);
  if (result != ncclSuccess) return result;
  note_object(arguments.registration, Call::register_buffer, bytes_of(arguments));
  *made = reinterpret_cast<void*>(arguments.registration);
  return result;
}

ncclResult_t ncclCommDeregister(const ncclComm_t communicator, void* registration) {
  const wire::deregister_buffer arguments{number_of(communicator), reinterpret_cast<uint64_t>(registration)};
  const auto result = ask<ncclResult_t>(Call::deregister_buffer, arguments);
  if (result == ncclSuccess) note_end(arguments.registration);
  return result;
}
