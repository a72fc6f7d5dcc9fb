// The communicators that the process is in, as all their ranks know them, and how they are made anew.
#pragma once
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "proxy/client/control_messages.h"
#include "proxy/transport/log_writer.h"
#include "proxy/wire.h"

namespace jitckpt::proxy::client {

// The calls that this rank has made with others: with everybody, or with a peer.
struct Counted {
  uint64_t sent = 0, received = 0;  // of collectives: sent
};
using Counts = std::map<int32_t, Counted>;  // by the peer's rank in the communicator; control::everybody
// One such call.
struct CountedCall {
  uint64_t communicator = 0;
  int32_t peer = control::everybody;
  bool receives = false;
};

struct CommunicatorEntry {
  uint64_t handle = 0, born = 0;  // born: number of the record that made it
  Key key{}, parent{};            // parent: no_key if it was not split from another
  uint32_t split = 0;             // which of the parent's
  int32_t color = 0, order = 0;   // of the split
  int32_t rank = 0, size = 0, device = 0;
  wire::Configuration configuration{};
  uint64_t ended = 0;   // number of the record that ended it; 0: it lives
  uint32_t splits = 0;  // that were made of it
  Counts counts{};

  // Whether it was there before the record of this number.
  bool lived(uint64_t before) const { return born < before && (ended == 0 || ended >= before); }
};

class CommunicatorTable {
 public:
  void add(const CommunicatorEntry& made);
  // keeps: calls of before may be made again. False if there is no such communicator.
  bool end(uint64_t handle, uint64_t ended, bool keeps);
  // What had ended before the record of this number.
  void forget_ended(uint64_t before);
  std::vector<CommunicatorEntry> all() const;
  // 0: there is no such communicator.
  uint64_t ranks_of(uint64_t handle) const;
  // Whether there is one of several ranks.
  bool joins_ranks() const;
  // The same, also while the first is still being made.
  bool has_met_ranks() const;

  void count(const CountedCall& exchange);
  std::map<uint64_t, Counts> counts() const;  // by handle

  // One is being made, for which this rank waits for the others; it is in no other list meanwhile.
  void begin(const CommunicatorEntry& awaited);
  void end_waiting(uint64_t handle);
  std::vector<CommunicatorEntry> awaited() const;

  // A split of this communicator begins.
  struct Split {
    Key parent;
    uint32_t number;
  };
  Split begin_split(uint64_t parent);

  // This process has got the id from NCCL, so it gets new ones for those that use it.
  void issue(const ncclUniqueId& id);
  // For which communicators this process gets new ids: also for splits whose parent is no more, if it is the
  // first in them.
  std::vector<Key> to_renew() const;

  // The calls that make those that there were before the record of this number: without other ranks, or as
  // the agent says. Throws std::runtime_error with a sentence if they can't be made.
  std::vector<LogWriter::Apart> creations_alone(uint64_t before) const;
  std::vector<LogWriter::Apart> creations(uint64_t before, const std::vector<control::Making>& all,
                                          const std::vector<control::NamedId>& ids) const;

  // Why they can't be made again: the end of a sentence; empty if they can. alone: without the other ranks.
  std::string obstacle(bool alone) const;

 private:
  const CommunicatorEntry* find(const Key& key, uint64_t before) const;

  mutable std::mutex mutex_;
  std::vector<CommunicatorEntry> all_;  // in the order in which they were made
  std::vector<CommunicatorEntry> awaited_;
  std::set<Key> issued_;
};

}  // namespace jitckpt::proxy::client
