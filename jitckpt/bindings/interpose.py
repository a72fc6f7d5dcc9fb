"""The preloaded library that is already in this process, called through cffi (its C interface: jitckpt.h)."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cffi import FFI

from jitckpt._seen import call_native
from jitckpt.errors import NativeError

ABI = 8

# The declarations of native/interpose/jitckpt.h; a test compares the two.
DECLARATIONS = """
typedef struct {
  uint64_t host_begun, host_ended;
  uint64_t device_begun, device_ended;
  uint64_t queued_ahead;
  uint32_t holding;
  uint32_t step_thread_parked;
} jitckpt_progress_t;

typedef int (*jitckpt_save_fn)(const char* order_json);

typedef struct {
  int agent_fd;
  double hang_timeout_s;
  double hang_floor_s;
  double settle_s;
  uint32_t max_ahead;
  uint32_t max_calls_ahead;
  jitckpt_save_fn save;
  int (*gil_check)(void);
  void* (*gil_release)(void);
  void (*gil_acquire)(void*);
  int (*gil_ensure)(void);
  void (*gil_restore)(int);
} jitckpt_config_t;

int jitckpt_abi(void);
const char* jitckpt_last_error(void);
int jitckpt_start(const jitckpt_config_t* config);
void jitckpt_stop(void);

void jitckpt_set_base(uint64_t step);
int jitckpt_step_enter(void);
int jitckpt_step_begin(uint64_t step, void* stream);
int jitckpt_step_end(uint64_t step, void* stream);
void jitckpt_await_boundary(int waits);
void jitckpt_get_progress(jitckpt_progress_t* progress);

int jitckpt_write_word(uint64_t* registered_host, uint64_t value, void* stream);
int jitckpt_write_area(uint64_t* words, uint64_t value, void* target, const void* device_source, size_t bytes,
                       void* stream);
typedef struct {
  uint64_t point;
  void* target;
  const void* source;
  size_t bytes;
} jitckpt_piece_t;

int jitckpt_copy_in_turn(const jitckpt_piece_t* pieces, size_t count, uint64_t* done, uint64_t value,
                         void* stream);
int64_t jitckpt_copy_rest(void);
void jitckpt_copy_no_more(void);
int jitckpt_stream_waits(void* stream, void* other);
int jitckpt_report(const char* json, size_t length);
int jitckpt_collectives(char* json, size_t capacity);
void jitckpt_profile_network(uint32_t minibatches);
size_t jitckpt_network_profile(double* numbers, size_t capacity);
void jitckpt_tell_step_time(uint64_t* where);
void jitckpt_tell_network_use(const uint64_t* wanted, uint64_t* used, const uint64_t* ends);
void jitckpt_resume(void);

void jitckpt_arm_fault(int signal_number);
"""
_PYTHON = """
int PyGILState_Check(void);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void*);
int PyGILState_Ensure(void);
void PyGILState_Release(int);
"""


def _declared() -> Any:  # its objects get their attributes from the declarations
    ffi = FFI()
    ffi.cdef(DECLARATIONS + _PYTHON)
    return ffi


@dataclass(frozen=True)
class StepProgress:
    """Steps begun and ended, by the host and by the device; see jitckpt_progress_t."""

    host_begun: int
    host_ended: int
    device_begun: int
    device_ended: int
    queued_ahead: int
    holding: bool
    step_thread_parked: bool


def stream_of(device: torch.device) -> Callable[[], int]:
    """Return what returns the handle of the calling thread's current stream there.

    It is asked several times a step, so it is torch's own function, and not looked up again.
    """
    return partial(torch._C._cuda_getCurrentRawStream, device.index)


class Native:
    """The library's calls. Streams and addresses are numbers."""

    def __init__(self) -> None:
        """Find the library in the process; raises NativeError if it is not there or of another version."""
        self._ffi = _declared()
        self._library = self._ffi.dlopen(None)
        try:
            abi = self._library.jitckpt_abi()
        except AttributeError:
            preload = os.environ.get("LD_PRELOAD", "")
            raise NativeError(
                f"libjitckpt.so is not preloaded into this process (LD_PRELOAD is {preload!r}). Start it "
                "with `jitckpt run`, or with LD_PRELOAD=$(jitckpt lib)."
            ) from None
        if abi != ABI:
            raise NativeError(
                f"The preloaded libjitckpt.so speaks version {abi} of the interface, this jitckpt {ABI}. "
                "Preload the library that came with it: LD_PRELOAD=$(jitckpt lib)."
            )
        self._progress = self._ffi.new("jitckpt_progress_t*")
        self._pointer = partial(self._ffi.cast, self._ffi.typeof("void*"))
        self._words = partial(self._ffi.cast, self._ffi.typeof("uint64_t*"))
        # What is called in each step takes numbers alone, and a call of cffi's some microseconds more.
        self._step_begin = self._address("jitckpt_step_begin")
        self._step_end = self._address("jitckpt_step_end")
        self._write_area = self._address("jitckpt_write_area")
        self._callback: Any = None

    def start(
        self,
        *,
        agent_fd: int,
        hang_timeout: float,
        hang_floor: float,
        settle: float,
        max_ahead: int,
        max_calls_ahead: int,
        save: Callable[[bytes], int],
    ) -> None:
        """Start the watchdog; `save` is called on a thread of the library with the agent's order.

        agent_fd: -1 without an agent. hang_timeout, hang_floor, settle: seconds; with a floor above 0 the
        time-out is learned between the two. max_calls_ahead: so many device calls, about, may wait on a
        stream; 0: any number. Raises NativeError.
        """

        def called(order: Any) -> int:
            return save(self._ffi.string(order))

        self._callback = self._ffi.callback("int(const char*)", called, error=1)
        config = self._ffi.new("jitckpt_config_t*")
        config.agent_fd, config.hang_timeout_s, config.settle_s = agent_fd, hang_timeout, settle
        config.hang_floor_s = hang_floor
        config.max_ahead, config.max_calls_ahead = max_ahead, max_calls_ahead
        config.save = self._callback
        config.gil_check = self._library.PyGILState_Check
        config.gil_release = self._library.PyEval_SaveThread
        config.gil_acquire = self._library.PyEval_RestoreThread
        config.gil_ensure = self._library.PyGILState_Ensure
        config.gil_restore = self._library.PyGILState_Release
        self._check(self._library.jitckpt_start(config))

    def stop(self) -> None:
        self._library.jitckpt_stop()

    def set_base(self, step: int) -> None:
        self._library.jitckpt_set_base(step)

    def step_enter(self) -> None:
        """Be inside an optimizer step from now on; a save lets this thread end it. May wait as step_begin."""
        self._check(self._library.jitckpt_step_enter())

    def step_begin(self, step: int, stream: int) -> None:
        """May wait until the device has caught up. Raises NativeError."""
        found = call_native(self._step_begin, step, stream)
        if found != 0:
            self._check(found)

    def step_end(self, step: int, stream: int) -> None:
        found = call_native(self._step_end, step, stream)
        if found != 0:
            self._check(found)

    def await_boundary(self, waits: bool) -> None:
        """Whether a save lets all threads go on: to the boundary of the iteration, whose step has begun."""
        self._library.jitckpt_await_boundary(waits)

    def progress(self) -> StepProgress:
        self._library.jitckpt_get_progress(self._progress)
        found = self._progress
        return StepProgress(
            found.host_begun,
            found.host_ended,
            found.device_begun,
            found.device_ended,
            found.queued_ahead,
            bool(found.holding),
            bool(found.step_thread_parked),
        )

    def write_word(self, address: int, value: int, stream: int) -> None:
        """Have the device write 8 bytes of registered host memory, in the order of the stream."""
        target = self._words(address)
        self._check(self._library.jitckpt_write_word(target, value, self._pointer(stream)))

    def write_area(self, area: tuple[int, int], value: int, source: tuple[int, int], stream: int) -> None:
        """Have the device write a word, then copy bytes to the host, then write the word behind it.

        area: the addresses of two words, which get `value`, and of the bytes, in registered host memory.
        source: the address of the bytes in device memory, and how many.
        """
        found = call_native(self._write_area, area[0], value, area[1], source[0], source[1], stream)
        if found != 0:
            self._check(found)

    def copy_in_turn(
        self, pieces: Sequence[tuple[int, int, int, int]], done: tuple[int, int], stream: int
    ) -> None:
        """Have copies begin at points of the minibatch; see jitckpt_copy_in_turn.

        pieces: point, addresses of registered host and device memory, bytes; in the order of their points.
        done: the address of a word, and what it gets in the end.
        """
        made = self._ffi.new("jitckpt_piece_t[]", len(pieces))
        for one, (point, target, source, size) in zip(made, pieces, strict=True):
            one.point, one.bytes = point, size
            one.target, one.source = self._ffi.cast("void*", target), self._ffi.cast("void*", source)
        self._check(
            self._library.jitckpt_copy_in_turn(
                made, len(pieces), self._words(done[0]), done[1], self._pointer(stream)
            )
        )

    def copy_rest(self) -> int:
        """Put what of that is still to come on its stream now; return how many pieces."""
        left: int = self._library.jitckpt_copy_rest()
        self._check(min(0, left))
        return left

    def copy_no_more(self) -> None:
        """Drop what of that is still to come."""
        self._library.jitckpt_copy_no_more()

    def stream_waits(self, stream: int, other: int) -> None:
        """Have a stream wait for what is on another now, which is no point of the minibatch."""
        self._check(self._library.jitckpt_stream_waits(self._pointer(stream), self._pointer(other)))

    def report(self, message: bytes) -> None:
        """Send one message to the agent; raises NativeError if there is none or it does not answer."""
        self._check(self._library.jitckpt_report(message, len(message)))

    def collectives(self) -> str:
        """Return what is in flight, oldest first, as JSON."""
        size = 4096
        while True:
            buffer = self._ffi.new("char[]", size)
            needed = self._library.jitckpt_collectives(buffer, size)
            if needed < size:
                text: str = self._ffi.string(buffer).decode()
                return text
            size = needed + 1

    def profile_network(self, minibatches: int) -> None:
        """Have the device's times of the collectives in so many minibatches from the next on taken."""
        self._library.jitckpt_profile_network(minibatches)

    def network_profile(self) -> list[float]:
        """Return those times, once, as soon as they are known: see jitckpt_network_profile; before, []."""
        size = 4096
        while True:
            numbers = self._ffi.new("double[]", size)
            count = self._library.jitckpt_network_profile(numbers, size)
            if count <= size:
                return list(numbers[0:count])
            size = count

    def tell_step_time(self, address: int) -> None:
        """Have the device write there when it comes to the end of a step; 0: no more. It must stay."""
        self._library.jitckpt_tell_step_time(self._words(address))

    def tell_network_use(self, wanted: int, used: int, ends: int) -> None:
        """Say in the word `used`, while `wanted` is not 0, whether the device is inside of a collective.

        All are addresses. Returns once `ends` is not 0.
        """
        words = (self._words(address) for address in (wanted, used, ends))
        self._library.jitckpt_tell_network_use(*words)

    def resume(self) -> None:
        self._library.jitckpt_resume()

    def arm_fault(self, signal_number: int) -> None:
        self._library.jitckpt_arm_fault(signal_number)

    def _address(self, name: str) -> int:
        return int(self._ffi.cast("uintptr_t", getattr(self._library, name)))

    def _check(self, result: int) -> None:
        if result != 0:
            raise NativeError(self._ffi.string(self._library.jitckpt_last_error()).decode(errors="replace"))
