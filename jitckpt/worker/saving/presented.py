"""Lets the objects of a training say for a while what the host held after an earlier step.

The host may be minibatches ahead of the device. What a save function reads of optimizers, schedulers, the
gradient scaler and the random number generators has to be of the step that the device has ended: so these are
put back there as a restart would, and afterwards are what they were: the same objects with the same contents.
The thread that trains is held meanwhile. Nothing on a device is written to.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from jitckpt.data.random_state import RandomState
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import SaveError
from jitckpt.state.host_state import HostState
from jitckpt.worker.saving.history import SharedSnapshot

# Not looked into: no state of an optimizer or a scheduler lies there.
_LEAVES = (nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class Memento:
    """The contents of all dicts, lists and the like that can be reached from some objects, to be put back."""

    def __init__(self, roots: Sequence[object]) -> None:
        self._contents: list[tuple[Any, Any]] = []
        self._numbers: list[tuple[Tensor, Tensor]] = []  # on the host, which are changed in their place
        seen: dict[int, object] = {}
        waiting: deque[object] = deque(roots)
        while waiting:
            one = waiting.popleft()
            if id(one) in seen or isinstance(one, _LEAVES):
                continue
            seen[id(one)] = one
            if isinstance(one, Tensor):
                if one.device.type == "cpu" and one.numel() == 1:
                    self._numbers.append((one, one.detach().clone()))
            elif isinstance(one, dict):
                self._contents.append((one, dict(one)))
                waiting.extend(one.values())
            elif isinstance(one, list | deque | set):
                self._contents.append((one, list(one)))
                waiting.extend(one)
            elif isinstance(one, tuple | frozenset):
                waiting.extend(one)
            elif (attributes := getattr(one, "__dict__", None)) is not None:
                waiting.append(attributes)

    def put_back(self) -> None:
        """Make the contents what they were, where they are not."""
        for container, content in self._contents:
            if isinstance(container, dict):
                if not (_are_same(container, content) and _are_same(container.values(), content.values())):
                    container.clear()
                    container.update(content)
            elif not _are_same(container, content):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(content)
        with torch.no_grad():
            for tensor, value in self._numbers:
                if not _same_bytes(tensor, value):
                    tensor.copy_(value)


@contextmanager
def presented(
    host: HostState, snapshot: SharedSnapshot, document: Mapping[str, Json], tensors: Mapping[str, Tensor]
) -> Iterator[None]:
    """Until the `with` statement is left, the objects of `host` say what `document` does.

    tensors: those that the document names, on the host. Raises SaveError if the objects can't be put back to
    that step.
    """
    optimizers = [state.optimizer for state in host.optimizers]
    schedulers = [state.scheduler for state in host.schedulers]
    memento = Memento([*optimizers, *schedulers, host.scaler])
    random = RandomState(host.device)
    generated = random.capture()
    newest = tree_codec.decode(generated.tree, generated.tensors)
    # Without what would be put back on the device.
    view = HostState(
        model=None, optimizers=host.given, schedulers=schedulers, scaler=None, extra=None, device=None
    )
    try:
        try:
            view.restore_shared(
                {**document, "scaler": None},
                {**tensors, **_moved(view, snapshot)},
                whole=False,
                for_a_while=True,
            )
            _present_scaler(host.scaler, document["scaler"])
            trees = document["local"]["trees"]
            if "random" in trees:
                random.restore(tree_codec.decode(trees["random"], tensors))
        except Exception as error:  # load_state_dict may be anybody's
            raise SaveError(
                f"What the host held after step {document['step']} can't be put into its objects: "
                f"{error!r:.300}"
            ) from error
        yield
    finally:
        memento.put_back()
        random.restore(newest)


def why_not(host: HostState, snapshot: SharedSnapshot) -> str | None:
    """Return why the state of a snapshot can't be put into the objects without the device's work, if so."""
    for index, (optimizer, part) in enumerate(zip(host.optimizers, snapshot.shared.optimizers, strict=True)):
        kept = [*part.others.tensors.values(), *part.beside.tensors.values()]
        if any(tensor.device.type != "cpu" for tensor in kept):
            return (
                f"Optimizer {index} ({type(optimizer.optimizer).__name__}) keeps tensors of the device in "
                "lists or the like, and the host is steps ahead of the device, so a save function would read "
                "what is not of the step that the device has ended. Let jitckpt save by itself (no save "
                "function)."
            )
    return None


def _moved(view: HostState, snapshot: SharedSnapshot) -> dict[str, Tensor]:
    """Return the tensors on the device that optimizers held then and have replaced since, by name."""
    found = {}
    for now, then in zip(view.shared().optimizers, snapshot.shared.optimizers, strict=True):
        for name, tensor in then.device.items():
            other = now.device.get(name)
            if other is None or _place(other) != _place(tensor):
                found[name] = tensor
    return found


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _present_scaler(scaler: Any, state: Mapping[str, Any] | None) -> None:
    """Let a scaler read from the host what it keeps on the device."""
    if scaler is None or not state or scaler._scale is None:
        return
    scaler._scale = torch.tensor(state["scale"], device="cpu", dtype=torch.float32)
    scaler._growth_tracker = torch.tensor(state["_growth_tracker"], device="cpu", dtype=torch.int32)


def _are_same(some: Iterable[object], others: Iterable[object]) -> bool:
    """Whether two series are of the same objects."""
    return [*map(id, some)] == [*map(id, others)]


def _same_bytes(tensor: Tensor, value: Tensor) -> bool:
    """Of tensors of one number; NaN is as good as any."""
    return torch.equal(tensor.detach().reshape(1).view(torch.uint8), value.reshape(1).view(torch.uint8))
