// NCCL's functions, as nccl.h declares them. Each checks its arguments; what they do is in the other files.
#include <dlfcn.h>
#include <nccl.h>

#include <cstring>
#include <string>
#include <vector>

#include "softgpu/nccl/bootstrap.h"
#include "softgpu/nccl/communicator.h"
#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/group.h"
#include "softgpu/nccl/membership.h"
#include "softgpu/runtime/enqueue.h"

struct ncclDevCommRequirements;
struct ncclDevComm;

namespace softgpu::nccl {
namespace {

template <class Work>
ncclResult_t run(Work work) {
  const ncclResult_t result = report([&] {
    if constexpr (std::is_void_v<decltype(work())>) {
      work();
      return ncclSuccess;
    } else {
      return work();
    }
  });
  if (result != ncclSuccess && result != ncclInProgress) spoil_group(result);
  return result;
}

ncclResult_t refuse(const char* function, const char* reason) {
  return run([&] { throw NcclFailure(ncclInvalidUsage, "softgpu has no ", function, ": ", reason); });
}

// NVIDIA's library calls some of its own functions by the linker, so that one that is preloaded before it
// sees them inside of others (ncclCommEnsureReady, ncclBcast): what must not trouble it there is seen here,
// too.
template <class Function>
Function* by_the_linker(Function* own, const char* name) {
  void* const found = dlsym(RTLD_DEFAULT, name);  // nothing in a program that has this linked into itself
  return found ? reinterpret_cast<Function*>(found) : own;
}

std::shared_ptr<Communicator> find_ready_by_the_linker(ncclComm_t handle) {
  static auto* const ask = by_the_linker(ncclCommGetAsyncError, "ncclCommGetAsyncError");
  ncclResult_t error = ncclSuccess;
  ask(handle, &error);
  return find_ready(handle);
}

template <class T>
T& result_at(T* pointer) {
  if (!pointer) throw NcclFailure(ncclInvalidArgument, "The pointer to the result is null.");
  return *pointer;
}

// Whether this rank's call reads or writes the buffer.
bool uses_send(const Operation& operation, bool is_root) {
  switch (operation.kind) {
    case Kind::broadcast:
    case Kind::scatter:
      return is_root;
    case Kind::receive:
      return false;
    default:
      return true;
  }
}
bool uses_receive(const Operation& operation, bool is_root) {
  switch (operation.kind) {
    case Kind::reduce:
    case Kind::gather:
      return is_root;
    case Kind::send:
      return false;
    default:
      return true;
  }
}

// Every collective, send and receive comes through here.
ncclResult_t call(ncclComm_t handle, cudaStream_t stream, Operation operation,
                  ncclRedOp_t reduction = ncclSum) {
  return run([&] {
    const auto communicator = find_ready(handle);
    if (communicator->is_revoked() || communicator->finalized) {
      throw NcclFailure(ncclInvalidUsage,
                        "This communicator is revoked or finalized: nothing can be launched on it.");
    }
    if (operation.type < 0 || operation.type >= ncclNumTypes) {
      throw NcclFailure(ncclInvalidArgument, "There is no data type ", static_cast<int>(operation.type), ".");
    }
    if (reduces(operation.kind))
      operation.reduction = communicator->find_reduction(reduction, operation.type);
    if (operation.peer < 0 || operation.peer >= communicator->ranks()) {
      throw NcclFailure(ncclInvalidArgument, to_text(describe(operation, 0)), ": there is no rank ",
                        operation.peer, " among ", communicator->ranks(), ".");
    }
    if (operation.count == 0 && !is_point_to_point(operation.kind)) return ncclSuccess;  // as NCCL
    const bool is_root = operation.peer == communicator->rank();
    if (operation.count != 0 && ((uses_send(operation, is_root) && !operation.send) ||
                                 (uses_receive(operation, is_root) && !operation.receive))) {
      throw NcclFailure(ncclInvalidArgument, to_text(describe(operation, 0)), ": a buffer is null.");
    }
    return submit(Call{communicator, stream, operation});
  });
}

}  // namespace
}  // namespace softgpu::nccl

using namespace softgpu::nccl;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  return run([&] { result_at(version) = NCCL_VERSION_CODE; });
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
#if NCCL_VERSION_CODE >= 23000
    case ncclTimeout:
      return "NCCL operation timed out";
#endif
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t handle) {
  // What a communicator failed of on a thread of ours is news to this one.
  const auto communicator = look_up(handle);
  std::string text = communicator ? communicator->state_text() : "";
  if (text.empty() && last_error().empty()) text = asynchronous_error();
  if (!text.empty()) last_error() = text;
  return last_error().c_str();
}

void ncclResetDebugInit() {}  // there is no log whose level could be read again

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return run([&] { result_at(id) = make_unique_id(); });
}

ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) {
  return run([&] { return init_rank(made, ranks, {id}, rank, nullptr); });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return run([&] { return init_rank(made, ranks, {id}, rank, config); });
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int ranks, int rank, int id_count, ncclUniqueId* ids,
                                      ncclConfig_t* config) {
  return run([&] {
    if (id_count < 1 || id_count > ranks) {
      throw NcclFailure(ncclInvalidArgument,
                        "ncclCommInitRankScalable takes 1 unique id to one per rank, not ", id_count, ".");
    }
    return init_rank(made, ranks, std::vector(&result_at(ids), ids + id_count), rank, config);
  });
}

ncclResult_t ncclCommInitAll(ncclComm_t* made, int devices, const int* device_list) {
  return run([&] { return init_all(made, devices, device_list); });
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  return run([&] { return split(parent, color, key, made, config); });
}

ncclResult_t ncclCommShrink(ncclComm_t parent, int* excluded, int excluded_count, ncclComm_t* made,
                            ncclConfig_t* config, int flags) {
  return run([&] {
    if (excluded_count < 1)
      throw NcclFailure(ncclInvalidArgument, "ncclCommShrink without ranks to exclude.");
    return shrink(parent, std::vector(&result_at(excluded), excluded + excluded_count), made, config, flags);
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  return run([&] {
    const auto communicator = find_ready(handle);
    if (communicator->is_revoked() || communicator->finalized.exchange(true)) {
      throw NcclFailure(ncclInvalidUsage, "This communicator is revoked, or finalized already.");
    }
    return submit(HostTask{.work = [=] { communicator->wait_for_launches(); },
                           .communicators = {communicator},
                           .blocking = communicator->blocking});
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  return run([&] {
    find_any(handle)->wait_for_launches();
    remove_handle(handle);
  });
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  return run([&] {
    const auto communicator = find_any(handle);
    remove_handle(handle);
    communicator->abort();
  });
}

ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  return run([&] {
    if (flags != NCCL_REVOKE_DEFAULT)
      throw NcclFailure(ncclInvalidArgument, "ncclCommRevoke: unknown flags ", flags, ".");
    find_made(handle)->revoke();
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  return run([&] { result_at(error) = find_any(handle)->state(); });
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  return run([&] { result_at(count) = find_ready_by_the_linker(handle)->ranks(); });
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  return run([&] { result_at(rank) = find_ready_by_the_linker(handle)->rank(); });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  return run([&] { result_at(device) = find_ready_by_the_linker(handle)->device; });
}

ncclResult_t ncclCommRegister(const ncclComm_t handle, void* buffer, size_t, void** registration) {
  return run([&] {
    result_at(static_cast<char*>(buffer));
    result_at(registration) = find_ready(handle)->add_registration();
  });
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* registration) {
  return run([&] { find_made(handle)->remove_registration(registration); });
}

ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void* buffer, size_t, ncclWindow_t* window, int) {
  return run([&] {
    result_at(static_cast<char*>(buffer));
    result_at(window) = static_cast<ncclWindow_t>(find_ready(handle)->add_registration());
  });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
  return run([&] { find_made(handle)->remove_registration(window); });
}

ncclResult_t ncclMemAlloc(void** memory, size_t size) {
  return run([&] {
    if (cudaMalloc(&result_at(memory), size) != cudaSuccess) {
      throw NcclFailure(ncclUnhandledCudaError, "ncclMemAlloc: the device has no ", size,
                        " bytes (cudaMalloc failed).");
    }
  });
}

ncclResult_t ncclMemFree(void* memory) {
  return run([&] {
    if (cudaFree(memory) != cudaSuccess) {
      throw NcclFailure(ncclUnhandledCudaError, "ncclMemFree: ", memory,
                        " is not memory of ncclMemAlloc (cudaFree failed).");
    }
  });
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* made, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t handle) {
  return run([&] {
    const auto communicator = find_ready(handle);
    if (type < 0 || type >= ncclNumTypes)
      throw NcclFailure(ncclInvalidArgument, "There is no data type ", static_cast<int>(type), ".");
    const void* value = &result_at(static_cast<char*>(scalar));
    Reduction reduction{.operation = pre_multiplied_sum};
    if (residence == ncclScalarDevice) {
      reduction.device_scalar = value;
    } else {
      std::memcpy(reduction.host_scalar.data(), value, size_of(type));
    }
    result_at(made) = communicator->add_reduction(reduction, type);
  });
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t reduction, ncclComm_t handle) {
  return run([&] { find_made(handle)->remove_reduction(reduction); });
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t communicator, cudaStream_t stream) {
  return call(communicator, stream,
              {.kind = Kind::all_reduce, .send = send, .receive = receive, .count = count, .type = type},
              reduction);
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t reduction, int root, ncclComm_t communicator, cudaStream_t stream) {
  return call(
      communicator, stream,
      {.kind = Kind::reduce, .send = send, .receive = receive, .count = count, .type = type, .peer = root},
      reduction);
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t communicator, cudaStream_t stream) {
  return call(communicator, stream,
              {.kind = Kind::reduce_scatter, .send = send, .receive = receive, .count = count, .type = type},
              reduction);
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
  return call(communicator, stream,
              {.kind = Kind::broadcast,
               .send = send,
               .receive = receive,
               .count = count,
               .type = type,
               .peer = root});
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
                       cudaStream_t stream) {
  static auto* const broadcast = by_the_linker(ncclBroadcast, "ncclBroadcast");
  return broadcast(buffer, buffer, count, type, root, communicator, stream);
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t communicator, cudaStream_t stream) {
  return call(communicator, stream,
              {.kind = Kind::all_gather, .send = send, .receive = receive, .count = count, .type = type});
}

ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type,
                          ncclComm_t communicator, cudaStream_t stream) {
  return call(communicator, stream,
              {.kind = Kind::all_to_all, .send = send, .receive = receive, .count = count, .type = type});
}

ncclResult_t ncclGather(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                        ncclComm_t communicator, cudaStream_t stream) {
  return call(
      communicator, stream,
      {.kind = Kind::gather, .send = send, .receive = receive, .count = count, .type = type, .peer = root});
}

ncclResult_t ncclScatter(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                         ncclComm_t communicator, cudaStream_t stream) {
  return call(
      communicator, stream,
      {.kind = Kind::scatter, .send = send, .receive = receive, .count = count, .type = type, .peer = root});
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return call(communicator, stream,
              {.kind = Kind::send, .send = send, .count = count, .type = type, .peer = peer});
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return call(communicator, stream,
              {.kind = Kind::receive, .receive = receive, .count = count, .type = type, .peer = peer});
}

ncclResult_t ncclGroupStart() {
  start_group();
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  return run([] { return end_group(); });
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) {
  drop_group();
  return refuse("ncclGroupSimulateEnd", "the time of a collective here says nothing about a GPU's.");
}

ncclResult_t ncclDevCommCreate(ncclComm_t, const ncclDevCommRequirements*, ncclDevComm*) {
  return refuse("ncclDevCommCreate", "its kernels cannot communicate by themselves.");
}

ncclResult_t ncclDevCommDestroy(ncclComm_t, const ncclDevComm*) {
  return refuse("ncclDevCommDestroy", "its kernels cannot communicate by themselves.");
}

}  // extern "C"
