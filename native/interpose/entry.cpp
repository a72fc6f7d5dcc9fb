#include "interpose/entry.h"

namespace jitckpt::interpose {

void Passage::meet_closed_gate(watchdog::Thread& thread, Gate gate) {
  in_save_ = works_for_save(thread);
  if (in_save_ || gate == Gate::ignores) return;
  // A call from inside another call has passed the gate already.
  if (thread.depth > 0 || passes_to_end_its_step(thread)) return;
  wait_at_gate(thread);
}

}  // namespace jitckpt::interpose
