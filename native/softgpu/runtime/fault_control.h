// The control socket: takes faults from other processes of the same user. One line in, one line back.
#pragma once

namespace softgpu {

// Listens at SOFTGPU_CONTROL/<process id>, if that variable is set. The folder is made if it is not there,
// and must be its owner's alone. Throws CudaFailure.
void open_fault_control();

// Removes the socket's name; called when the process exits.
void close_fault_control();

}  // namespace softgpu
