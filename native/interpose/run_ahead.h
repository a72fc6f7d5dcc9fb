// How far the host runs ahead of the device, in calls that wait on one stream.
//
// CUDA keeps about a thousand launches for a stream. The thread that makes one more waits inside of the
// driver for room, with a lock that nearly every other call of the process needs (seen on an H100, driver
// 580: after 1,021 launches no other thread could copy or make a stream). Behind a collective that hangs it
// waits for ever, and so would a save. So the host waits here, long before, where a save can be made
// meanwhile.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jitckpt::interpose::run_ahead {

// So many calls, a few more or less, may wait on a stream; 0: any number. Calls that a library makes inside,
// such as cuBLAS, are not seen, and need room too.
void allow(uint32_t calls);

// Before a call that puts work on the stream, in one of our entry points. May wait.
void before_call(cudaStream_t stream);

}  // namespace jitckpt::interpose::run_ahead
