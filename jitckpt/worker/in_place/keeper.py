"""Transparent mode in a worker: after every optimizer step the device proxy keeps what there is.

That is a copy of all memory of the device, from which the proxy replaces a server that has died; or, where
the user wants that and it is safe, of all but the state that stays on the device. Now and then it is seen
whether the calls since then lead from that copy to what there is.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from jitckpt.bindings import proxy_calls, symbols
from jitckpt.bindings.proxy_memory import Memory
from jitckpt.bindings.torch_library import EXTENT_BYTES
from jitckpt.decisions.transparent import validation
from jitckpt.errors import RecoveryError
from jitckpt.hooks import guard
from jitckpt.hooks.torch_steps import OptimizerSteps, State
from jitckpt.system.resting_place import Guest
from jitckpt.wire import environment, proxy_messages
from jitckpt.worker.ends import at_end
from jitckpt.worker.in_place import cudnn, naming, proxy_faults, torch_memory
from jitckpt.worker.in_place.blocks import Again, Seen, SwitchOff, Valid, judge
from jitckpt.worker.in_place.deterministic import DeterministicMinibatch
from jitckpt.worker.in_place.scratch import Scratch
from jitckpt.worker.in_place.state_on_device import SeenOf, StateOnDevice, digest, error_text

# A value of environment.STATE_ON_DEVICE: unless the script calls jitckpt.init.
WITHOUT_INIT = "without-init"


# What jitckpt_proxy_validate returns, and `found` says of a block that differs.
_OVER, _OVERWRITTEN, _PUT_BACK, _UNKNOWN, _VALID, _LEFT_OUT, _VALID_STAYS = range(7)
_DIFFERENT = 2
# By then it is known whether the state stays, and what reads it.
_TELLS_AT = 10  # steps


class MinibatchKeeper:
    """A listener to the steps of a script that knows nothing of it."""

    def __init__(
        self,
        process: Any,
        validate_every: int,
        state_on_device: str = "0",
        guest: Guest | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        """process: the symbols of this process. validate_every: steps; see is_due.

        guest: tells whether the agent wants all ranks to rest behind a step. deterministic: minibatches that
        are validated are made by such algorithms.
        """
        self._process = process
        proxy_calls.for_keeper(process)
        self._off = False
        self._guest = guest
        self._rests = self._silent = False  # behind the step that has begun
        self._every = validate_every
        self._valid = False  # a minibatch was
        self._tries = 0  # in how many minibatches before this one a validation that is due was left out
        self._deterministic = DeterministicMinibatch() if deterministic else None
        self._on_device: StateOnDevice | None = None
        if state_on_device in ("1", WITHOUT_INIT):
            self._on_device = StateOnDevice(process, beside_init=state_on_device == "1")
        self._tries_state = False  # in the step that has begun
        self._validate_at = 0  # the next step that is validated once the state stays; 0: none
        self._scratch = Scratch()
        self._left_out = b""  # by images: where that lies
        self.optimizers: Callable[[], Sequence[Optimizer | None]] = list
        self.seen: SeenOf = lambda optimizer: None

    def step_begins(self, step: int, optimizer: Optimizer, state: State) -> None:
        """The minibatch's calls are made: if it is time to, see whether they can be made again."""
        if self._deterministic is not None:
            self._deterministic.end()
        if self._off:
            return
        self._rests = self._guest is not None and self._guest.begins(step)
        # Without a word to others since the last step no image is made of this one.
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        self._silent = self._rests and not alone and not self._process.jitckpt_proxy_communicated()
        on_device = self._on_device
        stays = on_device is not None and on_device.stays
        if self._is_due(step):
            heard = _Validation(self._process, step, state(), self.optimizers(), on_device).run()
            self._off = heard == _OVER
            self._valid |= heard in (_VALID, _VALID_STAYS)
            if self._off and validation.RELIED in _given_up(self._process):
                raise RecoveryError(
                    f"The calls of minibatch {step} can't be made again the same, and before this was known "
                    "a failure was recovered from by making calls again: the result may differ. Begin again "
                    "from a save of before that, or without --mode transparent."
                )
            again = heard == _LEFT_OUT and self._tries + 1 < validation.MOST_TRIES
            self._tries = self._tries + 1 if again else 0
            if self._off:
                return
            if on_device is not None and (stays or heard == _VALID_STAYS):
                # What stays does so up to an image of before a step that is not held back.
                on_device.stays, self._tries_state = False, heard == _VALID_STAYS
                if error := on_device.trial_begins(state(), self.optimizers()):
                    self._end(error, step)
                return
        if on_device is not None and on_device.stays:
            on_device.step_begins(optimizer, state, self.optimizers)
        elif on_device is not None:
            on_device.watch()

    def _is_due(self, step: int) -> bool:
        """Return whether the minibatch of that step is to be validated."""
        stays = self._on_device is not None and self._on_device.stays
        due = step == self._validate_at if stays else validation.is_due(step, self._every, self._valid)
        return due or self._tries > 0

    def step_ended(self, step: int, optimizer: Optimizer, state: State) -> None:
        """A minibatch begins. If it can't be kept, transparent mode ends and training goes on."""
        if self._off:
            return
        self._keep(step, optimizer, state)
        if self._deterministic is not None and self._is_due(step + 1) and not self._off:
            self._deterministic.begin()
        if self._rests and not self._off:
            self._rest(step)
        if step == _TELLS_AT and not self._off and os.environ.get("RANK", "0") == "0":
            copied = self._process.jitckpt_proxy_image_bytes() / 1e6
            text = f"each step copies {copied:.3g} MB of rank 0's device to the host"
            print(f"jitckpt: {text} (docs/how-it-works/transparent.md).", file=sys.stderr, flush=True)

    def _keep(self, step: int, optimizer: Optimizer, state: State) -> None:
        on_device = self._on_device
        if on_device is not None and self._tries_state:
            # The image of before this step does for the next minibatch.
            self._tries_state = False
            heard = self._tell_of_trial(step, on_device.trial_ended(step, state(), self.optimizers()))
            self._off, on_device.stays = heard == _OVER, heard == _VALID_STAYS
            self._validate_at = step + self._every if self._every else 0
            return
        if on_device is not None and on_device.begun:
            error = on_device.step_ended(optimizer, state, self.optimizers, self.seen)
            if not error and step + 1 == self._validate_at and on_device.stays:
                error = self._process.jitckpt_proxy_keep_again()
            if error:
                self._end(error, step)
            return
        if on_device is not None:
            on_device.watched(self.optimizers())
        self._leave_out(self._scratch.extents())
        if error := self._process.jitckpt_proxy_keep():
            self._end(error, step)

    def _leave_out(self, places: bytes) -> None:
        if places != self._left_out:
            self._process.jitckpt_proxy_leave_out(places, len(places) // EXTENT_BYTES)
            self._left_out = places

    def _rest(self, step: int) -> None:
        """Wait for all ranks behind the step; there the agent may have them suspended, and made again."""
        torch.cuda.synchronize()  # what the step has left is whole by then
        unfit = "it has said nothing to other ranks since its last step" if self._silent else ""
        self._off = _say_until_heard(self._process, step, proxy_messages.RESTS, unfit=unfit) == _OVER

    def _tell_of_trial(self, step: int, unfit: str) -> int:
        """Return what all ranks hear of a step after which the state may stay; unfit: why not, or ""."""
        return _say_until_heard(self._process, step, proxy_messages.TRIED, unfit=unfit)

    def _end(self, error: int, step: int) -> None:
        """Switch transparent mode off after an error of CUDA."""
        reason = error_text(self._process, error)
        self._stop()
        if _given_up(self._process):
            return  # which was said as it was heard
        text = f"transparent mode is switched off after step {step}: {reason}. The training goes on"
        print(f"jitckpt: {text}, but it ends if a device's server dies.", file=sys.stderr, flush=True)

    def failed(self, step: int, error: Exception) -> None:
        """Have transparent mode switched off on all ranks, which would wait for this one to be kept."""
        self._stop()
        reason = f"around optimizer step {step} jitckpt's own hooks have failed: {guard.in_words(error)}"
        _say_until_heard(self._process, step, proxy_messages.FAILED, reason)
        if not _given_up(self._process):  # there is no agent that would say it
            print(f"jitckpt: {validation.told(reason)}", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        self._off = True
        if self._deterministic is not None:
            self._deterministic.end()
        if self._on_device is not None:
            self._on_device.end()

    def unsupported(self, reason: str) -> None:
        """The state can't stay on the device; with a copy of all memory it does not matter."""
        if self._on_device is not None:
            self._on_device.leave(reason)


class _Validation:
    """Of one minibatch. The agent has all ranks make their calls again until all say what they come to."""

    def __init__(
        self,
        process: Any,
        step: int,
        state: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer | None],
        on_device: StateOnDevice | None,
    ) -> None:
        self._process, self._step, self._state, self._optimizers = process, step, state, optimizers
        self._on_device = on_device
        self._memory = Memory()
        self._rounds = 0

    def run(self) -> int:
        """Return _VALID, _VALID_STAYS (it may be tried), _LEFT_OUT or _OVER. The memory is as it was."""
        error = proxy_calls.check(self._process, self._memory)
        if error:
            return self._leave_out(error_text(self._process, error))
        self._places = naming.Places(self._memory.pieces())
        changed = self._memory.bytes_at(self._memory.changed)
        tried = torch.zeros(changed.shape, dtype=torch.bool, device=changed.device)
        if self._on_device is not None:
            self._on_device.doubt_gradients(self._places, changed, tried)
        self._changed = changed != 0
        # All else is in every image, so a recovery finds it there, needed or not.
        self._put_back(self._changed & ~tried)
        heard = self._say(proxy_messages.FIRST)
        while heard in (_OVERWRITTEN, _PUT_BACK):
            heard = self._judge(heard)
        return self._leave_out("its memory was not compared") if heard == _UNKNOWN else heard

    def _judge(self, heard: int) -> int:
        """Say what follows from the calls that were made again, and return what is heard then."""
        self._rounds += 1
        if heard == _PUT_BACK:  # for a failure, which came between, or which something overwritten has led to
            self._put_back(self._changed)
        differing = self._memory.bytes_at(self._memory.found) == _DIFFERENT
        match judge(Seen(self._changed, differing), self._shadow, self._rounds):
            case Valid():
                if self._on_device is not None:
                    self._on_device.learn(self._places, self._shadow)
                return self._say(proxy_messages.VALID, self._described(self._shadow), *self._staying())
            case Again(shadow):
                self._put_back(shadow)
                return self._say(proxy_messages.AGAIN)
            case SwitchOff():
                what = self._described(differing, most=1)
                text = (
                    f"{what} is not the same when the minibatch is run again, though all that it starts from "
                    "is: something reads host memory behind the calls, or is not deterministic (which "
                    "--validate deterministic may help)"
                )
                return self._say(proxy_messages.SWITCH_OFF, text)

    def _put_back(self, shadow: Tensor) -> None:
        """Have those blocks put back from now on."""
        self._shadow = shadow
        self._memory.bytes_at(self._memory.kept).copy_(shadow)

    def _described(self, blocks: Tensor, most: int = naming.MOST_NAMES) -> str:
        if not blocks.any():
            return naming.NOTHING  # to find what has names takes a look at all objects
        named = naming.tensors(self._state, self._optimizers)
        return naming.described(blocks, self._places, named, most)

    def _staying(self) -> tuple[str, str]:
        """Return a digest of the state, or "" and why it can't stay on the device."""
        if self._on_device is None:
            return "", ""
        reason = self._on_device.why_not(self._state, self._optimizers, self._places, self._changed)
        return ("", reason) if reason else (digest(self._state), "")

    def _leave_out(self, why: str) -> int:
        return _say_until_heard(self._process, self._step, proxy_messages.LEFT_OUT, why)

    def _say(self, what: int, text: str = "", digest: str = "", unfit: str = "") -> int:
        return _say(self._process, self._step, what, text, digest, unfit=unfit)


def _say(process: Any, step: int, what: int, text: str = "", digest: str = "", *, unfit: str = "") -> int:
    """Tell the agent what this rank has come to; return what is heard, or that calls were made again."""
    texts = (one.encode() for one in (text, digest, unfit))
    return proxy_calls.validate(process, proxy_messages.place_of(step, what), what, *texts)


def _say_until_heard(process: Any, step: int, what: int, text: str = "", unfit: str = "") -> int:
    """Return what the agent answers, whatever failures are recovered from meanwhile."""
    while (heard := _say(process, step, what, text, unfit=unfit)) in (_OVERWRITTEN, _PUT_BACK, _UNKNOWN):
        pass
    return heard


def _given_up(process: Any) -> str:
    """Return why nobody recovers any more; "" if somebody does, or nobody ever did."""
    reason: bytes = process.jitckpt_proxy_given_up()
    return reason.decode(errors="replace")


def _tell_what_is_free() -> None:
    """Have torch's allocator tell the proxy what it gives out, so that no image has what it only keeps.

    As torch begins to use the device, which must not fail of this.
    """
    try:
        told = torch_memory.library().jitckpt_torch_tell_proxy()
        reason = told.decode().splitlines()[0] if told else ""
    except torch_memory.UnknownTorch as error:
        reason = str(error)
    except Exception as error:
        reason = guard.in_words(error)
    if reason:
        text = f"images of the device's memory have what is free, too: {reason}"
        print(f"jitckpt: {text}", file=sys.stderr, flush=True)


def _guest() -> Guest | None:
    """Return what tells when all ranks are to rest, if the job can be suspended."""
    place = environment.REST.get()
    try:
        return Guest(place) if place else None
    except OSError as error:  # the others give up to wait for this rank
        print(f"jitckpt: this rank can't be suspended: {error}", file=sys.stderr, flush=True)
        return None


def begin() -> None:
    """Let the proxy, if this process has it, keep each minibatch that there will be."""
    process = symbols.with_name("jitckpt_proxy_keep")
    if process is not None:
        proxy_calls.for_images(process)
        cudnn.leave_out(process)
        torch.cuda._lazy_call(_tell_what_is_free)  # the allocator is there once a device is used
        on_device = environment.STATE_ON_DEVICE.get()
        guest = _guest()
        every, deterministic = environment.VALIDATE_EVERY.get(), environment.VALIDATE_DETERMINISTIC.get()
        keeper = MinibatchKeeper(process, every, on_device, guest, deterministic=deterministic)
        # A server that is told of a fault is waited for, which is to be outside of the keeper's steps.
        rehearsal = proxy_faults.begin(process, guest)
        steps = OptimizerSteps(keeper)
        keeper.optimizers, keeper.seen = steps.optimizers, steps.seen
        if rehearsal is not None:
            rehearsal.end_last()
        at_end.stay_with_the_device()
