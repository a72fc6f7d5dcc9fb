#include "interpose/copies.h"

#include <memory>
#include <mutex>
#include <utility>

#include "interpose/library.h"
#include "real_calls.h"
#include "watchdog/device.h"

// A device proxy's, if there is one: it can't have a function of this process run by the device.
extern "C" __attribute__((weak)) int jitckpt_proxy_write_word(uint64_t* where, uint64_t value, void* stream);

namespace jitckpt::interpose::copies {
namespace {

// Of the pieces that are in turn: set before they are, and read under their lock.
Target target;

bool works(cudaError_t result) { return result == cudaSuccess; }

watchdog::PiecesInTurn::Device device(cudaStream_t training) {
  return {
      [training] { wait_for(target.stream, training); },
      [](const watchdog::CopyPiece& piece) {
        return works(real::cudaMemcpyAsync(piece.target, piece.source, piece.bytes, cudaMemcpyDeviceToHost,
                                           target.stream));
      },
      [] { return works(enqueue_word(target.done, target.value, target.stream)); },
  };
}

}  // namespace

void pass_point(watchdog::Mark mark, cudaStream_t called_on) {
  LibraryState& all = library();
  watchdog::DeviceWork& work = all.device;
  if (!work.in_turn.counts()) [[likely]]
    return;
  cudaStream_t const training = all.step_stream.load(std::memory_order_acquire);
  // What is captured runs later, where nobody passes here.
  if (watchdog::is_capturing(training) || (called_on != training && watchdog::is_capturing(called_on)))
    return;
  const auto recycle = [&work](watchdog::Event event) { work.times.give_back(event); };
  if (work.network.is_on())
    if (const auto event = work.times.record(training, work.streams.device_of(training)))
      work.network.point(*event, mark, recycle);
  work.in_turn.pass_point(device(training));
}

bool begin(std::vector<watchdog::CopyPiece> pieces, const Target& of_these) {
  LibraryState& all = library();
  all.device.in_turn.drop();
  target = of_these;
  return all.device.in_turn.begin(std::move(pieces), device(all.step_stream));
}

long put_rest() {
  // Of a thread that has made no device call yet another device may be the current one.
  int before = target.device;
  real::cudaGetDevice(&before);
  if (before != target.device) watchdog::use_device(target.device);
  const long left = library().device.in_turn.put_rest(device(nullptr));
  if (before != target.device) watchdog::use_device(before);
  return left;
}

void before_step(cudaStream_t stream) {
  if (!library().device.in_turn.is_open()) [[likely]]
    return;
  put_rest();
  wait_for(stream, target.stream);
}

cudaError_t wait_for(cudaStream_t waiting, cudaStream_t other) {
  watchdog::DeviceWork& work = library().device;
  const auto event = work.events.record(other, work.streams.device_of(other));
  if (!event) return cudaErrorUnknown;
  const cudaError_t result =
      real::cudaStreamWaitEvent(waiting, static_cast<cudaEvent_t>(event->handle), cudaEventWaitDefault);
  work.events.give_back(*event);  // whoever records it next does not change what is waited for
  return result;
}

cudaError_t enqueue_word(uint64_t* registered_host, uint64_t value, cudaStream_t stream) {
  if (jitckpt_proxy_write_word)
    return static_cast<cudaError_t>(jitckpt_proxy_write_word(registered_host, value, stream));
  struct Word {
    uint64_t* where;
    uint64_t value;
  };
  auto word = std::make_unique<Word>(Word{registered_host, value});
  const auto write = [](void* argument) {
    const std::unique_ptr<Word> owned(static_cast<Word*>(argument));
    __atomic_store_n(owned->where, owned->value, __ATOMIC_RELEASE);
  };
  const cudaError_t result = real::cudaLaunchHostFunc(stream, write, word.get());
  if (result == cudaSuccess) word.release();
  return result;
}

}  // namespace jitckpt::interpose::copies
