// How the client's calls reach the server: told (nobody waits) or asked.
#pragma once
#include <cstddef>
#include <cstring>
#include <span>

#include "proxy/client/communicator_table.h"
#include "proxy/client/errors.h"

namespace jitckpt::proxy::client {

class Connection;

using Bytes = std::span<const std::byte>;

template <class T>
Bytes bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

// Virtual handles: never an address, never used twice in a process.
uint64_t new_handle();
template <class Handle>
uint64_t number_of(Handle handle) {
  if constexpr (std::is_enum_v<Handle>)
    return static_cast<uint64_t>(handle);
  else
    return reinterpret_cast<uint64_t>(handle);
}

// The two ways for content of any kind; `more` follows the arguments. A result that is not 0 is noted as the
// thread's failure. It may be that of an earlier call that nobody waited for, unless the call only looks.
// allocates: the answer is put into the beginning of the record, so that the call gives the same when it is
// made again. makes_id: the answer is an id of NCCL, which has to be made anew with a new server.
enum class Question : uint8_t { asks, looks, allocates, makes_id };
// kept: if given, what follows the record is kept, and begins there.
int32_t tell_bytes(Library library, Call call, Bytes arguments, Bytes more, Position* kept = nullptr);
int32_t ask_bytes(Library library, Question question, Call call, Bytes arguments, Bytes more,
                  std::span<std::byte> answer);
int32_t tell_collective_bytes(Call call, Bytes arguments, const CountedCall& exchange);
// Such calls are in the log.
void count(std::span<const CountedCall> exchanges);

// Whether parameters and optimizer state stay on the device, and no optimizer step is under way. If so, every
// call that writes to other memory than its own says so before it is in the log; of kernels it is seen.
bool state_is_still();
void writes(const void* to, uint64_t bytes);
// Of a call that brings this to the device, where any later call may take addresses from.
void uploads_addresses(Bytes content);
uint64_t element_bytes(ncclDataType_t type);
uint64_t ranks_of(ncclComm_t communicator);

// Where this thread waits for its answers; slot_count if there are too many threads.
std::size_t slot_of_this_thread(Connection& connection);

// Where an answer to copy_to_host lies.
const std::byte* staging_memory();
// The beginning of this thread's newest record becomes that, if the record is kept.
void amend_newest(Bytes content);

// For questions on the way to a failure: it notes none of its own.
bool ask_bytes_quietly(Call call, Bytes arguments, std::span<std::byte> answer);

template <class Result, class Arguments>
Result tell(Call call, const Arguments& arguments, Bytes more = {}, Position* kept = nullptr) {
  return Result(tell_bytes(library_of<Result>, call, bytes_of(arguments), more, kept));
}

template <class Result, class Arguments>
Result tell_collective(Call call, const Arguments& arguments) {
  CountedCall exchange{arguments.comm};
  if constexpr (requires { arguments.peer; }) {
    exchange.peer = arguments.peer;
    exchange.receives = call == Call::ncclRecv;
  }
  return Result(tell_collective_bytes(call, bytes_of(arguments), exchange));
}

template <class Result, class Arguments>
Result ask(Call call, const Arguments& arguments, Bytes more = {}) {
  return Result(ask_bytes(library_of<Result>, Question::asks, call, bytes_of(arguments), more, {}));
}

template <class Result, class Arguments, class Answer>
  requires(!std::is_convertible_v<Answer, Bytes>)
Result ask(Call call, const Arguments& arguments, Answer& answer, Bytes more = {},
           Question question = Question::asks) {
  return Result(ask_bytes(library_of<Result>, question, call, bytes_of(arguments), more,
                          std::as_writable_bytes(std::span(&answer, 1))));
}

template <class Result, class Arguments>
Result look(Call call, const Arguments& arguments) {
  return Result(ask_bytes(library_of<Result>, Question::looks, call, bytes_of(arguments), {}, {}));
}

template <class Result, class Arguments, class Answer>
Result look(Call call, const Arguments& arguments, Answer& answer) {
  return Result(ask_bytes(library_of<Result>, Question::looks, call, bytes_of(arguments), {},
                          std::as_writable_bytes(std::span(&answer, 1))));
}

template <class Arguments, class Answer>
bool ask_quietly(Call call, const Arguments& arguments, Answer& answer) {
  return ask_bytes_quietly(call, bytes_of(arguments), std::as_writable_bytes(std::span(&answer, 1)));
}

}  // namespace jitckpt::proxy::client
