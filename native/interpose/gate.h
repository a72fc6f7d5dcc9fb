// The gate: while a save is ordered, the host's device calls wait here.
//
// In the common case a call costs one relaxed load of call_mode. A call that read "open" just before the gate
// closed may still reach its stream afterwards; nothing depends on that not happening: the device comes to
// rest after it, and a save that an optimizer step overtook is made again (the step markers tell).
#pragma once
#include <atomic>
#include <cstdint>

#include "watchdog/gil.h"
#include "watchdog/threads.h"

namespace jitckpt::interpose {

inline constexpr uint32_t job_registered = 1;  // jitckpt_start was called: calls are accounted for
inline constexpr uint32_t gate_closed = 2;

// Also the word that waiting threads sleep on.
extern constinit std::atomic<uint32_t> call_mode;

inline bool attentive() { return call_mode.load(std::memory_order_relaxed) != 0; }
inline bool holding() { return call_mode.load(std::memory_order_relaxed) & gate_closed; }

void set_gil(const watchdog::Gil& gil);
const watchdog::Gil& gil();

void close_gate();
void open_gate();

// An optimizer step that the host has begun before the gate closed is finished first, unless it takes too
// long: then its thread is held in the middle of it.
bool passes_to_end_its_step(const watchdog::Thread& thread);
void await_boundary(bool waits);  // whether all threads pass, as one does that is inside a step
void hold_steps_as_well();

// Returns when the gate is open. Fit for a signal handler.
void wait_until_open();

// A host thread that met the closed gate: gives the GIL up while it waits.
void wait_at_gate(watchdog::Thread& thread);

// While a save function runs, the saver thread works for it, and so do the threads born meanwhile (its own:
// the host's are held). One that the host starts all the same, without a device call before, is taken for the
// save's.
void begin_save();
void end_save();
bool works_for_save(watchdog::Thread& thread);
void leave_saves_behind();  // in a forked child

// Whether this call comes from a thread that works for the save. Only while holding().
bool in_save();

}  // namespace jitckpt::interpose
