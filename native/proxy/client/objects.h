// What the program has made and not ended: enough to make it again in a new server.
#pragma once
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "proxy/client/free_memory.h"
#include "proxy/client/requests.h"
#include "proxy/transport/log_writer.h"

namespace jitckpt::proxy::client {

class Objects {
 public:
  // born: the number of the record that made it; the content is that record's.
  void add(uint64_t key, uint64_t born, Call call, int32_t device, std::vector<std::byte> content);
  // ended: the number of the record that ended it. keeps: calls of before that may be made again.
  void end(uint64_t key, uint64_t ended, bool keeps);
  // A setting of an object, in place of the one that it had before. which: of its settings by this call.
  void set(uint64_t owner, uint64_t which, uint64_t born, Call call, int32_t device,
           std::vector<std::byte> content, bool keeps);
  // Copies the beginning of the call's content that made an object, or its newest setting; false if there is
  // none, or less of it.
  bool made_by(uint64_t key, std::span<std::byte> content);
  bool setting(uint64_t owner, Call call, uint64_t which, std::span<std::byte> content);
  // The newest record of an event, and the thread's device then; number 0: none.
  struct Recorded {
    uint64_t number = 0;
    int32_t device = 0;
  };
  void record(uint64_t event, const Recorded& recorded);
  Recorded recorded(uint64_t event);
  // What belongs to a communicator ends with it.
  void end_of_communicator(uint64_t communicator, uint64_t ended, bool keeps);
  // What had ended before the record of this number.
  void forget_ended(uint64_t before);

  // The calls that make, in the order of old, what there was before the record of this number: what belongs
  // to communicators, or all else.
  enum class Kind : uint8_t { plain, of_communicators };
  std::vector<LogWriter::Apart> creations(uint64_t before, Kind kind);
  // The libraries that a server has to load.
  std::set<std::string> libraries();
  // The device's memory that is not ended.
  std::vector<Allocation> allocations();

 private:
  struct Object {
    uint64_t key, born, ended;  // numbers of records; ended 0: it lives
    Call call;
    int32_t device;
    std::vector<std::byte> content;
    Recorded recorded{};
  };
  std::mutex mutex_;
  std::list<Object> objects_;                       // in the order in which they were made
  std::vector<std::list<Object>::iterator> ended_;  // of these
  std::map<uint64_t, Allocation> allocations_;      // by address
  std::unordered_map<uint64_t, std::list<Object>::iterator> current_;
  // By owner, call and which; in objects_ as well.
  std::map<std::tuple<uint64_t, Call, uint64_t>, std::list<Object>::iterator> settings_;

  void end(std::list<Object>::iterator object, uint64_t ended, bool keeps);
};

// For the entry points: the newest question of this thread has made the object that is known by the key (a
// handle, an address); a call has ended it.
void note_object(uint64_t key, Call call, Bytes arguments, Bytes more = {});
void note_end(uint64_t key);
// The newest call of this thread is a setting of the object.
void note_setting(uint64_t owner, uint64_t which, Call call, Bytes arguments, Bytes more = {});

// The call that made an object; its newest setting by a call.
template <class Arguments>
std::optional<Arguments> made_by(uint64_t key);
template <class Arguments>
std::optional<Arguments> setting(uint64_t owner, Call call, uint64_t which = 0);

// For these two.
bool made_by(uint64_t key, std::span<std::byte> content);
bool setting(uint64_t owner, Call call, uint64_t which, std::span<std::byte> content);

template <class Arguments>
std::optional<Arguments> made_by(uint64_t key) {
  Arguments found;
  const bool there = made_by(key, std::as_writable_bytes(std::span(&found, 1)));
  return there ? std::optional(found) : std::nullopt;
}
template <class Arguments>
std::optional<Arguments> setting(uint64_t owner, Call call, uint64_t which) {
  Arguments found;
  const bool there = setting(owner, call, which, std::as_writable_bytes(std::span(&found, 1)));
  return there ? std::optional(found) : std::nullopt;
}

}  // namespace jitckpt::proxy::client
