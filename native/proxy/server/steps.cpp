#include "proxy/server/steps.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <set>
#include <string>

#include "ground/environment.h"
#include "proxy/server/images.h"
#include "proxy/server/server.h"
#include "proxy/server/services.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

bool overlap(uint64_t one, uint64_t bytes, uint64_t other, uint64_t more) {
  return one < other + more && other < one + bytes;
}

// Longer than two hangs in a row take to be found, the second of which counts as one after twice the time:
// what is behind those is recovered from. So it is no hang.
std::chrono::duration<double> patience() {
  return std::chrono::duration<double>(3 * read(environment::hang_timeout));
}

// A part of a file of another process, as long as it lives.
class View {
 public:
  explicit View(const wire::restore_state& from) : bytes_(from.bytes) {
    const std::string path = "/proc/" + std::to_string(from.process) + "/fd/" + std::to_string(from.file);
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file >= 0)
      memory_ = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file, static_cast<off_t>(from.offset));
    const int error = errno;
    if (file >= 0) close(file);
    if (memory_ == MAP_FAILED)
      throw Different("the state can't be read at " + path + ": " + std::strerror(error));
  }
  ~View() { munmap(memory_, bytes_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  const std::byte* begin() const { return static_cast<const std::byte*>(memory_); }

 private:
  void* memory_ = MAP_FAILED;
  std::size_t bytes_;
};

template <class Arguments>
Arguments beginning(const Record& record) {
  Arguments arguments{};
  std::memcpy(&arguments, record.content, std::min(sizeof arguments, record.bytes));
  return arguments;
}

// Calls that write to the device's memory; what they make and record is needed all the same.
bool writes(const Record& record) {
  switch (static_cast<Call>(record.call)) {
    case Call::launch:
    case Call::copy_from_host:
    case Call::copy_from_pinned:
    case Call::cudaMemcpyPeerAsync:
      return true;
    case Call::copy:
      return beginning<wire::copy>(record).kind != cudaMemcpyDeviceToHost;
    case Call::fill:
      return beginning<wire::fill>(record).flag == no_copy_flag;  // else it is pinned memory
    default:
      return services[record.call].library == Library::cublas && services[record.call].runs == Runs::tells;
  }
}

}  // namespace

void HeldState::lose(uint64_t address, uint64_t bytes) {
  for (const wire::Place& place : places) intact &= !overlap(place.address, place.bytes, address, bytes);
}

bool Steps::is_whole(uint64_t step) { return server_.control().image_whole >= step && !server_.has_failed(); }

// Rule 1 of docs/how-it-works/transparent.md: what comes before the step is over on this device, and an image
// of it whole; all of the step is in the log; and so it is on all ranks. By the reader, or by the device.
bool Steps::is_ready(uint64_t step) {
  ControlBlock& control = server_.control();
  std::lock_guard lock(coming_);
  // step_open: the program waits for an answer that lies behind.
  const bool is_there = control.step_written >= step || control.step_open >= step;
  if (ready_for_ != step && is_there && is_whole(step)) {  // so not any more if the server is stopped
    ready_for_ = step;
    control.step_ready = step;
    together_->come(control.recovery, step);
  }
  return ready_for_ == step;
}

// Where nobody will recover, nobody waits.
bool Steps::may_begin(uint64_t step) {
  const bool ready = is_ready(step);
  if (server_.control().images == Images::unwanted) return true;
  if (together_->has_been_left()) return is_whole(step);
  if (!ready || !together_->all_have_come(server_.control().recovery, step)) return false;
  met_ = step;
  return true;
}

// Nothing comes behind it before it is whole, since the reader waits. The image before the last one, over
// which it is made, is not needed any more once all ranks have the last one: at the step barrier they had. So
// the copies are put behind all else at once. Otherwise the device has to come to rest first: what this rank
// has waited for, the others have begun. And where the copies would wait themselves: a hung collective is
// seen there.
cudaError_t Steps::make_image(const wire::begin_step& begins, const std::vector<wire::Range>& image) {
  const uint64_t step = begins.step;
  devices_ = devices_of(image);
  const bool waits = !server_.locked_pages.lock(begins.copies, begins.room);
  if (waits || met_ + 1 != step) {
    if (const cudaError_t error = come_to_rest(devices_, server_); error != cudaSuccess) return error;
    if (server_.has_failed()) return cudaSuccess;
  }
  if (!begin_image(server_, step)) return cudaSuccess;
  image_ = step;
  devices_left_ = devices_.size();
  if (devices_.empty()) {
    server_.control().image_whole = step;
    return cudaSuccess;
  }
  for (const int32_t device : devices_) {
    choose_device(device);
    if (const cudaError_t error = server_.streams.join(device); error != cudaSuccess) return error;
  }
  if (const cudaError_t error = copy_image(image); error != cudaSuccess) return error;
  for (const int32_t device : devices_) {
    choose_device(device);
    const auto copied = [](void* steps) { static_cast<Steps*>(steps)->image_is_copied(); };
    if (const cudaError_t error = real::cudaLaunchHostFunc(nullptr, copied, this); error != cudaSuccess)
      return error;
  }
  return cudaSuccess;
}

// By the device. Where this rank's step is not in the log yet, or other ranks are still to come, the client,
// or the last of them, wakes the reader.
void Steps::image_is_copied() {
  ControlBlock& control = server_.control();
  {
    std::lock_guard lock(coming_);
    if (--devices_left_ != 0 || !server_.counts()) return;
    control.image_whole = image_;
  }
  if (is_ready(image_) && together_->all_have_come(control.recovery, image_)) together_->notify();
}

// The device says nothing where it has failed, or a collective never ends.
cudaError_t Steps::look_for_failures() {
  server_.failed_collective();
  for (const int32_t device : devices_) {
    choose_device(device);
    const cudaError_t state = real::cudaStreamQuery(nullptr);
    if (state == cudaSuccess) continue;
    real::cudaGetLastError();
    if (state != cudaErrorNotReady) return state;
  }
  return cudaSuccess;
}

cudaError_t Steps::begin(const wire::begin_step& begins, const std::vector<wire::Range>& image) {
  const uint64_t step = begins.step;
  slot_ = begins.slot;
  if (step == restored_.state) {
    // A whole image is of before the step. Others need not come to it: they have such images, or are past it.
    skips_ = restored_.places != 0;
    return cudaSuccess;
  }
  if (!std::exchange(looked_, true)) {
    std::lock_guard lock(coming_);
    together_ = Together::of_environment();
  }
  if (!together_) throw Different("there is no step barrier: JITCKPT_PROXY_TOGETHER is not set");
  ControlBlock& control = server_.control();
  cudaError_t error = cudaSuccess;
  if (control.image_whole < step) error = make_image(begins, image);
  const auto began = std::chrono::steady_clock::now();
  for (;;) {
    const uint32_t seen = together_->happenings();
    if (server_.is_stopped()) return error;
    if (error != cudaSuccess || (ready_for_ != step && server_.has_failed())) {
      // Calls behind it tell the program of the failure. Nothing may change what they all will go back to.
      skips_ = leaves_out_ = true;
      return error;
    }
    if (may_begin(step)) {
      control.step_begun = step;  // sequentially consistent, as the client's own order is
      if (control.images != Images::frozen) break;
      control.step_begun = step - 1;
    } else if (std::chrono::steady_clock::now() - began > patience() && control.images == Images::made) {
      // Perhaps they make other numbers of steps than this one: then they would wait for each other for ever.
      std::fprintf(
          stderr,
          "jitckpt: other ranks do not come to optimizer step %llu; from now on images of all memory "
          "are made again.\n",
          static_cast<unsigned long long>(step));
      together_->leave();
    }
    together_->wait(seen, Server::look_interval);
    if (control.image_whole < step) error = look_for_failures();
  }
  inside_ = true;
  return cudaSuccess;
}

void Steps::stop() {
  const std::lock_guard lock(coming_);
  if (together_) together_->notify();
}

void Steps::begin_stopped() {
  server_.control().step_begun = ready_for_.load();
  inside_ = true;
}

void Steps::end(uint64_t step, std::vector<wire::Place> places) {
  inside_ = false;
  ready_for_ = 0;
  const bool skipped = std::exchange(skips_, false);
  if (std::exchange(leaves_out_, false)) return;
  if (skipped) {
    load();
    if (!held_.intact) throw Different("not all of the state's memory is there");
    server_.drop_kept();
  } else {
    hold({!places.empty() && !server_.device_has_failed(), step, std::move(places)});
  }
}

void Steps::restore(const wire::restore_state& state, std::vector<wire::Place> places) {
  restored_ = state;
  loaded_ = 0;
  if (places.empty()) {  // the image has all
    hold({false, state.state, {}});
    server_.drop_kept();
    return;
  }
  if (state.in_place != 0) {
    if (!held_.intact || held_.changed || held_.ended != state.state)
      throw Different("the device does not hold the state that it should");
    loaded_ = places.size();
    return hold({true, state.state, std::move(places)});
  }
  const uint64_t bytes = std::accumulate(places.begin(), places.end(), uint64_t{0},
                                         [](uint64_t sum, const auto& one) { return sum + one.bytes; });
  if (bytes != state.bytes) throw Different("the state that is to be taken has another size");
  hold({false, state.state, std::move(places)});
  load();
}

// As far as the memory is there: what the step itself has allocated comes with its calls.
void Steps::load() {
  if (loaded_ == held_.places.size()) return;
  const View view(restored_);
  uint64_t offset = 0;
  std::set<int32_t> devices;
  for (std::size_t i = 0; i < held_.places.size(); offset += held_.places[i++].bytes) {
    const wire::Place& place = held_.places[i];
    const auto device = server_.memory.device_of(place.address, place.bytes);
    if (i < loaded_) continue;
    if (!device) break;
    choose_device(*device);
    const cudaError_t error =
        real::cudaMemcpyAsync(reinterpret_cast<void*>(place.address), view.begin() + offset, place.bytes,
                              cudaMemcpyHostToDevice, nullptr);
    if (error != cudaSuccess) throw Different("the state can't be copied to the device");
    devices.insert(*device);
    loaded_ = i + 1;
  }
  if (synchronize(devices) != cudaSuccess) throw Different("the state can't be copied to the device");
  std::lock_guard lock(mutex_);
  held_.intact = loaded_ == held_.places.size();
}

bool Steps::skips(const Record& record) const {
  return (spares_ || (skips_ && record.slot == slot_)) && record.sequence < first_apart && writes(record);
}

bool copy_to_host(const wire::Range* ranges, uint64_t count) {
  std::set<int32_t> devices;
  for (uint64_t i = 0; i < count; ++i) devices.insert(ranges[i].device);
  bool well = true;
  for (const int32_t device : devices) {
    choose_device(device);
    // Of its own: others may wait for what will never come.
    cudaStream_t stream = nullptr;
    if (real::cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0) != cudaSuccess) return false;
    for (uint64_t i = 0; i < count; ++i) {
      if (ranges[i].device != device) continue;
      well &= real::cudaMemcpyAsync(reinterpret_cast<void*>(ranges[i].to),
                                    reinterpret_cast<const void*>(ranges[i].from), ranges[i].bytes,
                                    cudaMemcpyDeviceToHost, stream) == cudaSuccess;
    }
    well &= real::cudaStreamSynchronize(stream) == cudaSuccess;
    real::cudaStreamDestroy(stream);
  }
  return well;
}

int32_t serve_begin_step(Request& request) {
  const auto arguments = request.arguments<wire::begin_step>();
  return request.server.steps.begin(arguments,
                                    entries_after<wire::begin_step, wire::Range>(request, arguments.ranges));
}

int32_t serve_end_step(Request& request) {
  const auto arguments = request.arguments<wire::end_step>();
  request.server.steps.end(arguments.step,
                           entries_after<wire::end_step, wire::Place>(request, arguments.places));
  return cudaSuccess;
}

int32_t serve_restore_state(Request& request) {
  const auto arguments = request.arguments<wire::restore_state>();
  request.server.steps.restore(arguments,
                               entries_after<wire::restore_state, wire::Place>(request, arguments.places));
  return cudaSuccess;
}

}  // namespace jitckpt::proxy
