#include "softgpu/nccl/progress.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "softgpu/nccl/collectives.h"
#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/point_to_point.h"
#include "softgpu/nccl/rehearsed_failure.h"

namespace softgpu::nccl {
namespace {

// Runs one after the other.
template <class Work>
class Queue {
 public:
  void add(Communicator& communicator, const Operation& operation) {
    works_.emplace_back(communicator, operation);
  }
  bool empty() const { return works_.empty(); }
  bool step() {
    if (works_.empty() || !works_.front().step()) return false;
    if (works_.front().finished()) works_.pop_front();
    return true;
  }
  const RankLink* lost_peer() const { return works_.empty() ? nullptr : works_.front().lost_peer(); }

 private:
  std::deque<Work> works_;
};

// One step of the queue as its link allows it, which may change in the meantime.
template <class Work, class Now>
bool step_over(Now disturbance, Queue<Work>& queue, const Communicator& communicator) {
  const Disturbance before = disturbance();
  if (before.cut) return false;
  bool moved = false;
  run_slowed(
      before.factor, [&] { moved = queue.step(); },
      [&] { return communicator.should_stop() || disturbance().factor <= 1; });
  return moved;
}

// The launch does not end by it, only by ncclCommAbort, as with NCCL.
void fail_without(const RankLink& lost, Communicator& communicator) {
  if (communicator.state() == ncclRemoteError) return;
  set_asynchronous_error(lost.reason_of_end());
  communicator.set_state(ncclRemoteError, lost.reason_of_end());
}

}  // namespace

void run_operations(Communicator& communicator, const std::vector<Operation>& operations) {
  const auto doomed = std::find_if(operations.begin(), operations.end(),
                                   [](const Operation& operation) { return operation.fault.has_value(); });
  if (doomed != operations.end()) return suffer(communicator, *doomed->fault);

  Queue<Collective> collectives;
  std::map<std::pair<Kind, int>, Queue<Transfer>> transfers;  // by direction and peer
  for (const Operation& operation : operations) {
    if (is_point_to_point(operation.kind)) {
      transfers[{operation.kind, operation.peer}].add(communicator, operation);
    } else {
      collectives.add(communicator, operation);
    }
  }

  Bell& bell = communicator.shared().rank(communicator.rank()).device_bell;
  while (!communicator.should_stop() && !(collectives.empty() && transfers.empty())) {
    const uint32_t heard = bell.rings();
    bool moved = step_over([&] { return communicator.disturbance(); }, collectives, communicator);
    for (auto& [key, queue] : transfers) {
      moved |=
          step_over([&, peer = key.second] { return communicator.disturbance(peer); }, queue, communicator);
    }
    std::erase_if(transfers, [](const auto& entry) { return entry.second.empty(); });
    if (moved) continue;
    const RankLink* lost = collectives.lost_peer();
    for (const auto& [key, queue] : transfers) {
      if (!lost) lost = queue.lost_peer();
    }
    // A cut network would not tell.
    if (lost && !communicator.disturbance(lost->peer()).cut) fail_without(*lost, communicator);
    bell.wait_after(heard, device_poll);
  }
}

}  // namespace softgpu::nccl
