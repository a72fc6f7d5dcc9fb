#include "interpose/step_thread.h"

namespace jitckpt::interpose {

using watchdog::ThreadState;

void StepThread::passes() {
  auto thread = watchdog::share_this_thread();
  const std::lock_guard lock(mutex_);
  thread_ = std::move(thread);
}

void StepThread::device_at_rest() {
  const std::lock_guard lock(mutex_);
  call_at_rest_ = thread_ && thread_->state == ThreadState::in_call ? thread_->calls.load() : 0;
}

bool StepThread::stopped() const {
  const std::lock_guard lock(mutex_);
  if (!thread_) return false;
  const ThreadState state = thread_->state;
  if (state == ThreadState::in_call) return call_at_rest_ != 0 && thread_->calls == call_at_rest_;
  return state == ThreadState::parked;
}

}  // namespace jitckpt::interpose
