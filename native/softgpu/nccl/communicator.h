// One rank's end of a communicator: its state, the order of its launches, its exchanges with the other ranks.
#pragma once
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "softgpu/nccl/link.h"
#include "softgpu/nccl/operation.h"
#include "softgpu/nccl/shared_segment.h"
#include "softgpu/runtime/fault_registry.h"

namespace softgpu::nccl {

// Nobody tells those who wait that the device is lost or that the process ends: they look so often.
constexpr std::chrono::milliseconds device_poll{100};

class Communicator {
 public:
  Communicator(int device, bool blocking) : device(device), blocking(blocking) {}

  const int device;
  const bool blocking;

  // Blocks until all ranks have come; throws a NcclFailure. What is below is valid after it.
  void join(const ncclUniqueId& id, int rank, int ranks);
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int first_reduced() const { return first_reduced_; }  // see reduction_order.h
  SharedSegment& shared() { return *shared_; }          // with the ranks of this host
  // To every rank, this one too.
  const std::vector<RankLink>& links() const { return links_; }

  // Gives each participant everybody's message, in the order of `participants` (ranks, this one among them,
  // who all call this with the same list). Blocks until they have; throws a NcclFailure when aborted.
  std::vector<HostMessage> exchange(const HostMessage& message, const std::vector<int>& participants);

  // The way to all the others, or to one; a rehearsed fault may have cut it or slowed it down.
  Disturbance disturbance() const;
  Disturbance disturbance(int rank) const;

  // What ncclCommGetAsyncError answers, and why. An error stays.
  void set_state(ncclResult_t state, const std::string& text = {});
  ncclResult_t state() const { return state_; }
  std::string state_text() const;

  // Launches of one communicator run one after the other, whatever streams they are on, as with NCCL. A
  // launch takes its number as it enters its stream's queue, and is ended once, whether it had its turn or
  // not.
  uint64_t next_launch();
  bool wait_for_turn(uint64_t launch);  // false: it must not run
  void end_launch(bool had_turn);
  // Until all have ended and what they tell other hosts is on its way, or until they are stopped.
  void wait_for_launches();

  // Of the collectives on this communicator; only the launch whose turn it is may touch them.
  uint64_t collectives = 0;
  uint64_t chunks = 0;

  // Stops the work on the device: what runs returns, what is queued does nothing. Returns when nothing runs.
  void revoke();
  // As revoke, and exchanges throw, and the connections with other hosts are closed.
  void abort();
  bool is_revoked() const { return revoked_; }
  void wait_until_stopped();
  // True when device work has to give up: revoked, the device lost, the process ending.
  bool should_stop() const;

  // After ncclCommFinalize only ncclCommDestroy and ncclCommAbort are left.
  std::atomic<bool> finalized = false;

  ncclRedOp_t add_reduction(const Reduction& reduction, ncclDataType_t type);
  void remove_reduction(ncclRedOp_t handle);
  Reduction find_reduction(ncclRedOp_t handle, ncclDataType_t type) const;

  // Buffers that the application registers. Shared memory needs no registration: only the handles are kept.
  void* add_registration();
  void remove_registration(void* handle);

 private:
  void stop(bool exchanges_too);
  void wait_for_network();  // throws a NcclFailure when aborted

  int rank_ = 0, ranks_ = 0, first_reduced_ = 0;
  std::vector<int> job_ranks_;             // of the ranks; what faults call them
  std::unique_ptr<SharedSegment> shared_;  // with the ranks of this host
  std::unique_ptr<SharedSegment> mirror_;  // of the others, if there are any
  std::unique_ptr<Network> network_;       // which fills it
  std::vector<RankLink> links_;
  std::atomic<bool> revoked_ = false, aborted_ = false;
  std::atomic<ncclResult_t> state_ = ncclInProgress;

  mutable std::mutex mutex_;  // for what follows, and for replacing shared_
  std::condition_variable changed_;
  std::string state_text_;
  uint64_t launched_ = 0, ended_ = 0;
  int running_ = 0;     // launches that have their turn: 0 or 1
  int exchanging_ = 0;  // threads in join or exchange
  std::map<int, std::pair<ncclDataType_t, Reduction>> reductions_;
  int next_reduction_ = ncclNumOps;
  std::set<void*> registrations_;
  uintptr_t next_registration_ = 1;
};

// Handles of the communicators of this process. They are never used twice, so a call on one that was
// destroyed or aborted is refused.
ncclComm_t add_handle(const std::shared_ptr<Communicator>& communicator);
std::shared_ptr<Communicator> look_up(ncclComm_t handle);     // null if there is none
std::shared_ptr<Communicator> find_any(ncclComm_t handle);    // throws a NcclFailure instead
std::shared_ptr<Communicator> find_ready(ncclComm_t handle);  // and if it is still being made, or failed
std::shared_ptr<Communicator> find_made(ncclComm_t handle);   // though it may have failed since it was made
void remove_handle(ncclComm_t handle);

}  // namespace softgpu::nccl
