#include "proxy/server/stream_waits.h"

#include <algorithm>

#include "proxy/server/server.h"
#include "real_calls.h"

namespace jitckpt::proxy {

bool StreamWaits::add(const Record& record, cudaStream_t stream) {
  Wait* wait = nullptr;
  {
    std::lock_guard lock(mutex_);
    wait = &waits_.emplace_back(Wait{*this, record, {record.content, record.content + record.bytes}});
    wait->record.content = wait->content.data();
  }
  if (real::cudaLaunchHostFunc(stream, come_by, wait) == cudaSuccess) return true;
  real::cudaGetLastError();
  std::lock_guard lock(mutex_);
  remove(wait);
  return false;
}

void StreamWaits::come_by(void* argument) {
  const Wait* const wait = static_cast<Wait*>(argument);
  StreamWaits& all = wait->all;
  std::lock_guard lock(all.mutex_);
  if (wait->taken) return;
  all.server_.answer_wait(wait->record);
  all.remove(wait);
}

void StreamWaits::remove(const Wait* wait) {
  waits_.remove_if([wait](const Wait& one) { return &one == wait; });
}

// The device is asked without the lock, for which its own threads may wait.
std::vector<Record> StreamWaits::take_failed() {
  std::vector<std::pair<Record, std::vector<std::byte>>> open;
  {
    std::lock_guard lock(mutex_);
    for (const Wait& wait : waits_) {
      if (!wait.taken) open.emplace_back(wait.record, wait.content);
    }
  }
  std::erase_if(open, [this](auto& wait) {
    wait.first.content = wait.second.data();
    return !server_.stream_has_failed(wait.first);
  });
  std::lock_guard lock(mutex_);
  std::vector<Record> taken;
  for (Wait& wait : waits_) {
    const auto failed = [&](const auto& one) { return one.first.sequence == wait.record.sequence; };
    if (wait.taken || std::ranges::none_of(open, failed)) continue;
    wait.taken = true;
    taken.push_back(wait.record);
  }
  return taken;
}

}  // namespace jitckpt::proxy
