// What the program has made and not ended: enough to make it again in a new server.
#pragma once
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "log_writer.h"
#include "requests.h"

namespace jitckpt::proxy::client {

struct Allocation {
  uint64_t address, bytes;
  int32_t device;
};

class Objects {
 public:
  // born: the number of the record that made it; the content is that record's.
  void add(uint64_t key, uint64_t born, Call call, int32_t device, std::vector<std::byte> content);
  // ended: the number of the record that ended it. keeps: calls of before that may be made again.
  void end(uint64_t key, uint64_t ended, bool keeps);
  // What belongs to a communicator ends with it.
  void end_of_communicator(uint64_t communicator, uint64_t ended, bool keeps);
  // What had ended before the record of this number.
  void forget_ended(uint64_t before);

  // The calls that make, in the order of old, what there was before the record of this number: what belongs
  // to communicators, or all else.
  enum class Kind : uint8_t { plain, of_communicators };
  std::vector<LogWriter::Apart> creations(uint64_t before, Kind kind);
  // The device's memory that is not ended.
  std::vector<Allocation> allocations();

 private:
  struct Object {
    uint64_t key, born, ended;  // numbers of records; ended 0: it lives
    Call call;
    int32_t device;
    std::vector<std::byte> content;
  };
  std::mutex mutex_;
  std::list<Object> objects_;  // in the order in which they were made
  std::unordered_map<uint64_t, std::list<Object>::iterator> current_;
};

// For the entry points: the newest question of this thread has made the object that is known by the key (a
// handle, an address); a call has ended it.
void note_object(uint64_t key, Call call, Bytes arguments, Bytes more = {});
void note_end(uint64_t key);

}  // namespace jitckpt::proxy::client
