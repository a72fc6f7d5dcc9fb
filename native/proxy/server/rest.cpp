// A server that stays while its job recovers: what is under way ends and counts for nothing, and what has
// been made here is dropped. Then it begins like a new one, but with its libraries and kernels loaded.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <set>
#include <thread>

#include "proxy/server/device_memory.h"
#include "proxy/server/images.h"
#include "proxy/server/server.h"
#include "proxy/transport/futex.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

// With calls that may return by themselves.
constexpr auto a_moment = std::chrono::milliseconds(100);

template <class Predicate>
bool soon(const Predicate& predicate) {
  const auto deadline = std::chrono::steady_clock::now() + a_moment;
  while (!predicate()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace

bool Server::stop() {
  {
    std::lock_guard lock(stopping_);
    stops_ = true;
  }
  stopped_.notify_all();
  steps.stop();
  ControlBlock& control = log_.control();
  // NCCL wants nobody else in a call for a communicator that is aborted; but the reader may wait for just
  // that.
  soon([&] {
    control.reader_woken_by = awake;
    futex_wake_all(control.reader_woken_by);
    return !reads_;
  });
  // One that is being made or ended can't be aborted.
  if (!soon([this] { return changing_ == 0; })) return false;
  failed_collective();
  const std::unique_lock lock(communicators_stay_);
  for (const ncclComm_t communicator : communicators.take()) real::ncclCommAbort(communicator);
  return true;
}

void Server::end_threads() {
  if (watch_.joinable()) watch_.join();  // it may start one of the others
  for (auto& waiter : waiters_) waiter.reset();
  device_waiter_.reset();
}

wire::Rested Server::come_to_rest() {
  end_threads();
  std::set<int32_t> devices;
  for (const auto& [address, piece] : memory.all()) devices.insert(piece.device);
  for (const auto& [address, piece] : kept_) devices.insert(piece.device);
  if (synchronize(devices) != cudaSuccess) device_has_failed_ = true;
  wire::Rested rested = rests_not();
  rested.suspect = is_suspect_;
  return rested;
}

wire::Rested Server::rests_not() {
  const HeldState held = steps.held();
  const bool intact = held.intact && !steps.inside() && !device_has_failed_;
  return {wire::rest, intact, 1, held.changed, held.ended};
}

// By a thread of its own: a collective may never end.
std::optional<wire::Rested> Server::settle(const std::function<bool()>& interrupted) {
  std::set<int32_t> devices;
  for (const auto& [address, piece] : memory.all()) devices.insert(piece.device);
  const auto task =
      std::make_shared<std::packaged_task<cudaError_t()>>([devices] { return synchronize(devices); });
  std::future<cudaError_t> result = task->get_future();
  device_waiter().run([task] { (*task)(); });
  while (result.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    if (interrupted()) return std::nullopt;
  }
  failed_collective();
  const bool well = result.get() == cudaSuccess && !has_failed();
  const HeldState held = steps.held();
  return wire::Rested{wire::settle, well && held.intact && !steps.inside(), !well, held.changed, held.ended};
}

// What lies in its place would be in the way.
bool Server::take_kept(uint64_t address, const MadeMemory::Piece& piece) {
  if (address == 0) return false;
  const auto found = kept_.find(address);
  if (found != kept_.end() && found->second.bytes == piece.bytes && found->second.device == piece.device) {
    memory.add(address, piece);
    kept_.erase(found);
    return true;
  }
  for (auto one = kept_.begin(); one != kept_.end();) {
    const bool in_the_way = one->first < address + piece.bytes && address < one->first + one->second.bytes;
    if (in_the_way) {
      steps.lose(one->first, one->second.bytes);
      free_device_memory(one->first);
    }
    one = in_the_way ? kept_.erase(one) : std::next(one);
  }
  return false;
}

void Server::drop_kept() {
  for (const auto& [address, piece] : kept_) {
    choose_device(piece.device);
    free_device_memory(address);
  }
  kept_.clear();
}

bool Server::drop_all() {
  end_threads();
  if (is_suspect_) return false;
  std::set<int32_t> devices;
  for (const auto& [address, piece] : memory.all()) devices.insert(piece.device);
  bool well = true;
  const auto check = [&well](auto result) { well &= static_cast<int>(result) == 0; };
  for (const int32_t device : devices) {
    choose_device(device);
    check(real::cudaDeviceSynchronize());
  }
  for (const auto preference : matmul_preferences.all())
    check(real::cublasLtMatmulPreferenceDestroy(preference));
  for (const auto layout : matrix_layouts.all()) check(real::cublasLtMatrixLayoutDestroy(layout));
  for (const auto description : matmul_descriptions.all())
    check(real::cublasLtMatmulDescDestroy(description));
  for (const auto handle : blas_handles.all()) check(real::cublasDestroy_v2(handle));
  for (const auto event : events.all()) check(real::cudaEventDestroy(event));
  for (const auto stream : streams.all()) check(real::cudaStreamDestroy(stream));
  for (const auto& [address, piece] : kept_) memory.add(address, piece);
  locked_pages.unlock_all();
  for (const auto& [address, piece] : host_memory.all())
    check(real::cudaHostUnregister(reinterpret_cast<void*>(address)));
  return well;
}

}  // namespace jitckpt::proxy
