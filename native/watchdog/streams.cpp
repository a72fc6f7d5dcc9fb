#include "watchdog/streams.h"

#include <algorithm>

#include "real_calls.h"

namespace jitckpt::watchdog {

void Streams::created(cudaStream_t stream, int device) {
  used_device(device);
  const std::lock_guard lock(mutex_);
  created_[stream] = device;
}

void Streams::destroyed(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  created_.erase(stream);
}

void Streams::used_device(int device) {
  const std::lock_guard lock(mutex_);
  if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) devices_.push_back(device);
}

int Streams::device_of(cudaStream_t stream) const {
  {
    const std::lock_guard lock(mutex_);
    const auto known = created_.find(stream);
    if (known != created_.end()) return known->second;
  }
  int device = 0;
  real::cudaGetDevice(&device);
  return device;
}

std::optional<int> Streams::any_device() const {
  const std::lock_guard lock(mutex_);
  return devices_.empty() ? std::nullopt : std::optional(devices_.front());
}

std::vector<KnownStream> Streams::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<KnownStream> streams;
  for (const auto& [handle, device] : created_) streams.push_back({handle, device});
  for (const int device : devices_) streams.push_back({cudaStreamLegacy, device});
  // In a fixed order, so that the same answers give the same signature.
  std::sort(streams.begin(), streams.end(), [](const auto& a, const auto& b) {
    return a.device != b.device ? a.device < b.device : a.handle < b.handle;
  });
  return streams;
}

}  // namespace jitckpt::watchdog
