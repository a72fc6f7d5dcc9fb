#include "softgpu/nccl/communicator.h"

#include <algorithm>
#include <cstdlib>

#include "softgpu/nccl/bootstrap.h"
#include "softgpu/nccl/failure.h"
#include "softgpu/nccl/host.h"
#include "softgpu/nccl/reduction_order.h"
#include "softgpu/runtime/enqueue.h"

namespace softgpu::nccl {
namespace {

// Counts a thread that abort() has to wait for.
class Counted {
 public:
  Counted(std::mutex& mutex, std::condition_variable& changed, int& count)
      : mutex_(mutex), changed_(changed), count_(count) {
    const std::lock_guard lock(mutex_);
    ++count_;
  }
  ~Counted() {
    const std::lock_guard lock(mutex_);
    --count_;
    changed_.notify_all();
  }

 private:
  std::mutex& mutex_;
  std::condition_variable& changed_;
  int& count_;
};

// Never destroyed: streams may still run launches while the process exits.
struct Handles {
  std::mutex mutex;
  std::map<uintptr_t, std::shared_ptr<Communicator>> communicators;
  uintptr_t next = 0x10;
};
Handles& handles() {
  static auto* all = new Handles;
  return *all;
}

int64_t bus_id_of(int device) {
  char text[32] = "";
  cudaDeviceGetPCIBusId(text, sizeof text, device);
  std::string digits = text;
  std::erase_if(digits, [](char symbol) { return symbol == ':' || symbol == '.'; });
  return std::strtoll(digits.c_str(), nullptr, 16);
}

// NCCL's rule and words. The ranks on other devices would wait for those that
// leave here: they are told too.
void refuse_shared_devices(int rank, const std::vector<HostMessage>& joined) {
  const int ranks = static_cast<int>(joined.size());
  const auto on_one_device = [&](int first, int second) {
    return joined[first].host == joined[second].host && joined[first].bus_id == joined[second].bus_id;
  };
  for (int other = 0; other < ranks; ++other) {
    if (other == rank || !on_one_device(other, rank)) continue;
    throw NcclFailure(ncclInvalidUsage, "Duplicate GPU detected : rank ", rank, " and rank ", other,
                      " both on CUDA device ", std::hex, joined[rank].bus_id);
  }
  for (int first = 0; first < ranks; ++first) {
    for (int second = first + 1; second < ranks; ++second) {
      if (!on_one_device(first, second)) continue;
      throw NcclFailure(ncclRemoteError, "Rank ", first, " and rank ", second,
                        " are on one device, so this communicator can't be made.");
    }
  }
}

}  // namespace

void Communicator::join(const ncclUniqueId& id, int rank, int ranks) {
  {
    const Counted counted(mutex_, changed_, exchanging_);
    Meeting meeting = nccl::join(id, rank, ranks, aborted_);
    auto shared = std::make_unique<SharedSegment>(meeting.memory, ranks);
    std::unique_ptr<SharedSegment> mirror;
    std::unique_ptr<Network> network;
    std::vector<bool> is_remote(ranks);
    for (const RemotePeer& peer : meeting.remote) is_remote[peer.rank] = true;
    if (!meeting.remote.empty()) {
      mirror = std::make_unique<SharedSegment>(ranks);
      network = std::make_unique<Network>(rank, *shared, *mirror, std::move(meeting.remote));
    }
    const std::lock_guard lock(mutex_);
    shared_ = std::move(shared);
    mirror_ = std::move(mirror);
    network_ = std::move(network);
    rank_ = rank;
    ranks_ = ranks;
    first_reduced_ = nccl::first_reduced(rank, ranks);
    for (int other = 0; other < ranks; ++other) {
      if (is_remote[other]) {
        links_.emplace_back(*mirror_, rank, other, network_.get());
      } else {
        links_.emplace_back(*shared_, rank, other, nullptr);
      }
    }
  }
  std::vector<int> everybody;
  for (int i = 0; i < ranks; ++i) everybody.push_back(i);
  const HostMessage mine{.purpose = HostMessage::Purpose::join,
                         .key = job_rank().value_or(rank),
                         .host = this_host(),
                         .bus_id = bus_id_of(device)};
  const auto messages = exchange(mine, everybody);
  refuse_shared_devices(rank, messages);
  for (const HostMessage& message : messages) job_ranks_.push_back(message.key);
  const Counted counted(mutex_, changed_, exchanging_);
  wait_for_network();  // now that it is known where the others are
}

std::vector<HostMessage> Communicator::exchange(const HostMessage& message,
                                                const std::vector<int>& participants) {
  const Counted counted(mutex_, changed_, exchanging_);
  wait_for_network();
  RankState& mine = shared_->rank(rank_);
  const uint64_t round = mine.host_rounds;
  mine.host_messages[round % 2] = message;
  mine.host_rounds.store(round + 1);
  for (const int rank : participants) {
    links_[rank].tell({.counter = News::Counter::host_rounds, .bytes = sizeof message, .value = round + 1});
  }

  std::vector<HostMessage> messages;
  for (const int rank : participants) {
    const RankLink& other = links_[rank];
    for (;;) {
      const uint32_t heard = mine.host_bell.rings();
      if (aborted_) throw NcclFailure(ncclInternalError, "The communicator was aborted while its ranks met.");
      const bool has_ended = other.has_ended();  // before the last look at what it told
      if (other.host_rounds() > round) break;
      if (has_ended) throw NcclFailure(ncclRemoteError, other.reason_of_end());
      mine.host_bell.wait_after(heard, std::chrono::hours(1));
    }
    messages.push_back(other.host_message(round));
    if (messages.back().purpose != message.purpose) {
      throw NcclFailure(ncclInvalidUsage, "Rank ", rank,
                        " calls another of ncclCommSplit and ncclCommShrink than rank ", rank_,
                        " does. All ranks have to call the same.");
    }
  }
  return messages;
}

Disturbance Communicator::disturbance() const {
  Disturbance worst;
  if (!links_are_disturbed()) return worst;
  for (int rank = 0; rank < static_cast<int>(job_ranks_.size()); ++rank) {
    const Disturbance one = disturbance(rank);
    worst = {worst.cut || one.cut, std::max(worst.factor, one.factor)};
  }
  return worst;
}

Disturbance Communicator::disturbance(int rank) const {
  return links_are_disturbed() && rank != rank_ ? disturbance_to(job_ranks_[rank]) : Disturbance{};
}

void Communicator::wait_for_network() {
  std::unique_lock lock(mutex_);
  while (!aborted_ && disturbance().cut) changed_.wait_for(lock, device_poll);
  if (aborted_) throw NcclFailure(ncclInternalError, "The communicator was aborted while its ranks met.");
}

void Communicator::set_state(ncclResult_t state, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (state_ != ncclSuccess && state_ != ncclInProgress) return;
  state_text_ = text;
  state_ = state;
}

std::string Communicator::state_text() const {
  const std::lock_guard lock(mutex_);
  return state_text_;
}

uint64_t Communicator::next_launch() {
  const std::lock_guard lock(mutex_);
  return launched_++;
}

bool Communicator::wait_for_turn(uint64_t launch) {
  std::unique_lock lock(mutex_);
  while (ended_ != launch && !should_stop()) changed_.wait_for(lock, device_poll);
  if (should_stop()) return false;
  ++running_;
  return true;
}

void Communicator::end_launch(bool had_turn) {
  const std::lock_guard lock(mutex_);
  if (had_turn) --running_;
  ++ended_;
  changed_.notify_all();
}

void Communicator::wait_for_launches() {
  std::unique_lock lock(mutex_);
  while (ended_ != launched_ && !should_stop()) changed_.wait_for(lock, device_poll);
  lock.unlock();
  if (network_) network_->flush([this] { return should_stop(); }, device_poll);
}

void Communicator::wait_until_stopped() {
  std::unique_lock lock(mutex_);
  while (!should_stop()) changed_.wait_for(lock, device_poll);
}

void Communicator::stop(bool exchanges_too) {
  std::unique_lock lock(mutex_);
  revoked_ = true;
  if (exchanges_too) aborted_ = true;
  changed_.notify_all();
  if (shared_) {
    shared_->rank(rank_).device_bell.ring();
    shared_->rank(rank_).host_bell.ring();
  }
  changed_.wait(lock, [&] { return running_ == 0 && (!exchanges_too || exchanging_ == 0); });
  if (exchanges_too && network_) network_->stop();
}

void Communicator::revoke() { stop(false); }
void Communicator::abort() { stop(true); }
bool Communicator::should_stop() const { return revoked_ || !device_usable(device); }

ncclRedOp_t Communicator::add_reduction(const Reduction& reduction, ncclDataType_t type) {
  const std::lock_guard lock(mutex_);
  const int handle = next_reduction_++;
  reductions_[handle] = {type, reduction};
  return static_cast<ncclRedOp_t>(handle);
}

void Communicator::remove_reduction(ncclRedOp_t handle) {
  const std::lock_guard lock(mutex_);
  if (reductions_.erase(handle) == 0) {
    throw NcclFailure(ncclInvalidArgument, "Reduction ", handle,
                      " was not made by ncclRedOpCreatePreMulSum on this "
                      "communicator, or is destroyed already.");
  }
}

Reduction Communicator::find_reduction(ncclRedOp_t handle, ncclDataType_t type) const {
  if (handle >= 0 && handle < ncclNumOps) return {.operation = handle};
  const std::lock_guard lock(mutex_);
  const auto found = reductions_.find(handle);
  if (found == reductions_.end()) {
    throw NcclFailure(ncclInvalidArgument, handle, " is neither a reduction of NCCL's (0 to ", ncclNumOps - 1,
                      ") nor one that this communicator made.");
  }
  if (found->second.first != type) {
    throw NcclFailure(ncclInvalidArgument, "Reduction ", handle, " was made for ",
                      name_of(found->second.first), ", not ", name_of(type), ".");
  }
  return found->second.second;
}

void* Communicator::add_registration() {
  const std::lock_guard lock(mutex_);
  void* handle = reinterpret_cast<void*>(next_registration_++);
  registrations_.insert(handle);
  return handle;
}

void Communicator::remove_registration(void* handle) {
  const std::lock_guard lock(mutex_);
  if (registrations_.erase(handle) == 0) {
    throw NcclFailure(ncclInvalidArgument, "This buffer is not registered with this communicator.");
  }
}

ncclComm_t add_handle(const std::shared_ptr<Communicator>& communicator) {
  const std::lock_guard lock(handles().mutex);
  const uintptr_t handle = handles().next;
  handles().next += 0x10;
  handles().communicators[handle] = communicator;
  return reinterpret_cast<ncclComm_t>(handle);
}

std::shared_ptr<Communicator> look_up(ncclComm_t handle) {
  const std::lock_guard lock(handles().mutex);
  const auto found = handles().communicators.find(reinterpret_cast<uintptr_t>(handle));
  return found == handles().communicators.end() ? nullptr : found->second;
}

std::shared_ptr<Communicator> find_any(ncclComm_t handle) {
  auto communicator = look_up(handle);
  if (!communicator) {
    throw NcclFailure(ncclInvalidArgument,
                      "There is no such communicator: it was destroyed or aborted, or never made.");
  }
  return communicator;
}

std::shared_ptr<Communicator> find_ready(ncclComm_t handle) {
  auto communicator = find_any(handle);
  const ncclResult_t state = communicator->state();
  if (state == ncclInProgress) {
    throw NcclFailure(
        ncclInvalidArgument,
        "This communicator is still being made or finalized. Wait until ncclCommGetAsyncError gives "
        "ncclSuccess.");
  }
  if (state != ncclSuccess) throw NcclFailure(state, communicator->state_text());
  return communicator;
}

std::shared_ptr<Communicator> find_made(ncclComm_t handle) {
  auto communicator = find_any(handle);
  const bool is_made = communicator->state() != ncclInProgress && communicator->ranks() > 0;
  return is_made ? communicator : find_ready(handle);
}

void remove_handle(ncclComm_t handle) {
  const auto last = look_up(handle);  // so that it is not destroyed with the lock held
  const std::lock_guard lock(handles().mutex);
  handles().communicators.erase(reinterpret_cast<uintptr_t>(handle));
}

}  // namespace softgpu::nccl
