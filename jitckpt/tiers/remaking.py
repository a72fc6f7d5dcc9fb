"""A rank's optimizer step, made again on the host that keeps a copy of its state (REFT's AOR).

The copy is of the step before. The rank's host sends gradients, and whatever else the step does not make; of
what other ranks have stepped this host's own ranks have a snapshot. All together must be bit for bit what the
rank has: the checksums that it sends along say so. Torch has three ways to make a step on a host, which may
round unlike the device; the one that gives the device's bits is found by trying.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from jitckpt.errors import SaveError
from jitckpt.tiers import chunks, shard
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.optimizer_step import OptimizerStep, Stepped
from jitckpt.tiers.shard import Index, Seal
from jitckpt.tiers.tier import Shard

WAYS: Mapping[str, Mapping[str, bool]] = {
    "foreach": {"foreach": True, "fused": False},
    "loop": {"foreach": False, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
OWN_SECONDS = 1.0  # for this host's own ranks to have the same step, too
LOOK_SECONDS = 0.005


class CannotRemakeError(SaveError):
    """This host lacks what it would need; a whole copy is to come. lasts: and will lack it the next time."""

    def __init__(self, text: str, *, lasts: bool = False) -> None:
        super().__init__(text)
        self.lasts = lasts


class DiffersError(SaveError):
    """No way gives the device's bits; digests: of what came out in each way, by tensor."""

    def __init__(self, digests: Sequence[Mapping[str, str]]) -> None:
        super().__init__("The optimizer's step on this host gives other bits than on the device.")
        self.digests = digests


@dataclass(frozen=True)
class _Needed:
    """What a step is made of beside what comes: the shard before it, and tensors of this host's own ranks."""

    before: Shard
    index: Index
    elsewhere: Sequence[tuple[str, Tensor]]


class Remaker:
    """Makes the steps of those ranks whose state this host keeps. Safe for several threads, one a rank."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._ways: dict[int, str] = {}  # by rank, the one that was right last

    def needed(self, slot: int, seal: Seal, encoded: bytes) -> "_Needed":
        """Return what is here of what a step needs; waits a while. Raises CannotRemakeError, or SaveError."""
        index = shard.parse_index(encoded, seal)
        if index.made_by is None:
            raise CannotRemakeError("Its optimizer's step is none that a host can make.")
        rank = index.identity.rank
        try:
            before = self._memory.shard(rank, seal.step - 1, index.timeline)
        except SaveError as error:
            raise CannotRemakeError(str(error)) from error
        earlier = shard.parse_index(before.index, before.seal)
        alike = {name: (kind, shape) for name, (kind, shape, _) in earlier.tensors.items()}
        for name in _made(index):
            kind, shape, _ = index.tensors[name]
            if alike.get(name) != (kind, shape) or before.slot == slot:
                raise CannotRemakeError(f"{name:.80} was another before step {seal.step}.")
        until = time.monotonic() + OWN_SECONDS
        while (elsewhere := self._elsewhere(index, index.made_by)) is None:
            if time.monotonic() > until:
                text = f"No other rank's state there has what others have stepped in step {seal.step}."
                raise CannotRemakeError(text, lasts=True)
            time.sleep(LOOK_SECONDS)
        return _Needed(before, earlier, elsewhere)

    def make(self, index: Index, window: Window, needed: _Needed) -> None:
        """Put into the data what the step makes, and what others have of it, and check all of the data.

        Raises DiffersError if some of it is another than on the device; CannotRemakeError if what was here is
        damaged, so that this may not be the device's fault; what torch raises if it can in no way make it.
        """
        assert index.made_by is not None
        rank = index.identity.rank
        data = torch.frombuffer(window, dtype=torch.uint8)
        earlier = torch.frombuffer(needed.before.window, dtype=torch.uint8)
        clear_gaps(index, data)
        for name, tensor in needed.elsewhere:
            shard.tensor_in(data, index.tensors[name]).copy_(tensor)
        known = self._ways.get(rank)
        found: list[Mapping[str, str]] = []
        failed: Exception | None = None
        for way in sorted(WAYS, key=lambda one: one != known):
            for name in _made(index):
                before = shard.tensor_in(earlier, needed.index.tensors[name])
                shard.tensor_in(data, index.tensors[name]).copy_(before)
            try:
                make_step(index.made_by, index, data, way)
            except Exception as error:  # not all ways can make all steps
                failed = error
                continue
            if _is_whole(window, index):
                self._ways[rank] = way
                return
            found.append(digests(index, window))
        if not _is_whole(needed.before.window, needed.index):
            raise CannotRemakeError(f"Step {needed.index.step} of rank {rank} is damaged on this host.")
        if failed is not None and not found:
            raise failed
        raise DiffersError(found)

    def _elsewhere(self, index: Index, step: OptimizerStep) -> list[tuple[str, Tensor]] | None:
        """Return what this host's ranks hold of the tensors that others have stepped; None: not yet."""
        missing = set(step.elsewhere)
        found: list[tuple[str, Tensor]] = []
        for rank in list(self._memory.descriptors) if missing else []:
            if rank == index.identity.rank:
                continue
            try:
                one = self._memory.shard(rank, index.step, index.timeline)
            except SaveError:
                continue  # it has not made it yet
            other = shard.parse_index(one.index, one.seal)
            data = torch.frombuffer(one.window, dtype=torch.uint8)
            for name in sorted(missing):
                kind, shape, _ = index.tensors[name]
                if name in other.tensors and tuple(other.tensors[name][:2]) == (kind, shape):
                    found.append((name, shard.tensor_in(data, other.tensors[name])))
                    missing.remove(name)
        return None if missing else found


def make_step(step: OptimizerStep, index: Index, data: Tensor, way: str) -> None:
    """Make an optimizer's step on a shard's data, in its place.

    By torch's functions: its classes ask the device for its state, and an agent is to leave that alone.
    Raises what they raise, and ValueError.
    """
    kept: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, place in index.tensors.items():
        owner, dot, key = name.rpartition(".")
        kept[owner + dot][key] = shard.tensor_in(data, place)
    make = _sgd if step.kind == "SGD" else partial(_adam, FUNCTIONS[step.kind])
    for group in step.groups:
        stepped = [
            (shard.tensor_in(data, index.tensors[one.tensor]), shard.tensor_in(data, one.gradient), state)
            for one in group.parameters
            if one.gradient is not None
            for state in [kept[one.state] | _numbers(one)]
        ]
        if stepped:
            _check_shapes(stepped)
            with torch.no_grad():
                make(group.options, [*zip(*stepped, strict=True)], WAYS[way])


def _check_shapes(stepped: Iterable[tuple[Tensor, Tensor, Mapping[str, Tensor]]]) -> None:
    """Raise ValueError for what torch's fused step would read and write beyond the end of."""
    for parameter, gradient, state in stepped:
        for one in (gradient, *(value for key, value in state.items() if key != "step")):
            if one.shape != parameter.shape:
                shapes = f"{tuple(parameter.shape)} and {tuple(one.shape)}"
                raise ValueError(f"a parameter and its gradient or state have the shapes {shapes}")


_Stepped = Sequence[Sequence[Any]]  # parameters, gradients and states
FUNCTIONS = {"Adam": adam, "AdamW": adamw}


def _adam(
    function: Callable[..., None], options: Mapping[str, Any], stepped: _Stepped, way: Mapping[str, Any]
) -> None:
    parameters, gradients, states = stepped
    amsgrad = options["amsgrad"]
    beta1, beta2 = options["betas"]
    function(
        [*parameters],
        [*gradients],
        [one["exp_avg"] for one in states],
        [one["exp_avg_sq"] for one in states],
        [one["max_exp_avg_sq"] for one in states] if amsgrad else [],
        [one["step"] for one in states],
        has_complex=False,
        amsgrad=amsgrad,
        beta1=beta1,
        beta2=beta2,
        **_of(options, "lr", "weight_decay", "eps", "maximize"),
        **way,
    )


def _sgd(options: Mapping[str, Any], stepped: _Stepped, way: Mapping[str, Any]) -> None:
    parameters, gradients, states = stepped
    sgd(
        [*parameters],
        [*gradients],
        [one.get("momentum_buffer") for one in states],
        has_sparse_grad=False,
        **_of(options, "weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize"),
        **way,
    )


def _of(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names}


def _numbers(one: Stepped) -> dict[str, Tensor]:
    return {
        key: torch.tensor(value, dtype=getattr(torch, kind), device="cpu")
        for key, (kind, value) in one.numbers.items()
    }


def clear_gaps(index: Index, data: Tensor) -> None:
    """Have nothing between the tensors that a step makes: checksums are of all bytes."""
    assert index.made_by is not None
    end = index.made_by.sent
    made = [place for place in index.tensors.values() if index.made_by.sent <= place[2] < index.host_from]
    for place in sorted(made, key=lambda one: one[2]):
        data[end : place[2]].zero_()
        end = max(end, place[2] + shard.tensor_in(data, place).nbytes)
    data[end : index.host_from].zero_()


def _made(index: Index) -> list[str]:
    """Return the tensors that were as they are before the step, or that it makes of what they were."""
    assert index.made_by is not None
    elsewhere = set(index.made_by.elsewhere)
    return [
        name
        for name, (_, _, offset) in index.tensors.items()
        if index.made_by.sent <= offset < index.host_from and name not in elsewhere
    ]


def _is_whole(window: Window, index: Index) -> bool:
    try:
        with chunks.of(index):
            chunks.verify(window, index.digests)
    except SaveError:
        return False
    return True


def digests(index: Index, window: Window) -> dict[str, str]:
    """Return those of all tensors that do not come with the gradients."""
    assert index.made_by is not None
    data = torch.frombuffer(window, dtype=torch.uint8)
    return {
        name: xxhash.xxh3_128_hexdigest(_bytes(shard.tensor_in(data, place)))
        for name, place in index.tensors.items()
        if index.made_by.sent <= place[2] < index.host_from
    }


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
