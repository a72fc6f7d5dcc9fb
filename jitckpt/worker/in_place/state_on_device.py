"""Parameters and optimizer state that stay on the device: whether they can, and where they are.

They can where nothing but the optimizer step changes them, the step changes nothing else, and its calls are
all made before the first of them has to have run.
"""

import hashlib
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt import _seen
from jitckpt._seen import Seen
from jitckpt.bindings import proxy_calls
from jitckpt.bindings.memory import at as memory_at
from jitckpt.bindings.proxy_memory import Memory
from jitckpt.errors import RecoveryError
from jitckpt.hooks.torch_steps import State
from jitckpt.state import parallel
from jitckpt.worker.in_place import naming, torch_memory
from jitckpt.worker.in_place.torch_memory import Buckets

STEPS_LOOKED_AT = 2  # before a validation; in the first two of a job much is allocated
EXTENT = struct.Struct("=QQ")  # address and bytes
VERSION = struct.Struct("=QQ")  # how often torch has written to a parameter, and where it lies
Optimizers = Callable[[], Sequence[Optimizer | None]]
SeenOf = Callable[[Optimizer], Seen | None]
PLAIN = (nn.Parameter, Tensor)  # types of parameters whose memory is their own
CHANGED = -1  # says a steady step, which is asked only where there is an error of CUDA or none
STEADY = "_jitckpt_steady_step"  # kept in an optimizer's own dict, so that it lives no longer
# In how many minibatches, of so many, the state may be copied before a call, until it may as well leave.
OFTEN, OF_LATE = 16, 32


class StateOnDevice:
    """Of one process, once its user wants that.

    stays: it is so from the step on that begins now; of the last such step the image has the state, too.
    begun: a step has begun so, and has not ended.
    """

    def __init__(self, process: Any, beside_init: bool = False) -> None:
        """process: the symbols of this process. beside_init: also with jitckpt.init."""
        self._process = process
        self._beside_init = beside_init
        proxy_calls.for_state(process)
        self.stays = self.begun = False
        self._unsupported = self._unfit = ""  # since when ever; of the tensors that were looked at
        self._answers = 0
        self._waited = deque[bool](maxlen=STEPS_LOOKED_AT)
        self._parameters: list[Tensor] = []
        self._are_plain = False  # the parameters
        self._versions = bytearray()  # of them, after the newest step
        self._changed = ""  # which of them has changed since, a clause
        self._copied = deque[bool](maxlen=OF_LATE)  # in which minibatches the state was, in vain
        self._seen: Mapping[str, Tensor] = {}  # of which the next two are
        self._places = b""
        self._digest = 0
        self._gradients: list[tuple[int, int]] = []  # when the newest minibatch began, and their buckets
        self._buckets = Buckets()
        self._needs_gradients = True
        self._tried: list[tuple[int, int]] = []  # what the image would have left out
        self._steady_of: weakref.ref[Optimizer] | None = None  # whose next step may be as its last

    def watch(self) -> None:
        """A step begins, with the state still in images."""
        self._answers = self._process.jitckpt_proxy_answers()

    def watched(self, optimizers: Sequence[Optimizer | None]) -> None:
        """It has ended."""
        self._waited.append(self._process.jitckpt_proxy_answers() != self._answers)
        self._gradients = unpacked(gradients(optimizers) + self._buckets.extents())

    def doubt_gradients(self, places: naming.Places, changed: Tensor, tried: Tensor) -> None:
        """Have a validation overwrite the gradients that the minibatch began with, whether it has or not.

        changed, tried: a byte for each block of `places`, which are set.
        """
        for extent in self._gradients:
            own = places.blocks(*extent)
            changed[own.start : own.stop] = 1
            tried[own.start : own.stop] = True

    def learn(self, places: naming.Places, shadow: Tensor) -> None:
        """A validation has found what the minibatch needs: images leave out the gradients if not those."""
        self._forget_steady()
        blocks = [places.blocks(*extent) for extent in self._gradients]
        self._needs_gradients = any(not own or shadow[own.start : own.stop].any() for own in blocks)

    # Where all is cold in the caches each call of a Python function takes some microseconds. So where a step
    # is as the one before, which is found out in one call, that is all there is to do.

    def step_begins(self, optimizer: Optimizer, state: State, optimizers: Optimizers) -> None:
        """Have an image made without the state, if it stays still, on all ranks."""
        steady = optimizer.__dict__.get(STEADY)
        error = CHANGED if steady is None else steady.begins()
        if error == CHANGED:
            self._forget_steady()
            self._other_step_begins(state(), optimizers())
        else:
            self._begins(error)

    def _other_step_begins(self, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]) -> None:
        self.begun = False  # one that was left by an exception does not end
        self.stays = self.stays and self._process.jitckpt_proxy_state_stays() == 1
        if not self.stays:
            return
        self._look_for_changes(state, optimizers)
        left_out = self._left_out(state, optimizers)
        if self._unfit:
            self.leave(self._unfit)
        self._begins(self._process.jitckpt_proxy_step_begins(left_out, len(left_out) // EXTENT.size))

    def _look_for_changes(self, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]) -> None:
        """Have the state leave if it has changed since the step before.

        The proxy copies it before a call that may do so, and a replay makes that call again. What it has not
        seen may have been done twice.
        """
        seen = self._process.jitckpt_proxy_state_was_written() == 1
        by_a_call = self._process.jitckpt_proxy_state_was_changed() == 1
        changed = self._changed_outside(state, optimizers)
        if by_a_call and not changed:
            changed = "the program has written to the state outside of the optimizer step"
        self._copied.append(seen)
        if changed:
            self._changed = changed
            self.leave(changed)
            if self._process.jitckpt_proxy_state_changed() and not seen:
                raise RecoveryError(
                    f"{changed}, and since the step before a failure was recovered from with it on the "
                    "device: that may have changed it twice. Begin again from a save, with "
                    "--no-state-on-device."
                )
        elif self._copied.count(True) >= OFTEN:
            self.leave(
                "in most minibatches kernels are given the state in ways that were not seen before, so that "
                "it has to be copied there anyway"
            )

    def _begins(self, error: int) -> None:
        self.begun = not error
        if error:
            self.leave(error_text(self._process, error))
            self.end()

    def step_ended(self, optimizer: Optimizer, state: State, optimizers: Optimizers, seen: SeenOf) -> int:
        """Say where the state is; return 0, or the error of CUDA."""
        self.begun = False
        steady = optimizer.__dict__.get(STEADY)
        error: int = CHANGED if steady is None else steady.ended()
        if error == CHANGED:
            self._forget_steady()
            error = self._other_step_ended(state(), optimizers())
            if not error and self.stays and not self._changed and not self._unfit:
                self._be_steady(optimizer, seen(optimizer))
        return error

    def _be_steady(self, optimizer: Optimizer, seen: Seen | None) -> None:
        """Have its next step made in one call, if it is as the one that has just ended."""
        if seen is None or not self._are_plain:
            return
        steady = torch_memory.steady_step(
            seen,
            self._parameters,
            self._versions,
            buckets=self._buckets,
            places=self._places,
            digest=self._digest,
            needs_gradients=self._needs_gradients,
        )
        if steady is not None:
            optimizer.__dict__[STEADY], self._steady_of = steady, weakref.ref(optimizer)

    def _forget_steady(self) -> None:
        optimizer, self._steady_of = self._steady_of and self._steady_of(), None
        if optimizer is not None:
            del optimizer.__dict__[STEADY]

    def _other_step_ended(self, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]) -> int:
        self._look_at(state, optimizers)
        if self._unfit:
            self.leave(self._unfit)
        self._versions = bytearray(self._versions_now())
        count = len(self._places) // EXTENT.size
        error: int = self._process.jitckpt_proxy_step_ended(self._places, count, self._digest)
        return error

    def trial_begins(self, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]) -> int:
        """A step begins after which the state may stay: have an image made of all before, to compare with.

        Return 0, or the error of CUDA.
        """
        self._forget_steady()
        self._tried = unpacked(self._left_out(state, optimizers))
        error: int = self._process.jitckpt_proxy_keep_again()
        self.watch()
        return error

    def trial_ended(
        self, step: int, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]
    ) -> str:
        """Return what the step has done after which the state can't stay, a clause; "" if it can."""
        self.watched(optimizers)
        self._look_at(state, optimizers)
        self._versions = bytearray(self._versions_now())
        if self._process.jitckpt_proxy_communicated():
            return f"a collective runs in optimizer step {step}"
        return self._why_never(state, optimizers) or self._what_else_has_changed(step, state, optimizers)

    def _what_else_has_changed(
        self, step: int, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]
    ) -> str:
        """Return what the step has changed besides what an image would leave out, a clause; "" if nothing."""
        memory = Memory()
        if failed := proxy_calls.check(self._process, memory):
            return f"nobody sees what step {step} has changed: {error_text(self._process, failed)}"
        places = naming.Places(memory.pieces())
        # What is free may be in an image, too.
        looked_at = torch.zeros(memory.block_count, dtype=torch.bool, device="cpu")
        own = [naming.extent(tensor) for tensor in state.values()]
        for found, extents in ((True, given_out()), (False, self._tried + own)):
            for extent in extents:
                blocks = places.blocks(*extent)
                looked_at[blocks.start : blocks.stop] = found
        changed = (memory.bytes_at(memory.changed) != 0) & looked_at
        if not changed.any():
            return ""
        named = naming.tensors(state, optimizers)
        what = naming.described(changed, places, named, most=1)
        return f"step {step} has changed {what}, which is no state of the optimizer"

    def end(self) -> None:
        """Transparent mode is off here: the others need not wait for this rank's steps."""
        if self.stays:
            self.stays = False
            self._process.jitckpt_proxy_state_ends()

    def leave(self, reason: str) -> None:
        """From the next step but one on images have all memory again, on all ranks; reason: a clause."""
        first, self._unsupported = not self._unsupported, self._unsupported or reason
        if self.stays and first:
            self._process.jitckpt_proxy_state_leaves()
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
        if reason := self._why_never(state, optimizers):
            return reason
        for name, tensor in state.items():
            if tensor.numel():
                own = places.blocks(*naming.extent(tensor))
                if not own:
                    return f"{name} lies in memory that the proxy does not know"
                if changed[own.start : own.stop].any():
                    return f"{name} has changed outside of the optimizer step"
        return ""

    def _why_never(self, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]) -> str:
        """Return the same as far as no memory has to be looked at for it."""
        called = "" if self._beside_init or not _has_called_init() else "the script has called jitckpt.init"
        left = "" if self._process.jitckpt_proxy_state_stays() else "some rank has made it leave before"
        several = "there are several optimizers" if len(optimizers) > 1 else ""
        waits = "in its optimizer step the program waits for the device" if any(self._waited) else ""
        allocator = torch.cuda.get_allocator_backend()
        other = "" if allocator == "native" else f"the allocator of the device's memory is {allocator}"
        return self._unsupported or called or left or several or waits or other or unfit(state)

    def _left_out(self, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]) -> bytes:
        """Return the places that an image leaves out: none if it has to have all."""
        self._look_at(state, optimizers)
        if self._changed:
            return b""  # the next minibatch begins with what is changed by then
        if self._unfit or self._needs_gradients:
            return self._places
        return self._places + gradients_of(self._parameters) + self._buckets.extents()

    def _changed_outside(self, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]) -> str:
        """Return what has changed since the last step, a clause; "" if nothing, as far as torch counts it."""
        if (
            self._parameters
            and state is not self._seen
            and [*map(id, self._parameters)] != [*map(id, parameters(optimizers))]
        ):
            return "the optimizer has got other parameters"
        now = self._versions_now()
        if now == self._versions:
            return ""
        both = zip(VERSION.iter_unpack(self._versions), VERSION.iter_unpack(now), strict=True)
        number = next(number for number, (before, after) in enumerate(both) if before != after)
        return f"optimizer.0.parameter.{number} has changed outside of the optimizer step"

    def _versions_now(self) -> bytes:
        """Return how often torch has written to each parameter, as it counts that, and where it lies."""
        if self._are_plain:
            return _seen.versions(self._parameters)
        return b"".join([VERSION.pack(one._version, address_of(one)) for one in self._parameters])

    def _look_at(self, state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]) -> None:
        if state is self._seen:
            return
        self._parameters = parameters(optimizers)
        self._are_plain = all(type(one) in PLAIN for one in self._parameters)
        self._unfit = unfit(state)
        extents = [(name, *naming.extent(state[name])) for name in sorted(state)]
        held = [EXTENT.pack(address, size) for _, address, size in extents if size and not self._unfit]
        self._seen, self._places = state, b"".join(held)
        storages = b"".join([EXTENT.pack(*naming.storage(tensor)) for tensor in state.values()])
        self._process.jitckpt_proxy_watch_state(storages, len(storages) // EXTENT.size)
        text = repr([(name, size) for name, _, size in extents])
        self._digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _has_called_init() -> bool:
    """Return whether jitckpt.init protects this process, too: its threads may wait for answers in a step."""
    job = sys.modules.get("jitckpt.worker.job")
    return job is not None and job._current is not None


def gradients(optimizers: Sequence[Optimizer | None]) -> bytes:
    """Return the extents of all gradients that lie in one piece, of all parameters of optimizers."""
    return gradients_of(parameters(optimizers))


def gradients_of(parameters: list[Tensor]) -> bytes:
    """Return the same of these parameters."""
    found = _seen.gradients(parameters, Tensor)
    if found is not None:
        return found
    found = b""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided:
            gradient = parallel.local(gradient)
            if gradient.is_cuda and gradient.is_contiguous() and gradient.nbytes:
                found += EXTENT.pack(gradient.data_ptr(), gradient.nbytes)
    return found


def unpacked(extents: bytes) -> list[tuple[int, int]]:
    """Return address and bytes of each."""
    return [(address, size) for address, size in EXTENT.iter_unpack(extents)]


def parameters(optimizers: Sequence[Optimizer | None]) -> list[Tensor]:
    """Return all parameters of optimizers."""
    return [
        parameter
        for optimizer in optimizers
        if optimizer is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def address_of(parameter: Tensor) -> int:
    """Return where this rank's part of a parameter lies."""
    # Asking for the part takes ten times as long, and most parameters are whole.
    if type(parameter) in PLAIN:
        return parameter.data_ptr()
    return next(iter(parallel.held(parameter, "").values())).data_ptr()


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
        tensor = parallel.local(state[name])
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
        tensor = parallel.local(state[name]).cpu()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(memory_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b"")
    return found.hexdigest()
