// The device as the watchdog asks it, from threads of ours or inside a caller's thread, without leaving a
// trace there.
#pragma once
#include <cuda_runtime_api.h>

#include <optional>

#include "watchdog/event.h"

namespace jitckpt::watchdog {

// Makes a device current on this thread. Only for devices that the application uses: it would create a
// context.
void use_device(int device);

// Whether the device has passed an event. An error counts as no: what failed is not finished.
bool finished(Event event);

// Whether the device is still to come to an event. No more where it has failed.
bool is_pending(Event event);

// Seconds from one event that the device has passed to another; nothing if it has no such time.
std::optional<double> seconds_between(Event from, Event to);

// Whether what is put on the stream becomes part of a graph, as far as that can be told.
bool is_capturing(cudaStream_t stream);

enum class StreamState { idle, busy, capturing };
StreamState state_of(cudaStream_t stream);

// Stream capture of other threads must not be disturbed by the questions of this one (as c10d's watchdog does
// it).
void leave_captures_alone();

}  // namespace jitckpt::watchdog
