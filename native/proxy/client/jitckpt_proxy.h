// What libjitckpt_proxy.so offers beside CUDA's and NCCL's symbols. Plain C, so that any language can call
// it.
#ifndef JITCKPT_PROXY_H
#define JITCKPT_PROXY_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define JITCKPT_PROXY_CALL __attribute__((visibility("default")))

// A minibatch begins: from here on a server that dies is replaced by a new one, which gets the device's
// memory as it is now and then makes all calls since. The server copies all memory of the devices to the host
// (an image) when it has come so far, but for what is free; this call only waits for the last call's image.
// What the calls before this one have kept stays until then. No other thread may put work on the device
// meanwhile. Does nothing if there are other ranks and this one has said nothing to any since the last call.
// Returns 0, or the CUDA error of the thread, with its text for cudaGetErrorString.
JITCKPT_PROXY_CALL int jitckpt_proxy_keep(void);
// The same, also if this rank has said nothing to others since then: all ranks do so at the same place of
// their programs. `communicated`: 1 if it has.
JITCKPT_PROXY_CALL int jitckpt_proxy_keep_again(void);
JITCKPT_PROXY_CALL int jitckpt_proxy_communicated(void);
// What the newest image copies of the device's memory.
JITCKPT_PROXY_CALL uint64_t jitckpt_proxy_image_bytes(void);

struct jitckpt_proxy_place {
  uint64_t address, bytes;
};

// No minibatch needs what is there when it begins: images of jitckpt_proxy_keep leave those places out, until
// others are told.
JITCKPT_PROXY_CALL void jitckpt_proxy_leave_out(const struct jitckpt_proxy_place* places, uint64_t count);

// Parameters and optimizer state can stay on the device while all else is copied, if other ranks have the
// same (docs/how-it-works/transparent.md): around each optimizer step, instead of jitckpt_proxy_keep.
// `begins` comes before the first call that changes the state; the image, made then, leaves out its places.
// `ended` comes behind the last; digest: of the places' names and sizes in their order, which other ranks'
// have to equal. A thread that waits for an answer between the two is answered, but until the step has ended
// a failure can't be recovered from. No places: the image is whole, and nothing is said of where the state
// is. Return 0, or the CUDA error.
JITCKPT_PROXY_CALL int jitckpt_proxy_step_begins(const struct jitckpt_proxy_place* places, uint64_t count);
JITCKPT_PROXY_CALL int jitckpt_proxy_step_ended(const struct jitckpt_proxy_place* places, uint64_t count,
                                                uint64_t digest);
// 1: that is to be done; 0: no more, since some rank wants that, so jitckpt_proxy_keep is to be called from
// the next step on. The newest image is whole then, whatever the places. `leaves`: this one wants that.
// `ends`: this one will make no such step any more, so no other may wait for it.
JITCKPT_PROXY_CALL int jitckpt_proxy_state_stays(void);
JITCKPT_PROXY_CALL void jitckpt_proxy_state_leaves(void);
JITCKPT_PROXY_CALL void jitckpt_proxy_state_ends(void);
// The places have been changed since the newest step: nothing goes back to that any more. 1: something may
// have done so before this call, with what had been changed by then.
JITCKPT_PROXY_CALL int jitckpt_proxy_state_changed(void);
// Before a call that may write to the places between two steps, whoever makes it, they are copied to the
// host: so a failure behind it is recovered from like any other. `was_written`: there was such a call.
// `was_changed`: and the places are not what they were, or nobody knows; waits for the device. If they are,
// calls of just that kind don't count any more. `watch_state`: the storages that have the places in them,
// before the next step ends.
JITCKPT_PROXY_CALL int jitckpt_proxy_state_was_written(void);
JITCKPT_PROXY_CALL int jitckpt_proxy_state_was_changed(void);
JITCKPT_PROXY_CALL void jitckpt_proxy_watch_state(const struct jitckpt_proxy_place* memory, uint64_t count);
// How many answers this thread has waited for.
JITCKPT_PROXY_CALL uint64_t jitckpt_proxy_answers(void);

// An allocator of the program's says what of its memory it has given out (hold) and what not (free). What is
// free holds nothing: who reads there before writing may find anything. All is held of which nothing is said.
// Nothing is asked of the server, so both may be called with the allocator's locks held.
JITCKPT_PROXY_CALL void jitckpt_proxy_free(uint64_t address, uint64_t bytes);
JITCKPT_PROXY_CALL void jitckpt_proxy_hold(uint64_t address, uint64_t bytes);

// The process id of the server; 0: there is none (yet, or any more). While all ranks recover it waits for the
// new one.
JITCKPT_PROXY_CALL int jitckpt_proxy_server(void);

// For saves of the program's state (libjitckpt.so and jitckpt's Python use these).

// Pinned memory that is part of a file of the program's, such as one that outlives it; whole pages. It stays
// until the process ends. Returns 0, or the CUDA error.
JITCKPT_PROXY_CALL int jitckpt_proxy_share(int file, uint64_t offset, uint64_t bytes, void** pointer);

// In the order of the stream the value is written to a word of pinned memory; or 0, which is to be no value
// of anybody's, where what comes before it on the device may count for nothing and will be made again.
// Returns 0, or the CUDA error.
JITCKPT_PROXY_CALL int jitckpt_proxy_write_word(uint64_t* where, uint64_t value, void* stream);

// Whether the device is where the program's calls and events say.
enum jitckpt_proxy_standing {
  jitckpt_proxy_intact,
  jitckpt_proxy_recovers,  // a recovery is under way
  jitckpt_proxy_lost,      // it was brought back, and has not ended a minibatch since; or will never be
};
JITCKPT_PROXY_CALL int jitckpt_proxy_stands(void);

// How many values that the program has got from its device came out differently when their calls were made
// again after a failure; since the process began. If there are any, the training may end otherwise than if
// nothing had failed. Those of a recovery are all counted once a second minibatch begins after it.
JITCKPT_PROXY_CALL uint64_t jitckpt_proxy_different_answers(void);

// A validation of the minibatch until here. The device's memory is copied to the host; the thread may then
// say `jitckpt_proxy_first`, which has all ranks go back to where their minibatches began and make their
// calls again, and look at what `memory` holds: bytes of memory, in blocks of 512 bytes of each place. It is
// valid until jitckpt_proxy_validate returns what ends the validation. Needs an agent. Returns 0, or the CUDA
// error.
struct jitckpt_proxy_memory {
  uint64_t place_count;
  const struct jitckpt_proxy_place* places;
  uint64_t block_count;
  const unsigned char* changed;  // 1: since the minibatch began
  unsigned char* kept;           // to be set to 1: it is put back before the calls are made again
  const unsigned char* found;    // after that: 0 the same as before, 1 the same but where it was overwritten
                                 // and nothing has written to it, 2 different
};
JITCKPT_PROXY_CALL int jitckpt_proxy_check(struct jitckpt_proxy_memory* memory);

// Says what this rank has come to at a place of its program (the numbers are the agent's, in
// jitckpt/wire/proxy_messages.py), with a clause, and waits for all others. digest: of the
// parameters and the optimizer state, or "" where they can't stay on the device; then `unfit` says why not.
// Whatever has differed is again what it was.
enum jitckpt_proxy_validation {
  jitckpt_proxy_over,         // there are no recoveries any more
  jitckpt_proxy_overwritten,  // the calls were made again, after what had changed and is not kept was
                              // overwritten
  jitckpt_proxy_put_back,     // they were made again, after all was put back: there was a failure
  jitckpt_proxy_unknown,      // they were made again, but not compared
  jitckpt_proxy_valid,        // all ranks' calls are all that their memory depends on
  jitckpt_proxy_left_out,     // not now
  jitckpt_proxy_valid_stays,  // valid; and from this step on the state can stay on the device
};
JITCKPT_PROXY_CALL int jitckpt_proxy_validate(uint64_t place, int says, const char* text, const char* digest,
                                              const char* unfit);

// Why there are no recoveries any more, as the agent has said; "" if there are. Stands until this thread's
// next call of it.
JITCKPT_PROXY_CALL const char* jitckpt_proxy_given_up(void);

#ifdef __cplusplus
}
#endif
#endif
