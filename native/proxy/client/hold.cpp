#include "proxy/client/hold.h"

#include <utility>

namespace jitckpt::proxy::client {

void Hold::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !held_; });
}

void Hold::when_free(const std::function<void()>& work) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !held_; });
  work();
}

// With mutex_ held.
bool Hold::raise(uint64_t call, const std::string& error, const std::function<bool()>& still) {
  if (!on_) return false;
  if (stopped_ || !still()) return true;
  if (delivers_ > 0) return false;
  note(call, error);
  return true;
}

// With mutex_ held.
void Hold::note(uint64_t call, const std::string& error) {
  held_ = true;
  if (!failed_.error.empty()) return;
  failed_ = {call, error};
  told_ = false;
  news_();
}

bool Hold::alarm(uint64_t call, const std::string& error, const std::function<bool()>& still) {
  std::lock_guard lock(mutex_);
  return raise(call, error, still);
}

void Hold::alarm(const std::string& error) {
  std::lock_guard lock(mutex_);
  if (on_ && !stopped_) note(0, error);
}

bool Hold::recovers(uint64_t call, const std::string& error, const std::function<bool()>& still) {
  std::unique_lock lock(mutex_);
  if (!raise(call, error, still)) return false;
  changed_.wait(lock, [this] { return !held_; });
  return on_;
}

std::string Hold::given_up() const {
  std::lock_guard lock(mutex_);
  return given_up_;
}

void Hold::forget_failures() {
  std::lock_guard lock(mutex_);
  if (delivers_ > 0) --delivers_;
}

void Hold::begin(std::function<void()> news) {
  std::lock_guard lock(mutex_);
  news_ = std::move(news);
  on_ = true;
}

void Hold::pause() {
  std::lock_guard lock(mutex_);
  held_ = true;
}

void Hold::stop() {
  std::lock_guard lock(mutex_);
  held_ = true;
  stopped_ = true;
}

void Hold::replay(bool deliver_errors, const std::function<void()>& work) {
  std::lock_guard lock(mutex_);
  work();
  failed_ = {};
  told_ = true;
  delivers_ = deliver_errors ? 2 : 0;
  stopped_ = false;
}

Hold::Failed Hold::failed() const {
  std::lock_guard lock(mutex_);
  return failed_;
}

Hold::Failed Hold::take_alarm() {
  std::lock_guard lock(mutex_);
  return std::exchange(told_, true) ? Failed{} : failed_;
}

bool Hold::release() {
  std::lock_guard lock(mutex_);
  if (!failed_.error.empty()) return false;
  held_ = false;
  changed_.notify_all();
  return true;
}

void Hold::give_up(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (on_) given_up_ = why;
  on_ = false;
  held_ = false;
  changed_.notify_all();
}

void Hold::end() {
  std::lock_guard lock(mutex_);
  on_ = false;
  held_ = false;
  changed_.notify_all();
}

}  // namespace jitckpt::proxy::client
