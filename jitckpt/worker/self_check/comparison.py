"""Whether what a save would hold brings a training back: two descriptions of its objects are compared.

One describes the objects of the training as they are, the other fresh ones into which a save was restored.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt.encoding import tensor_file
from jitckpt.state import inner_tensors, parallel

# Values of environment.SELF_CHECK.
NO_SELF_CHECK, SAMPLED_SELF_CHECK, FULL_SELF_CHECK = "0", "1", "full"
# How the names of tensors begin.
PARAMETER, BUFFER, NON_PERSISTENT, STATE = "parameter ", "buffer ", "non-persistent buffer ", "state of "
MOST_VALUES = 20_000  # in the attributes of one object
SHOWN = 3  # names of each kind of difference
LONGEST = 80  # characters of a value in a sentence
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LEAVES = (nn.Module, type, ModuleType, BuiltinFunctionType, MethodType)
KEPT_OTHERWISE: list[type] = []  # classes of a framework's own, whose objects its adapter keeps


@cache
def torchs_own() -> frozenset[str]:
    """Return the attributes of torch's own optimizers and schedulers, which they set anew.

    Not as this module is loaded: torch's first optimizer loads its compiler.
    """
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, dtype=torch.float32, device="cpu")]))) | {
        "step",
        "_opt_called",
        "_warned_capturable_if_run_uncaptured",
        "_need_device_dtype_check_for_fused",
        "_numel_cache",  # of LBFGS
        "_jitckpt_state",
        "_get_lr_called_within_step",
        "_is_initial",
        *("grad_scale", "found_inf"),  # a gradient scaler's, there for the time of a fused step
    }


@dataclass(frozen=True)
class TensorLeaf:
    """same_as: of parameters, buffers and their state the first name of what lies in the same memory.

    digest: of its values, if they count.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    same_as: str
    digest: str | None


Snapshot = Mapping[str, TensorLeaf | str]


@dataclass(frozen=True)
class Difference:
    """What becomes of something in a restore, as a remark; and its name."""

    what: str
    name: str


class TooManyError(Exception):
    """An object has more values than are looked at."""


@dataclass
class Described:
    """The values of some objects, by names that say where they were found.

    shared: names of what a copy of the objects has in common with them (what functions close over).
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)

    def add(
        self, value: object, name: str, *, known: Set[int] = frozenset(), optimizers: bool = False
    ) -> None:
        """Add what can be reached from a value.

        known: ids of objects that are described elsewhere. optimizers: look into optimizers, too.
        Raises TooManyError.
        """
        seen: set[int] = set()
        waiting: deque[tuple[object, str, bool]] = deque([(value, name, False)])
        while waiting:
            one, path, is_shared = waiting.popleft()
            if isinstance(one, Tensor):
                if id(one) not in known:
                    self.add_tensor(path, one)
            elif isinstance(one, _PLAIN):
                self.texts[path] = repr(one)
            elif isinstance(one, numpy.ndarray | numpy.generic):
                data = numpy.ascontiguousarray(one)
                self.texts[path] = f"{data.dtype}{data.shape} {xxhash.xxh3_64_hexdigest(data.tobytes())}"
            elif id(one) in seen or id(one) in known or isinstance(one, (*_LEAVES, *KEPT_OTHERWISE)):
                continue
            else:
                if not isinstance(one, _CONTAINERS):  # a list in two places is described twice
                    seen.add(id(one))
                parts = _parts(one, optimizers)
                is_shared |= isinstance(one, FunctionType)
                waiting.extend((part, f"{path}.{key}" if key else path, is_shared) for key, part in parts)
                if not parts and isinstance(one, _CONTAINERS) and path != name:
                    self.texts[path] = type(one).__name__
            if is_shared and (path in self.texts or path in self.tensors):
                self.shared.add(path)
            if len(self.texts) + len(self.tensors) + len(waiting) > MOST_VALUES:
                raise TooManyError(f"{name} has more than {MOST_VALUES} values")

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add one; of what is made of others these."""
        memory = parallel.memory_of(tensor)
        inside = inner_tensors.leaves(memory, name) if inner_tensors.is_wrapper(memory) else {name: tensor}
        self.tensors |= inside


def _parts(one: Any, optimizers: bool) -> list[tuple[str, object]]:
    if isinstance(one, dict):
        labels = (str(key) if isinstance(key, str | int) else f"[{place}]" for place, key in enumerate(one))
        return [*zip(labels, one.values(), strict=True)]
    if isinstance(one, list | tuple | deque | set | frozenset):
        items = sorted(one, key=repr) if isinstance(one, set | frozenset) else one
        return [(str(place), item) for place, item in enumerate(items)]
    if isinstance(one, FunctionType):
        return [*_closed_over(one)]
    if isinstance(one, Optimizer) and not optimizers:
        return []
    attributes = getattr(one, "__dict__", None)
    if not isinstance(attributes, dict):
        return []
    return [
        (name, value)
        for name, value in attributes.items()
        if name not in torchs_own() or _is_state(one, name)
    ]


def _is_state(one: object, name: str) -> bool:
    return isinstance(one, Optimizer) and name in ("state", "param_groups")


def _closed_over(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # it is empty yet


def leaves(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, TensorLeaf]:
    """Describe tensors; values: what they hold, on the host, of those whose values are compared."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in tensors.items():
        counts = tensor.numel() and name.startswith((PARAMETER, BUFFER, NON_PERSISTENT, STATE))
        place = tensor.data_ptr() if counts and tensor.device.type != "meta" else 0
        value = values.get(name)
        found[name] = TensorLeaf(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stride=tuple(
                stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
            ),
            requires_grad=tensor.requires_grad,
            same_as=first.setdefault(place, name) if place else name,
            digest=None if value is None else digest(value),
        )
    return found


def digest(value: Tensor) -> str:
    """Return a digest of the elements of a tensor on the host, however they lie."""
    return xxhash.xxh3_64_hexdigest(tensor_file.bytes_of(value))


def compare(held: Snapshot, restored: Snapshot) -> list[Difference]:
    """Return how what was restored differs from what the training holds."""
    found = []
    for name, leaf in held.items():
        other = restored.get(name)
        if other is None:
            found.append(Difference("not restored", name))
        elif isinstance(leaf, str) or isinstance(other, str):
            if leaf != other:
                found.append(Difference(f"{_short(leaf)}, but {_short(other)} after a restore", name))
        else:
            found += [Difference(what, name) for what in _differ(leaf, other)]
    found += [Difference("there after a restore only", name) for name in restored.keys() - held.keys()]
    return found


def _differ(held: TensorLeaf, restored: TensorLeaf) -> Iterator[str]:
    if held.dtype != restored.dtype:
        yield f"restored as {restored.dtype} instead of {held.dtype}"
    elif held.shape != restored.shape:
        yield "restored with another shape"
    else:
        if held.stride != restored.stride:
            yield "restored with other strides: another memory layout"
        if held.digest is not None and restored.digest is not None and held.digest != restored.digest:
            yield "restored with other values"
    if held.requires_grad != restored.requires_grad:
        yield f"requires_grad={held.requires_grad}, but {restored.requires_grad} after a restore"
    if held.same_as != restored.same_as:
        yield "shares memory with others than after a restore"


def _short(leaf: TensorLeaf | str) -> str:
    text = leaf if isinstance(leaf, str) else f"a tensor of {leaf.dtype}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def differing(own: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the names of what replicas hold different values of."""
    return sorted(name for name in own.keys() | others.keys() if own.get(name) != others.get(name))


def sentences(differences: Sequence[Difference]) -> list[str]:
    """Return the differences as clauses, one of a kind."""
    kinds: dict[str, list[str]] = {}
    for one in differences:
        kinds.setdefault(one.what, []).append(one.name)
    return [f"{some(names)} ({what})" for what, names in kinds.items()]


def some(names: Iterable[str]) -> str:
    """Return the first of some names, and how many more there are."""
    every = list(names)
    more = len(every) - SHOWN
    return ", ".join(every[:SHOWN]) + (f" and {more} more" if more > 0 else "")
