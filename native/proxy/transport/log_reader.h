// The server's end of the log: one thread reads the records in their order.
#pragma once
#include <chrono>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

#include "proxy/transport/layout.h"

namespace jitckpt::proxy {

// The log can't be what a client of this version has written; a sentence that says where and why.
struct DamagedLog : std::runtime_error {
  explicit DamagedLog(const std::string& what)
      : std::runtime_error(what +
                           " Code of the program has written there, or the machine's memory is faulty: "
                           "look for memory errors in dmesg before you start it again here.") {}
};

struct Record {
  uint64_t sequence;
  uint16_t call, slot;
  int32_t device;
  uint32_t answer;
  const std::byte* content;  // in shared memory, until the record is done
  std::size_t bytes;         // of the content, with up to 15 of padding
};

// Checks the control block against the memory's size. Throws DamagedLog.
Geometry read_geometry(const std::byte* begin, std::size_t bytes);

// How the reader sleeps where there is no record for it: at the longest so long, until so many are there or
// somebody waits for an answer.
struct Sleep {
  std::chrono::microseconds longest;
  uint64_t records;
};

// To wake the reader costs who writes microseconds, far more than the call itself. So the reader first takes
// naps, in which not each record wakes it: what is written meanwhile is read a little later, and nobody waits
// for it. With nothing there after some naps it sleeps until the next record: then the device has nothing to
// do. Where cores are scarce, so that it does not spin either, who looks soon takes the core from who writes,
// and has nothing to read again. slept: how often it has since the last record.
Sleep next_sleep(bool spins, int slept);

class LogReader {
 public:
  // spin_time: how long to look for a record before sleeping; `go_on` is asked now and then while there is
  // none.
  // Throws DamagedLog.
  LogReader(Log log, std::chrono::microseconds spin_time, std::function<bool()> go_on);

  // Waits for the next record; nothing if go_on said that none will come. Throws DamagedLog.
  std::optional<Record> next();

  // The newest record's memory is not needed any more.
  void done();

 private:
  void go_to(const Position& position);
  bool wait_for(const RecordHeader& header);
  [[noreturn]] void damaged(const char* why) const;

  Log log_;
  std::chrono::microseconds spin_time_;
  std::function<bool()> go_on_;
  std::size_t segment_, offset_;
  uint64_t expected_;
};

}  // namespace jitckpt::proxy
