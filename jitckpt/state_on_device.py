"""Parameters and optimizer state that stay on the device: whether they can, and where they are.

They can where nothing but the optimizer step changes them, the step changes nothing else, and its calls are
all made before the first of them has to have run.
"""

import ctypes
import hashlib
import struct
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from jitckpt import _seen
from jitckpt.hooks import torch_parallel
from jitckpt.proxy_memory import Memory
from jitckpt.transparent import naming

STEPS_LOOKED_AT = 2  # before a validation; in the first two of a job much is allocated
EXTENT = struct.Struct("=QQ")  # address and bytes


class StateOnDevice:
    """Of one process, once its user wants that.

    stays: it is so from the step on that begins now. begun: a step has begun so, and has not ended.
    """

    def __init__(self, process: Any) -> None:
        """process: the symbols of this process, as ctypes has them."""
        self._process = process
        process.cudaGetErrorString.restype = ctypes.c_char_p
        process.jitckpt_proxy_answers.restype = ctypes.c_uint64
        process.jitckpt_proxy_step_ended.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
        process.jitckpt_proxy_step_begins.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        self.stays = self.begun = False
        self._unsupported = ""
        self._answers = 0
        self._waited = deque[bool](maxlen=STEPS_LOOKED_AT)
        self._seen: Mapping[str, Tensor] = {}  # of which the next two are
        self._places = b""
        self._digest = 0
        self._is_first = True
        self._gradients: list[tuple[int, int]] = []  # when the newest minibatch began
        self._needs_gradients = True
        self._left_out: list[tuple[int, int]] = []  # of the first image

    def watch(self) -> None:
        """A step begins, with the state still in images."""
        self._answers = self._process.jitckpt_proxy_answers()

    def watched(self, optimizers: Sequence[Optimizer | None]) -> None:
        """It has ended."""
        self._waited.append(self._process.jitckpt_proxy_answers() != self._answers)
        self._gradients = unpacked(gradients(optimizers))

    def doubt_gradients(self, places: naming.Places, changed: Tensor) -> None:
        """Have a validation overwrite the gradients that the minibatch began with, whether it has or not.

        changed: a byte for each block of `places`, which is set.
        """
        for extent in self._gradients:
            own = places.blocks(*extent)
            changed[own.start : own.stop] = 1

    def learn(self, places: naming.Places, shadow: Tensor) -> None:
        """A validation has found what the minibatch needs: images leave out the gradients if not those."""
        blocks = [places.blocks(*extent) for extent in self._gradients]
        self._needs_gradients = any(not own or shadow[own.start : own.stop].any() for own in blocks)

    def step_begins(self, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]) -> None:
        """Have an image made without the state, if it stays still, on all ranks."""
        self.begun = False  # one that was left by an exception does not end
        if state is not self._seen and (reason := unfit(state)):
            self.leave(reason)
        self.stays = self.stays and self._process.jitckpt_proxy_state_stays() == 1
        if self.stays:
            self._look_at(state)
            left_out = self._places if self._needs_gradients else self._places + gradients(optimizers)
            if self._is_first:
                self._left_out = unpacked(left_out)
            error = self._process.jitckpt_proxy_step_begins(left_out, len(left_out) // EXTENT.size)
            self.begun = not error
            if error:
                self.leave(error_text(self._process, error))

    def step_ended(
        self, step: int, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]
    ) -> int:
        """Say where the state is; return 0, or the error of CUDA. After the first such step, look at it."""
        self.begun = False
        self._look_at(state)
        count = len(self._places) // EXTENT.size
        error: int = self._process.jitckpt_proxy_step_ended(self._places, count, self._digest)
        if not error and self._is_first:
            self._is_first = False
            if reason := self._what_else_has_changed(step, optimizers):
                self.leave(reason)
        return error

    def _what_else_has_changed(self, step: int, optimizers: Sequence[Optimizer | None]) -> str:
        """Return what the step has changed besides the state, a clause; "" if nothing."""
        memory = Memory()
        if failed := self._process.jitckpt_proxy_check(ctypes.byref(memory)):
            return f"nobody sees what step {step} has changed: {error_text(self._process, failed)}"
        places = naming.Places(memory.pieces())
        # What is free may be in an image, too; and the image has nothing of what was left out.
        looked_at = torch.zeros(memory.block_count, dtype=torch.bool)
        for found, extents in ((True, given_out()), (False, self._left_out)):
            for extent in extents:
                own = places.blocks(*extent)
                looked_at[own.start : own.stop] = found
        changed = (memory.bytes_at(memory.changed) != 0) & looked_at
        if not changed.any():
            return ""
        named = naming.tensors(self._seen, optimizers)
        what = naming.described(changed, places, named, most=1)
        return f"step {step} has changed {what}, which is no state of the optimizer"

    def end(self) -> None:
        """Transparent mode is off here: the others need not wait for this rank's steps."""
        if self.stays:
            self.stays = False
            self._process.jitckpt_proxy_state_leaves()

    def leave(self, reason: str) -> None:
        """From the next step on images have all memory again, on all ranks; reason: a clause."""
        self._unsupported = self._unsupported or reason
        if self.stays:
            self.end()
            text = f"the state does not stay on the device any more: {reason}"
            print(
                f"jitckpt: {text}. It is copied to the host in every step again.", file=sys.stderr, flush=True
            )

    def why_not(
        self,
        state: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer | None],
        places: naming.Places,
        changed: Tensor,
    ) -> str:
        """Return why the state can't stay, a clause; "" if it can.

        changed: the blocks of `places` that have changed in the minibatch, before its step.
        """
        several = "there are several optimizers" if len(optimizers) > 1 else ""
        waits = "in its optimizer step the program waits for the device" if any(self._waited) else ""
        allocator = torch.cuda.get_allocator_backend()
        other = "" if allocator == "native" else f"the allocator of the device's memory is {allocator}"
        if reason := self._unsupported or several or waits or other or unfit(state):
            return reason
        for name, tensor in state.items():
            if tensor.numel():
                own = places.blocks(*naming.extent(tensor))
                if not own:
                    return f"{name} lies in memory that the proxy does not know"
                if changed[own.start : own.stop].any():
                    return f"{name} has changed outside of the optimizer step"
        return ""

    def _look_at(self, state: Mapping[str, Tensor]) -> None:
        if state is self._seen:
            return
        extents = [(name, *naming.extent(state[name])) for name in sorted(state)]
        held = [EXTENT.pack(address, size) for _, address, size in extents if size]
        self._seen, self._places = state, b"".join(held)
        text = repr([(name, size) for name, _, size in extents])
        self._digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def gradients(optimizers: Sequence[Optimizer | None]) -> bytes:
    """Return the extents of all gradients that lie in one piece, of all parameters of optimizers."""
    plain: list[Tensor] = []
    found = b""
    for optimizer in optimizers:
        for group in () if optimizer is None else optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                if type(gradient) is Tensor:
                    plain.append(gradient)
                else:
                    gradient = torch_parallel.local(gradient)
                    if gradient.is_cuda and gradient.is_contiguous() and gradient.nbytes:
                        found += EXTENT.pack(gradient.data_ptr(), gradient.nbytes)
    return found + _seen.extents(plain)


def unpacked(extents: bytes) -> list[tuple[int, int]]:
    """Return address and bytes of each."""
    return [(address, size) for address, size in EXTENT.iter_unpack(extents)]


def error_text(process: Any, error: int) -> str:
    """Return what CUDA says of an error, which torch must not take for one of its own call."""
    reason: str = process.cudaGetErrorString(error).decode()
    process.cudaGetLastError()
    return reason


def given_out() -> list[tuple[int, int]]:
    """Return address and size of all blocks of memory that torch's allocator has given out."""
    return [
        (block["address"], block["size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"].startswith("active")
    ]


def unfit(state: Mapping[str, Tensor]) -> str:
    """Return why these tensors can't stay, a clause; "" if they can."""
    last_name, end = "", 0
    for (address, size), name in sorted((naming.extent(tensor), name) for name, tensor in state.items()):
        tensor = torch_parallel.local(state[name])
        if not tensor.numel():
            continue
        if not tensor.is_cuda:
            return f"{name} is not on the device"
        if not tensor.is_contiguous():
            return f"{name} does not lie in one piece"
        if address < end:
            return f"{name} and {last_name} share memory"
        last_name, end = name, address + size
    return ""


def digest(state: Mapping[str, Tensor]) -> str:
    """Return a digest of names, types, shapes and contents; waits for the device."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        tensor = torch_parallel.local(state[name]).cpu()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(
            (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.numel() else b""
        )
    return found.hexdigest()
