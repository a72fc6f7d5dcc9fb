// Stream capture and CUDA graphs. A graph is a list of calls that is kept here: to launch it is to make these
// calls on the stream that it is launched on, one after the other, as if the program did. So a server knows
// of no graphs, and what is true of a call in the log is true of one in a graph.
#pragma once
#include <functional>
#include <vector>

#include "proxy/client/errors.h"
#include "proxy/client/requests.h"

namespace jitckpt::proxy::client {

// Makes the call on a stream.
using CapturedCall = std::function<int32_t(cudaStream_t)>;

// Whether a call for the stream does not go into the log, but has to be given to `capture`.
bool captures(cudaStream_t stream);
// Also by this thread, of the handle's stream.
bool captures_of_handle(uint64_t blas_handle);

// Puts the call into the graph, or says why it can't be: its result.
int32_t capture(Library library, cudaStream_t stream, cudaGraphNodeType type, CapturedCall call);
// Ends what the stream captures.
int32_t refuse_in_capture(Library library, cudaStream_t stream, int32_t error, std::string_view text);

// Calls between ncclGroupStart and ncclGroupEnd are one: the outermost end puts them into the graph. False:
// it has none to put.
bool capture_group(int32_t& result);

cudaError_t record_in_capture(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
// The event has been recorded outside of all captures.
void recorded_outside(uint64_t event);
// Whether the wait concerns a capture: of the stream, or that in which the event was recorded.
bool waits_in_capture(cudaStream_t stream, cudaEvent_t event);
cudaError_t wait_in_capture(cudaStream_t stream, cudaEvent_t event, unsigned flags);

// The error of a question that a capture does not bear, which ends it; else 0.
int32_t forbidden_in_capture(Call call, Bytes arguments);
cudaError_t forbidden_while_capturing();  // as cudaMemcpy is, of this thread

}  // namespace jitckpt::proxy::client
