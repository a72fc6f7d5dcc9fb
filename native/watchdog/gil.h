// Python's global interpreter lock, which a save function needs and a thread that hangs may hold.
//
// Giving it up eagerly in every blocking call of ours would invite deadlocks: torch calls us under locks of
// its own (the caching allocator's), and a thread that comes back from a device call and waits for the GIL
// under such a lock blocks another that holds the GIL and wants the lock. So nothing is given up until a save
// is ordered, and then in three steps:
//
// 1. A thread that waits at the gate gives it up there (without_gil).
// 2. A thread inside one of our calls is signalled; the handler gives the GIL up and waits for the resume.
//    This is safe because the thread is at a known place: it entered our call from native code that expects
//    a device call to take any time, the interpreter's own structures are not half changed, and on that
//    thread nothing goes on until it has taken the GIL back.
// 3. If the save function still can't be entered, every other thread is signalled, again and again. Whoever
//    holds the GIL has then not answered the interpreter's request to hand it over, which any thread that
//    runs Python code does within milliseconds, for a third of a second. Either it is inside native code
//    that waits for something; its handler does the same as above. Or it is busy, and its handler does
//    nothing: it may be in the middle of a garbage collection, of an allocation or of the growth of a dict,
//    and whoever had the GIL then would find the interpreter's structures half changed. It comes to an end
//    by itself.
//
// What is a wait: the signal has interrupted a system call, and none that is about memory (is_waiting). The
// interpreter's critical sections make no other:
// - A garbage collection looks for garbage without a call that could wait. What it then finalizes and clears
//   runs code of others, which may give the GIL up by CPython's own rules, as any Py_DECREF may.
// - pymalloc changes its lists without a call, and has new arenas from mmap, which is about memory.
// - A dict or list that grows gets memory from the same places, or from the C library, whose own lock it may
//   wait for before anything is changed; then it copies.
// - list.sort takes the list's items away before it begins, so others find it empty, and compares by code
//   that may give the GIL up at any time, too.
// - Files are read and written, and locks waited for, by CPython without the GIL.
// The same holds in 2: a device call is made by code of others, never by these sections.
//
// What remains is a lock of the C library that a thread may hold where it waits: then the save gets stuck
// and its deadline ends it, no worse than without the signal. System calls of threads that did not hold the
// GIL are restarted by the kernel where it can. The handler calls PyGILState_Check (reads thread-local data),
// PyEval_SaveThread (unlocks), and PyEval_RestoreThread (locks): the interrupted code can't be inside the
// GIL's own mutex, because it holds the GIL and does not move.
#pragma once
#include <sys/types.h>

#include <vector>

namespace jitckpt::watchdog {

// The interpreter's functions, all of them or (a process without Python) none.
struct Gil {
  int (*check)() = nullptr;          // PyGILState_Check
  void* (*release)() = nullptr;      // PyEval_SaveThread
  void (*acquire)(void*) = nullptr;  // PyEval_RestoreThread
  int (*ensure)() = nullptr;         // PyGILState_Ensure
  void (*restore)(int) = nullptr;    // PyGILState_Release
};

// Lets the GIL go while `wait` runs, if this thread holds it.
template <typename Wait>
void without_gil(const Gil& gil, const Wait& wait) {
  void* const held = gil.check && gil.check() ? gil.release() : nullptr;
  wait();
  if (held) gil.acquire(held);
}

// Begins a rescue: from now on the handler acts, and lets its thread go on when `wait_for_resume` returns
// (which must be fit for a signal handler). An error is a sentence, nullptr otherwise.
const char* begin_rescue(const Gil& gil, void (*wait_for_resume)());

void signal_threads_in_calls();                                  // step 2
void signal_all_threads_except(const std::vector<pid_t>& ours);  // step 3

// The save function has been entered: signals that are still under way do nothing.
void end_rescue();

}  // namespace jitckpt::watchdog
