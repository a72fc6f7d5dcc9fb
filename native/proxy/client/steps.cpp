// Optimizer steps in which parameters and optimizer state stay on the device:
// docs/how-it-works/transparent.md has the rules.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "proxy/client/connection.h"
#include "proxy/client/jitckpt_proxy.h"
#include "proxy/client/requests.h"
#include "proxy/client/thread.h"

namespace jitckpt::proxy::client {
namespace {

// What lies in its way is at most other copies of the device's memory.
constexpr auto longest_rest = std::chrono::seconds(5);
constexpr auto longest_copy = std::chrono::seconds(60);

bool is_same_place(const jitckpt_proxy_place& one, const jitckpt_proxy_place& other) {
  return one.address == other.address && one.bytes == other.bytes;
}

}  // namespace

cudaError_t Connection::step_begins(std::span<const jitckpt_proxy_place> places) {
  state_is_still_ = state_was_written_ = false;
  if (!hold_.on() || !together_)
    return cudaError_t(fail(Library::cudart, cudaErrorNotSupported,
                            "there is no step barrier, so parameters and optimizer state can't stay on the "
                            "device"));
  bool needed = false;
  if (const cudaError_t result = prepare_image(needed, true); result != cudaSuccess) return result;
  // By now all ranks have come to the last step, and those have said so that wanted to leave before it.
  const uint64_t whole_from = together_->whole_from();
  has_left_ = together_->has_been_left() || (whole_from != 0 && whole_from <= states_ + 1);
  if (has_left_ || step_needs_others_) places = {};
  if (!std::ranges::equal(places, left_out_places_, is_same_place)) {
    left_out_places_.assign(places.begin(), places.end());
    left_out_ = Extents(places, extent_of);
  }
  if (const cudaError_t result = make_image(left_out_, places.empty(), true); result != cudaSuccess) {
    forget_images(0);
    return result;
  }
  begin_minibatch();
  return stepping_ == nobody ? tell_step(states_, nullptr) : cudaSuccess;
}

// The record that begins a step, by this thread, with the image that is to be made first, if it is not whole.
cudaError_t Connection::tell_step(uint64_t step, Image* image) {
  proxy::ControlBlock& control = log_.control();
  // The first such step: those before it were not counted.
  for (std::atomic<uint64_t>* const number : {&control.step_ready, &control.step_begun}) {
    if (*number + 1 < step) *number = step - 1;
  }
  step_needs_others_ = false;
  // Before the record is in the log: who waits behind that has to see it.
  const std::size_t slot = slot_of_this_thread(*this);
  step_ = step;
  stepping_ = slot;
  wire::begin_step begins{step, 0, 0, 0, static_cast<uint32_t>(slot)};
  Bytes ranges;
  if (image) {
    ranges = std::as_bytes(std::span(image->held));
    begins.ranges = image->held.size();
    begins.copies = reinterpret_cast<uint64_t>(image->copies);
    begins.room = image->room;
  }
  const auto result = tell<cudaError_t>(Call::begin_step, begins, ranges, image ? &image->start : nullptr);
  if (result != cudaSuccess) stepping_ = nobody;
  return result;
}

cudaError_t Connection::step_ended(std::span<const jitckpt_proxy_place> places, uint64_t digest) {
  if (stepping_.exchange(nobody) == nobody)
    return cudaError_t(fail(Library::cudart, cudaErrorNotSupported, "no optimizer step has begun"));
  const bool whole = images_.empty() || images_.back().whole;
  if (whole) places = {};
  const auto result =
      tell<cudaError_t>(Call::end_step, wire::end_step{states_, places.size()}, std::as_bytes(places));
  if (result != cudaSuccess) return result;
  hold_.when_free([&] {
    std::lock_guard lock(mutex_);
    if (images_.empty()) return;
    Image& image = images_.back();
    image.places.assign(places.begin(), places.end());
    image.digest = digest;
    image.stepped = !step_needs_others_ && !places.empty();
    log_.control().step_written = states_.load();
  });
  // Else the device looks for that once the image is whole: the two are written before they are looked for.
  if (log_.control().image_whole >= states_) together_->notify();
  if (!places.empty()) {
    const std::vector<Allocation> device = objects_.allocations();
    std::lock_guard lock(still_mutex_);
    if (!std::ranges::equal(places, still_as_told_, is_same_place)) {
      still_as_told_.assign(places.begin(), places.end());
      still_ = still_as_told_;
      std::ranges::sort(still_, {}, &jitckpt_proxy_place::address);
    }
    watch_.watch(still_as_told_, device);
    still_state_ = states_;
    state_is_still_ = true;
  }
  return cudaSuccess;
}

// Another thread's answer can be waited for, unless the step's thread needs what this one has: Python's lock.
void Connection::wait_within_step(bool by_its_thread) {
  static const auto holds_python = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  if (by_its_thread || (holds_python && holds_python() != 0)) open_step();
}

// No rank could finish such a step alone, and a replay would make the collective again, on what the step has
// left. So nothing leads back to behind it, and the state does not stay any more.
void Connection::communicates_within_step() {
  if (!step_needs_others_.exchange(true))
    std::fprintf(
        stderr,
        "jitckpt: a collective runs in the optimizer step, so images of all memory are made again.\n");
  state_leaves();
}

// The server goes on without the end of the step; until that is in the log, nothing leads back to a state.
void Connection::open_step() {
  log_.control().step_open = step_.load();
  together_->notify();
}

// No image without the state leads on any more. True if a recovery has gone back to one in this minibatch.
bool Connection::state_changed() {
  bool recovered = false;
  hold_.when_free([&] {
    std::lock_guard lock(mutex_);
    for (Image& image : images_) {
      recovered |= recoveries_ > 0 && !image.whole;
      image.stepped = false;
    }
  });
  return recovered;
}

void Connection::state_leaves() {
  if (together_) together_->leave_after(states_);
}

void Connection::state_ends() {
  if (together_) together_->leave();
}

// The server is stopped, and the optimizer step that it has begun is over. One that does not come to rest is
// ended. With mutex_ held.
void Connection::rest() {
  rested_ = server_->alive() ? server_->rest(longest_rest) : std::nullopt;
  if (!rested_ && server_->alive()) server_->kill();
}

void Connection::report_device(control::Stopped& report) const {
  const proxy::ControlBlock& control = log_.control();
  report.begun = report.ended = control.step_begun;
  report.ready = std::max<uint64_t>(report.begun, control.step_ready);
  if (!rested_ || rested_->intact == 0 || rested_->ended != report.begun) return;
  if (rested_->changed != 0)
    report.device = rested_->suspect != 0 ? control::DeviceState::lost : control::DeviceState::changed;
  else
    report.device = rested_->suspect != 0 ? control::DeviceState::suspect : control::DeviceState::healthy;
}

// With mutex_ held. An image that is whole has it already. device: what it holds, as its server says.
std::vector<control::HostCopy> Connection::copy_state(uint64_t state,
                                                      const std::optional<wire::Rested>& device) {
  if (copied_ && copied_->state == state) return {copied_->copy};
  forget_copy();
  const auto image =
      std::ranges::find_if(images_, [&](const Image& one) { return one.state == state && one.leads_on(); });
  if (image == images_.end())
    throw std::runtime_error("this process keeps nothing of state " + std::to_string(state));
  if (image->whole) return {};
  if (const auto saved = saved_state(*image)) return {*saved};
  if (!device || device->intact == 0 || device->changed != 0 || device->ended != state)
    throw std::runtime_error("the device does not hold state " + std::to_string(state));
  const uint64_t bytes = bytes_of_places(image->places);
  void* const memory = pinned_.allocate(std::max<uint64_t>(bytes, 1));
  auto* const ranges =
      static_cast<wire::Range*>(pinned_.allocate((image->places.size() + 1) * sizeof(wire::Range)));
  bool done = memory && ranges;
  if (done) {
    const std::vector<wire::Range> all = ranges_of(image->places, reinterpret_cast<uint64_t>(memory));
    std::ranges::copy(all, ranges);
    const std::size_t count = all.size();
    done = server_->copy_state(ranges, count, longest_copy);
  }
  if (ranges) pinned_.release(ranges);
  if (!done) {
    if (memory) pinned_.release(memory);
    throw std::runtime_error("state " + std::to_string(state) + " can't be copied to host memory");
  }
  const auto offset = static_cast<uint64_t>(static_cast<std::byte*>(memory) - pinned_.begin());
  copied_ = Copied{
      state,
      memory,
      {control::rank_of_process(), getpid(), pinned_.file().descriptor(), offset, bytes, image->digest}};
  return {copied_->copy};
}

void Connection::forget_copy() {
  if (copied_) pinned_.release(copied_->memory);
  copied_.reset();
}

}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

int jitckpt_proxy_step_begins(const struct jitckpt_proxy_place* places, uint64_t count) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->step_begins({places, count}) : result;
}

int jitckpt_proxy_step_ended(const struct jitckpt_proxy_place* places, uint64_t count, uint64_t digest) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->step_ended({places, count}, digest) : result;
}

int jitckpt_proxy_state_stays(void) {
  int32_t result = 0;
  const Connection* const connection = Connection::get(Library::cudart, result);
  return connection && connection->state_stays();
}

void jitckpt_proxy_state_leaves(void) {
  int32_t result = 0;
  if (Connection* const connection = Connection::get(Library::cudart, result)) connection->state_leaves();
}

void jitckpt_proxy_state_ends(void) {
  int32_t result = 0;
  if (Connection* const connection = Connection::get(Library::cudart, result)) connection->state_ends();
}

int jitckpt_proxy_state_changed(void) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection && connection->state_changed();
}

void jitckpt_proxy_watch_state(const struct jitckpt_proxy_place* memory, uint64_t count) {
  int32_t result = 0;
  if (Connection* const connection = Connection::get(Library::cudart, result))
    connection->watch_state({memory, count});
}

int jitckpt_proxy_state_was_written(void) {
  int32_t result = 0;
  const Connection* const connection = Connection::get(Library::cudart, result);
  return connection && connection->state_was_written();
}

int jitckpt_proxy_state_was_changed(void) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection && connection->state_was_changed();
}

uint64_t jitckpt_proxy_answers(void) { return this_thread().answers; }
