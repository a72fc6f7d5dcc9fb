"""What trains along, but was not given to jitckpt.init: modules, optimizers, schedulers, a gradient scaler.

A restart would find them as the script builds them. They are found among all objects there are, for once,
and that they train by what torch counts as written to their parameters and buffers.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jitckpt.encoding.tree_codec import Json, to_json
from jitckpt.state import parallel
from jitckpt.state.host_state import HostState
from jitckpt.state.optimizer_state import parameters_of
from jitckpt.worker.self_check.comparison import Difference

CHANGES = "changes in the training, and jitckpt.init was not given it"
Versions = list[tuple[int, int]]
AVERAGE = "AveragedModel"  # of torch.optim.swa_utils: it may be changed in later epochs only


class NotGiven:
    """Of one job: `look` is called twice, some steps apart."""

    def __init__(self, host: HostState, module: nn.Module, ours: Collection[object]) -> None:
        """module: the model that was given. ours: modules and optimizers that jitckpt has made itself."""
        self._host, self._module = host, module
        self._ours = {*map(id, ours)}
        self._modules_first: list[tuple[weakref.ref[nn.Module], Versions]] | None = None
        self._optimizers_first: list[tuple[weakref.ref[Optimizer], Versions]] | None = None

    def look(self, extra: Mapping[str, Tensor], said: Json, scaler: object) -> list[Difference]:
        """Return what was found by now. extra, said: the tensors that `extra` keeps, and what else it says.

        scaler: one that is used.
        """
        text = to_json(said)
        found = [*self._optimizers()]
        if '"last_epoch"' not in text:
            found += self._schedulers()
        if scaler is not None and self._host.scaler is None and '"growth_factor"' not in text:
            found.append(Difference("not given to jitckpt.init: scaler=...", "a GradScaler"))
        return [*found, *self._modules(extra)]

    def _optimizers(self) -> Iterator[Difference]:
        if self._optimizers_first is None:
            known = {id(one) for state in self._host.optimizers for one in state.parameters()}
            self._optimizers_first = [
                (weakref.ref(one), _versions(own))
                for one in parallel.all_of(Optimizer)
                if id(one) not in self._ours and not known.issuperset(map(id, own := parameters_of(one)))
            ]
        for of, before in self._optimizers_first:
            if (one := of()) is not None and _versions(own := parameters_of(one)) != before:
                name = f"{type(one).__qualname__} with {len(own)} parameters"
                yield Difference("not given to jitckpt.init: optimizer=[...]", name)

    def _schedulers(self) -> Iterator[Difference]:
        given = [state.scheduler for state in self._host.schedulers]
        numbers = {id(state.optimizer): number for number, state in enumerate(self._host.optimizers)}
        every: list[Any] = parallel.all_of(LRScheduler)
        known = {id(part) for one in [*every, *given] for part in getattr(one, "_schedulers", ())}
        known |= {*map(id, given)}
        for scheduler in every:
            number = numbers.get(id(getattr(scheduler, "optimizer", None)))
            if number is not None and id(scheduler) not in known:
                name = f"the scheduler of optimizer {number}, {type(scheduler).__qualname__}"
                yield Difference("not given to jitckpt.init: scheduler=...", name)

    def _modules(self, extra: Mapping[str, Tensor]) -> Iterator[Difference]:
        """Look for modules with tensors that nobody saves, which have changed since the first call."""
        if self._modules_first is None:
            self._modules_first = [
                (weakref.ref(one), _versions(_tensors(one))) for one in self._unsaved(extra)
            ]
            changed = [one for of, _ in self._modules_first if type(one := of()).__name__ == AVERAGE]
        else:
            changed = [
                one
                for of, before in self._modules_first
                if (one := of()) is not None and _versions(_tensors(one)) != before
            ]
        for name in sorted({_name_of(one) for one in _outermost(changed)}):
            yield Difference(CHANGES, name)

    def _unsaved(self, extra: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        of_model = {id(part) for part in self._module.modules()}
        saved = {*map(id, self._module.parameters()), *map(id, self._module.buffers())}
        saved |= {id(one) for state in self._host.optimizers for one in state.parameters()}
        places = {one.data_ptr() for one in extra.values() if one.device.type != "meta"}
        alike = {(one.shape, one.dtype) for one in extra.values() if one.device.type == "cpu"}
        for module in parallel.all_of(nn.Module):
            if id(module) in of_model or id(module) in self._ours:
                continue
            tensors = [
                one
                for one in _tensors(module)
                if id(one) not in saved
                and one.data_ptr() not in places
                and (one.shape, one.dtype) not in alike
            ]
            if tensors:
                yield module


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return what belongs to a module alone and torch counts the writes to."""
    own = [*module._parameters.values(), *module._buffers.values()]
    plain = [one for one in own if isinstance(one, Tensor) and type(one) in (Tensor, nn.Parameter)]
    return [one for one in plain if not one.is_inference()]


def _versions(tensors: Iterable[Tensor]) -> Versions:
    return [(id(one), one._version) for one in tensors]


def _outermost(modules: Iterable[object]) -> list[nn.Module]:
    """Return those that contain these, and are in no other."""
    every = parallel.all_of(nn.Module)
    parts = {id(part) for one in every for part in one._modules.values()}
    wanted = {*map(id, modules)}
    return [
        one for one in every if id(one) not in parts and any(id(part) in wanted for part in one.modules())
    ]


def _name_of(module: nn.Module) -> str:
    inner = getattr(module, "module", None)
    if isinstance(module, nn.parallel.DistributedDataParallel) and isinstance(inner, nn.Module):
        module = inner
    return f"the module {type(module).__qualname__}"
