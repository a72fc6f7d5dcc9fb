"""What the programs under test share: CUDA, NCCL and jitckpt's C functions through ctypes, without torch.

Each program runs in a process of its own with libjitckpt.so and libsoftgpu.so preloaded, and prints one JSON
object.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SUCCESS, NOT_READY = 0, 600
NCCL_FLOAT32, NCCL_SUM, NCCL_INVALID_USAGE = 7, 0, 5
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
NON_BLOCKING = 1

device = ctypes.CDLL(None)  # releases the GIL, as torch does
holding_gil = ctypes.PyDLL(None)  # does not
blocks = ctypes.CDLL(os.environ["TEST_BLOCKS"])  # blocks.c
blocks_holding_gil = ctypes.PyDLL(os.environ["TEST_BLOCKS"])

for library in (device, holding_gil):
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.restype = ctypes.c_char_p
    library.jitckpt_last_error.restype = ctypes.c_char_p

Stream = ctypes.c_void_p
SAVE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)


class Config(ctypes.Structure):
    _fields_ = [
        ("agent_fd", ctypes.c_int),
        ("hang_timeout_s", ctypes.c_double),
        ("hang_floor_s", ctypes.c_double),
        ("settle_s", ctypes.c_double),
        ("max_ahead", ctypes.c_uint32),
        ("max_calls_ahead", ctypes.c_uint32),
        ("save", SAVE),
        ("gil_check", ctypes.c_void_p),
        ("gil_release", ctypes.c_void_p),
        ("gil_acquire", ctypes.c_void_p),
        ("gil_ensure", ctypes.c_void_p),
        ("gil_restore", ctypes.c_void_p),
    ]


class Progress(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in ("host_begun", "host_ended", "device_begun", "device_ended", "queued")
        ),
        ("holding", ctypes.c_uint32),
        ("step_thread_parked", ctypes.c_uint32),
    ]


def check(result: int) -> None:
    if result != SUCCESS:
        raise RuntimeError(f"the device answered {result}")


def python_function(name: str) -> int:
    address = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    assert address is not None
    return address


_jobs: list[Job] = []


class Job:
    """A registered job; `agent` is this side of its socket, if it has an agent."""

    def __init__(
        self,
        save: Callable[[dict[str, Any]], int | None],
        *,
        agent: bool = True,
        hang_timeout: float = 0,
        settle: float = 0.2,
        max_ahead: int = 0,
        max_calls_ahead: int = 0,
    ) -> None:
        _jobs.append(self)  # the library keeps its callback, and the other side of the socket must stay open
        self.agent, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.worker_fd = worker.detach() if agent else -1
        self._save = SAVE(lambda order: save(json.loads(order)) or 0)
        config = Config(
            agent_fd=self.worker_fd,
            hang_timeout_s=hang_timeout,
            hang_floor_s=0,
            settle_s=settle,
            max_ahead=max_ahead,
            max_calls_ahead=max_calls_ahead,
            save=self._save,
            gil_check=python_function("PyGILState_Check"),
            gil_release=python_function("PyEval_SaveThread"),
            gil_acquire=python_function("PyEval_RestoreThread"),
            gil_ensure=python_function("PyGILState_Ensure"),
            gil_restore=python_function("PyGILState_Release"),
        )
        if device.jitckpt_start(ctypes.byref(config)) != 0:
            raise RuntimeError(device.jitckpt_last_error().decode())

    def order_save(self, save_id: int = 1) -> None:
        self.agent.send(json.dumps({"type": "save", "save_id": save_id}, separators=(",", ":")).encode())

    def order_save_later(self, save_id: int = 1) -> None:
        """From a thread without Python, when the caller is inside its next call."""
        message = json.dumps({"type": "save", "save_id": save_id}, separators=(",", ":"))
        blocks.send_later(self.agent.fileno(), message.encode())

    def order_resume(self) -> None:
        self.agent.send(b'{"type":"resume"}')

    def hear(self, kind: str, timeout: float = 20) -> dict[str, Any]:
        """The next message of a kind; others are dropped."""
        self.agent.settimeout(timeout)
        while True:
            message: dict[str, Any] = json.loads(self.agent.recv(65536))
            if message["type"] == kind:
                return message


def progress() -> Progress:
    result = Progress()
    device.jitckpt_get_progress(ctypes.byref(result))
    return result


def malloc(size: int) -> ctypes.c_void_p:
    pointer = ctypes.c_void_p()
    check(device.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)))
    return pointer


def new_stream(flags: int = NON_BLOCKING) -> Stream:
    stream = Stream()
    check(device.cudaStreamCreateWithPriority(ctypes.byref(stream), flags, 0))
    return stream


def new_event() -> ctypes.c_void_p:
    event = ctypes.c_void_p()
    check(device.cudaEventCreateWithFlags(ctypes.byref(event), 2))
    return event


class Blocker:
    """Work on a stream that goes on until release()."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.flag = ctypes.c_int(0)
        function = ctypes.cast(blocks.block_until, ctypes.c_void_p)
        check(device.cudaLaunchHostFunc(stream, function, ctypes.byref(self.flag)))

    def release(self) -> None:
        self.flag.value = 1


def communicators(count: int) -> list[ctypes.c_void_p]:
    """One communicator a device, all in this process."""
    handles = (ctypes.c_void_p * count)()
    check(device.ncclCommInitAll(handles, count, (ctypes.c_int * count)(*range(count))))
    return [ctypes.c_void_p(handle) for handle in handles]


def all_reduce(communicator: ctypes.c_void_p, buffer: ctypes.c_void_p, count: int, stream: Stream) -> int:
    result: int = device.ncclAllReduce(
        buffer, buffer, ctypes.c_size_t(count), NCCL_FLOAT32, NCCL_SUM, communicator, stream
    )
    return result


def wait_for(condition: Callable[[], bool], timeout: float = 20) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the awaited condition did not come")
        time.sleep(0.005)


class HostThread:
    """A thread of the application's, there before the save: runs one call after the other."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Callable[[], object]] = queue.Queue()
        self.done = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._calls.get()()
            self.done += 1

    def call(self, body: Callable[[], object]) -> None:
        self._calls.put(body)


def finish(**results: Any) -> None:
    """Prints the results and ends the process as it is: device work may be stuck."""
    print(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)
