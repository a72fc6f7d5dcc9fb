// A server that has died is replaced: the new one makes what there was at the beginning of the minibatch,
// gets the memory of then, and reads the log from there.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <set>
#include <utility>

#include "proxy/client/connection.h"
#include "proxy/client/jitckpt_proxy.h"
#include "proxy/client/thread.h"
#include "proxy/transport/answer.h"
#include "proxy_by_hand.h"

namespace jitckpt::proxy::client {
namespace {

// A failure that comes back each time the calls are made again is the program's own, or the machine's.
constexpr int most_recoveries = 2;        // in one minibatch
constexpr uint64_t never = ~uint64_t{0};  // comes an image of this number
// A server whose device has not come to rest by then is ended.
constexpr auto longest_reset = std::chrono::seconds(5);
// An optimizer step that nothing stands in the way of.
constexpr auto longest_step = std::chrono::seconds(30);

template <class Arguments>
LogWriter::Apart apart(Call call, int32_t device, const Arguments& arguments) {
  const Bytes bytes = bytes_of(arguments);
  return {static_cast<uint16_t>(call), device, {bytes.begin(), bytes.end()}};
}

}  // namespace

std::vector<void*> Connection::Freed::take(uint64_t before) {
  std::lock_guard lock(mutex_);
  const auto later = std::stable_partition(all_.begin(), all_.end(),
                                           [before](const Piece& piece) { return piece.freed >= before; });
  std::vector<void*> taken;
  for (auto piece = later; piece != all_.end(); ++piece) taken.push_back(piece->pointer);
  all_.erase(later, all_.end());
  return taken;
}

// Image k + 2 is written over image k.
bool Connection::is_usable(const Image& image) const {
  const proxy::ControlBlock& control = log_.control();
  return writer_.is_kept(image.start.sequence) && image.state <= control.image_whole &&
         control.image_begun < image.state + 2;
}

// An image is behind all that the devices had to do, of those that it has memory of. Who asks does not wait
// for a recovery.
bool Connection::is_over(uint64_t event) {
  const Objects::Recorded recorded = objects_.recorded(event);
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (recorded.number == 0 || !lock || !nothing_has_failed() || stands() != jitckpt_proxy_intact)
    return false;
  const uint64_t whole = log_.control().image_whole;
  return std::ranges::any_of(images_, [&](const Image& image) {
    return image.state <= whole && recorded.number < image.start.sequence &&
           std::ranges::any_of(
               image.held, [&](const wire::Range& range) { return range.device == recorded.device; });
  });
}

// The device is past it once it is whole.
void Connection::forget_copies_before(const Image& image) {
  if (image.state > log_.control().image_whole) return;
  pinned_reads_.forget_before(image.start.sequence);
  copy_flags_.forget_before(image.start.sequence);
}

// All but the newest ones, whose log is still there, with what only they need. None may be under way.
void Connection::forget_images(std::size_t remaining) {
  hold_.when_free([&] {
    std::lock_guard lock(mutex_);
    while (!images_.empty() &&
           (images_.size() > remaining || !writer_.is_kept(images_.front().start.sequence))) {
      for (void* const memory : {images_.front().copies, images_.front().saved})
        if (memory) pinned_.release(memory);
      images_.pop_front();
    }
    if (images_.empty()) {
      writer_.keep_nothing();
    } else {
      writer_.forget_before(images_.front().start);
      forget_copies_before(images_.front());
    }
    const uint64_t needed_from = images_.empty() ? ~uint64_t{0} : images_.front().start.sequence;
    objects_.forget_ended(needed_from);
    communicators_.forget_ended(needed_from);
    for (void* const freed : freed_pinned_.take(needed_from)) pinned_.release(freed);
  });
}

// The server answers when it has come past that image's place in the log.
cudaError_t Connection::wait_for_newest_image() {
  if (log_.control().image_whole >= states_) return cudaSuccess;
  wire::newest_image_answer newest{};
  const auto result = ask<cudaError_t>(Call::newest_image, wire::newest_image{}, newest);
  if (result != cudaSuccess || newest.image >= states_) return result;
  return cudaError_t(
      fail(Library::cudart, cudaErrorUnknown, "the device's memory could not be copied to the host"));
}

void Connection::note_image_bytes(uint64_t more) {
  for (const Image& image : images_) {
    if (image.copies) more += image.bytes;
  }
  if (more > most_image_bytes_) most_image_bytes_ = more;
}

uint64_t Connection::image_bytes() {
  std::lock_guard lock(mutex_);
  return images_.empty() ? 0 : images_.back().bytes;
}

// The server makes it when it comes to the record. It goes over what the last but one has, which stays until
// then: what this rank has waited for, the others have begun, so they have the last one by then.
// steps: the record is the beginning of an optimizer step, too.
cudaError_t Connection::make_image(const Extents& leave_out, bool whole, bool steps) {
  forget_images(2);
  Image image;
  image.state = states_ + 1;
  image.memory = objects_.allocations();
  image.whole = whole;
  image.steps = steps;
  // Nothing of what is free may be given out, and written to, before the record is in the log. Other threads'
  // calls are before it, and in the image; or behind it, and made again.
  std::unique_lock stays_free(free_memory().mutex);
  for (const Allocation& held : free_memory().held(image.memory, leave_out)) {
    image.held.push_back({held.address, image.bytes, held.bytes, held.device});
    image.bytes += held.bytes;
  }
  Image* const before = images_.size() == 2 ? &images_.front() : nullptr;
  const bool takes_over = before && before->room >= image.bytes && before->room / 4 <= image.bytes;
  image.room = takes_over ? before->room : image.bytes + image.bytes / 8 + 1;
  image.copies = takes_over ? before->copies : pinned_.allocate(image.room);
  if (!image.copies) {
    return cudaError_t(fail(Library::cudart, cudaErrorMemoryAllocation,
                            "no room for copies of the device's memory: raise JITCKPT_PROXY_PINNED_BYTES"));
  }
  for (wire::Range& range : image.held) range.to += reinterpret_cast<uint64_t>(image.copies);
  // Without an older one there is nothing to go back to before it is whole, so the program waits for it.
  const bool is_only = images_.empty();
  const wire::keep_image keep{image.state, image.held.size(), reinterpret_cast<uint64_t>(image.copies),
                              image.room};
  if (steps && !is_only) step_behind_ = writer_.newest();
  const cudaError_t result =
      steps && !is_only
          ? tell_step(image.state, &image)
          : tell<cudaError_t>(Call::keep_image, keep, std::as_bytes(std::span(image.held)), &image.start);
  stays_free.unlock();
  if (result != cudaSuccess) {
    step_behind_ = ~uint64_t{0};
    if (!takes_over) pinned_.release(image.copies);
    return result;
  }
  if (takes_over) before->copies = nullptr;
  hold_.when_free([&] {
    std::lock_guard lock(mutex_);
    states_ = image.state;
    outgrown_since_ = 0;
    image.counts = communicators_.counts();
    images_.push_back(std::move(image));
    step_behind_ = ~uint64_t{0};
  });
  note_image_bytes(0);
  return is_only ? wait_for_newest_image() : cudaSuccess;
}

// They came in a recovery of this minibatch or the one before: the device is past that.
void Connection::tell_of_different_answers() {
  const uint64_t different = log_.control().different_answers;
  if (std::exchange(different_answers_, different) == different) return;
  std::fprintf(
      stderr,
      "jitckpt: calls that were made again after a failure have given other values than the program has "
      "got from them, so its result may differ from an undisturbed run's. A kernel that reads pinned "
      "memory which the program overwrites does that.\n");
}

// needed: whether there is to be one. again: there is, whatever was said to others since the last.
cudaError_t Connection::prepare_image(bool& needed, bool again) {
  needed = false;
  // First this: who gives up says why, and then that there is nobody any more.
  const bool alone = !hold_.on();
  std::string obstacle = hold_.given_up();
  if (obstacle.empty()) obstacle = communicators_.obstacle(alone);
  // Ranks are as far apart as from one word between them to the next, and have to have an image in common: so
  // there is no more than one of each such time (several optimizers, one after the other).
  if (obstacle.empty() && communicators_.joins_ranks() && !has_communicated_.exchange(false) && !again)
    return cudaSuccess;
  if (!obstacle.empty()) {
    writer_.keep_nothing();
    return cudaError_t(fail(Library::cudart, cudaErrorNotSupported,
                            "the device proxy can't bring this process's device back: " + obstacle));
  }
  // So the program is no more than a minibatch ahead of its device, and no image is under way here.
  if (const cudaError_t result = wait_for_newest_image(); result != cudaSuccess) {
    writer_.keep_nothing();
    return result;
  }
  recoveries_ = 0;
  tell_of_different_answers();
  hold_.forget_failures();
  needed = true;
  return cudaSuccess;
}

cudaError_t Connection::keep(bool again) {
  state_is_still_ = state_was_written_ = false;  // the image has it, too
  bool needed = false;
  if (const cudaError_t result = prepare_image(needed, again); result != cudaSuccess || !needed)
    return result;
  if (const cudaError_t result = make_image(again ? Extents() : unneeded_, true, false);
      result != cudaSuccess) {
    forget_images(0);
    return result;
  }
  begin_minibatch();
  return cudaSuccess;
}

void Connection::leave_out(std::span<const jitckpt_proxy_place> places) {
  unneeded_ = Extents(places, extent_of);
}

void Connection::begin_minibatch() {
  const auto now = std::chrono::steady_clock::now();
  if (has_kept_) {
    minibatch_before_ = minibatch_.load();
    minibatch_ = now - minibatch_began_;
  }
  minibatch_began_ = now;
  has_kept_ = true;
}

// An event that was over before a recovery need not be after it, until the device has come past all that the
// program had called by then.
jitckpt_proxy_standing Connection::stands() const {
  if (hold_.held()) return jitckpt_proxy_recovers;
  return !dead_ && log_.control().image_whole >= intact_from_ ? jitckpt_proxy_intact : jitckpt_proxy_lost;
}

void Connection::prepare_spare() {
  if (!has_kept_ || !std::exchange(wants_spare_, false)) return;
  try {
    spare_ = std::make_unique<ServerProcess>(log_file_.descriptor(), pinned_.file().descriptor());
    for (const std::string& path : objects_.libraries()) spare_->load(path);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "jitckpt: There is no spare server: %s\n", error.what());
  }
}

void Connection::end_spare() {
  if (spare_) spare_->kill();
  spare_.reset();
}

// The spare, if there is one that lives, or a new one.
std::unique_ptr<ServerProcess> Connection::ready_server() {
  wants_spare_ = settings_.spare_server;
  if (auto spare = std::exchange(spare_, nullptr); spare && spare->alive()) {
    try {
      spare->wait_until_ready();
      return spare;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "jitckpt: The spare server can't be used, so another is started: %s\n",
                   error.what());
    }
  }
  auto server = std::make_unique<ServerProcess>(log_file_.descriptor(), pinned_.file().descriptor());
  server->wait_until_ready();
  return server;
}

// In one go: nobody gets the number of a process that is no more.
Connection::Restarted Connection::restart_server(const control::Restart& order) {
  using Clock = std::chrono::steady_clock;
  std::lock_guard lock(mutex_);
  const auto begin = Clock::now();
  intact_from_ = never;
  if (order.finish != 0) {
    if (!rested_ || !server_->finish(order.finish, longest_step))
      throw std::runtime_error("optimizer step " + std::to_string(order.finish) + " can't be finished");
    rested_->ended = order.finish;
    rested_->changed = 0;
    log_.control().step_begun = order.finish;
  }
  Restarted restarted{};
  if (order.copy != 0) restarted.copy = copy_state(order.copy, rested_);
  const bool keeps_memory = rested_ && rested_->intact != 0;
  // One that has been reset before, and holds what it should, is as it has to be.
  restarted.stays = order.may_stay != 0 && server_->alive() &&
                    (begun_ ? server_->reset(longest_reset, keeps_memory) : keeps_memory);
  if (!restarted.stays) {
    server_->kill();
    server_->end();
    rested_.reset();
  }
  pinned_reads_.put_back();
  copy_flags_.forget_since_freeze();
  const auto ended = Clock::now();
  begun_ = false;
  if (!restarted.stays) server_ = ready_server();
  restarted.ending = ended - begin;
  restarted.starting = Clock::now() - ended;
  return restarted;
}

// What makes a new server as the old one was when the image was made.
std::vector<LogWriter::Apart> Connection::calls_before(const Image& image,
                                                       const std::vector<LogWriter::Apart>& ids,
                                                       const std::vector<LogWriter::Apart>& communicators,
                                                       const std::vector<LogWriter::Apart>& overwriting,
                                                       const Source& source) {
  const uint64_t from = image.start.sequence;
  std::vector<LogWriter::Apart> calls = ids;
  const auto add = [&calls](const std::vector<LogWriter::Apart>& more) {
    calls.insert(calls.end(), more.begin(), more.end());
  };
  const auto note_time = [&calls](Made made) {
    calls.push_back(apart(Call::note_time, 0, wire::note_time{static_cast<uint32_t>(made)}));
  };
  add(objects_.creations(from, Objects::Kind::plain));
  note_time(Made::handles);
  std::set<int32_t> devices;
  const Extents state(image.places, extent_of);
  for (const wire::Range& range : image.held) {
    state.outside(memory_of(range), [&](const Extent& part) {
      const wire::copy arguments{part.begin,
                                 range.to + (part.begin - range.from),
                                 part.end - part.begin,
                                 0,
                                 cudaMemcpyHostToDevice,
                                 no_copy_flag,
                                 0,
                                 0,
                                 0};
      calls.push_back(apart(Call::copy, range.device, arguments));
    });
  }
  for (const Allocation& one : image.memory) devices.insert(one.device);
  add(overwriting);
  for (const int32_t device : devices)
    calls.push_back(apart(Call::cudaDeviceSynchronize, device, wire::cudaDeviceSynchronize{}));
  const wire::restore_state restored{image.state,       image.places.size(), source.copy.offset,
                                     source.copy.bytes, source.in_place,     source.copy.process,
                                     source.copy.file};
  calls.push_back(apart(Call::restore_state, 0, restored));
  const auto places = std::as_bytes(std::span(image.places));
  calls.back().content.insert(calls.back().content.end(), places.begin(), places.end());
  note_time(Made::image);
  add(communicators);
  add(objects_.creations(from, Objects::Kind::of_communicators));
  note_time(Made::communicators);
  return calls;
}

// A new server begins with the image, and makes all calls since. With mutex_ held.
bool Connection::begin_server(const Image& image, const std::vector<LogWriter::Apart>& ids,
                              const std::vector<LogWriter::Apart>& communicators,
                              const std::vector<LogWriter::Apart>& overwriting, const Source& source) {
  const auto start =
      writer_.write_apart(calls_before(image, ids, communicators, overwriting, source), image.start);
  if (!start) return false;
  log_.control().start = *start;
  log_.control().reader_woken_by = awake;
  log_.control().images = Images::made;
  log_.control().check_compared = 0;
  log_.control().compares_answers = recovers_from_failure_;
  for (AsynchronousError& error : log_.control().errors) error.origin = 0;
  replayed_from_ = image.start.sequence;
  log_.control().replay_end = replay_end_ = writer_.newest();
  // The next optimizer step waits for other ranks' programs, and so for the end of their replays.
  for (const Image& later : images_) {
    if (later.state > image.state && later.steps)
      replay_end_ = std::min(replay_end_, later.start.sequence - 1);
  }
  replay_end_ = std::min(replay_end_, step_behind_.load());
  log_.control().step_begun = log_.control().step_ready = image.state;
  rested_.reset();
  void_answers(log_);
  server_->begin();
  begun_ = true;
  return true;
}

// Without an agent. With mutex_ held.
bool Connection::recover() {
  const auto image =
      std::find_if(images_.rbegin(), images_.rend(), [this](const Image& one) { return is_usable(one); });
  if (image == images_.rend() || ++recoveries_ > most_recoveries || !communicators_.obstacle(true).empty())
    return false;
  try {
    const std::string death = server_->end();
    server_ = ready_server();
    std::fprintf(stderr,
                 "jitckpt: the device proxy's server %s; process %d takes over and makes its calls again.\n",
                 death.c_str(), server_->id());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "jitckpt: %s\n", error.what());
    return false;
  }
  intact_from_ = states_ + 1;
  return begin_server(*image, {}, communicators_.creations_alone(image->start.sequence), {}, {});
}

}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

int jitckpt_proxy_keep(void) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->keep(false) : result;
}

void jitckpt_proxy_leave_out(const struct jitckpt_proxy_place* places, uint64_t count) {
  int32_t result = 0;
  if (Connection* const connection = Connection::get(Library::cudart, result))
    connection->leave_out({places, count});
}

int jitckpt_proxy_keep_again(void) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->keep(true) : result;
}

int jitckpt_proxy_communicated(void) {
  int32_t result = 0;
  const Connection* const connection = Connection::get(Library::cudart, result);
  return connection && connection->communicated();
}

uint64_t jitckpt_proxy_image_bytes(void) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->image_bytes() : 0;
}

int jitckpt_proxy_stands(void) {
  int32_t result = 0;
  const Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->stands() : jitckpt_proxy_lost;
}

uint64_t jitckpt_proxy_different_answers(void) {
  int32_t result = 0;
  const Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->log().control().different_answers.load() : 0;
}

int jitckpt_proxy_server(void) { return Connection::usable() ? Connection::server_of_process() : 0; }
