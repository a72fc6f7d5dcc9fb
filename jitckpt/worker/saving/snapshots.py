"""A snapshot of the rank's whole state in host memory every so many steps: for what no replica holds.

The copies go straight from the device into the memory tier's memfd (tiers/host_memory.py), which the agent
holds, and its keeper. The next snapshot begins once all ranks have the last one, on all hosts that it is
meant for: so the two slots of every rank always hold one step in common.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from jitckpt.bindings import behind_proxy
from jitckpt.decisions import cut
from jitckpt.encoding import tensor_file
from jitckpt.encoding.tree_codec import Encoded, Json
from jitckpt.errors import JitckptError, NativeError, SaveError
from jitckpt.saves.folders import SavedState
from jitckpt.saves.layout import Identity
from jitckpt.saves.starts import Starts
from jitckpt.state.host_state import HostState, Shared
from jitckpt.tiers import asked, chunks, host_memory, remaking, shard
from jitckpt.tiers.host_memory import (
    AWAITED,
    BEGUN,
    COPY_WAITED,
    COUNT_GRADIENTS,
    GRADIENTS,
    NO_GRADIENTS,
    NO_MORE,
    OFF,
    READY,
    SAFE,
    SETTLED,
    SKIPPED,
    SLOTS,
    STEP_BYTES,
    WAITED,
)
from jitckpt.tiers.own_shard import OwnShard
from jitckpt.tiers.shard import Cut
from jitckpt.wire.environment import MEMORY_EVERY, MEMORY_LIMIT
from jitckpt.worker.saving import gradients
from jitckpt.worker.saving.beside import Begun, BesideTraining
from jitckpt.worker.saving.gradients import CannotBeMadeError, StepTaken
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.host_copies import HostCopies
from jitckpt.worker.saving.in_spans import CopiesInSpans, MinibatchTimes
from jitckpt.worker.saving.rhythm import Rhythm
from jitckpt.worker.saving.saver import as_it_is
from jitckpt.worker.saving.waiting import LOOK_SECONDS, wait_in_device_calls

# So long the training waits for a snapshot to be whole everywhere, before it leaves the next one out.
PATIENCE_SECONDS = 5.0
REASON = "memory"
DEVICE_ERRORS = (RuntimeError, NativeError)  # as torch has them, and our library
MOST_REFUSALS = 3  # of the device, one after the other: it works, or the training would have ended


@dataclass(frozen=True)
class SnapshotRule:
    """What the agent says of the tier. every: steps; 0: it will say. limit: bytes for two snapshots.

    whole: what the replicas have of a cut state, as GivenDescriptors has it. members: the ranks among which
    what they hold alike is cut from now on; none if it is not. replicas: ranks beside which copies are to
    be, on other hosts.
    """

    descriptor: int
    every: int = 1
    limit: float = inf
    whole: int | None = None
    members: Sequence[int] = ()
    replicas: Sequence[int] = ()


def given(
    descriptor: int, whole: int | None = None, members: Sequence[int] = (), replicas: Sequence[int] = ()
) -> SnapshotRule:
    """Return what the agent has said, beside this memory; or the script, where it may."""
    wanted = asked.of(descriptor)
    if wanted is None:
        return SnapshotRule(descriptor, MEMORY_EVERY.get(), MEMORY_LIMIT.get(), whole, members, replicas)
    limit = MEMORY_LIMIT.get()
    if wanted.limit is not None:
        limit = wanted.limit / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return SnapshotRule(descriptor, wanted.steps, limit / wanted.copies, replicas=replicas)


# Memory that the device may write to stays mapped until the process ends; see ring/ring.py.
_registered: list[Tensor] = []


@dataclass
class _Room:
    """The page-locked memory of each slot, as much as was ever needed."""

    descriptor: int
    by_slot: dict[int, Tensor] = field(default_factory=dict)

    def of(self, slot: int, size: int) -> Tensor:
        known = self.by_slot.get(slot)
        if known is None or known.numel() < size:
            whole = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
            host_memory.reserve(self.descriptor, slot, whole)
            known = self.by_slot[slot] = self._mapped(host_memory.data_place(slot), whole)
        return known[:size]

    def _mapped(self, place: int, size: int) -> Tensor:
        if behind_proxy.is_there():
            return torch.frombuffer(behind_proxy.shared(self.descriptor, place, size), dtype=torch.uint8)
        memory = mmap.mmap(self.descriptor, size, offset=place)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
        _registered.append(tensor)
        return tensor


class Snapshots(BesideTraining):
    """Keeps the state after every so many steps in host memory."""

    def __init__(
        self,
        given: SnapshotRule,
        *,
        identity: Identity,
        timeline: str,
        host: HostState,
        history: History,
        write_word: Callable[[int, int, int], None],
        warn: Callable[[str], None],
        times: MinibatchTimes | None = None,
        spans: CopiesInSpans | None = None,
    ) -> None:
        """timeline: of this start, the same on all ranks. times, spans: where copies may be put off."""
        super().__init__(
            host,
            history,
            HostCopies(host.device, write_word, self._room_for, measures=True, spans=spans),
            replica=True,
            reason=REASON,
            warn=warn,
        )
        self._given, self._identity, self._timeline = given, identity, timeline
        self._memory = given.descriptor
        self._times, self._spans = times, spans
        self._timed = -1  # the newest step whose end was noted
        self._room = _Room(given.descriptor)
        self._rhythm = Rhythm(given.descriptor, given.every)
        self._windows: dict[int, chunks.Window] = {}  # by slot, as they were last
        self._restored = 0  # the step in memory that the job has gone on from
        self._held: int | None = None  # a step, to be read
        self._slot = 0  # of the newest snapshot
        self._whole = given.whole
        self._cut: Cut | None = None  # of the newest snapshot
        self._taken: tuple[int, StepTaken | None] = (0, None)  # a step, as it began
        self._made_by: StepTaken | None = None  # what made the newest snapshot
        self._counted = 0  # bytes of gradients that made it, where they are only counted
        self._refusals = 0  # of the device
        self._expected = 0  # bytes of the first snapshot, at least

    def expect(self, size: int) -> None:
        """All that is to be kept will have so many bytes, or more, which is refused before the first step.

        Not yet where memory has something: the job is to go on from that first.
        """
        self._expected = max(0, size // max(1, len(self._given.members)))
        if next(host_memory.found(self._memory), None) is None:
            self._refuse_expected()

    def _refuse_expected(self) -> None:
        if (problem := self._no_room(self._expected)) and not self._off:
            self._end(f"{problem}, which its parameters and optimizer tell before the first step")

    def found(self, identity: Identity, starts: Starts) -> OwnShard:
        """Return what the memory has of this rank."""
        return OwnShard(self._memory, identity, starts, self._whole)

    def is_made_of(self, step: int) -> bool:
        """Whether all of the state after `step` is in memory, or on its way there."""
        return self._newest == step and not self._given.members and not self._off

    def hold(self, step: int | None) -> None:
        """Let no newer state take the place of this one; None: of none any more."""
        self._held = step

    def read(self, step: int, stopping: threading.Event) -> SavedState:
        """Return a state that is held in memory of its own, on another thread than the training's.

        Waits until it is whole, and holds it no more then. Raises SaveError if it never is, or is damaged.
        """
        try:
            while True:
                newest = self._newest
                if any(seal.step == step for _, seal in host_memory.found(self._memory)):
                    return host_memory.read(self._memory, step)[1]
                if self._off or newest > step or stopping.wait(LOOK_SECONDS):
                    raise SaveError(f"The snapshot of step {step} is not whole in memory.")
        finally:
            self.hold(None)

    def restored(self, step: int) -> None:
        """The job goes on from this step in memory (0: from none); what is of other steps is given up."""
        self._restored = step
        for slot, one in host_memory.found(self._memory):
            if one.step != step:
                host_memory.unseal(self._memory, slot)
        host_memory.put_word(self._memory, READY, 1)
        self._refuse_expected()

    def make_no_more(self) -> None:
        """This rank makes no newer ones: nobody is to wait for any. What memory has by now stays of use."""
        if not host_memory.word(self._memory, READY):
            self.restored(0)
        host_memory.put_word(self._memory, SKIPPED, NO_MORE)

    @property
    def _off(self) -> bool:
        """Whether no snapshot of this start is of use any more: this rank has ended them, or the agent."""
        return bool(host_memory.word(self._memory, OFF))

    @property
    def _is_over(self) -> bool:
        """Whether some rank makes no more."""
        return host_memory.word(self._memory, SETTLED) == NO_MORE

    def is_due(self, step: int) -> bool:
        is_due = self._rhythm.is_due(step) and not self._off and not self._is_over
        if not is_due:
            self._next_minibatch(step)
        return is_due

    def _next_minibatch(self, step: int) -> None:
        """The minibatch behind `step` begins, as is noted once."""
        if self._times is not None and step > self._timed:
            self._timed = step
            self._times.begins()

    def _may_begin(self, step: int) -> bool:
        if not host_memory.word(self._memory, READY):
            self.restored(0)  # the script has asked for nothing
        begun = time.monotonic()
        settled = self._is_settled() or self._await(begun + PATIENCE_SECONDS)
        seconds = time.monotonic() - begun
        self._next_minibatch(step)  # what was waited belongs to the one whose snapshot came late
        if not settled:
            if not self._off:
                self._rhythm.waited(seconds)
                host_memory.put_word(self._memory, SKIPPED, step)
            return False
        self._rhythm.waited(seconds)
        host_memory.put_word(
            self._memory, WAITED, host_memory.word(self._memory, WAITED) + int(seconds * 1e6)
        )
        copy_waited = self._copies.waited()
        host_memory.put_word(self._memory, COPY_WAITED, int(copy_waited * 1e6))
        if self._spans is not None:
            # Where nothing is sent nobody waits for what is copied late, but the next step.
            until_safe = host_memory.word(self._memory, WAITED) / 1e6 if self._spans.sends else 0.0
            self._spans.waited(copy_waited + until_safe, self._rhythm.seconds_between)
            self._spans.compare()
        if self._whole is not None and self._newest > self._restored:
            os.close(self._whole)  # a minibatch is done since: its memory is to be free
            self._whole = None
        self._slot = self._free_slot()
        host_memory.put_word(self._memory, BEGUN, step)
        host_memory.unseal(self._memory, self._slot)
        return True

    def _is_settled(self) -> bool:
        """Whether nobody waits for the last snapshot any more, nor needs what the next takes the place of."""
        if not self.wait() or host_memory.word(self._memory, SETTLED) < self._newest:
            return False
        seal = host_memory.seal_in(self._memory, self._free_slot())
        return seal is None or seal.step != self._held

    def _await(self, until: float) -> bool:
        """Have the training wait for the last snapshot, which the agent hears of; return whether it came."""
        host_memory.put_word(self._memory, AWAITED, 1)
        try:
            wait_in_device_calls(self._host.device, lambda: self._off or self._is_settled(), until)
            return self._is_settled() and not self._off
        finally:
            host_memory.put_word(self._memory, AWAITED, 0)

    def cancel(self, step: int) -> None:
        if self._newest == step and not self._off:
            self._begun = None
            self._end(
                f"the script changed parameters or optimizer state after step {step}, outside of the "
                "optimizer step, while they were copied"
            )

    def wait(self) -> bool:
        return self._writer is None or not self._writer.is_alive()

    def finish(self) -> None:
        self._copies.put_rest()
        until = time.monotonic() + PATIENCE_SECONDS
        wait_in_device_calls(self._host.device, lambda: self.wait() or self._off, until)

    def optimizer_begins(self, step: int, scaler: object) -> None:
        """See what another host would need to make this step again, if one does that."""
        self._taken = step, None
        if not host_memory.word(self._memory, GRADIENTS) or not self.is_due(step):
            return
        try:
            self._taken = step, gradients.take(self._host, scaler)
        except CannotBeMadeError as error:
            self._take_no_more(error)

    def _take_no_more(self, error: CannotBeMadeError) -> None:
        is_asked = host_memory.word(self._memory, GRADIENTS) == COUNT_GRADIENTS
        host_memory.put_word(self._memory, GRADIENTS, NO_GRADIENTS)
        if is_asked:  # nobody has wanted them to be sent
            return
        self._warn(
            f"The memory tier sends whole copies to other hosts, and no gradients (+optimizer): {error}."
        )

    def _soon_gone(self, step: int) -> Mapping[str, Tensor]:
        of, taken = self._taken
        self._made_by, self._counted = None, 0
        if taken is None or of != step:
            return {}
        try:
            taken.check()
        except CannotBeMadeError as error:
            self._take_no_more(error)
            return {}
        if host_memory.word(self._memory, GRADIENTS) == COUNT_GRADIENTS:
            self._counted = sum(shard.aligned(one.nbytes) for one in taken.gradients.values())
            return {}
        self._made_by = replace(
            taken, gradients={}, versions=()
        )  # whose memory is to be free as soon as ever
        return taken.gradients

    def copy_again(self, shared: Shared) -> None:
        self._made_by = None  # it was changed after the step, and the gradients may be gone
        super().copy_again(shared)

    def _free_slot(self) -> int:
        """Return the slot of which nobody may need what is in it."""
        kept = max(host_memory.word(self._memory, SAFE), self._restored)
        seals = {slot: host_memory.seal_in(self._memory, slot) for slot in SLOTS}
        return min(SLOTS, key=lambda slot: host_memory.worth(seals[slot], kept))

    def _of_replicas(self, shared: Shared) -> Mapping[str, Tensor]:
        tensors = shared.all_tensors()
        members = self._given.members
        if len(members) < 2:
            return tensors
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        uncut = {name for name, tensor in tensors.items() if not tensor.is_contiguous()}
        found: dict[str, Tensor] = {}
        places: dict[str, tuple[list[int], int]] = {}
        for part in cut.parts(sizes, len(members), members.index(self._identity.rank), uncut):
            tensor = tensors[part.name].detach()
            first, last = (place // tensor.itemsize for place in (part.begin, part.end))
            places[part.name] = (list(tensor.shape), first)
            found[part.name] = tensor if part.name in uncut else tensor.view(-1)[first:last]
        self._cut = Cut(list(members), places)
        return found

    def _no_room(self, size: int) -> str:
        """Return why snapshots of so many bytes have no room, a clause; "" if they have."""
        # A cut state is put together in a start that goes on from it: its parts, and all of them in one.
        needed = 2 * size * (1 + len(self._given.members))
        if needed <= self._given.limit:
            return ""
        return (
            f"two snapshots of this rank would take {needed} bytes of host memory, and may take "
            f"{self._given.limit:.0f}: raise --memory-limit, or give the job hosts with more memory"
        )

    def _room_for(self, size: int) -> Tensor:
        if problem := self._no_room(size):
            raise JitckptError(problem)
        return self._room.of(self._slot, shard.aligned(size))

    def step_ended(self, step: int, parts: Mapping[str, Encoded], shared: Shared) -> None:
        try:
            super().step_ended(step, parts, shared)
        except DEVICE_ERRORS as error:
            self._leave_out(error)
        except (JitckptError, OSError) as error:
            self._end(str(error).rstrip("."))
        finally:
            self._taken = 0, None

    def _leave_out(self, error: Exception) -> None:
        """The device has refused a call: it has failed, mostly, and what is in memory is needed soon."""
        self._refusals += 1
        if self._refusals == MOST_REFUSALS and not self._off:
            self._end(str(error).rstrip("."))

    def _end(self, reason: str) -> None:
        """Make no snapshots any more, and have none used: this rank's part would be missing."""
        host_memory.put_word(self._memory, OFF, 1)
        for slot in SLOTS:
            host_memory.unseal(self._memory, slot)
        self._warn(
            f"The memory tier protects this job no more: {reason}. The training goes on; what has no replica "
            "comes back from files (save_every=...)."
        )

    def _write(self, begun: Begun, document: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        try:
            if self._are_there(begun):
                self._put_in(begun, document, tensors)
                self._refusals = 0
        except DEVICE_ERRORS as error:
            self._leave_out(error)
        except Exception as error:  # whatever it is: nobody is to wait for this snapshot
            if not self._off:
                self._end((str(error) or repr(error)).rstrip("."))

    def _put_in(self, begun: Begun, document: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        memory, slot = self._memory, self._slot
        start = self._room.by_slot[slot].data_ptr() if self._room.by_slot else 0
        places: dict[str, tuple[str, list[int], int]] = {}
        of_gradients: dict[str, tuple[str, list[int], int]] = {}
        end = sent = 0
        for name, tensor in begun.copies.items():
            offset = tensor.data_ptr() - start if tensor.numel() else end
            end = max(end, shard.aligned(offset + tensor.nbytes))
            if not tensor.is_contiguous():  # it lies as on the device
                place = self._room.by_slot[slot][offset : offset + tensor.nbytes]
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor.contiguous())
            if name in begun.own or name.startswith(gradients.PREFIX):
                sent = end  # these are the first
            if name.startswith(gradients.PREFIX):
                of_gradients[name] = shard.dtype_name(tensor.dtype), list(tensor.shape), offset
                continue
            is_part = self._cut is not None and name in self._cut.parts
            shape = [tensor.numel()] if is_part else list(tensor.shape)
            places[name] = (shard.dtype_name(tensor.dtype), shape, offset)
        host_from = end
        for name, tensor in tensors.items():
            if name not in begun.copies:
                places[name] = (shard.dtype_name(tensor.dtype), list(tensor.shape), end)
                host_memory.write(memory, tensor_file.bytes_of(tensor), host_memory.data_place(slot) + end)
                end = shard.aligned(end + tensor.nbytes)
        made = shard.Index(
            identity=as_it_is(self._identity, self._host),
            step=begun.step,
            timeline=self._timeline,
            time=time.time(),
            checksums=[],
            tensors=places,
            host_from=host_from,
            document=document,
            cut=self._cut,
            replicas=self._given.replicas,
            made_by=None if self._made_by is None else self._made_by.placed(of_gradients, sent),
        )
        if made.made_by is not None:
            remaking.clear_gaps(made, self._room.by_slot[slot])
        index = replace(made, checksums=self._checksums(slot, end)).encode()
        if not self._off:
            host_memory.seal(memory, slot, index, shard.seal_of(index, begun.step, end))
        if self._counted:
            host_memory.put_word(memory, GRADIENTS, NO_GRADIENTS)  # once is enough
            host_memory.put_word(memory, STEP_BYTES, sent + self._counted + end - host_from)

    def _checksums(self, slot: int, size: int) -> list[str]:
        """Return those of a slot's chunks, made without Python's lock."""
        known = self._windows.get(slot)
        if known is None or known.size != size:
            known = self._windows[slot] = chunks.window(self._memory, host_memory.data_place(slot), size)
        return [digest.hex() for digest in chunks.digests(known)]
