#include "proxy/client/connection.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "proxy/client/thread.h"

namespace jitckpt::proxy::client {
namespace {

enum class Phase { fresh, running, failed, forked, ending };

std::atomic<Phase> phase{Phase::fresh};
std::atomic<Connection*> connection{nullptr};  // never destroyed: threads outlive main()
std::mutex starting;

std::string& start_failure() {
  static auto* const text = new std::string;
  return *text;
}

int32_t unusable(Library library) {
  switch (phase) {
    case Phase::forked:
      return fail(
          library,
          in_words_of(library, cudaErrorInitializationError, ncclInvalidUsage, CUBLAS_STATUS_NOT_INITIALIZED),
          "a forked process can't use the device that its parent opened before; start it with spawn "
          "instead");
    case Phase::ending:
      return fail(
          library,
          in_words_of(library, cudaErrorCudartUnloading, ncclSystemError, CUBLAS_STATUS_NOT_INITIALIZED), "");
    default:
      return fail(library, device_gone(library), start_failure());
  }
}

}  // namespace

void end_connection() {
  Phase running = Phase::running;
  if (!phase.compare_exchange_strong(running, Phase::ending)) return;
  Connection& ending = *connection.load();
  ending.control_.reset();
  ending.end_spare();
  std::lock_guard lock(ending.mutex_);
  ending.server_.reset();
}

void forget_connection() {
  if (phase == Phase::running) {
    AgentStarter::forget();
    connection.load()->server_->forget();
    if (auto& spare = connection.load()->spare_) spare->forget();
    if (auto& control = connection.load()->control_) control->forget();
  }
  if (phase != Phase::fresh) phase = Phase::forked;
}

Connection::Connection(const ProxySettings& settings)
    : settings_(settings),
      log_file_("jitckpt-log", settings.log.bytes()),
      log_mapping_(log_file_),
      log_(log_mapping_.begin(), settings.log),
      pinned_(settings.pinned_bytes),
      writer_(
          log_, [this] { return go_on(); }, [this] { outgrown(); }),
      copy_flags_(log_),
      pinned_reads_(pinned_, copy_flags_, settings.log.segment_bytes, settings.log.segment_count) {
  proxy::ControlBlock& control = log_.control();
  control.magic = log_magic;
  control.table_hash = table_hash;
  control.segment_bytes = settings.log.segment_bytes;
  control.segment_count = settings.log.segment_count;
  control.start = {0, 0, 1};
  control.pinned_address = reinterpret_cast<uint64_t>(pinned_.begin());
  server_ = ready_server();
  server_->begin();
  begun_ = true;
  if (settings.control.empty()) return;
  // What comes before the first minibatch is kept too: it leads from nothing to there.
  images_.emplace_back().start = writer_.keep();
  try {
    together_ = Together::of_environment();
    control_ = std::make_unique<ControlThread>(*this, settings.control);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "jitckpt: %s Failures of the device won't be recovered from.\n", error.what());
    images_.clear();
    writer_.keep_nothing();
  }
}

// By the thread whose call has no more room.
void Connection::outgrown() {
  outgrown_since_ = states_ + 1;
  if (!std::exchange(told_outgrown_, true))
    std::fprintf(
        stderr,
        "jitckpt: rank %d: %s. A long evaluation does that. Until the next optimizer step a failure of "
        "the device can't be recovered from in place. To have it protected too, raise "
        "JITCKPT_PROXY_LOG_BYTES. This is said once.\n",
        control::rank_of_process(), outgrown_in_words().c_str());
  if (stepping_ < slot_count) open_step();
}

std::string Connection::outgrown_in_words() const {
  const uint64_t since = outgrown_since_ - 1;
  return "the calls since " + (since == 0 ? "the beginning" : "optimizer step " + std::to_string(since)) +
         " are more than the device proxy's log holds (" +
         std::to_string(settings_.log.segment_bytes * settings_.log.segment_count) + " bytes)";
}

bool Connection::ending() { return phase == Phase::ending; }

bool Connection::usable() { return phase == Phase::fresh || phase == Phase::running; }

Connection* Connection::get(Library library, int32_t& result) {
  if (phase.load(std::memory_order_acquire) == Phase::running) [[likely]]
    return connection.load(std::memory_order_relaxed);
  std::lock_guard lock(starting);
  if (phase == Phase::fresh) {
    try {
      connection = new Connection(read_settings());
      phase = Phase::running;
      pthread_atfork(nullptr, nullptr, forget_connection);
      std::atexit(end_connection);
    } catch (const std::exception& error) {
      start_failure() = error.what();
      std::fprintf(stderr, "jitckpt: %s\n", error.what());
      phase = Phase::failed;
    }
  }
  if (phase == Phase::running) return connection;
  result = unusable(library);
  return nullptr;
}

bool Connection::go_on() {
  if (phase != Phase::running || dead_.load(std::memory_order_acquire)) return false;
  if (hold_.on()) return true;  // the control thread sees to the server
  const std::string why = hold_.given_up();
  // Who comes while another brings a new server in place waits here for it.
  std::lock_guard lock(mutex_);
  if (!server_ || dead_) return false;
  if (server_->alive()) return true;
  if (recover()) return true;
  death_ = "the device proxy's server " + server_->end();
  if (!why.empty())
    death_ += ", and " + why;
  else if (outgrown_since_ != 0)
    death_ += ", and " + outgrown_in_words() + ", so they can't be made again: raise JITCKPT_PROXY_LOG_BYTES";
  std::fprintf(stderr, "jitckpt: %s.\n", death_.c_str());
  dead_.store(true, std::memory_order_release);
  return false;
}

bool Connection::nothing_has_failed() const {
  const proxy::ControlBlock& control = log_.control();
  const auto is_unset = [](const AsynchronousError& error) { return error.origin == 0; };
  return !dead_ && control.collective_failed == 0 && std::ranges::all_of(control.errors, is_unset);
}

std::optional<MachineFailure> Connection::pending_failure() const {
  for (const Library library : {Library::cudart, Library::nccl}) {
    const AsynchronousError& error = log_.control().errors[static_cast<std::size_t>(library)];
    if (error.origin.load(std::memory_order_acquire) == 0 || !is_of_the_machine(library, error.result))
      continue;
    return MachineFailure{library, error.result,
                          std::string(error.text, strnlen(error.text, sizeof error.text))};
  }
  return std::nullopt;
}

std::optional<std::chrono::milliseconds> Connection::hang_time() const {
  if (!has_kept_ && !communicators_.has_met_ranks()) return std::nullopt;
  return settings_.hang_time * (1 << std::min(recoveries_.load(), 10));
}

pid_t Connection::server() {
  for (;;) {
    hold_.pass();
    {
      std::lock_guard lock(mutex_);
      if (!server_) return 0;
      if (!server_->has_ended()) return server_->id();
      if (!hold_.on()) return 0;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // another takes its place
  }
}

std::string Connection::end_of_server() {
  std::lock_guard lock(mutex_);
  return server_->end();
}

pid_t Connection::server_of_process() {
  Connection* const running = connection;
  return running ? running->server() : 0;
}

void Connection::release_pinned(void* pointer) {
  if (writer_.keeps()) {
    freed_pinned_.add(pointer, this_thread().newest.sequence);
  } else {
    pinned_.release(pointer);
  }
}

int32_t Connection::fail_for_good(Library library) {
  if (phase != Phase::running) return unusable(library);
  std::lock_guard lock(mutex_);
  return fail(library, device_gone(library), death_);
}

}  // namespace jitckpt::proxy::client
