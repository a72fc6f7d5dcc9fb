#include "communicators.h"

#include <utility>

namespace jitckpt::interpose {

Communicators::Known& Communicators::known(ncclComm_t communicator) {
  const auto found = known_.find(communicator);
  if (found != known_.end()) return found->second;
  return known_.emplace(communicator, Known{.number = count_++, .postponed = {}}).first->second;
}

Place Communicators::next(ncclComm_t communicator) {
  const std::lock_guard lock(mutex_);
  Known& entry = known(communicator);
  return {entry.number, ++entry.sequence};
}

void Communicators::forget(ncclComm_t communicator) {
  const std::lock_guard lock(mutex_);
  known_.erase(communicator);
}

void Communicators::postpone(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  known(operation.communicator).postponed.push_back(operation);
}

std::vector<Operation> Communicators::take_postponed(ncclComm_t communicator) {
  const std::lock_guard lock(mutex_);
  std::vector<Operation> operations;
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
