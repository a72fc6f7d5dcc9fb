"""Copies of a training's objects as they are when jitckpt.init is called, to restore a save into.

A restart builds the objects anew and restores the save into them. So what the copies then say otherwise than
the training's own objects is what a restart would lose. They are on the host, and run nobody's code but that
of optimizers, schedulers and scalers; a model is a tree of empty modules with its tensors. Of large tensors
there is the description only (torch's device "meta").
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from jitckpt.encoding import strides
from jitckpt.encoding.tree_codec import Json
from jitckpt.state import host_state, parallel
from jitckpt.state.host_state import HostState
from jitckpt.state.kept import Kept
from jitckpt.state.optimizer_state import with_inner
from jitckpt.state.schedules import Stateful
from jitckpt.state.unwrapping import unwrapped
from jitckpt.worker.self_check.comparison import Described, TooManyError

_HOOKS = "_optimizer_"  # begins the names of the attributes with an optimizer's hooks
MOST_SAMPLED = 64  # tensors, or parameters with their state: each takes the training's thread some time
STATE_OF_A_PARAMETER = 3  # so many times its bytes, as a rule; with itself, and the piece of the file


class FreshCopy:
    """Made in jitckpt.init; `restore` is for another thread later."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Stateful],
        scaler: Any,
        kept: Sequence[str] = (),
        limit: int | None,
    ) -> None:
        """optimizers: without those that these have inside, of which copies are made as well.

        kept: what the last of the schedulers are called, as far as jitckpt.init was not given them.

        limit: bytes of tensors of which the values are kept and compared, the smallest first; None: all.

        Raises TypeError if some of it can't be copied, saying what.
        """
        self._memo: dict[int, Any] = {}
        self._left = self._left_for_objects = limit
        self.sampled: set[str] = set()  # names of parameters and buffers
        self.names: dict[int, str] = {}  # of parameters, by id, of the training's and of the copies
        self._places: dict[tuple[Any, ...], Tensor] = {}
        self.module = unwrapped(model)
        self._copy_parameters([each for one in optimizers for _, each in with_inner(one, "")])
        self.copy = self._skeleton(self.module)
        self._memo[id(model)] = self.copy
        copied: list[list[Any]] = []
        try:
            for objects in (optimizers, schedulers, [scaler]):
                copied.append([self._object(one) for one in objects])
        except TooManyError as error:
            raise TypeError(str(error)) from error
        self.schedulers: list[Stateful] = copied[1]
        self.scaler: Any = copied[2][0]
        given = len(self.schedulers) - len(kept)
        self.host = HostState(
            model=self.copy,
            optimizers=copied[0],
            schedulers=self.schedulers[:given],
            scaler=self.scaler,
            extra=None,
            device=None,
            kept=Kept(dict(zip(kept, copied[1][given:], strict=True))),
        )
        self.optimizers = [one.optimizer for one in self.host.optimizers]
        self._built = [_entries(parallel.own_state(one)) for one in self.optimizers]

    def restore(self, document: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
        """Put a save into the copies as a restart does, but for random numbers and `extra`.

        Those have effects on the whole process. Raises what a restart would.
        """
        # What an earlier check has put there lies in memory that the save of this one has by now.
        for optimizer, built in zip(self.optimizers, self._built, strict=True):
            state = parallel.own_state(optimizer)
            state.clear()
            state.update(_entries(built))
        tensors = strides.all_laid_out(tensors, document["strides"])
        self.host.restore_parameters(tensors, document["frozen"])
        assert self.host.model is not None
        trees = {name: tree for name, tree in document["local"]["trees"].items() if name == "buffers"}
        parts = host_state.local_parts({"trees": trees}, tensors, None)
        self.host.model.restore_buffers(parts.get("buffers", {}))
        self.host.restore_shared(document, tensors, whole=True)

    def _copy_parameters(self, optimizers: Sequence[Optimizer]) -> None:
        found: dict[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        if parallel.parameters(self.module).keys() - found.keys():
            raise TypeError("the model's parameters are parts of flat ones (FullyShardedDataParallel)")
        in_model = {id(parameter) for parameter in found.values()}
        for index, optimizer in enumerate(optimizers):
            for number, parameter in enumerate(parameters_of(optimizer)):
                if id(parameter) not in in_model:
                    found[f"parameter {number} of optimizer {index}"] = parameter
        for name, parameter in found.items():
            if not is_plain(parameter):
                raise TypeError(
                    f"{name} is a {type(parameter.data).__name__}, of which a rank may hold a part"
                )
        for name in worth_looking_at(found):
            parameter = found[name]
            values = self._takes(name, parameter, 1 + STATE_OF_A_PARAMETER)
            if id(parameter) in self._memo:
                continue
            place = (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype)
            tensor = (
                self._places.setdefault(place, _like(parameter, values))
                if parameter.numel()
                else _like(parameter, values)
            )
            new = (
                nn.Parameter(tensor, parameter.requires_grad)
                if isinstance(parameter, nn.Parameter)
                else tensor.detach().requires_grad_(parameter.requires_grad)
            )
            self._memo[id(parameter)] = new
            self.names[id(new)] = self.names[id(parameter)] = name

    def _takes(self, name: str, tensor: Tensor, times: int) -> bool:
        """Whether the values of a tensor, and what belongs to it, are looked at."""
        if self._left is not None:
            if tensor.nbytes * times > self._left or len(self.sampled) >= MOST_SAMPLED:
                return False
            self._left -= tensor.nbytes * times
        self.sampled.add(name)
        return True

    def _skeleton(self, module: nn.Module, prefix: str = "") -> nn.Module:
        known = self._memo.get(id(module))
        if isinstance(known, nn.Module):
            return known
        # An average is told from other modules: it counts how many models it is of.
        new = nn.Module.__new__(AveragedModel if isinstance(module, AveragedModel) else nn.Module)
        nn.Module.__init__(new)
        self._memo[id(module)] = new
        for name, parameter in module._parameters.items():
            new._parameters[name] = None if parameter is None else self._memo[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._memo:
                if not is_plain(buffer):
                    raise TypeError(f"{prefix}{name} is a {type(buffer).__name__}")
                self._memo[id(buffer)] = _like(buffer, self._takes(f"{prefix}{name}", buffer, 2))
            new._buffers[name] = None if buffer is None else self._memo[id(buffer)]
        new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            inside = f"{prefix}{name}." if name else prefix  # a model stands so among its averages
            new._modules[name] = None if child is None else self._skeleton(child, inside)
        return new

    def _object(self, one: Any) -> Any:
        """Return a copy of an optimizer, a scheduler or a scaler."""
        if one is None:
            return None
        reached = Described()
        reached.add(one, type(one).__name__, known=self.names.keys(), optimizers=True)
        for name, tensor in reached.tensors.items():
            if id(tensor) in self._memo:
                continue
            values = self._left_for_objects is None or tensor.nbytes <= self._left_for_objects
            if values and self._left_for_objects is not None:
                self._left_for_objects -= tensor.nbytes
            if tensor.device.type != "cpu":
                self._memo[id(tensor)] = tensor.detach().cpu() if values else _like(tensor, False)
            elif not values:
                raise TypeError(f"{name} is too large")
        new = self._memo.get(id(one))
        if new is None:
            new = self._memo[id(one)] = object.__new__(type(one))
            try:
                for name, value in vars(one).items():
                    hooks = isinstance(one, Optimizer) and name.startswith(_HOOKS)
                    vars(new)[name] = OrderedDict() if hooks else copy.deepcopy(value, self._memo)
            except Exception as error:  # __deepcopy__ and the like may raise anything
                raise TypeError(f"{type(one).__name__}.{name} can't be copied ({error!r:.100})") from error
        return new


def _entries(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's state in dicts of its own."""
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in state.items()}


def worth_looking_at(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order in which they are taken: small ones, and in turn of all kinds."""
    kinds: dict[tuple[object, ...], list[tuple[int, str]]] = {}
    for name, tensor in tensors.items():
        kind = (tensor.dim(), tensor.dtype, tensor.is_contiguous(), tensor.requires_grad)
        kinds.setdefault(kind, []).append((parallel.held_bytes(tensor), name))
    turns = [(turn, *one) for kind in kinds.values() for turn, one in enumerate(sorted(kind))]
    return [name for _, _, name in sorted(turns)]


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is an ordinary one, all of which is on this rank."""
    whole = not hasattr(tensor, "_local_shard") and not parallel.is_distributed(tensor)
    return whole and type(tensor.detach()) is Tensor and tensor.layout == torch.strided


def parameters_of(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _like(tensor: Tensor, values: bool) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu" if values else "meta"
    )
