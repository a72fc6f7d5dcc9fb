#include "twin.h"

#include "server.h"

namespace jitckpt::proxy {

Twin::Twin(Server& server) : server_(server), thread_([this] { run(); }) {}

Twin::~Twin() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Twin::take_over(const Record& record) {
  Call call{record, {record.content, record.content + record.bytes}};
  {
    std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
  }
  changed_.notify_one();
}

void Twin::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ending_ || !calls_.empty(); });
    if (ending_) return;
    Call call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    call.record.content = call.content.data();
    server_.serve(call.record);
    lock.lock();
  }
}

}  // namespace jitckpt::proxy
