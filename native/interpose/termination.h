// SIGTERM, where no agent decides what it means: it wakes the control thread, which saves and then lets it
// act.
#pragma once

namespace jitckpt::interpose::termination {

// From now on SIGTERM makes wake_descriptor (an eventfd) readable and sets arrived(). False if the process
// ignores SIGTERM: then so do we.
bool catch_signal(int wake_descriptor);
bool arrived();

// Puts back what was there before (also in a forked child, where nobody waits for the signal).
void release_signal();

}  // namespace jitckpt::interpose::termination
