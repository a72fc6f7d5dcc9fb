// What a worker and its agent say to each other in a recovery, one datagram each: docs/how-it-works/proxy.md
// has the table.
#pragma once
#include <nccl.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "proxy/identity.h"

namespace jitckpt::proxy::client::control {

// Recoveries are in order. The agents count both.
struct RecoveryNumber {
  uint64_t term = 0, recovery = 0;
  auto operator<=>(const RecoveryNumber&) const = default;
};

// As torchrun has set it.
int32_t rank_of_process();

struct NamedId {
  Key key;
  ncclUniqueId id;
};

// Of the worker.
struct Hello {
  int32_t process, rank;
  std::string table_hash;
};
struct Alarm {
  uint64_t call;  // which place of the program; 0: none
  std::string error;
};
constexpr uint64_t lasting = ~uint64_t{0};
// The calls that the rank had made on a communicator when an image was made.
struct Count {
  uint64_t state;  // of the image; lasting: the calls until now
  int32_t peer;    // rank in the communicator; everybody: collectives
  uint64_t sent, received;
};
constexpr int32_t everybody = -1;
struct Membership {
  Key key, parent;  // parent: no_key if it was not split from another
  uint32_t split;   // which of the parent's
  int32_t rank;     // in the communicator
  uint32_t size;
  uint64_t since, until;  // states of images that it lives in; until lasting: it lives
  std::vector<Count> counts;
};
// How the device is: it works; it can be read, but what lies below may be damaged; nothing is on it; it
// works, but calls may have written to the state since the step that it has ended; nothing can be read from
// it.
enum class DeviceState : uint64_t { lost, healthy, suspect, empty, changed };
struct Held {};
struct Stopped {
  uint64_t kept_from, kept_to;  // states of the images; kept_from > kept_to: there is none
  uint64_t images;              // bit i: the image of kept_from + i is whole
  uint64_t copies;              // bit i: the state of kept_from + i is in host memory, where others find it
  DeviceState device;
  uint64_t begun, ended, ready;  // the newest steps that the device has begun, ended, and could begin
  uint64_t log_end;
  uint64_t failed_call;
  std::string error;
  std::vector<Membership> communicators;
  uint64_t
      outgrown;  // the calls since this state are more than the log holds, so nothing is kept; plus 1; 0: no
};
// A state's parameters and optimizer state in host memory: so many bytes of that file of that process.
struct HostCopy {
  int32_t rank;  // whose process
  int32_t process, file;
  uint64_t offset, bytes;
  uint64_t digest;  // of what is there, in which order
};
struct Ids {
  std::vector<NamedId> ids;
  uint64_t ending_us, starting_us;
  uint64_t stays;              // 1: the server is the same as before
  std::vector<HostCopy> copy;  // that was ordered; none or one
};
struct Done {
  uint64_t handles_us, image_us, communicators_us, replay_us;
  uint64_t log_bytes, image_bytes;  // the most that they have taken at one time
};
struct Standing {
  uint64_t waited_us;  // that some thread has waited for one answer of the device
  uint64_t limit_us;   // from when on that is too long; 0: it never is
  std::vector<Membership> communicators;
};
// This rank takes part in a validation, and has come to this: numbers as in the agent's messages.py.
struct Validates {
  uint64_t place;  // where it waits
  uint64_t says;
  std::string text;
  std::string digest, unfit;  // of the state that could stay on the device; why it can't
};

// The host is held, all that it has called is over on its device, and its state is in host memory (1); or
// that can't be (0).
struct Settled {
  uint64_t settled;
  std::string text;  // why not
};

// Of the agent.
struct Stop {};
struct Rest {};
// Nothing has failed, and this process is to be written to files while its server stays: Settled says when.
struct Settle {};
struct GoOn {};
struct Restart {
  uint64_t may_stay;  // 0: the server is replaced in any case
  uint64_t finish;    // the step that is to be made before; 0: none
  uint64_t copy;      // the state that is to be copied to host memory then; 0: none
};
struct Making {
  Key parent;  // no_key: it is made from an id
  uint32_t split;
  Key key;  // of what this rank gets; no_key: nothing
};
struct Replay {
  uint64_t state, deliver_error;
  uint64_t overwrite;            // 1: for a validation, what is not kept
  uint64_t in_place;             // 1: parameters and optimizer state are on the device
  std::vector<HostCopy> source;  // else they are there; none: in the image
  std::vector<NamedId> ids;
  std::vector<Making> creations;
};
struct GiveUp {
  std::string text;
};
struct Ask {};
struct Validated {
  uint64_t place;  // as it was said: no answer for who waits at another by now
  uint64_t valid;  // 0: the validation is left out; 2: from now on the state stays on the device
};

using FromWorker = std::variant<Hello, Alarm, Stopped, Ids, Done, Standing, Validates, Held, Settled>;
using FromAgent = std::variant<Stop, Restart, Replay, GiveUp, Ask, Validated, Rest, Settle, GoOn>;

template <class Message>
struct Numbered {
  RecoveryNumber number;
  Message message;
};

// It can't be what the other side says; a sentence that says why.
struct BadMessage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::vector<std::byte> encode(const Numbered<FromWorker>& message);
std::vector<std::byte> encode(const Numbered<FromAgent>& message);
// Throw BadMessage.
Numbered<FromWorker> decode_from_worker(std::span<const std::byte> bytes);
Numbered<FromAgent> decode_from_agent(std::span<const std::byte> bytes);

}  // namespace jitckpt::proxy::client::control
