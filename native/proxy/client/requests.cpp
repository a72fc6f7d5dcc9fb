#include "requests.h"

#include <algorithm>
#include <atomic>

#include "answer.h"
#include "connection.h"
#include "thread.h"

namespace jitckpt::proxy::client {
namespace {

bool appended(Connection& connection, Thread& thread, Call call, uint32_t answer, Bytes arguments,
              Bytes more) {
  const auto place = connection.writer().reserve(arguments.size() + more.size());
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

bool has_slot(Connection& connection, Thread& thread) {
  if (thread.slot == slot_count) [[unlikely]]
    thread.slot = take_slot(connection.log());
  return thread.slot != slot_count;
}

int32_t too_many_threads(Library library) {
  return fail(library, library == Library::nccl ? int{ncclSystemError} : int{cudaErrorDevicesUnavailable},
              "more than 256 threads use the device proxy at one time");
}

// The failure of an earlier call that nobody waited for: for the thread that made it at its next call of that
// library; for every thread when it waits for the device.
int32_t take_asynchronous_error(Connection& connection, const Thread& thread, Library library,
                                bool any_thread) {
  for (int which = 0; which < 2; ++which) {
    AsynchronousError& error = connection.log().control().errors[which];
    uint32_t origin = error.origin.load(std::memory_order_acquire);
    if (origin == 0) [[likely]]
      continue;
    const bool same_library = which == static_cast<int>(library);
    if (!any_thread && !(same_library && origin == thread.slot + 1)) continue;
    const int32_t result = error.result;
    char text[sizeof error.text];
    std::memcpy(text, error.text, sizeof text);
    text[sizeof text - 1] = '\0';
    if (!error.origin.compare_exchange_strong(origin, 0)) continue;  // another thread was told
    if (same_library) return fail(library, result, text);
    return fail(library, library == Library::nccl ? int{ncclUnhandledCudaError} : int{cudaErrorUnknown},
                text);
  }
  return 0;
}

// The thread's slot, with the answer; null if the server is gone.
const Slot* answered(Connection& connection, Thread& thread, Call call, Bytes arguments, Bytes more) {
  Slot& slot = connection.log().slot(thread.slot);
  // A thread may have taken the slot of one that has ended: the numbers go on, without 0.
  const uint32_t number = std::max(slot.answered.load(std::memory_order_relaxed) + 1, uint32_t{1});
  for (;;) {
    const pid_t server = connection.server();
    if (!appended(connection, thread, call, number, arguments, more)) return nullptr;
    // A new server answers what it reads again; what it does not read is asked once more.
    const auto go_on = [&] {
      return connection.go_on() &&
             (connection.server() == server || connection.writer().is_kept(thread.newest.sequence));
    };
    if (wait_for_answer(slot, number, connection.spin_time(), go_on)) return &slot;
    if (!connection.go_on()) return nullptr;
  }
}

bool may_block(Call call) {
  return call == Call::cudaStreamSynchronize || call == Call::cudaDeviceSynchronize ||
         call == Call::cudaEventSynchronize || call == Call::copy_to_host;
}

}  // namespace

Thread::~Thread() {
  int32_t result = 0;
  if (slot == slot_count || !Connection::usable()) return;
  if (Connection* connection = Connection::get(Library::cudart, result))
    connection->log().slot(slot).taken = 0;
  slot = slot_count;
}

Thread& this_thread() {
  thread_local Thread thread;
  return thread;
}

uint64_t new_handle() {
  // Multiples of 16 as addresses are, and far from any address.
  static std::atomic<uint64_t> next{0x6a69'7400'0000'0000};
  return next.fetch_add(16, std::memory_order_relaxed);
}

int32_t tell_bytes(Library library, Call call, Bytes arguments, Bytes more) {
  int32_t result = 0;
  Connection* const connection = Connection::get(library, result);
  if (!connection) [[unlikely]]
    return result;
  Thread& thread = this_thread();
  if (!has_slot(*connection, thread)) [[unlikely]]
    return too_many_threads(library);
  if ((result = take_asynchronous_error(*connection, thread, library, false)) != 0) [[unlikely]]
    return result;
  if (!appended(*connection, thread, call, 0, arguments, more)) [[unlikely]] {
    if (arguments.size() + more.size() <= connection->writer().longest_content())
      return connection->fail_for_good(library);
    return fail(
        library, library == Library::nccl ? int{ncclSystemError} : int{cudaErrorInvalidValue},
        "one call is longer than a segment of the device proxy's log: raise JITCKPT_PROXY_SEGMENT_BYTES");
  }
  return 0;
}

int32_t ask_bytes(Library library, Question question, Call call, Bytes arguments, Bytes more,
                  std::span<std::byte> answer) {
  int32_t result = 0;
  Connection* const connection = Connection::get(library, result);
  if (!connection) return result;
  Thread& thread = this_thread();
  if (!has_slot(*connection, thread)) return too_many_threads(library);
  const Slot* const slot = answered(*connection, thread, call, arguments, more);
  if (!slot) return connection->fail_for_good(library);
  if (question == Question::asks)
    result = take_asynchronous_error(*connection, thread, library, may_block(call));
  if (result != 0) return result;
  if (slot->result != 0) {
    char text[sizeof slot->text];
    std::memcpy(text, slot->text, sizeof text);
    text[sizeof text - 1] = '\0';
    return fail(library, slot->result, text);
  }
  if (!answer.empty()) std::memcpy(answer.data(), slot->content, answer.size());
  return 0;
}

bool ask_bytes_quietly(Call call, Bytes arguments, std::span<std::byte> answer) {
  int32_t result = 0;
  Connection* const connection = Connection::usable() ? Connection::get(Library::cudart, result) : nullptr;
  Thread& thread = this_thread();
  if (!connection || !has_slot(*connection, thread)) return false;
  const Slot* const slot = answered(*connection, thread, call, arguments, {});
  if (!slot || slot->result != 0) return false;
  std::memcpy(answer.data(), slot->content, answer.size());
  return true;
}

void amend_newest(Bytes arguments) {
  int32_t result = 0;
  if (Connection* const connection = Connection::get(Library::cudart, result))
    connection->writer().amend(this_thread().newest, arguments);
}

const std::byte* staging_memory() {
  int32_t result = 0;
  return Connection::get(Library::cudart, result)->log().slot(this_thread().slot).staging;
}

int32_t tell_collective_bytes(Call call, Bytes arguments) {
  Thread& thread = this_thread();
  if (thread.group_depth == 0) return tell_bytes(Library::nccl, call, arguments, {});
  const wire::GroupedCall header{static_cast<uint16_t>(call), static_cast<uint32_t>(arguments.size())};
  const Bytes header_bytes = bytes_of(header);
  thread.group.insert(thread.group.end(), header_bytes.begin(), header_bytes.end());
  thread.group.insert(thread.group.end(), arguments.begin(), arguments.end());
  thread.group.resize((thread.group.size() + record_alignment - 1) / record_alignment * record_alignment);
  ++thread.grouped_calls;
  return 0;
}

}  // namespace jitckpt::proxy::client
