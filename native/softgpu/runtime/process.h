// The life of the process as CUDA sees it: a forked child has no device, and at exit the driver goes before
// everything else.
#pragma once

namespace softgpu {

enum class ProcessPhase { fresh, running, forked, exiting };

ProcessPhase process_phase();

// The device comes into use: from here on a fork leaves the child without it, and exit first calls at_exit.
void enter_running(void (*at_exit)());

}  // namespace softgpu
