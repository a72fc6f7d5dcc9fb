#include "softgpu/nccl/membership.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "softgpu/nccl/bootstrap.h"
#include "softgpu/nccl/communicator.h"
#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/group.h"
#include "softgpu/runtime/enqueue.h"

namespace softgpu::nccl {
namespace {

constexpr unsigned config_magic = 0xcafebeef;

// Of a configuration only `blocking` means something here. An application built with an older nccl.h passes a
// shorter one.
bool is_blocking(const ncclConfig_t* config, bool inherited) {
  if (!config) return inherited;
  if (config->magic != config_magic || config->size < offsetof(ncclConfig_t, blocking) + sizeof(int)) {
    throw NcclFailure(ncclInvalidArgument,
                      "The ncclConfig_t is not initialized: start from NCCL_CONFIG_INITIALIZER.");
  }
  if (config->blocking == NCCL_CONFIG_UNDEF_INT) return inherited;
  if (config->blocking != 0 && config->blocking != 1) {
    throw NcclFailure(ncclInvalidArgument, "ncclConfig_t: blocking is ", config->blocking,
                      ", must be 0 or 1.");
  }
  return config->blocking == 1;
}

void check_rank(int rank, int ranks) {
  if (ranks < 1 || ranks > max_ranks) {
    throw NcclFailure(ncclInvalidArgument, "A communicator has 1 to ", max_ranks, " ranks, not ", ranks, ".");
  }
  if (rank < 0 || rank >= ranks) {
    throw NcclFailure(ncclInvalidArgument, "Rank ", rank, " is not one of 0 to ", ranks - 1, ".");
  }
}

void check_pointer(const void* pointer, const char* name) {
  if (!pointer) throw NcclFailure(ncclInvalidArgument, name, " is null.");
}

// Another thread of the application may look for the handle while this one waits for the ranks: to abort it.
void publish(ncclComm_t* made, ncclComm_t handle) { std::atomic_ref(*made).store(handle); }

ncclResult_t make(ncclComm_t* made, bool blocking, int device, std::function<void(Communicator&)> join,
                  const std::shared_ptr<Communicator>& parent = nullptr) {
  const auto communicator = std::make_shared<Communicator>(device, blocking);
  publish(made, add_handle(communicator));
  HostTask task{.work = [=] { join(*communicator); },
                .communicators = {communicator},
                .made = made,
                .blocking = blocking};
  if (parent && !blocking) task.communicators.push_back(parent);
  return submit(std::move(task));
}

std::vector<int> all_ranks(const Communicator& communicator) {
  std::vector<int> ranks;
  for (int rank = 0; rank < communicator.ranks(); ++rank) ranks.push_back(rank);
  return ranks;
}

// All ranks of the parent take part, those without a color too. Gives the ranks of this one's color in their
// new order, and the id that the first of them made.
struct Membership {
  std::vector<int> ranks;
  ncclUniqueId id;
  int rank(int old_rank) const {
    return static_cast<int>(std::find(ranks.begin(), ranks.end(), old_rank) - ranks.begin());
  }
};
Membership agree_on_split(Communicator& parent, int color, int key) {
  const std::vector<int> everybody = all_ranks(parent);
  const auto choices =
      parent.exchange({.purpose = HostMessage::Purpose::split, .color = color, .key = key}, everybody);
  Membership mine{};
  for (const int rank : everybody) {
    if (color != NCCL_SPLIT_NOCOLOR && choices[rank].color == color) mine.ranks.push_back(rank);
  }
  std::stable_sort(mine.ranks.begin(), mine.ranks.end(),
                   [&](int left, int right) { return choices[left].key < choices[right].key; });

  HostMessage message{.purpose = HostMessage::Purpose::share_id, .color = color, .key = key};
  const bool leads = !mine.ranks.empty() && mine.ranks[0] == parent.rank();
  if (leads) message.id = make_unique_id();
  const auto ids = parent.exchange(message, everybody);
  if (!mine.ranks.empty()) mine.id = ids[mine.ranks[0]].id;
  return mine;
}

}  // namespace

ncclResult_t init_rank(ncclComm_t* made, int ranks, const std::vector<ncclUniqueId>& ids, int rank,
                       const ncclConfig_t* config) {
  check_pointer(made, "The communicator to make");
  publish(made, nullptr);
  check_rank(rank, ranks);
  if (ids.empty()) throw NcclFailure(ncclInvalidArgument, "No unique id is given.");
  return make(made, is_blocking(config, true), current_device(), [=](Communicator& communicator) {
    // One listener does for all ranks of a host.
    if (rank == 0) std::for_each(ids.begin() + 1, ids.end(), dismiss);
    communicator.join(ids[0], rank, ranks);
  });
}

ncclResult_t init_all(ncclComm_t* made, int devices, const int* device_list) {
  check_pointer(made, "The array of communicators to make");
  int available = 0;
  if (cudaGetDeviceCount(&available) != cudaSuccess || devices < 1 || devices > available) {
    throw NcclFailure(ncclInvalidArgument, "ncclCommInitAll for ", devices, " devices: there are ", available,
                      ".");
  }
  std::vector<int> list;
  for (int i = 0; i < devices; ++i) {
    const int device = device_list ? device_list[i] : i;
    if (device < 0 || device >= available || std::find(list.begin(), list.end(), device) != list.end()) {
      throw NcclFailure(ncclInvalidUsage, "ncclCommInitAll: device ", device,
                        " does not exist or is given twice.");
    }
    list.push_back(device);
  }
  const ncclUniqueId id = make_unique_id();
  start_group();
  for (int rank = 0; rank < devices; ++rank) {
    make(&made[rank], true, list[rank],
         [=](Communicator& communicator) { communicator.join(id, rank, devices); });
  }
  return end_group();
}

ncclResult_t split(ncclComm_t parent_handle, int color, int key, ncclComm_t* made,
                   const ncclConfig_t* config) {
  check_pointer(made, "The communicator to make");
  publish(made, nullptr);
  const auto parent = find_ready(parent_handle);
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR) {
    throw NcclFailure(ncclInvalidArgument, "ncclCommSplit: color ", color,
                      " is negative and not NCCL_SPLIT_NOCOLOR.");
  }
  const bool blocking = is_blocking(config, parent->blocking);
  if (color == NCCL_SPLIT_NOCOLOR) {
    HostTask task{
        .work = [=] { agree_on_split(*parent, color, key); }, .communicators = {}, .blocking = blocking};
    if (!blocking) task.communicators.push_back(parent);
    return submit(std::move(task));
  }
  return make(
      made, blocking, parent->device,
      [=](Communicator& communicator) {
        const Membership membership = agree_on_split(*parent, color, key);
        communicator.join(membership.id, membership.rank(parent->rank()),
                          static_cast<int>(membership.ranks.size()));
      },
      parent);
}

ncclResult_t shrink(ncclComm_t parent_handle, const std::vector<int>& excluded, ncclComm_t* made,
                    const ncclConfig_t* config, int flags) {
  check_pointer(made, "The communicator to make");
  publish(made, nullptr);
  // After an error too: that is what it is for.
  const auto parent = flags == NCCL_SHRINK_ABORT ? find_made(parent_handle) : find_ready(parent_handle);
  if (flags != NCCL_SHRINK_DEFAULT && flags != NCCL_SHRINK_ABORT) {
    throw NcclFailure(ncclInvalidArgument, "ncclCommShrink: unknown flags ", flags, ".");
  }
  std::vector<int> staying = all_ranks(*parent);
  for (const int rank : excluded) {
    if (std::erase(staying, rank) == 0) {
      throw NcclFailure(ncclInvalidArgument, "ncclCommShrink: rank ", rank,
                        " is not in the communicator, or is given twice.");
    }
  }
  if (std::find(staying.begin(), staying.end(), parent->rank()) == staying.end()) {
    throw NcclFailure(ncclInvalidArgument, "ncclCommShrink: rank ", parent->rank(),
                      " excludes itself. Only the ranks that stay may call it.");
  }
  if (flags == NCCL_SHRINK_ABORT) parent->revoke();
  return make(
      made, is_blocking(config, parent->blocking), parent->device,
      [=](Communicator& communicator) {
        HostMessage message{.purpose = HostMessage::Purpose::shrink};
        if (staying[0] == parent->rank()) message.id = make_unique_id();
        const Membership membership{staying, parent->exchange(message, staying)[0].id};
        communicator.join(membership.id, membership.rank(parent->rank()), static_cast<int>(staying.size()));
      },
      parent);
}

}  // namespace softgpu::nccl
