"""The random number generators that a loader draws from: the process's own ones, and those of its sampler."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from jitckpt.data.kept_generator import GENERATORS, KeptGenerator, put_state, state_of
from jitckpt.data.random_state import RandomState
from jitckpt.encoding import packed, tree_codec
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.errors import CheckpointError

_CHANGED = "*changed"  # the key of what is no generator and no number
PLAIN = (bool, int, float, str)
# Those of the script that are kept with the process's own, by name: a pass, or what comes between two loops,
# may draw from them as well.
of_script: dict[str, KeptGenerator] = {}
# What these keep besides a generator they do not change themselves.
TORCHS = (BatchSampler, DistributedSampler, RandomSampler, SequentialSampler)


class Generators:
    """Takes and puts back their states: of the process on the host, of a loader, and of its samplers.

    Of a sampler that torch does not have, also numbers and texts among its attributes (an epoch, a position),
    and what its state_dict says; and tensors, arrays and containers there (weights) that have changed since
    this was made.
    """

    def __init__(self, loader: DataLoader[Any] | None = None) -> None:
        self._random = RandomState(None)
        self._keepers: list[Any] = []
        if loader is not None:
            self._keepers = [loader, *samplers(loader)]
        self._built = [dict(_marks(keeper)) for keeper in self._keepers]

    def capture(self) -> Encoded:
        """Return all states, to be packed."""
        own = [_own_state(keeper, built) for keeper, built in zip(self._keepers, self._built, strict=True)]
        on_host, of_keepers, scripts = self._random.capture(), tree_codec.encode(own, "own"), _scripts()
        tree = {"host": on_host.tree, "own": of_keepers.tree, "script": scripts.tree}
        return Encoded(tree, on_host.tensors | of_keepers.tensors | scripts.tensors)

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `capture` returned, decoded. Raises CheckpointError if it is of another loader."""
        saved = state["own"]
        if len(saved) != len(self._keepers):
            here = ", ".join(type(keeper).__qualname__ for keeper in self._keepers) or "nothing"
            raise CheckpointError(
                f"The save has the generators of {len(saved)} loaders and samplers of this pass, and the "
                f"script has those of {len(self._keepers)} ({here}). Build the loader as it was when the "
                "save was made, with the same version of jitckpt; or begin anew in another directory."
            )
        self._random.restore(state["host"])
        _put_scripts(state)
        for keeper, own in zip(self._keepers, saved, strict=True):
            _restore_own(keeper, own)

    @contextmanager
    def made_again(self, begun: bytes) -> Iterator[None]:
        """A pass that had ended before the failure is made again, from what `capture` returned, packed.

        What no pass changes is behind it as it was before: the script may have set it since that pass.
        """
        before = [dict(_attributes(keeper)) for keeper in self._keepers]
        yield
        saved = packed.unpack(begun)["own"] if begun else [{}] * len(before)
        for keeper, own, values in zip(self._keepers, saved, before, strict=True):
            began = {name: one for name, one in own.items() if type(one) in PLAIN} | own.get(_CHANGED, {})
            for name in began.keys() & values.keys():
                if _mark(began[name]) == _mark(getattr(keeper, name, None)):
                    setattr(keeper, name, values[name])


def all_packed() -> bytes:
    """Return the states of the process's generators, and of the device's where there is one."""
    on_host = RandomState(None).capture()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    on_device = tree_codec.encode(device, "device")
    scripts = _scripts()
    tree = {"host": on_host.tree, "device": on_device.tree, "script": scripts.tree}
    return packed.pack(Encoded(tree, on_host.tensors | on_device.tensors | scripts.tensors))


def put_all(states: bytes) -> None:
    """Put back what `all_packed` returned."""
    saved = packed.unpack(states)
    RandomState(None).restore(saved["host"])
    _put_scripts(saved)
    if saved["device"] is not None:
        torch.cuda.set_rng_state(saved["device"])


def _scripts() -> Encoded:
    states = {name: one.capture() for name, one in of_script.items()}
    tensors = {key: tensor for one in states.values() for key, tensor in one.tensors.items()}
    return Encoded({name: one.tree for name, one in states.items()}, tensors)


def _put_scripts(saved: Mapping[str, Any]) -> None:
    for name, state in saved.get("script", {}).items():  # a version before had none
        if name in of_script:
            of_script[name].restore(state)


def samplers(loader: DataLoader[Any] | Sampler[Any]) -> list[Any]:
    """Return the loader's samplers, from the one that gives batches to the one that gives single indices.

    A sampler may be iterated itself, too.
    """
    found: list[Any] = []
    waiting: list[Any] = [loader]
    if isinstance(loader, DataLoader):
        waiting = [loader.batch_sampler, loader.sampler]
    while waiting:
        one = waiting.pop(0)
        if one is not None and all(one is not other for other in found):
            found.append(one)
            waiting += [getattr(one, "batch_sampler", None), getattr(one, "sampler", None)]
    return found


def _own_state(keeper: Any, built: dict[str, object]) -> dict[str, Any]:
    if not isinstance(keeper, DataLoader) and hasattr(keeper, "load_state_dict"):
        return {"state_dict": keeper.state_dict()}
    state: dict[str, Any] = {}
    for name, value in _attributes(keeper).items():
        if isinstance(value, GENERATORS):
            state[name] = state_of(value)
        elif isinstance(value, PLAIN) and not isinstance(keeper, DataLoader) and type(keeper) not in TORCHS:
            state[name] = value
    changed = {name: getattr(keeper, name) for name, mark in _marks(keeper) if built.get(name) != mark}
    return state | {_CHANGED: changed} if changed else state


def _marks(keeper: Any) -> Iterator[tuple[str, object]]:
    """Yield what tells whether a sampler's tensors, arrays and containers are as they were."""
    if isinstance(keeper, DataLoader) or type(keeper) in TORCHS or hasattr(keeper, "load_state_dict"):
        return
    for name, value in _attributes(keeper).items():
        if type(value) not in PLAIN and (mark := _mark(value)) is not None:
            yield name, mark


def _mark(value: Any) -> object:
    """Return what is another once a value is; None of what is neither plain, nor a tensor or an array."""
    if type(value) in PLAIN:
        return value
    if type(value) is torch.Tensor and value.is_cpu and value.layout == torch.strided:
        numbers = value.detach().contiguous().view(-1).view(torch.uint8)
        return xxhash.xxh3_64_digest(numbers.numpy().data)
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return xxhash.xxh3_64_digest(numpy.ascontiguousarray(value).data)
    if isinstance(value, list | tuple | dict | set) and _is_plain(value):
        return xxhash.xxh3_64_digest(repr(value).encode())
    return None


def _attributes(keeper: Any) -> Mapping[str, Any]:
    return getattr(keeper, "__dict__", {})


def _is_plain(value: Any) -> bool:
    """Whether it has nothing but numbers and texts inside."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return all(type(one) in PLAIN or (type(one) in (list, tuple) and _is_plain(one)) for one in parts)


def _restore_own(keeper: Any, state: dict[str, Any]) -> None:
    if changed := state.pop(_CHANGED, {}):
        vars(keeper).update(changed)
    for name, saved in state.items():
        value = getattr(keeper, name, None)  # None also of what only a pass or a loop has put there
        if name == "state_dict":
            keeper.load_state_dict(saved)
        elif isinstance(value, GENERATORS):
            put_state(value, saved)
        elif isinstance(saved, torch.Tensor):  # of a generator that the sampler makes with its first draw
            made = torch.Generator()
            made.set_state(saved)
            setattr(keeper, name, made)
        else:
            setattr(keeper, name, saved)
