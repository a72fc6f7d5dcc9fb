// A validation, as far as the program's thread and the control thread have to do with it: all ranks bring
// their devices back to where a minibatch began, make its calls again, and compare.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "proxy/client/control_messages.h"
#include "proxy/client/jitckpt_proxy.h"
#include "proxy/transport/log_writer.h"
#include "proxy/wire.h"

namespace jitckpt::proxy::client {

// What a rank's thread says while the agent does something to all ranks, such as a snapshot:
// jitckpt/wire/proxy_messages.py.
constexpr uint64_t says_rests = 6;

// What a rank's thread waits for at its place of the program.
class Validation {
 public:
  // again: the calls have been made again. over: nobody orders anything any more.
  enum class Heard : uint8_t { over, again, valid, stays, left_out };

  // For the program's thread: tells the agent, and waits. look: called now and then meanwhile, as others may
  // wait for what this thread's device does, and no call tells that it has failed.
  Heard say(control::Validates what, const std::function<void()>& look = [] {});

  // For the control thread. news: called when there is something to be told.
  void begin(std::function<void()> news);
  std::optional<control::Validates> take();
  void hear(Heard heard);
  // What is said of a place counts for nothing at another.
  void hear_of(uint64_t place, Heard heard);
  bool rests();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> news_;
  std::optional<control::Validates> said_;
  uint64_t place_ = 0;  // of the thread's newest word
  uint64_t says_ = 0;
  bool over_ = true;  // until there is a control thread
  Heard heard_ = Heard::over;
  bool waits_ = false;
};

// The device's memory at one place of the program, after the image of `state`. A byte for each block.
struct Check {
  uint64_t number, state;
  std::vector<wire::Piece> pieces;
  std::size_t blocks;
  void* copy;                               // pinned, as `found` is
  wire::Found* found;                       // in the newest replay
  std::vector<uint8_t> changed;             // since the image
  std::vector<uint8_t> kept;                // to be put back from the image, by the program's word
  std::vector<jitckpt_proxy_place> places;  // of the pieces
  bool overwrites = false;  // whether the newest replay began with what else has changed overwritten

  std::vector<LogWriter::Apart> overwriting() const;  // the calls for that
  void compare_with_image();                          // says what has changed, once the copy is whole
};

std::size_t blocks_of(std::size_t bytes);

}  // namespace jitckpt::proxy::client
