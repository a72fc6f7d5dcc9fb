#include "proxy/server/server.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <thread>
#include <vector>

#include "proxy/server/device_memory.h"
#include "proxy/server/services.h"
#include "proxy/transport/answer.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

// What the library has to say of a failure in this thread; CUDA's own memory of it is the client's affair.
std::string describe(Library library, int32_t result) {
  if (library == Library::nccl) {
    const char* const text = real::ncclGetLastError(nullptr);
    return text ? text : "";
  }
  if (library == Library::cublas) return "cuBLAS status " + std::to_string(result);
  real::cudaGetLastError();
  return result == cudaErrorNotReady ? "" : real::cudaGetErrorString(static_cast<cudaError_t>(result));
}

// Of communicators, which are at no other thread's disposal meanwhile.
bool changes_communicators(Call call) {
  return call == Call::init_communicator || call == Call::split_communicator ||
         call == Call::ncclCommDestroy || call == Call::ncclCommAbort || call == Call::ncclCommFinalize ||
         call == Call::ncclCommRevoke;
}

class Counted {
 public:
  Counted(std::atomic<int>& count, bool counts) : count_(count), counts_(counts) { count_ += counts_; }
  ~Counted() { count_ -= counts_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<int>& count_;
  int counts_;
};

bool is_unfinished(cudaError_t state) {
  if (state != cudaErrorNotReady) return false;
  real::cudaGetLastError();
  return true;
}

}  // namespace

void choose_device(int device) {
  thread_local int current = 0;
  if (device == current) return;
  if (real::cudaSetDevice(device) != cudaSuccess) real::cudaGetLastError();
  current = device;
}

Server::Server(Log log, Kept kept)
    : events("event", cudaErrorInvalidResourceHandle, 0),
      communicators("communicator", ncclInvalidArgument, 0),
      reductions("reduction", ncclInvalidArgument, ncclNumOps),
      registrations("registration", ncclInvalidArgument, 0),
      blas_handles("cuBLAS handle", CUBLAS_STATUS_NOT_INITIALIZED, 0),
      matmul_descriptions("description of a product", CUBLAS_STATUS_INVALID_VALUE,
                          1),  // null stands for itself
      matrix_layouts("matrix layout", CUBLAS_STATUS_INVALID_VALUE, 1),
      matmul_preferences("preference", CUBLAS_STATUS_INVALID_VALUE, 1),
      log_(log),
      kept_(std::move(kept.memory)) {
  steps.hold(std::move(kept.state));
  for (std::size_t slot = 0; slot < slot_count; ++slot) answered_[slot] = log.slot(slot).answered;
}

Server::~Server() = default;

void Server::run(std::chrono::microseconds spin_time) {
  reader_.emplace(log_, spin_time, [this] { return !stops_ || steps.inside(); });
  log_.control().collective_failed = 0;
  watch_ = std::thread([this] { watch_collectives(); });
  read();
  reads_ = false;
}

void Server::read() {
  while (!stops_ || steps.inside()) {
    const auto record = reader_->next();
    if (!record) break;
    if (stops_ && !steps.inside()) break;
    if (record->call >= static_cast<uint16_t>(Call::count))
      throw DamagedLog("Record " + std::to_string(record->sequence) +
                       " of the log names a call that there is not.");
    if (record->sequence < first_apart) record_ = record->sequence;
    if (steps.skips(*record)) {
      reader_->done();
      continue;
    }
    if (!stops_ && services[record->call].runs == Runs::waits && record->answer != 0 &&
        !is_answered(*record) && has_to_wait(*record)) {
      wait_beside(*record);
    } else {
      serve(*record);
    }
    reader_->done();
  }
}

// Makes a call that waits while the reader goes on with those of all other threads.
void Server::wait_beside(const Record& record) {
  try {
    if (static_cast<Call>(record.call) == Call::cudaStreamSynchronize &&
        stream_waits_.add(record, stream_of_wait(record)))
      return;
  } catch (const CallFailure&) {
    // the call itself will say so
  }
  make_beside(record);
}

// By a thread that serves only this one of the client.
void Server::make_beside(const Record& record) {
  auto& waiter = waiters_[record.slot];
  if (!waiter) waiter = std::make_unique<TaskThread>();
  waiter->run([this, record, content = std::vector(record.content, record.content + record.bytes)] {
    Record own = record;
    own.content = content.data();
    serve(own);
  });
}

// From a freeze on who waits is answered by the next server, or once nobody recovers.
bool Server::wait_while_frozen() const {
  while (control().images == Images::frozen && !stops_)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return !stops_;
}

void Server::answer_wait(const Record& record) {
  if (!wait_while_frozen()) return;
  Slot& slot = log_.slot(record.slot);
  slot.answered.load(std::memory_order_acquire);  // as in serve
  answer(slot, record.answer, 0, 0, "");
}

cudaStream_t Server::stream_of_wait(const Record& record) {
  const Request request{*this, {record.content, record.bytes}, log_.slot(record.slot)};
  return streams.find(request.arguments<wire::cudaStreamSynchronize>().stream);
}

bool Server::stream_has_failed(const Record& record) {
  try {
    choose_device(record.device);
    const cudaError_t state = real::cudaStreamQuery(stream_of_wait(record));
    if (state != cudaSuccess) real::cudaGetLastError();
    return state != cudaSuccess && state != cudaErrorNotReady;
  } catch (const CallFailure&) {
    return false;  // the program has ended it, but what is in it is still done
  }
}

TaskThread& Server::device_waiter() {
  const std::lock_guard lock(device_waiter_begins_);
  if (!device_waiter_) device_waiter_.emplace();
  return *device_waiter_;
}

bool Server::finish(uint64_t step) {
  if (!steps.is_ready_for(step)) return false;
  steps.begin_stopped();
  read();
  const wire::Rested rested = come_to_rest();
  return rested.intact != 0 && rested.ended == step;
}

// The program asks again and again whether a collective has failed; it is answered on its own side as long as
// nothing is said here. While it is held, nobody else sees that one has failed for which the reader may wait,
// nor that the device has while the reader meets others for a communicator: they may wait for this device.
void Server::watch_collectives() {
  const uint64_t replay_end = log_.control().replay_end;
  int looks = 0;  // while a communicator has been made or ended
  for (;;) {
    {
      std::unique_lock lock(stopping_);
      if (stopped_.wait_for(lock, look_interval, [this] { return stops_.load(); })) return;
    }
    looks = changing_ > 0 ? looks + 1 : 0;
    for (const Record& wait : stream_waits_.take_failed()) make_beside(wait);
    std::string failure;
    if (state_of_collectives() != ncclSuccess) {
      log_.control().collective_failed = 1;
      if (record_ <= replay_end && is_stopped_soon()) return;
      if (record_ <= replay_end) failure = failed_collective();
    } else if (looks >= 2 && record_ <= replay_end) {
      failure = failed_device();
    }
    if (failure.empty() || stops_) continue;
    std::fprintf(stderr, "jitckpt: the device proxy's server can't go on in the replay: %s\n",
                 failure.c_str());
    _exit(1);
  }
}

// Another rank's server may have died in the replay, too: the agent hears of it, and has all servers stop.
// This one must not end before that, as the state on its device may be all that is left.
bool Server::is_stopped_soon() {
  std::unique_lock lock(stopping_);
  return stopped_.wait_for(lock, longest_way_of_an_order, [this] { return stops_.load(); });
}

void Server::serve(const Record& record) {
  const Counted changing(changing_, changes_communicators(static_cast<Call>(record.call)));
  if (stops_ && !steps.makes(record)) return;
  choose_device(record.device);
  const Service& service = services[record.call];
  const bool waited_for = record.answer != 0 && !is_answered(record);
  thread_local const auto nobodys = std::make_unique<Slot>();
  Slot& slot = waited_for ? log_.slot(record.slot) : *nobodys;
  // The caller's last answer may have been another thread's here: what that has done comes before this call.
  log_.slot(record.slot).answered.load(std::memory_order_acquire);
  Request request{*this, {record.content, record.bytes}, slot, waited_for};
  int32_t result = 0;
  std::string text;
  const auto call = static_cast<Call>(record.call);
  std::shared_lock ends_communicator(communicators_stay_, std::defer_lock);
  if (call == Call::ncclCommDestroy || call == Call::ncclCommAbort) ends_communicator.lock();
  try {
    if (call == Call::cudaStreamDestroy) streams.leaves(request.arguments<wire::cudaStreamDestroy>().stream);
    result = call == Call::cudaFree
                 ? free_device_memory(reinterpret_cast<uint64_t>(request.arguments<wire::cudaFree>().devPtr))
                 : service.serve(request);
    if (result != 0) text = describe(service.library, result);
  } catch (const CallFailure& failure) {
    result = failure.result;
    text = failure.what();
  }
  if (ends_communicator.owns_lock()) ends_communicator.unlock();
  if (result == 0 && call == Call::cublasSetStream_v2)  // which has found it, so that it is used by now
    streams.belongs_to_handle(request.arguments<wire::cublasSetStream_v2>().streamId);
  if (result == 0 && call == Call::cudaFree) {
    const auto address = reinterpret_cast<uint64_t>(request.arguments<wire::cudaFree>().devPtr);
    steps.lose(address, memory.remove(address));
  }
  const bool fails_in_replay = result != 0 && record.sequence >= first_apart;
  if (fails_in_replay && service.library == Library::nccl && is_stopped_soon()) return;
  if (is_of_the_machine(service.library, result)) note_failure(service.library, result);
  if (stops_) return;
  if (fails_in_replay)
    throw Different(std::string(service.name) + ", which had succeeded before, fails: " + text);
  if (waited_for) {
    if (!wait_while_frozen()) return;
    answer(slot, record.answer, result, request.answer_bytes, text);
  } else if (result != 0 && (record.answer == 0 || is_of_the_machine(service.library, result))) {
    // Also where an earlier server has answered: that was no such failure. A failure of the machine has the
    // library's own words alone: any later call would give them.
    const bool named = !is_of_the_machine(service.library, result);
    report(service.library, record.slot, result, named ? std::string(service.name) + ": " + text : text);
  }
}

// Only one failure of NCCL says that it lies elsewhere.
void Server::note_failure(Library library, int32_t result) {
  // What an abort lets fail says nothing.
  if (stops_ && library == Library::nccl) return;
  has_failed_ = true;
  if (library != Library::nccl) device_has_failed_ = true;
  if (library != Library::nccl || result != ncclRemoteError) is_suspect_ = true;
}

ncclResult_t Server::state_of_collectives() {
  // Nothing where another thread is about to end a communicator.
  const std::unique_lock lock(communicators_stay_, std::try_to_lock);
  if (!lock) return ncclSuccess;
  for (const ncclComm_t communicator : communicators.all()) {
    ncclResult_t state = ncclSuccess;
    if (real::ncclCommGetAsyncError(communicator, &state) == ncclSuccess && state != ncclSuccess)
      return state;
  }
  return ncclSuccess;
}

std::string Server::failed_collective() {
  const ncclResult_t state = state_of_collectives();
  if (!is_of_the_machine(Library::nccl, state)) return "";
  report(Library::nccl, 0, state, describe(Library::nccl, state));
  has_failed_ = true;
  if (state != ncclRemoteError) is_suspect_ = true;
  return "NCCL error " + std::to_string(state);
}

std::string Server::failed_device() {
  std::set<int32_t> devices;
  for (const auto& [address, piece] : memory.all()) devices.insert(piece.device);
  for (const int32_t device : devices) {
    choose_device(device);
    const cudaError_t state = real::cudaStreamQuery(nullptr);
    if (is_of_the_machine(Library::cudart, state)) return describe(Library::cudart, state);
    if (state != cudaSuccess) real::cudaGetLastError();
  }
  return "";
}

// Where the device has finished what a call would wait for, the reader makes the call itself: another thread
// would first have to be woken up.
bool Server::has_to_wait(const Record& record) {
  const Request request{*this, {record.content, record.bytes}, log_.slot(record.slot)};
  const auto unfinished = [&](uint64_t stream) {
    return is_unfinished(real::cudaStreamQuery(streams.find(stream)));
  };
  try {
    choose_device(record.device);
    switch (static_cast<Call>(record.call)) {
      case Call::cudaStreamSynchronize:
        return unfinished(request.arguments<wire::cudaStreamSynchronize>().stream);
      case Call::copy_to_host: {
        // Most streams wait for the legacy one, too.
        const uint64_t stream = request.arguments<wire::copy_to_host>().stream;
        return unfinished(stream) || (stream >= wire::named_streams && unfinished(0));
      }
      case Call::cudaEventSynchronize:
        return is_unfinished(
            real::cudaEventQuery(events.find(request.arguments<wire::cudaEventSynchronize>().event)));
      default:
        return true;
    }
  } catch (const CallFailure&) {
    return true;  // the call itself will say so
  }
}

bool Server::is_answered(const Record& record) const {
  // Numbers go on beyond the largest.
  return record.answer != 0 && static_cast<int32_t>(answered_[record.slot] - record.answer) >= 0;
}

// The first failure is kept until the client has taken note: the later ones follow from it.
void Server::report(Library library, uint32_t slot, int32_t result, const std::string& text) {
  AsynchronousError& error = log_.control().errors[static_cast<std::size_t>(library)];
  std::lock_guard lock(errors_);
  if (error.origin.load(std::memory_order_acquire) != 0) return;
  error.result = result;
  put_text(error.text, sizeof error.text, text);
  error.origin.store(slot + 1u, std::memory_order_release);
}

}  // namespace jitckpt::proxy
