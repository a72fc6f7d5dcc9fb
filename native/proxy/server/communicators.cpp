#include <utility>

#include "proxy/server/failure.h"
#include "proxy/server/server.h"
#include "proxy/server/services.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

// NCCL's configuration, with its texts where they lie here.
ncclConfig_t* unpacked(wire::Configuration& packed) {
  if (!packed.given) return nullptr;
  auto* const undefined = reinterpret_cast<const char*>(NCCL_CONFIG_UNDEF_PTR);
  packed.communicator_name[sizeof packed.communicator_name - 1] = '\0';
  packed.network_name[sizeof packed.network_name - 1] = '\0';
  packed.values.commName = packed.has_communicator_name ? packed.communicator_name : undefined;
  packed.values.netName = packed.has_network_name ? packed.network_name : undefined;
  // Who asks for it waits in a thread of its own here, and a replay has to know that it is made.
  packed.values.blocking = 1;
  return &packed.values;
}

}  // namespace

int32_t serve_make_id(Request& request) {
  // In a replay it is one that nobody knows: the new server has made another one for those that do.
  if (!request.waited_for) return ncclSuccess;
  return real::ncclGetUniqueId(&request.answer<wire::make_id_answer>().id);
}

int32_t serve_renew_id(Request& request) {
  const auto arguments = request.arguments<wire::renew_id>();
  request.server.renewed_ids.add(arguments.key, arguments.id);
  return ncclSuccess;
}

int32_t serve_init_communicator(Request& request) {
  auto arguments = request.arguments<wire::init_communicator>();
  // Who meets nobody needs no id that others know, and one that was used before is worth nothing.
  if (arguments.ranks == 1)
    real::ncclGetUniqueId(&arguments.id);
  else
    arguments.id = request.server.renewed_ids.newest(arguments.id);
  ncclComm_t made = nullptr;
  const ncclResult_t result = real::ncclCommInitRankConfig(&made, arguments.ranks, arguments.id,
                                                           arguments.rank, unpacked(arguments.configuration));
  if (result == ncclSuccess) request.server.communicators.add(arguments.communicator, made);
  return result;
}

int32_t serve_split_communicator(Request& request) {
  auto arguments = request.arguments<wire::split_communicator>();
  ncclComm_t made = nullptr;
  const ncclResult_t result =
      real::ncclCommSplit(request.server.communicators.find(arguments.parent), arguments.color, arguments.key,
                          &made, unpacked(arguments.configuration));
  if (result != ncclSuccess || !made) return result;
  request.server.communicators.add(arguments.communicator, made);
  auto& answer = request.answer<wire::split_communicator_answer>();
  const ncclResult_t ranked = real::ncclCommUserRank(made, &answer.rank);
  return ranked == ncclSuccess ? real::ncclCommCount(made, &answer.size) : ranked;
}

int32_t serve_make_reduction(Request& request) {
  auto arguments = request.arguments<wire::make_reduction>();
  void* const scalar = arguments.residence == ncclScalarDevice
                           ? reinterpret_cast<void*>(arguments.device_scalar)
                           : arguments.host_scalar;
  ncclRedOp_t made = ncclSum;
  const ncclResult_t result =
      real::ncclRedOpCreatePreMulSum(&made, scalar, arguments.type, arguments.residence,
                                     request.server.communicators.find(arguments.communicator));
  if (result == ncclSuccess) request.server.reductions.add(arguments.reduction, made);
  return result;
}

int32_t serve_register_buffer(Request& request) {
  const auto arguments = request.arguments<wire::register_buffer>();
  void* made = nullptr;
  const ncclResult_t result =
      real::ncclCommRegister(request.server.communicators.find(arguments.communicator),
                             reinterpret_cast<void*>(arguments.address), arguments.bytes, &made);
  if (result == ncclSuccess) request.server.registrations.add(arguments.registration, made);
  return result;
}

int32_t serve_deregister_buffer(Request& request) {
  const auto arguments = request.arguments<wire::deregister_buffer>();
  const ncclResult_t result =
      real::ncclCommDeregister(request.server.communicators.find(arguments.communicator),
                               request.server.registrations.find(arguments.registration));
  if (result == ncclSuccess) request.server.registrations.remove(arguments.registration);
  return result;
}

int32_t serve_collective_group(Request& request) {
  const auto arguments = request.arguments<wire::collective_group>();
  auto rest = request.rest<wire::collective_group>();
  int32_t failed = real::ncclGroupStart();
  for (uint32_t number = 0; number < arguments.calls && failed == ncclSuccess; ++number) {
    wire::GroupedCall header;
    if (rest.size() < sizeof header)
      throw CallFailure(ncclInternalError, "a group's record is shorter than it says");
    std::memcpy(&header, rest.data(), sizeof header);
    rest = rest.subspan(sizeof header);
    if (header.call >= static_cast<uint16_t>(Call::count) || header.bytes > rest.size() ||
        header.call == static_cast<uint16_t>(Call::collective_group) ||
        services[header.call].library != Library::nccl || services[header.call].runs != Runs::tells)
      throw CallFailure(ncclInternalError, "a group's record holds a call that can't be in a group");
    Request grouped{request.server, rest.first(header.bytes), request.slot};
    failed = services[header.call].serve(grouped);
    const std::size_t padded = (header.bytes + record_alignment - 1) / record_alignment * record_alignment;
    rest = rest.subspan(std::min(padded, rest.size()));
  }
  const int32_t ended = real::ncclGroupEnd();
  return failed != ncclSuccess ? failed : ended;
}

}  // namespace jitckpt::proxy
