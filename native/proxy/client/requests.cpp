#include "proxy/client/requests.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>

#include "proxy/client/capture.h"
#include "proxy/client/connection.h"
#include "proxy/client/thread.h"
#include "proxy/transport/answer.h"

namespace jitckpt::proxy::client {
namespace {

bool appended(Connection& connection, ProgramThread& thread, Call call, uint32_t answer, Bytes arguments,
              Bytes more, Position* kept = nullptr) {
  const auto place = connection.writer().reserve(arguments.size() + more.size(), kept);
  if (!place.header) return false;
  place.header->call = static_cast<uint16_t>(call);
  place.header->slot = static_cast<uint16_t>(thread.slot);
  place.header->device = thread.device;
  place.header->answer = answer;
  if (!arguments.empty()) std::memcpy(place.content(), arguments.data(), arguments.size());
  if (!more.empty()) std::memcpy(place.content() + arguments.size(), more.data(), more.size());
  connection.writer().commit(place);
  thread.newest = place;
  return true;
}

bool has_slot(Connection& connection, ProgramThread& thread) {
  if (thread.slot == slot_count) [[unlikely]]
    thread.slot = take_slot(connection.log());
  return thread.slot != slot_count;
}

int32_t too_many_threads(Library library) {
  return fail(library, device_gone(library), "more than 256 threads use the device proxy at one time");
}

// The place of the program at which the thread is, for who compares failures.
uint64_t place_of(const ProgramThread& thread) { return thread.newest.sequence + 1; }

// A failure of the machine: true if the call is to be made again, on another server.
bool recovers(Connection& connection, const ProgramThread& thread, const MachineFailure& failure,
              const std::function<bool()>& still) {
  return connection.hold().recovers(place_of(thread), failure.describe(), still);
}

template <class Arguments>
Arguments read(Bytes bytes) {
  Arguments arguments;
  std::memcpy(&arguments, bytes.data(), sizeof arguments);
  return arguments;
}

// Of a call whose first argument it is.
uint64_t event_of(Bytes arguments) { return read<wire::cudaEventQuery>(arguments).event; }

// Calls that a program makes again and again to see whether something is over.
bool is_query(Call call) {
  return call == Call::cudaEventQuery || call == Call::cudaStreamQuery || call == Call::ncclCommGetAsyncError;
}

bool may_block(Call call) {
  return call == Call::cudaStreamSynchronize || call == Call::cudaDeviceSynchronize ||
         call == Call::cudaEventSynchronize || call == Call::copy_to_host || call == Call::newest_image ||
         call == Call::check_memory;
}

// Calls after which code that nobody knows has what addresses they name. What others write to is known.
bool hands_addresses_on(Library library, Call call) {
  return call == Call::launch || call == Call::copy_from_host || library == Library::cublas;
}

// A watchdog's queries never wait: it would take that for a hang. But a thread that has waited for the device
// itself may know what is over, and torch's timers raise an error if a query says otherwise.
bool only_watches(const ProgramThread& thread, Call call) { return is_query(call) && !thread.has_waited; }

// What a query says while the host is held: that nothing is over, and nothing has failed.
int32_t not_over(Call call, std::span<std::byte> content) {
  if (call != Call::ncclCommGetAsyncError) return fail(Library::cudart, cudaErrorNotReady, "");
  const wire::ncclCommGetAsyncError_answer nothing{ncclSuccess};
  std::memcpy(content.data(), &nothing, content.size());
  return ncclSuccess;
}

// The failure of an earlier call that nobody waited for: for the thread that made it at its next call of that
// library; for every thread when it waits for the device.
int32_t take_asynchronous_error(Connection& connection, const ProgramThread& thread, Library library,
                                bool any_thread) {
  for (int which = 0; which < int{library_count}; ++which) {
    AsynchronousError& error = connection.log().control().errors[which];
    uint32_t origin = error.origin.load(std::memory_order_acquire);
    if (origin == 0) [[likely]]
      continue;
    const bool same_library = which == static_cast<int>(library);
    if (is_of_the_machine(static_cast<Library>(which), error.result)) {
      const auto failure = connection.pending_failure();
      if (!failure || recovers(connection, thread, *failure, [&] { return error.origin != 0; })) {
        which = -1;
        continue;
      }
    }
    if (!any_thread && !(same_library && origin == thread.slot + 1)) continue;
    const int32_t result = error.result;
    char text[sizeof error.text];
    std::memcpy(text, error.text, sizeof text);
    text[sizeof text - 1] = '\0';
    if (!error.origin.compare_exchange_strong(origin, 0)) continue;  // another thread was told
    if (same_library) return fail(library, result, text);
    return fail(
        library,
        in_words_of(library, cudaErrorUnknown, ncclUnhandledCudaError, CUBLAS_STATUS_EXECUTION_FAILED), text);
  }
  return 0;
}

struct Answer {
  int32_t result = 0;
  char text[sizeof Slot::text] = "";
};

// What there is to be done with an answer before the program has it.
void settle(Connection& connection, const ProgramThread& thread, Question question,
            std::span<const std::byte> content) {
  if (question == Question::allocates) connection.writer().amend(thread.newest, content);
  if (question == Question::makes_id) {
    wire::make_id_answer made;
    std::memcpy(&made, content.data(), sizeof made);
    connection.communicators().issue(made.id);
  }
}

// Torch gives memory to another stream once a query has said that the first is through.
void note_what_is_over(Connection& connection, ProgramThread& thread, Call call, Bytes arguments) {
  if (!connection.writer().keeps()) return;
  wire::was_over over{};
  if (call == Call::cudaEventQuery) {
    over.event = event_of(arguments);
  } else if (call == Call::cudaStreamQuery) {
    over.stream = read<wire::cudaStreamQuery>(arguments).stream;
  } else {
    return;
  }
  appended(connection, thread, Call::was_over, 0, bytes_of(over), {});
}

// The failure of the machine that the answer tells of, or that makes it worthless.
std::optional<MachineFailure> failure_behind(Connection& connection, Library library, Call call,
                                             const Answer& answer, std::span<const std::byte> content) {
  if (is_of_the_machine(library, answer.result)) return MachineFailure{library, answer.result, answer.text};
  if (call == Call::ncclCommGetAsyncError && answer.result == 0) {
    const auto state = read<wire::ncclCommGetAsyncError_answer>(content);
    if (is_of_the_machine(Library::nccl, state.asyncError))
      return MachineFailure{Library::nccl, state.asyncError, ""};
  }
  return connection.pending_failure();
}

enum class Outcome : uint8_t { answered, held, gone };

// Gets the answer, with its content. held: only of queries. gone: the server is.
Outcome get_answer(Connection& connection, ProgramThread& thread, Library library, Question question,
                   Call call, Bytes arguments, Bytes more, Answer& answer, std::span<std::byte> content) {
  Slot& slot = connection.log().slot(thread.slot);
  const uint32_t number = begin_question(slot);
  const auto still = [&slot] { return slot.waits == Waits::yes; };
  const bool watches = only_watches(thread, call);
  const auto is_held = [&] { return watches && connection.hold().held(); };
  const auto go_on = [&] { return still() && !is_held() && connection.go_on(); };
  const auto end = [&slot](Outcome outcome) {
    slot.waits = Waits::no;
    return outcome;
  };
  bool there = appended(connection, thread, call, number, arguments, more);
  connection.waits_for_answer(thread.slot);  // behind whatever is in the log by now
  // A new server answers what it reads again; what it does not read is asked once more.
  const auto ask_again = [&] {
    if (thread.newest.sequence < connection.replayed_from())
      there = appended(connection, thread, call, number, arguments, more);
  };
  while (there) {
    if (wait_for_answer(slot, number, connection.spin_time(), go_on)) {
      answer.result = slot.result;
      if (answer.result != 0) {
        std::memcpy(answer.text, slot.text, sizeof answer.text);
        answer.text[sizeof answer.text - 1] = '\0';
      } else if (!content.empty()) {
        std::memcpy(content.data(), slot.content, content.size());
        settle(connection, thread, question, content);
      }
      const auto failure =
          connection.hold().on() ? failure_behind(connection, library, call, answer, content) : std::nullopt;
      if (failure && watches) {
        if (connection.hold().alarm(0, failure->describe(), still)) return end(Outcome::held);
      } else if (failure && recovers(connection, thread, *failure, still)) {
        slot.waits = Waits::yes;
        ask_again();
        continue;
      }
      if (end_question(slot)) return Outcome::answered;
    } else if (is_held()) {
      return end(Outcome::held);
    } else if (!connection.go_on()) {
      break;
    } else {
      slot.waits = Waits::yes;
    }
    ask_again();
  }
  return end(Outcome::gone);
}

}  // namespace

ProgramThread::~ProgramThread() {
  int32_t result = 0;
  if (slot == slot_count || !Connection::usable()) return;
  if (Connection* connection = Connection::get(Library::cudart, result))
    connection->log().slot(slot).taken = 0;
  slot = slot_count;
}

std::size_t slot_of_this_thread(Connection& connection) {
  ProgramThread& thread = this_thread();
  has_slot(connection, thread);
  return thread.slot;
}

ProgramThread& this_thread() {
  thread_local ProgramThread thread;
  return thread;
}

uint64_t new_handle() {
  // Multiples of 16 as addresses are, and far from any address.
  static std::atomic<uint64_t> next{0x6a69'7400'0000'0000};
  return next.fetch_add(16, std::memory_order_relaxed);
}

int32_t tell_bytes(Library library, Call call, Bytes arguments, Bytes more, Position* kept) {
  int32_t result = 0;
  Connection* const connection = Connection::get(library, result);
  if (!connection) [[unlikely]]
    return result;
  ProgramThread& thread = this_thread();
  if (!has_slot(*connection, thread)) [[unlikely]]
    return too_many_threads(library);
  connection->hold().pass();
  if ((result = take_asynchronous_error(*connection, thread, library, false)) != 0) [[unlikely]]
    return result;
  std::optional<Connection::Look> look;
  if (connection->state_is_still() && hands_addresses_on(library, call))
    look = connection->gives(call, arguments, more);
  if (!appended(*connection, thread, call, 0, arguments, more, kept)) [[unlikely]] {
    if (arguments.size() + more.size() <= connection->writer().longest_content())
      return connection->fail_for_good(library);
    return fail(
        library, in_words_of(library, cudaErrorInvalidValue, ncclSystemError, CUBLAS_STATUS_INVALID_VALUE),
        "one call is longer than a segment of the device proxy's log: raise JITCKPT_PROXY_SEGMENT_BYTES");
  }
  if (call == Call::cudaEventRecord || call == Call::cudaEventRecordWithFlags) {
    connection->objects().record(event_of(arguments), {thread.newest.sequence, thread.device});
    recorded_outside(event_of(arguments));
  }
  if (call == Call::copy_from_host)
    thread.quiet.go_on(read<wire::copy_from_host>(arguments).stream, thread.device, thread.newest.sequence);
  if (look) {
    const auto found = reinterpret_cast<uint64_t>(look->found);
    tell<cudaError_t>(Call::look_at_state, wire::look_at_state{look->ranges.size(), found},
                      std::as_bytes(std::span(look->ranges)));
  }
  return 0;
}

// A program can't see whether copies have been made whose content is in the log: so it need not wait for a
// stream that has nothing else to do (torch waits after each copy from pageable memory, such as a batch's).
// The server does, before it reads on: whatever comes next, in whatever stream, finds them made.
bool leaves_the_wait_to_the_server(Connection& connection, ProgramThread& thread, Call call, Bytes arguments,
                                   int32_t& result) {
  if (call != Call::cudaStreamSynchronize) return false;
  const uint64_t stream = read<wire::cudaStreamSynchronize>(arguments).stream;
  if (!thread.quiet.is(stream, thread.device, connection.writer().newest()) ||
      !connection.nothing_has_failed() || connection.stands() != jitckpt_proxy_intact)
    return false;
  result = tell_bytes(Library::cudart, call, arguments, {});
  if (result == 0) thread.quiet.go_on(stream, thread.device, thread.newest.sequence);
  return true;
}

int32_t ask_bytes(Library library, Question question, Call call, Bytes arguments, Bytes more,
                  std::span<std::byte> answer) {
  int32_t result = 0;
  Connection* const connection = Connection::get(library, result);
  // A watchdog still asks while the process ends: it must not take that for a failure.
  if (!connection && is_query(call) && Connection::ending()) return not_over(call, answer);
  if (!connection) return result;
  if ((result = forbidden_in_capture(call, arguments)) != 0) return result;
  ProgramThread& thread = this_thread();
  if (!has_slot(*connection, thread)) return too_many_threads(library);
  thread.has_waited |= may_block(call);
  if (!only_watches(thread, call)) {
    connection->hold().pass();
  } else if (connection->hold().held()) {
    return not_over(call, answer);
  }
  // C10d's watchdog asks this several times a step, and the server would have to be woken up for it.
  if (call == Call::ncclCommGetAsyncError && connection->nothing_has_failed()) return not_over(call, answer);
  if (call == Call::cudaEventQuery && connection->is_over(event_of(arguments))) {
    note_what_is_over(*connection, thread, call, arguments);
    return 0;
  }
  if (leaves_the_wait_to_the_server(*connection, thread, call, arguments, result)) return result;
  ++thread.answers;
  Answer given;
  const Outcome outcome =
      get_answer(*connection, thread, library, question, call, arguments, more, given, answer);
  if (outcome == Outcome::gone) return connection->fail_for_good(library);
  if (outcome == Outcome::held) return not_over(call, answer);
  if (question != Question::looks)
    result = take_asynchronous_error(*connection, thread, library, may_block(call));
  if (result != 0) return result;
  if (given.result != 0) return fail(library, given.result, given.text);
  note_what_is_over(*connection, thread, call, arguments);
  if (call == Call::cudaStreamSynchronize)
    thread.quiet.begin(read<wire::cudaStreamSynchronize>(arguments).stream, thread.device,
                       thread.newest.sequence);
  return 0;
}

bool ask_bytes_quietly(Call call, Bytes arguments, std::span<std::byte> answer) {
  int32_t result = 0;
  Connection* const connection = Connection::usable() ? Connection::get(Library::cudart, result) : nullptr;
  ProgramThread& thread = this_thread();
  if (!connection || !has_slot(*connection, thread)) return false;
  Answer given;
  return get_answer(*connection, thread, Library::cudart, Question::looks, call, arguments, {}, given,
                    answer) == Outcome::answered &&
         given.result == 0;
}

bool state_is_still() {
  int32_t result = 0;
  const Connection* const connection = Connection::get(Library::cudart, result);
  return connection && connection->state_is_still();
}

void writes(const void* to, uint64_t bytes) {
  int32_t result = 0;
  if (Connection* const connection = Connection::get(Library::cudart, result))
    connection->writes(reinterpret_cast<uint64_t>(to), bytes);
}

void uploads_addresses(Bytes content) {
  int32_t result = 0;
  if (Connection* const connection = Connection::get(Library::cudart, result))
    connection->gives(Call::copy_from_host, {}, content);
}

const std::byte* staging_memory() {
  int32_t result = 0;
  return Connection::get(Library::cudart, result)->log().slot(this_thread().slot).staging;
}

void amend_newest(Bytes content) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  if (connection && connection->writer().keeps()) connection->writer().amend(this_thread().newest, content);
}

void count(std::span<const CountedCall> exchanges) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::nccl, result);
  for (const CountedCall& exchange : exchanges) {
    if (connection) connection->communicators().count(exchange);
  }
}

int32_t tell_collective_bytes(Call call, Bytes arguments, const CountedCall& exchange) {
  ProgramThread& thread = this_thread();
  int32_t result = 0;
  if (Connection* const connection = Connection::get(Library::nccl, result)) connection->communicates();
  if (thread.group_depth == 0) {
    result = tell_bytes(Library::nccl, call, arguments, {});
    if (result == 0) count(std::span(&exchange, 1));
    return result;
  }
  thread.exchanges.push_back(exchange);
  const wire::GroupedCall header{static_cast<uint16_t>(call), static_cast<uint32_t>(arguments.size())};
  const Bytes header_bytes = bytes_of(header);
  thread.group.insert(thread.group.end(), header_bytes.begin(), header_bytes.end());
  thread.group.insert(thread.group.end(), arguments.begin(), arguments.end());
  thread.group.resize((thread.group.size() + record_alignment - 1) / record_alignment * record_alignment);
  ++thread.grouped_calls;
  return 0;
}

}  // namespace jitckpt::proxy::client
