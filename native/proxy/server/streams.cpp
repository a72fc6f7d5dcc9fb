#include "proxy/server/streams.h"

#include <utility>

#include "proxy/server/failure.h"
#include "proxy/wire.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

cudaError_t record(cudaStream_t stream, cudaEvent_t& event) {
  cudaError_t error = real::cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error != cudaSuccess) return error;
  error = real::cudaEventRecord(event, stream);
  if (error != cudaSuccess) real::cudaEventDestroy(event);
  return error;
}

}  // namespace

StreamTable::~StreamTable() {
  for (const Left& left : left_) real::cudaEventDestroy(left.event);
}

cudaStream_t StreamTable::find(uint64_t number) {
  if (number < wire::named_streams) return reinterpret_cast<cudaStream_t>(number);
  std::lock_guard lock(mutex_);
  const auto found = streams_.find(number);
  if (found == streams_.end())
    throw CallFailure(cudaErrorInvalidResourceHandle, "there is no such stream (any more)");
  if (!std::exchange(found->second.used, true)) used_.push_back(number);
  return found->second.stream;
}

void StreamTable::belongs_to_handle(uint64_t number) {
  std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(number); found != streams_.end()) found->second.of_handle = true;
}

void StreamTable::add(uint64_t number, cudaStream_t stream) {
  int device = 0;
  if (real::cudaGetDevice(&device) != cudaSuccess) real::cudaGetLastError();
  std::lock_guard lock(mutex_);
  streams_[number] = {stream, device};
}

void StreamTable::remove(uint64_t number) {
  std::lock_guard lock(mutex_);
  std::erase(used_, number);
  streams_.erase(number);
}

std::vector<cudaStream_t> StreamTable::all() {
  std::lock_guard lock(mutex_);
  std::vector<cudaStream_t> found;
  for (const auto& [number, stream] : streams_) found.push_back(stream.stream);
  return found;
}

// Where that fails the device has failed, which whoever waits for it is told.
void StreamTable::leaves(uint64_t number) {
  std::lock_guard lock(mutex_);
  const auto found = streams_.find(number);
  if (found == streams_.end() || !found->second.used) return;
  cudaEvent_t event = nullptr;
  if (record(found->second.stream, event) == cudaSuccess) left_.push_back({event, found->second.device});
}

cudaError_t StreamTable::join(int32_t device) {
  std::lock_guard lock(mutex_);
  std::vector<cudaEvent_t> events;
  cudaError_t error = cudaSuccess;
  for (const uint64_t number : used_) {
    Stream& stream = streams_.at(number);
    cudaEvent_t event = nullptr;
    if (stream.device != device || error != cudaSuccess) continue;
    error = record(stream.stream, event);
    if (error != cudaSuccess) continue;
    events.push_back(event);
    stream.used = stream.of_handle;
  }
  std::erase_if(used_, [&](uint64_t number) { return !streams_.at(number).used; });
  std::erase_if(left_, [&](const Left& left) {
    if (left.device == device) events.push_back(left.event);
    return left.device == device;
  });
  for (const cudaEvent_t event : events) {
    if (error == cudaSuccess) error = real::cudaStreamWaitEvent(nullptr, event, 0);
    real::cudaEventDestroy(event);
  }
  return error;
}

}  // namespace jitckpt::proxy
