// A snapshot's copies off the device, which begin where the training's stream comes to a point of its
// minibatch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "watchdog/network_profile.h"
#include "watchdog/pieces_in_turn.h"

namespace jitckpt::interpose::copies {

// Where they are put, and the word that says that all are there.
struct Target {
  cudaStream_t stream = nullptr;
  int device = 0;
  uint64_t* done = nullptr;  // registered host memory
  uint64_t value = 0;
};

// The training comes to another point of its minibatch, by a call on a stream. The point lies on that of its
// optimizer step.
void pass_point(watchdog::Mark mark, cudaStream_t called_on);

// See jitckpt_copy_in_turn and jitckpt_copy_rest.
bool begin(std::vector<watchdog::CopyPiece> pieces, const Target& target);
long put_rest();

// An optimizer step begins on this stream: whatever has not been waited for, it waits for.
void before_step(cudaStream_t stream);

// Has a stream wait for what is on another one now; no point of the minibatch.
cudaError_t wait_for(cudaStream_t waiting, cudaStream_t other);

// Has the device write 8 bytes in the order of the stream.
cudaError_t enqueue_word(uint64_t* registered_host, uint64_t value, cudaStream_t stream);

}  // namespace jitckpt::interpose::copies
