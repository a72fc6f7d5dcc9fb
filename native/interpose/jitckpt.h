// What the preloaded library offers to the process that it is preloaded into: the C functions that
// jitckpt/bindings/interpose.py calls through cffi (dlopen(NULL)). Plain C, so that cffi can read it;
// everything below this line is its whole surface.
//
// Steps are counted from 1: step k is the k-th optimizer step of the job, 0 means "none yet". "Device"
// progress is what the device has really finished, which may be many steps behind the host.
#ifndef JITCKPT_H
#define JITCKPT_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define JITCKPT_ABI 8

typedef struct {
  uint64_t host_begun, host_ended;      // newest step whose begin/end the host has passed
  uint64_t device_begun, device_ended;  // newest step whose begin/end marker the device has finished
  uint64_t queued_ahead;                // step markers still unfinished
  uint32_t holding;                     // 1 while the host's device calls are held
  uint32_t step_thread_parked;  // 1 if the thread that last called jitckpt_step_end waits at the gate or in a
                                // blocking call
} jitckpt_progress_t;

// Called on a thread of ours that holds the GIL. order_json: the agent's order, or one of
// the same form made by the library itself. Returns 0 if a whole save was written.
typedef int (*jitckpt_save_fn)(const char* order_json);

typedef struct {
  int agent_fd;           // SOCK_SEQPACKET to the agent, -1 without one
  double hang_timeout_s;  // a watched collective that makes no progress for so long hangs; <= 0: never
  double hang_floor_s;    // > 0: learned from the job's own collectives, between this and hang_timeout_s
  double settle_s;        // the device is at rest when nothing has moved for so long
  // So many steps may be unfinished on the device, or 8 if they are more than two seconds of its work. Where
  // it is as many, jitckpt_step_begin waits for half of them.
  uint32_t max_ahead;
  uint32_t max_calls_ahead;  // so many calls, about, may wait on one stream; 0: any number (run_ahead.h)
  jitckpt_save_fn save;
  // The interpreter's functions, all five (or none, in a process without Python):
  int (*gil_check)(void);      // PyGILState_Check
  void* (*gil_release)(void);  // PyEval_SaveThread
  void (*gil_acquire)(void*);  // PyEval_RestoreThread
  int (*gil_ensure)(void);     // PyGILState_Ensure
  void (*gil_restore)(int);    // PyGILState_Release
} jitckpt_config_t;

int jitckpt_abi(void);
const char* jitckpt_last_error(void);               // of this thread, a sentence
int jitckpt_start(const jitckpt_config_t* config);  // 0, or -1 and jitckpt_last_error
void jitckpt_stop(void);  // ends the control thread, after a save that is under way; the job has finished

void jitckpt_set_base(uint64_t step);  // after a restore: the device and the host are at this step
// From here on this thread is inside an optimizer step, which a save lets it end; for what has to be enqueued
// in one go with the step, before jitckpt_step_begin.
int jitckpt_step_enter(void);
int jitckpt_step_begin(uint64_t step,
                       void* stream);  // marker on the stream, before the optimizer's first kernel
int jitckpt_step_end(uint64_t step, void* stream);  // marker on the stream, after its last
// 1: until 0, a save lets all threads go on, as it lets one that is inside an optimizer step: the loop tells
// its boundaries, and what it does before the next one belongs to the step that has begun.
void jitckpt_await_boundary(int waits);
void jitckpt_get_progress(jitckpt_progress_t* progress);

int jitckpt_write_word(uint64_t* registered_host, uint64_t value,
                       void* stream);  // stream-ordered write of 8 bytes
// In the order of the stream: value to words[0], the bytes to target, value to words[1]. All of the host's
// memory is registered.
int jitckpt_write_area(uint64_t* words, uint64_t value, void* target, const void* device_source, size_t bytes,
                       void* stream);
// A copy off the device into registered host memory. point: of the minibatch, at which it begins; see below.
typedef struct {
  uint64_t point;
  void* target;
  const void* source;
  size_t bytes;
} jitckpt_piece_t;

// Has pieces, in the order of their points, put on `stream`: each as the host comes to its point of the
// minibatch, to begin once the device is there on the stream of the optimizer step. Behind the last comes
// `value` in *done. Pieces whose point is over are put at once, and what was still to come is dropped.
// Points are what jitckpt_network_profile tells, numbered from 1 in each minibatch; 0 is its beginning. None
// is put later than the next jitckpt_step_begin, which waits for all on its stream, unless
// jitckpt_copy_rest was called since.
int jitckpt_copy_in_turn(const jitckpt_piece_t* pieces, size_t count, uint64_t* done, uint64_t value,
                         void* stream);
int64_t jitckpt_copy_rest(void);  // puts what is still to come on the stream now; how many pieces, or -1
void jitckpt_copy_no_more(void);  // drops it
int jitckpt_stream_waits(void* stream,
                         void* other);  // for what is on the other now; no point of the minibatch
int jitckpt_report(const char* json,
                   size_t length);  // one message to the agent, atomically; -1 without an agent
int jitckpt_collectives(char* json,
                        size_t capacity);  // what is in flight, oldest first; returns the bytes needed
// Has the device's time of the collectives in so many minibatches from the next jitckpt_step_end on taken,
// and forgets what was taken before.
void jitckpt_profile_network(uint32_t minibatches);
// Those times, once all of them are known, one minibatch after the other: its seconds, how many collectives
// it had, and of each the seconds from the minibatch's beginning to its begin and to its end, and 1 if it was
// sends and receives alone; then how many points the stream of the optimizer step has passed, and of each the
// seconds, and what it was: 0 a collective's call, 1 and 2 a wait's beginning and its end (a collective on
// that stream is one, too), 3 the beginning of the optimizer step. Returns how
// many numbers there are; if that is more than capacity, or 0, nothing was written. 0: not yet. They are
// given once.
size_t jitckpt_network_profile(double* numbers, size_t capacity);
// From now on, as the device comes to the end of a step, it has the time (CLOCK_MONOTONIC, in ns) written
// there; nowhere if that is null. The memory must stay.
void jitckpt_tell_step_time(uint64_t* where);
// Until *ends is not 0: says in *used, while *wanted is not 0, whether the device is inside of a collective;
// a millisecond late, and not in minibatches that are profiled. To be called on a thread of its own.
void jitckpt_tell_network_use(const uint64_t* wanted, uint64_t* used, const uint64_t* ends);
void jitckpt_resume(void);  // let the held calls go on (false alarm)

// A rehearsed failure at the next NCCL call: the signal that the process sends itself right after the call
// was passed on.
void jitckpt_arm_fault(int signal_number);

#ifdef __cplusplus
}
#endif
#endif
