// One server, for one process of the program: reads its log and makes its calls.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <thread>

#include "proxy/failures.h"
#include "proxy/identity.h"
#include "proxy/server/failure.h"
#include "proxy/server/handles.h"
#include "proxy/server/kernels.h"
#include "proxy/server/locked_pages.h"
#include "proxy/server/steps.h"
#include "proxy/server/stream_waits.h"
#include "proxy/server/streams.h"
#include "proxy/server/task_thread.h"
#include "proxy/transport/log_reader.h"
#include "proxy/wire.h"

namespace jitckpt::proxy {

// New ids of NCCL for communicators that were made from others in an earlier server.
class RenewedIds {
 public:
  void add(const Key& key, const ncclUniqueId& id) {
    std::lock_guard lock(mutex_);
    ids_[key] = id;
  }
  ncclUniqueId newest(const ncclUniqueId& id) {
    std::lock_guard lock(mutex_);
    const auto renewed = ids_.find(key_of(id));
    return renewed == ids_.end() ? id : renewed->second;
  }

 private:
  std::mutex mutex_;
  std::map<Key, ncclUniqueId> ids_;
};

// What one server leaves to the next of its process: memory with what is in it.
struct Kept {
  MadeMemory::Pieces memory;
  HeldState state;
};

class Server {
 public:
  explicit Server(Log log, Kept kept = {});
  ~Server();

  // Serves the calls of the log until it is stopped. Throws DamagedLog, or Different.
  void run(std::chrono::microseconds spin_time);

  // By another thread: has `run` return, and aborts all communicators. From here on nothing is answered, and
  // what the device does counts for nothing, but for an optimizer step that has begun: it is made to its end.
  // False if a communicator can't be aborted, and so `run` does not return.
  bool stop();
  // After both: waits until the device has come to rest. What is said where `stop` was in vain is only what
  // can be copied.
  wire::Rested come_to_rest();
  wire::Rested rests_not();
  // While `run` waits for records, of which there are none: waits until the device has nothing to do. Nothing
  // if somebody interrupts it.
  std::optional<wire::Rested> settle(const std::function<bool()>& interrupted);
  // Makes the optimizer step for which all ranks are ready.
  bool finish(uint64_t step);
  // Ends all that has been made here, but the memory. False if that does not do, or something has failed that
  // may be amiss in this process.
  bool drop_all();
  // After that, what is left.
  Kept leave() { return {memory.all(), steps.held()}; }
  // A piece of memory that an earlier server has left, which is asked for again; what lies where it would
  // have to be is given back.
  bool take_kept(uint64_t address, const MadeMemory::Piece& piece);
  void drop_kept();

  // Makes one call: by the reader's thread in the log's order, or by a thread for the one that waits for it.
  void serve(const Record& record);

  // Of a wait for a stream: it is over; the stream is one of a device that has failed.
  void answer_wait(const Record& record);
  bool stream_has_failed(const Record& record);

  // How often it is looked for failures that nothing tells of. Each look wakes a thread up, which costs more
  // than the look itself.
  static constexpr std::chrono::milliseconds look_interval{50};
  static constexpr std::chrono::seconds longest_way_of_an_order{1};

  ControlBlock& control() const { return log_.control(); }
  // Whether the call that the reader is at may have been made before, by an earlier server.
  bool replays() const { return record_ <= control().replay_end; }
  // Whether a call has failed in such a way that what follows may be wrong, or nobody wants to know.
  bool has_failed() const { return has_failed_ || stops_; }
  bool is_stopped() const { return stops_; }
  // Whether what the device has made up to now is what it should be. From a freeze on ranks end their
  // communicators, one after the other.
  bool counts() const { return !has_failed() && control().images != Images::frozen; }
  bool device_has_failed() const { return device_has_failed_; }
  // Waits while all is frozen; then false if the server has been stopped.
  bool wait_while_frozen() const;
  // Waits for devices where the reader can't: it has to see a collective that never ends.
  TaskThread& device_waiter();
  // Takes note if a collective has failed, which may never end; returns what it is, empty if none has.
  std::string failed_collective();

  StreamTable streams;
  Handles<cudaEvent_t> events;
  Handles<ncclComm_t> communicators;
  Handles<ncclRedOp_t> reductions;
  Handles<void*> registrations;  // of memory with communicators
  Handles<cublasHandle_t> blas_handles;
  Handles<cublasLtMatmulDesc_t> matmul_descriptions;
  Handles<cublasLtMatrixLayout_t> matrix_layouts;
  Handles<cublasLtMatmulPreference_t> matmul_preferences;
  MadeMemory memory, host_memory;  // of the device; page-locked
  LockedPages locked_pages;
  RenewedIds renewed_ids;
  Kernels kernels;
  Steps steps{*this};

 private:
  void read();
  void wait_beside(const Record& record);
  void make_beside(const Record& record);
  cudaStream_t stream_of_wait(const Record& record);
  void end_threads();
  bool is_answered(const Record& record) const;
  bool has_to_wait(const Record& record);
  void watch_collectives();
  bool is_stopped_soon();
  ncclResult_t state_of_collectives();
  // What has failed, where only another process would help; empty if nothing has.
  std::string failed_device();
  void note_failure(Library library, int32_t result);
  void report(Library library, uint32_t slot, int32_t result, const std::string& text);

  Log log_;
  std::optional<LogReader> reader_;
  MadeMemory::Pieces kept_;          // of an earlier server
  std::atomic<uint64_t> record_{0};  // that the reader is at
  std::mutex errors_;
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_suspect_{false};  // what has failed may be amiss in this process
  std::atomic<bool> device_has_failed_{false};
  std::atomic<bool> stops_{false}, reads_{true};
  std::mutex stopping_;
  std::condition_variable stopped_;
  std::atomic<int> changing_{0};  // calls that make or end a communicator just now
  std::thread watch_;
  StreamWaits stream_waits_{*this};
  std::shared_mutex communicators_stay_;  // shared: by who ends one
  std::mutex device_waiter_begins_;       // by the reader, or by who settles
  std::optional<TaskThread> device_waiter_;
  std::unique_ptr<TaskThread> waiters_[slot_count];  // for each thread of the client that has waited
  // What an earlier server has answered: those calls are made again for what they do, and their answers
  // thrown away.
  uint32_t answered_[slot_count];
};

// Of this thread. A device that can't be chosen is one that fails the call itself.
void choose_device(int device);

// A call that is being served.
struct Request {
  Server& server;
  std::span<const std::byte> content;
  Slot& slot;  // of the thread that waits; of nobody if none does
  bool waited_for = false;
  std::size_t answer_bytes = 0;

  // Throws CallFailure if the record is too short for them.
  template <class Arguments>
  Arguments arguments() const {
    Arguments arguments;
    if (content.size() < sizeof arguments)
      throw CallFailure(cudaErrorInvalidValue, "a record is shorter than its call needs");
    std::memcpy(&arguments, content.data(), sizeof arguments);
    return arguments;
  }

  // What follows the arguments, with the record's padding.
  template <class Arguments>
  std::span<const std::byte> rest() const {
    return content.subspan(sizeof(Arguments));
  }

  // So many bytes behind the arguments. Throws CallFailure if they are not all there.
  template <class Arguments>
  const void* content_after(std::size_t bytes) const {
    if (content.size() < sizeof(Arguments) || content.size() - sizeof(Arguments) < bytes)
      throw CallFailure(cudaErrorInvalidValue, "a record is shorter than it says");
    return content.data() + sizeof(Arguments);
  }

  template <class Answer>
  Answer& answer() {
    static_assert(sizeof(Answer) <= sizeof(Slot::content) && std::is_trivially_copyable_v<Answer>);
    answer_bytes = sizeof(Answer);
    return *reinterpret_cast<Answer*>(slot.content);
  }
};

}  // namespace jitckpt::proxy
