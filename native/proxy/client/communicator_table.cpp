#include "proxy/client/communicator_table.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "proxy/client/requests.h"

namespace jitckpt::proxy::client {
namespace {

template <class Arguments>
LogWriter::Apart apart(Call call, int32_t device, const Arguments& arguments) {
  const Bytes bytes = bytes_of(arguments);
  return {static_cast<uint16_t>(call), device, {bytes.begin(), bytes.end()}};
}

LogWriter::Apart made_from_id(const CommunicatorEntry& communicator, const ncclUniqueId& id) {
  return apart(Call::init_communicator, communicator.device,
               wire::init_communicator{communicator.handle, communicator.size, communicator.rank, id,
                                       communicator.configuration});
}

}  // namespace

void CommunicatorTable::add(const CommunicatorEntry& made) {
  std::lock_guard lock(mutex_);
  all_.push_back(made);
}

bool CommunicatorTable::end(uint64_t handle, uint64_t ended, bool keeps) {
  std::lock_guard lock(mutex_);
  const auto living = std::ranges::find_if(
      all_, [handle](const CommunicatorEntry& one) { return one.handle == handle && one.ended == 0; });
  if (living == all_.end()) return false;
  living->ended = ended;
  if (!keeps) {
    issued_.erase(living->key);
    all_.erase(living);
  }
  return true;
}

void CommunicatorTable::forget_ended(uint64_t before) {
  std::lock_guard lock(mutex_);
  std::erase_if(all_, [&](const CommunicatorEntry& one) {
    const bool forgotten = one.ended != 0 && one.ended < before;
    if (forgotten) issued_.erase(one.key);
    return forgotten;
  });
}

std::vector<CommunicatorEntry> CommunicatorTable::all() const {
  std::lock_guard lock(mutex_);
  return all_;
}

uint64_t CommunicatorTable::ranks_of(uint64_t handle) const {
  std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(all_, handle, &CommunicatorEntry::handle);
  return found == all_.end() ? 0 : static_cast<uint64_t>(found->size);
}

void CommunicatorTable::count(const CountedCall& exchange) {
  std::lock_guard lock(mutex_);
  for (CommunicatorEntry& one : all_) {
    if (one.handle != exchange.communicator) continue;
    Counted& counted = one.counts[exchange.peer];
    ++(exchange.receives ? counted.received : counted.sent);
  }
}

std::map<uint64_t, Counts> CommunicatorTable::counts() const {
  std::lock_guard lock(mutex_);
  std::map<uint64_t, Counts> all;
  for (const CommunicatorEntry& one : all_) all[one.handle] = one.counts;
  return all;
}

void CommunicatorTable::begin(const CommunicatorEntry& awaited) {
  std::lock_guard lock(mutex_);
  awaited_.push_back(awaited);
}

void CommunicatorTable::end_waiting(uint64_t handle) {
  std::lock_guard lock(mutex_);
  std::erase_if(awaited_, [handle](const CommunicatorEntry& one) { return one.handle == handle; });
}

std::vector<CommunicatorEntry> CommunicatorTable::awaited() const {
  std::lock_guard lock(mutex_);
  return awaited_;
}

CommunicatorTable::Split CommunicatorTable::begin_split(uint64_t parent) {
  std::lock_guard lock(mutex_);
  for (CommunicatorEntry& one : all_) {
    if (one.handle != parent || one.ended != 0) continue;
    ++one.counts[control::everybody].sent;  // all of its ranks take part, whatever they get
    return {one.key, one.splits++};
  }
  return {no_key, 0};  // the call will fail
}

void CommunicatorTable::issue(const ncclUniqueId& id) {
  std::lock_guard lock(mutex_);
  issued_.insert(key_of(id));
}

std::vector<Key> CommunicatorTable::to_renew() const {
  std::lock_guard lock(mutex_);
  std::vector<Key> keys(issued_.begin(), issued_.end());
  for (const CommunicatorEntry& one : all_) {
    if (one.parent == no_key || one.rank != 0) continue;
    const bool has_parent = std::ranges::any_of(
        all_, [&](const CommunicatorEntry& other) { return other.key == one.parent && other.ended == 0; });
    if (!has_parent) keys.push_back(one.key);
  }
  return keys;
}

const CommunicatorEntry* CommunicatorTable::find(const Key& key, uint64_t before) const {
  const auto found = std::ranges::find_if(
      all_, [&](const CommunicatorEntry& one) { return one.key == key && one.lived(before); });
  return found == all_.end() ? nullptr : &*found;
}

std::vector<LogWriter::Apart> CommunicatorTable::creations_alone(uint64_t before) const {
  std::lock_guard lock(mutex_);
  std::vector<LogWriter::Apart> calls;
  for (const CommunicatorEntry& one : all_) {
    if (one.lived(before)) calls.push_back(made_from_id(one, ncclUniqueId{}));
  }
  return calls;
}

std::vector<LogWriter::Apart> CommunicatorTable::creations(uint64_t before,
                                                           const std::vector<control::Making>& all,
                                                           const std::vector<control::NamedId>& ids) const {
  std::lock_guard lock(mutex_);
  std::vector<LogWriter::Apart> calls;
  for (const control::Making& creation : all) {
    const bool is_split = creation.parent != no_key;
    const CommunicatorEntry* const parent = is_split ? find(creation.parent, before) : nullptr;
    const CommunicatorEntry* const made = creation.key == no_key ? nullptr : find(creation.key, before);
    if ((is_split && !parent) || (creation.key != no_key && !made))
      throw std::runtime_error("the agent orders a communicator that this process was not in");
    if (is_split) {
      wire::split_communicator arguments{parent->handle, 0, NCCL_SPLIT_NOCOLOR, 0, {}};
      if (made) arguments = {parent->handle, made->handle, made->color, made->order, made->configuration};
      calls.push_back(apart(Call::split_communicator, parent->device, arguments));
    } else if (made) {
      const auto id = std::ranges::find(ids, made->key, &control::NamedId::key);
      if (id == ids.end() && made->size > 1)
        throw std::runtime_error("the agent gives no id for a communicator that is to be made anew");
      calls.push_back(made_from_id(*made, id == ids.end() ? ncclUniqueId{} : id->id));
    }
  }
  return calls;
}

bool CommunicatorTable::joins_ranks() const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(all_,
                             [](const CommunicatorEntry& one) { return one.ended == 0 && one.size > 1; });
}

bool CommunicatorTable::has_met_ranks() const {
  std::lock_guard lock(mutex_);
  const auto joins = [](const CommunicatorEntry& one) { return one.size > 1; };
  return std::ranges::any_of(all_, joins) || std::ranges::any_of(awaited_, joins);
}

std::string CommunicatorTable::obstacle(bool alone) const {
  std::lock_guard lock(mutex_);
  std::set<Key> keys;
  for (const CommunicatorEntry& one : all_) {
    if (alone && (one.size > 1 || one.parent != no_key))
      return "a communicator joins it to other ranks, which would have to meet it again";
    if (!keys.insert(one.key).second) return "it has two ranks of one communicator";
  }
  return "";
}

}  // namespace jitckpt::proxy::client
