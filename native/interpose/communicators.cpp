#include "interpose/communicators.h"

#include <unistd.h>

#include <string_view>
#include <utility>

#include "real_calls.h"

namespace jitckpt::interpose {
namespace {

// FNV-1a.
constexpr uint64_t empty_hash = 0xcbf29ce484222325;
uint64_t hash(uint64_t begun, std::string_view bytes) {
  for (const char byte : bytes) begun = (begun ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return begun;
}
uint64_t hash(uint64_t begun, uint64_t number) {
  return hash(begun, std::string_view(reinterpret_cast<const char*>(&number), sizeof number));
}

}  // namespace

Communicators::Known& Communicators::known(ncclComm_t communicator) {
  const auto found = known_.find(communicator);
  if (found != known_.end()) return found->second;
  Known entry{.progress = {}, .postponed = {}};
  entry.progress.identity = hash(hash(empty_hash, static_cast<uint64_t>(getpid())), ++unnamed_);
  return known_.emplace(communicator, std::move(entry)).first->second;
}

void Communicators::made(ncclComm_t communicator, const ncclUniqueId* ids, int count) {
  const std::lock_guard lock(mutex_);
  uint64_t identity = empty_hash;
  for (int index = 0; index < count; ++index) {
    identity = hash(identity, std::string_view(ids[index].internal, sizeof ids[index].internal));
  }
  known_.erase(communicator);  // an older one at the same address
  known(communicator).progress.identity = identity;
}

void Communicators::made_from(ncclComm_t parent, ncclComm_t communicator, uint64_t distinction) {
  const std::lock_guard lock(mutex_);
  Known& origin = known(parent);
  const uint64_t identity = hash(hash(origin.progress.identity, ++origin.children), distinction);
  if (!communicator) return;  // this rank is in none of the new ones
  known_.erase(communicator);
  known(communicator).progress.identity = identity;
}

watchdog::Watch Communicators::next(const ObservedOperation& operation) {
  std::unique_lock lock(mutex_);
  if (known(operation.communicator).progress.ranks == 0) {
    // NCCL asks itself for errors here, by the entry points, which may need the lock.
    lock.unlock();
    int rank = 0, ranks = 0;
    real::ncclCommUserRank(operation.communicator, &rank);
    real::ncclCommCount(operation.communicator, &ranks);
    lock.lock();
    CommunicatorProgress& unknown = known(operation.communicator).progress;
    unknown.rank = rank;
    unknown.ranks = ranks;
  }
  CommunicatorProgress& progress = known(operation.communicator).progress;
  watchdog::Watch watch{.communicator = progress.identity,
                        .operation = operation.name,
                        .calls = operation.calls,
                        .bytes = operation.bytes,
                        .exchanges = operation.exchanges};
  for (watchdog::PointToPoint& exchange : watch.exchanges) {
    exchange.number = ++(exchange.send ? progress.sends : progress.receives)[exchange.peer];
  }
  watch.sequence = watch.exchanges.empty() ? ++progress.sequence : progress.sequence;
  return watch;
}

std::vector<CommunicatorProgress> Communicators::progress() const {
  const std::lock_guard lock(mutex_);
  std::vector<CommunicatorProgress> all;
  for (const auto& [communicator, entry] : known_) all.push_back(entry.progress);
  return all;
}

void Communicators::forget(ncclComm_t communicator) {
  const std::lock_guard lock(mutex_);
  known_.erase(communicator);
}

void Communicators::postpone(const ObservedOperation& operation) {
  const std::lock_guard lock(mutex_);
  known(operation.communicator).postponed.push_back(operation);
}

std::vector<ObservedOperation> Communicators::take_postponed(ncclComm_t communicator) {
  const std::lock_guard lock(mutex_);
  std::vector<ObservedOperation> operations;
  const auto found = known_.find(communicator);
  if (found != known_.end()) operations.swap(found->second.postponed);
  return operations;
}

bool Communicators::failed(ncclComm_t communicator) {
  const std::lock_guard lock(mutex_);
  Known& entry = known(communicator);
  return !std::exchange(entry.failed, true);
}

}  // namespace jitckpt::interpose
