// A server that has died is replaced: the new one makes what there was at the beginning of the minibatch,
// gets the memory of then, and reads the log from there.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <set>
#include <utility>

#include "answer.h"
#include "connection.h"
#include "jitckpt_proxy.h"
#include "proxy_by_hand.h"
#include "thread.h"

namespace jitckpt::proxy::client {
namespace {

// A failure that comes back each time the calls are made again is the program's own, or the machine's.
constexpr int most_recoveries = 2;  // in one minibatch

template <class Arguments>
LogWriter::Apart apart(Call call, int32_t device, const Arguments& arguments) {
  const Bytes bytes = bytes_of(arguments);
  return {static_cast<uint16_t>(call), device, {bytes.begin(), bytes.end()}};
}

// The thread's device, for a moment.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) : before_(this_thread().device) { this_thread().device = device; }
  ~OnDevice() { this_thread().device = before_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int32_t before_;
};

cudaError_t synchronize(const std::vector<Allocation>& allocations) {
  std::set<int32_t> devices;
  for (const Allocation& allocation : allocations) devices.insert(allocation.device);
  for (const int32_t device : devices) {
    const OnDevice on_device(device);
    if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
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

// All but the newest ones, whose log is still there, with what only they need. Their memory serves the next.
void Connection::forget_images(std::size_t remaining) {
  hold_.when_free([&] {
    std::lock_guard lock(mutex_);
    while (!images_.empty() &&
           (images_.size() > remaining || !writer_.is_kept(images_.front().start.sequence))) {
      for (const auto& [address, old] : next_copies_) pinned_.release(old.copy);
      next_copies_ = std::move(images_.front().copies);
      images_.pop_front();
    }
    if (images_.empty())
      writer_.keep_nothing();
    else
      writer_.forget_before(images_.front().start);
    const uint64_t needed_from = images_.empty() ? ~uint64_t{0} : images_.front().start.sequence;
    objects_.forget_ended(needed_from);
    communicators_.forget_ended(needed_from);
    for (void* const freed : freed_pinned_.take(needed_from)) pinned_.release(freed);
  });
}

// To next_copies_.
cudaError_t Connection::copy_memory() {
  const std::vector<Allocation> allocations = objects_.allocations();
  // Before the older image is overwritten: what this rank has waited for, the others have begun, so they have
  // the image that stays.
  if (const cudaError_t error = synchronize(allocations); error != cudaSuccess) return error;
  forget_images(1);
  Copies before = std::move(next_copies_);
  next_copies_.clear();
  cudaError_t result = cudaSuccess;
  for (const Allocation& allocation : allocations) {
    Copy copy{allocation, nullptr};
    const auto old = before.find(allocation.address);
    if (old != before.end() && old->second.allocation.bytes == allocation.bytes) {
      copy.copy = old->second.copy;
      before.erase(old);
    } else {
      copy.copy = pinned_.allocate(allocation.bytes);
    }
    if (!copy.copy) {
      result =
          cudaError_t(fail(Library::cudart, cudaErrorMemoryAllocation,
                           "no room for copies of the device's memory: raise JITCKPT_PROXY_PINNED_BYTES"));
      break;
    }
    next_copies_.emplace(allocation.address, copy);
    const OnDevice on_device(allocation.device);
    const wire::copy arguments{reinterpret_cast<uint64_t>(copy.copy),
                               allocation.address,
                               allocation.bytes,
                               0,
                               cudaMemcpyDeviceToHost,
                               no_copy_flag};
    result = tell<cudaError_t>(Call::copy, arguments);
    if (result != cudaSuccess) break;
  }
  for (const auto& [address, old] : before) pinned_.release(old.copy);
  return result == cudaSuccess ? synchronize(allocations) : result;
}

cudaError_t Connection::keep() {
  std::string obstacle = hold_.given_up();
  if (obstacle.empty()) obstacle = communicators_.obstacle(!hold_.on());
  // Ranks are as far apart as from one word between them to the next, and have to have an image in common: so
  // there is no more than one of each such time (several optimizers, one after the other).
  if (obstacle.empty() && communicators_.joins_ranks() && !has_communicated_.exchange(false))
    return cudaSuccess;
  recoveries_ = 0;
  const cudaError_t result =
      obstacle.empty()
          ? copy_memory()
          : cudaError_t(fail(Library::cudart, cudaErrorNotSupported,
                             "the device proxy can't bring this process's device back: " + obstacle));
  if (result != cudaSuccess) {
    forget_images(0);
    return result;
  }
  hold_.when_free([&] {
    std::lock_guard lock(mutex_);
    images_.push_back({++states_, writer_.keep(), std::exchange(next_copies_, {}), communicators_.counts()});
  });
  has_kept_ = true;
  hold_.forget_failures();
  return result;
}

// In one go: nobody gets the number of a process that is no more.
Connection::Replaced Connection::replace_server() {
  using Clock = std::chrono::steady_clock;
  std::lock_guard lock(mutex_);
  const auto begin = Clock::now();
  server_->kill();
  server_->end();
  const auto ended = Clock::now();
  begun_ = false;
  server_ = std::make_unique<ServerProcess>(log_file_.descriptor(), pinned_.file().descriptor());
  return {ended - begin, Clock::now() - ended};
}

// A new server begins with the image, and makes all calls since. With mutex_ held.
bool Connection::begin_server(const Image& image, const std::vector<LogWriter::Apart>& ids,
                              const std::vector<LogWriter::Apart>& communicators) {
  const uint64_t from = image.start.sequence;
  std::vector<LogWriter::Apart> calls = ids;
  const auto add = [&calls](const std::vector<LogWriter::Apart>& more) {
    calls.insert(calls.end(), more.begin(), more.end());
  };
  add(objects_.creations(from, Objects::Kind::plain));
  std::set<int32_t> devices;
  for (const auto& [address, copy] : image.copies) {
    const wire::copy arguments{
        address,     reinterpret_cast<uint64_t>(copy.copy), copy.allocation.bytes, 0, cudaMemcpyHostToDevice,
        no_copy_flag};
    calls.push_back(apart(Call::copy, copy.allocation.device, arguments));
    devices.insert(copy.allocation.device);
  }
  for (const int32_t device : devices)
    calls.push_back(apart(Call::cudaDeviceSynchronize, device, wire::cudaDeviceSynchronize{}));
  add(communicators);
  add(objects_.creations(from, Objects::Kind::of_communicators));
  const auto start = writer_.write_apart(calls, image.start);
  if (!start) return false;
  log_.control().start = *start;
  log_.control().reader_sleeps = 0;
  for (AsynchronousError& error : log_.control().errors) error.origin = 0;
  replayed_from_ = from;
  replay_end_ = writer_.newest();
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
    server_ = std::make_unique<ServerProcess>(log_file_.descriptor(), pinned_.file().descriptor());
    std::fprintf(stderr,
                 "jitckpt: the device proxy's server %s; process %d takes over and makes its calls again.\n",
                 death.c_str(), server_->id());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "jitckpt: %s\n", error.what());
    return false;
  }
  return begin_server(*image, {}, communicators_.creations_alone(image->start.sequence));
}

}  // namespace jitckpt::proxy::client

using namespace jitckpt::proxy;
using namespace jitckpt::proxy::client;

int jitckpt_proxy_keep(void) {
  int32_t result = 0;
  Connection* const connection = Connection::get(Library::cudart, result);
  return connection ? connection->keep() : result;
}

int jitckpt_proxy_server(void) { return Connection::usable() ? Connection::server_of_process() : 0; }
