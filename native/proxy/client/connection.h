// The process's one server, and the memory that is shared with it.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "proxy/client/communicator_table.h"
#include "proxy/client/control_thread.h"
#include "proxy/client/copy_flags.h"
#include "proxy/client/errors.h"
#include "proxy/client/free_memory.h"
#include "proxy/client/hold.h"
#include "proxy/client/jitckpt_proxy.h"
#include "proxy/client/objects.h"
#include "proxy/client/pinned_memory.h"
#include "proxy/client/pinned_reads.h"
#include "proxy/client/server_process.h"
#include "proxy/client/settings.h"
#include "proxy/client/state_watch.h"
#include "proxy/client/validation.h"
#include "proxy/transport/log_writer.h"
#include "proxy/transport/together.h"

namespace jitckpt::proxy::client {

inline Extent extent_of(const jitckpt_proxy_place& place) {
  return {place.address, place.address + place.bytes};
}
uint64_t bytes_of_places(std::span<const jitckpt_proxy_place> places);
inline Extent memory_of(const wire::Range& range) { return {range.from, range.from + range.bytes}; }

// For the log to be read and answered, and then for the device to have nothing to do: no more than what
// threads have called since the program waited for it. The agent waits for both (validations.py).
constexpr auto longest_settling = std::chrono::seconds(5);

class Connection {
 public:
  // The one of this process, which the first call starts the server for. Null if there is none (any more):
  // the library's failure is noted then, and is `result`.
  static Connection* get(Library library, int32_t& result);

  // Whether the process may ask for a server at all: false in a forked child and while the process ends.
  static bool usable();
  static bool ending();

  LogWriter& writer() { return writer_; }
  const Log& log() const { return log_; }
  PinnedMemory& pinned() { return pinned_; }
  std::chrono::microseconds spin_time() const { return settings_.spin_time; }
  CopyFlags& copy_flags() { return copy_flags_; }
  PinnedReads& pinned_reads() { return pinned_reads_; }
  Objects& objects() { return objects_; }
  CommunicatorTable& communicators() { return communicators_; }
  Hold& hold() { return hold_; }
  Validation& validation() { return validation_; }
  // The server's process; 0: there is none any more. Waits while another takes its place.
  pid_t server();
  static pid_t server_of_process();

  // See jitckpt_proxy.h.
  cudaError_t keep(bool again);
  void leave_out(std::span<const jitckpt_proxy_place> places);
  bool state_changed();
  bool communicated() const { return has_communicated_; }
  cudaError_t step_begins(std::span<const jitckpt_proxy_place> places);
  cudaError_t step_ended(std::span<const jitckpt_proxy_place> places, uint64_t digest);
  bool state_stays() const { return together_ && !has_left_; }
  void state_leaves();
  void state_ends();
  void watch_state(std::span<const jitckpt_proxy_place> memory);
  bool state_was_changed();
  // See requests.h.
  bool state_is_still() const { return state_is_still_; }
  void writes(uint64_t address, uint64_t bytes);
  // A kernel, or a library's, gets what the record says: before that is in the log.
  // What it returns is to be looked at once it is there.
  struct Look {
    wire::Found* found;
    std::vector<wire::Range> ranges;
  };
  std::optional<Look> gives(Call call, Bytes arguments, Bytes more);
  bool state_was_written() const { return state_was_written_; }
  // A thread waits for an answer; within a step that answer may lie behind what waits for the step's end.
  void waits_for_answer(std::size_t slot) {
    if (const std::size_t stepping = stepping_; stepping < slot_count) [[unlikely]]
      wait_within_step(slot == stepping);
  }
  cudaError_t check(jitckpt_proxy_memory& memory);
  jitckpt_proxy_validation validate(const control::Validates& says);
  // This rank has a call with others: it can't end before they have come as far.
  void communicates() {
    has_communicated_.store(true, std::memory_order_relaxed);
    if (stepping_ < slot_count) [[unlikely]]
      communicates_within_step();
  }
  // Number of the first record that the server reads, or has read, of those that threads have written.
  uint64_t replayed_from() const { return replayed_from_; }
  // Gives pinned memory back, as soon as no call will be made again that used it.
  void release_pinned(void* pointer);

  // False once the server is dead and can't be replaced, or the process ends; asked by threads that wait for
  // it.
  bool go_on();
  // The failure of a call that has no server any more.
  int32_t fail_for_good(Library library);

  explicit Connection(const ProxySettings& settings);

  // As far as is known here, and the server said by itself.
  bool nothing_has_failed() const;
  // The same of an event: it was recorded before an image that is whole.
  bool is_over(uint64_t event);
  // A failure of the machine that a call has met which nobody waited for.
  std::optional<MachineFailure> pending_failure() const;

  // How long a thread may wait for an answer before that counts as a hang: after each recovery twice as long,
  // since the device may only be slow. Nothing before this rank first meets others or keeps a minibatch: what
  // it does alone until then takes as long as it likes.
  std::optional<std::chrono::milliseconds> hang_time() const;

  // Of those whose calls a replay makes again; and recoveries since the newest began.
  std::chrono::steady_clock::duration longest_minibatch() const {
    return std::max(minibatch_.load(), minibatch_before_.load());
  }
  int recoveries() const { return recoveries_; }
  // That images have had at one time, and the copy of a check with them.
  uint64_t most_image_bytes() const { return most_image_bytes_; }
  uint64_t image_bytes();

  // For the control thread, which stops the host before and lets it go on afterwards.
  // From here on nothing counts that the device does: ranks end their communicators one after the other, and
  // what a device makes of the first of them it may send through the others, also to this one.
  void freeze();
  control::Stopped report();
  control::Standing standing(std::chrono::steady_clock::duration waited) const;
  jitckpt_proxy_standing stands() const;
  // Nothing has failed, and this process is to be written to files while its server stays. The host makes no
  // call any more, and nothing gets into the log.
  void pause();
  // Whether all is read and answered that there is in the log.
  bool is_quiet() const;
  // Once it is: nothing that the server does is seen from here any more, the newest state is in host memory,
  // and no file here stands for the server. Returns why that can't be, a clause; empty if it is so.
  std::string settle();
  // After that, in this process or in one that was made of the files, whose server is gone. May be called
  // twice.
  void watch_again();
  // The host goes on, unless something has failed.
  bool go_on_from_pause();
  // Brings the server to rest, so that it can begin anew; if that fails, or may not be, ends it and starts
  // another. Throws std::runtime_error with a sentence.
  struct Restarted {
    std::chrono::steady_clock::duration ending, starting;
    bool stays;
    std::vector<control::HostCopy> copy;
  };
  Restarted restart_server(const control::Restart& order);
  // Once there is something to recover: has another server ready, with the libraries loaded that this one
  // has. It has no device until it takes this one's place.
  void prepare_spare();
  std::vector<control::NamedId> make_ids();
  bool server_is_gone() const { return !server_->alive(); }
  int server_process_file() const { return server_->process_file(); }
  std::string end_of_server();
  // Throws std::runtime_error with a sentence.
  void replay(uint64_t recovery, const control::Replay& order);
  bool replayed() const;
  // Why a validation's replay that is at its end has come to nothing, so that the memory is not what it was;
  // empty if it has not.
  std::string failed_trial();
  bool release();
  void give_up(const std::string& why);

 private:
  // The device's memory as it was when a minibatch began.
  struct Image {
    uint64_t state = 0;  // images are numbered; all ranks have the same
    Position start{};    // of the log that leads on from it
    std::vector<Allocation> memory;
    std::vector<wire::Range> held;      // of that memory, by address; each with its copy
    uint64_t bytes = 0;                 // of all copies
    void* copies = nullptr;             // pinned; null if a newer image has taken them over
    uint64_t room = 0;                  // bytes that there is for the copies
    std::map<uint64_t, Counts> counts;  // of the calls before, by the communicator's handle
    // Where the state stays on the device, the image is of before its optimizer step (steps), and without
    // these places; they are there once the step is whole in the log. With the last such step it is whole.
    bool whole = true, steps = false, stepped = false;
    std::vector<jitckpt_proxy_place> places{};
    uint64_t digest = 0;
    void* saved = nullptr;  // pinned: has the places, one after the other, once ControlBlock says so
    uint64_t saved_bytes = 0;

    bool leads_on() const { return whole || stepped; }

    // The calls that fill what was free.
    std::vector<LogWriter::Apart> filling(uint8_t byte) const;
  };
  // Pinned memory that the program has freed.
  class Freed {
   public:
    void add(void* pointer, uint64_t freed) {
      std::lock_guard lock(mutex_);
      all_.push_back({pointer, freed});
    }
    // What was freed before the record of this number.
    std::vector<void*> take(uint64_t before);

   private:
    struct Piece {
      void* pointer;
      uint64_t freed;
    };
    std::mutex mutex_;
    std::vector<Piece> all_;
  };

  bool is_usable(const Image& image) const;
  void forget_images(std::size_t remaining);
  void forget_copies_before(const Image& image);
  cudaError_t wait_for_newest_image();
  cudaError_t prepare_image(bool& needed, bool again);
  cudaError_t make_image(const Extents& leave_out, bool whole, bool steps);
  cudaError_t tell_step(uint64_t step, Image* image);
  void begin_minibatch();
  void wait_within_step(bool by_its_thread);
  void communicates_within_step();
  void open_step();
  void outgrown();
  std::string outgrown_in_words() const;
  void tell_of_different_answers();
  void rest();
  void report_device(control::Stopped& report) const;
  std::vector<control::HostCopy> copy_state(uint64_t state, const std::optional<wire::Rested>& device);
  void forget_copy();
  void save_state();  // with still_mutex_ held
  std::optional<control::HostCopy> saved_state(const Image& image) const;
  std::vector<wire::Range> ranges_of(const std::vector<jitckpt_proxy_place>& places, uint64_t to);
  void note_image_bytes(uint64_t more);
  std::vector<wire::Piece> pieces_to_check(const Image& image);
  std::unique_ptr<Check> begin_check(const Image& image);
  std::unique_ptr<ServerProcess> ready_server();
  void end_spare();
  void end_check();
  bool recover();
  // Where parameters and optimizer state are if not in the image; nowhere: on the device.
  struct Source {
    bool in_place = false;
    control::HostCopy copy{};
  };
  std::vector<LogWriter::Apart> calls_before(const Image& image, const std::vector<LogWriter::Apart>& ids,
                                             const std::vector<LogWriter::Apart>& communicators,
                                             const std::vector<LogWriter::Apart>& overwriting,
                                             const Source& source);
  bool begin_server(const Image& image, const std::vector<LogWriter::Apart>& ids,
                    const std::vector<LogWriter::Apart>& communicators,
                    const std::vector<LogWriter::Apart>& overwriting, const Source& source);

  ProxySettings settings_;
  SharedFile log_file_;
  Mapping log_mapping_;
  Log log_;
  PinnedMemory pinned_;
  LogWriter writer_;
  CopyFlags copy_flags_;
  PinnedReads pinned_reads_;
  Objects objects_;
  CommunicatorTable communicators_;
  std::deque<Image> images_;         // the oldest first; the newest may not be whole yet
  std::atomic<uint64_t> states_{0};  // number of the newest image
  // Of it, plus 1, if the calls since then have outgrown the log; 0: they have not.
  std::atomic<uint64_t> outgrown_since_{0};
  std::atomic<uint64_t> most_image_bytes_{0};
  std::unique_ptr<Together> together_;  // null: the state does not stay
  bool told_outgrown_ = false;          // that the calls of a minibatch have outgrown the log
  bool has_left_ = false;               // the newest step was the last with a barrier
  static constexpr std::size_t nobody = slot_count + 1;
  std::atomic<std::size_t> stepping_{nobody};  // slot of the thread that makes an optimizer step
  // Number of a record before the beginning of a step that is told just now, and of which images_ do not
  // know.
  std::atomic<uint64_t> step_behind_{~uint64_t{0}};
  std::atomic<uint64_t> step_{0};                     // its number
  std::vector<jitckpt_proxy_place> left_out_places_;  // of the newest step's image
  Extents left_out_;                                  // the same
  Extents unneeded_;                                  // by images with the state
  std::atomic<bool> step_needs_others_{false};
  // Where the state stays, between two optimizer steps: its places, by address. The control thread never
  // takes this lock, since who has it may wait for a recovery.
  std::mutex still_mutex_;
  std::vector<jitckpt_proxy_place> still_, still_as_told_;
  uint64_t still_state_ = 0, saves_ = 0;  // the state's number; the newest that was to be saved
  StateWatch watch_;
  std::vector<wire::Range> saved_;  // the places with their copies, by address
  // What is found after the first call of each way: in pinned memory, behind the copies.
  std::unordered_map<uint64_t, const wire::Found*> looked_;
  wire::Found* found_ = nullptr;
  std::atomic<bool> state_is_still_{false}, state_was_written_{false};
  std::optional<wire::Rested> rested_;  // what a server said that has been stopped
  // The state in host memory, until the recovery is over.
  struct Copied {
    uint64_t state;
    void* memory;
    control::HostCopy copy;
  };
  std::optional<Copied> copied_;
  std::unique_ptr<Check> check_;    // of the validation that is under way
  uint64_t checks_ = 0;             // number of the newest
  std::atomic<int> recoveries_{0};  // of the minibatch
  uint64_t different_answers_ = 0;  // of which the program's user has been told
  std::atomic<bool> has_kept_{false};
  // How long the newest two took, and when the newest began.
  std::atomic<std::chrono::steady_clock::duration> minibatch_{}, minibatch_before_{};
  std::chrono::steady_clock::time_point minibatch_began_;
  std::atomic<bool> has_communicated_{false};  // since the newest image
  std::atomic<uint64_t> replayed_from_{0};
  // Number of the image from which on the device is where the program's events say, if it was ever brought
  // back: it may be anywhere before.
  std::atomic<uint64_t> intact_from_{0};
  uint64_t replay_end_ = 0;            // number of the last record of the replay
  bool recovers_from_failure_ = true;  // not for a validation
  bool begun_ = false;                 // whether the server reads the log
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<ServerProcess> spare_;  // the control thread's
  bool wants_spare_ = false;              // one that dies is not replaced: the next one would die too
  std::mutex mutex_;
  std::atomic<bool> dead_{false};
  std::string death_;
  Freed freed_pinned_;
  Hold hold_;
  Validation validation_;
  std::unique_ptr<ControlThread> control_;

  friend void end_connection();
  friend void forget_connection();
};

}  // namespace jitckpt::proxy::client
