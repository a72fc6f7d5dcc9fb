#include "softgpu/runtime/stream.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <string>
#include <thread>

#include "softgpu/runtime/blocked_signals.h"
#include "softgpu/runtime/device.h"
#include "softgpu/runtime/error.h"
#include "softgpu/runtime/process.h"

namespace softgpu {
namespace {

constexpr std::uint64_t launches_kept = 1021;  // of a stream: seen on an H100, driver 580

[[noreturn]] void park() {
  for (;;) pause();
}

}  // namespace

bool Point::reached() const { return !stream || stream->finished(ticket); }

std::uint64_t Stream::append(std::unique_ptr<Work> work, std::vector<Point> after) {
  std::unique_lock lock(mutex_);
  require(!closed_, cudaErrorInvalidResourceHandle, "the stream has been destroyed");
  if (!started_) start_thread();
  queue_.push_back({std::move(work), std::move(after)});
  const bool was_empty = queue_.size() == 1;
  const std::uint64_t ticket = ++enqueued_;
  lock.unlock();
  if (was_empty) work_came_.notify_one();
  return ticket;
}

void Stream::await_room() {
  const std::uint64_t enqueued = tail().ticket;
  if (enqueued >= launches_kept) wait(enqueued - launches_kept + 1);
}

Point Stream::tail() {
  std::lock_guard lock(mutex_);
  return {shared_from_this(), enqueued_};
}

void Stream::wait(std::uint64_t ticket) {
  if (finished(ticket)) return;
  std::unique_lock lock(mutex_);
  while (!finished(ticket) && !device.failed()) {
    nearest_awaited_ = std::min(nearest_awaited_, ticket);
    progressed_.wait(lock);
  }
}

bool Stream::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  work_came_.notify_one();
  return started_;
}

void Stream::notice_failure() {
  std::lock_guard lock(mutex_);
  progressed_.notify_all();
}

void Stream::start_thread() {
  const BlockedSignals blocked;
  std::thread([self = shared_from_this()] { self->serve(); }).detach();
  started_ = true;
}

void Stream::serve() {
  pthread_setname_np(pthread_self(),
                     ("softgpu" + std::to_string(device.index) + "-" + std::to_string(id)).c_str());
  use_device(device.index);
  std::unique_lock lock(mutex_);
  for (;;) {
    work_came_.wait(lock, [this] { return !queue_.empty() || closed_; });
    if (queue_.empty()) break;
    {
      Item item = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      execute(item);
    }
    lock.lock();
    const std::uint64_t finished = finished_.load(std::memory_order_relaxed) + 1;
    finished_.store(finished, std::memory_order_release);
    if (finished >= nearest_awaited_) {
      nearest_awaited_ = UINT64_MAX;
      progressed_.notify_all();
    }
  }
  lock.unlock();
  device.forget(this);
}

void Stream::execute(Item& item) {
  for (const Point& point : item.after) {
    if (!point.reached()) point.stream->wait(point.ticket);
  }
  if (!item.work) return;
  try {
    do {
      if (device.failed()) return;
      foreign_ = item.work->foreign();
      if (process_phase() != ProcessPhase::running) {
        // The libraries whose code this thread runs are being torn down: it must neither run more nor end.
        foreign_ = false;
        park();
      }
      item.work->run();
      report_illegal_accesses();
      foreign_ = false;
    } while (!item.work->finished());
  } catch (const CudaFailure& failure) {
    report_illegal_accesses();  // the cause first, not what came of it
    device.fail(failure);
  } catch (const std::exception& error) {
    report_illegal_accesses();
    device.fail({cudaErrorLaunchFailure, error.what()});
  }
  foreign_ = false;
}

}  // namespace softgpu
