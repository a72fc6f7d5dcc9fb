// What softgpu's NCCL sees of the runtime.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>
#include <vector>

namespace softgpu {

// Puts work at the end of the stream (null: the legacy default stream of the current device) and returns at
// once. It runs on the stream's thread, after everything enqueued there before; it may block for as long as
// it likes, and holds up nothing but what comes after it. It must not call the CUDA runtime. Anything but
// cudaSuccess becomes the device's sticky error, as from a failed kernel. After a sticky error, or when the
// process ends, work still queued is dropped without being run.
//
// Returns cudaErrorInvalidResourceHandle for a stream that does not exist, or the device's sticky error; the
// work is then dropped.
cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> work);

// Whether what is put on the stream does not run, but becomes part of a graph. The error is that of enqueue.
cudaError_t find_capture(cudaStream_t stream, bool& captured);

// The same as enqueue for streams that one graph captures: one node, behind all of them. Each launch of the
// graph makes its work anew, on the thread that launches it, under keep_launch_order.
cudaError_t enqueue_captured(const std::vector<cudaStream_t>& streams,
                             std::function<std::function<cudaError_t()>()> make);

// Held while work is made whose number is its place in the order of all launches, until it is on its stream.
std::unique_lock<std::mutex> keep_launch_order();

// Ends the device for good, as a failed kernel does.
void fail_device(int device, cudaError_t error);

// The device that cudaSetDevice chose for this thread.
int current_device();

// The device that a stream belongs to; for the default streams the current one. -1 if there is no such
// stream.
int stream_device(cudaStream_t stream);

// Where work on a stream may read and write what a device pointer points to; host pointers come back
// unchanged.
void* shadow(const void* pointer);

// False after a sticky error of the device and while the process ends: work that waits for something polls
// this, and gives up (its result is then ignored).
bool device_usable(int device);

}  // namespace softgpu
