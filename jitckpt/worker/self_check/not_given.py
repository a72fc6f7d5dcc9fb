"""What trains along, but was not given to jitckpt.init: modules, optimizers, schedulers, a gradient scaler.

A restart would find them as the script builds them. They are found among all objects there are, for once,
and that they train by what torch counts as written to their parameters and buffers.
"""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from jitckpt.encoding.tree_codec import Json, to_json
from jitckpt.hooks.untraced import untraced
from jitckpt.state import parallel
from jitckpt.state.host_state import HostState
from jitckpt.state.optimizer_state import parameters_of
from jitckpt.worker.self_check.comparison import KEPT_OTHERWISE, Difference

CHANGES = "changes in the training, and jitckpt.init was not given it"
TORCHMETRICS = "_defaults"  # where each of its metrics has what its states are at first
AVERAGE = "AveragedModel"  # of torch.optim.swa_utils: it may be changed in later epochs only


class _Beside(NamedTuple):
    """A module or an optimizer that was not given, and how its state was that nobody saves.

    versions: how often was written to its tensors. states: the tensors of a module that it replaces itself.
    """

    owner: weakref.ref[Any]
    versions: Sequence[tuple[weakref.ref[Tensor], int]]
    states: Mapping[str, object]

    def changed(self) -> Any:
        """Return the owner if something was written or replaced since."""
        owner = self.owner()
        alive = [(one, before) for of, before in self.versions if (one := of()) is not None]
        is_written = any(one._version != before for one, before in alive)
        replaced = any(not _is_same(mark, getattr(owner, name, None)) for name, mark in self.states.items())
        return owner if is_written or replaced else None


class NotGiven:
    """Of one job. `look` is called twice, some steps apart, by the training's thread."""

    def __init__(self, host: HostState, module: nn.Module, ours: Collection[object]) -> None:
        """module: the model that was given. ours: modules and optimizers that jitckpt has made itself."""
        self._host, self._module = host, module
        self._ours = {*map(id, ours)}
        # What wraps the training's optimizer, and is reached from it, was copied with it.
        self._of_ours = {
            id(one) for each in ours if isinstance(each, Optimizer) for one in parameters_of(each)
        }
        self._modules: list[_Beside] | None = None
        self._optimizers: list[_Beside] = []
        # A fused step is not counted among the writes to its parameters.
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hook = register_optimizer_step_post_hook(untraced(lambda one, *_: self._stepped.add(one)))
        self.named: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._schedulers: list[str] = []
        self._hooks: list[Difference] = []  # of DDP

    def look(self, extra: Mapping[str, Tensor], said: Json, scaler: object) -> list[Difference]:
        """Return what was found by now. extra, said: the tensors that `extra` keeps, and what else it says.

        scaler: one that is used.
        """
        text = to_json(said)
        is_first = self._modules is None
        if not is_first:
            self._hook.remove()
        if self._modules is None:
            self._modules = self._look_first(extra)
        changed = [
            of.owner()
            for of in self._modules
            if of.changed() is not None or (is_first and _is_still_to_begin(of.owner()))
        ]
        found = [Difference(CHANGES, name) for name in sorted({*map(_name_of, _outermost(changed))})]
        for optimizer in (one for of in self._optimizers if (one := self._has_trained(of)) is not None):
            name = f"{type(optimizer).__qualname__} with {len(parameters_of(optimizer))} parameters"
            found.append(Difference("not given to jitckpt.init: optimizer=[...]", name))
            self.named.add(optimizer)
        if '"last_epoch"' not in text:
            found += [
                Difference("not given to jitckpt.init: scheduler=...", name) for name in self._schedulers
            ]
        if scaler is not None and self._host.scaler is None and '"growth_factor"' not in text:
            found.append(Difference("not given to jitckpt.init: scaler=...", "a GradScaler"))
        return found + self._hooks

    def _has_trained(self, optimizer: _Beside) -> Any:
        owner = optimizer.owner()
        return owner if owner in self._stepped else optimizer.changed()

    def _look_first(self, extra: Mapping[str, Tensor]) -> list[_Beside]:
        every = parallel.all_of(nn.Module, Optimizer, LRScheduler)
        ours = self._ours | {id(part) for part in self._module.modules()}
        of_optimizers = {id(one) for state in self._host.optimizers for one in state.parameters()}
        of_optimizers |= self._of_ours
        # Not buffers(): Megatron's DistributedDataParallel has an attribute of that name, a list.
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        saved = of_optimizers | {id(tensor) for _, tensor in named}
        # A graph that torch.compile has made of an optimizer's step has the optimizer's state in its buffers.
        saved |= {
            id(value)
            for state in self._host.optimizers
            for values in parallel.own_state(state.optimizer).values()
            if isinstance(values, dict)
            for value in values.values()
        }
        known = [*extra.values(), *(one for _, one in named if type(one) in (Tensor, nn.Parameter))]
        places = {one.data_ptr() for one in known if one.device.type != "meta"} - {0}
        alike = {(one.shape, one.dtype) for one in extra.values() if one.device.type == "cpu"}
        modules: list[_Beside] = []
        for one in every:
            states: Mapping[str, object] = {}
            if isinstance(one, Optimizer):
                tensors = [tensor for tensor in parameters_of(one) if id(tensor) not in of_optimizers]
                kept = self._optimizers
            elif isinstance(one, nn.Module):
                if isinstance(one, (*KEPT_OTHERWISE,)):
                    continue
                tensors = [
                    tensor
                    for tensor in _tensors(one)
                    if id(tensor) not in saved
                    and tensor.data_ptr() not in places
                    and (tensor.shape, tensor.dtype) not in alike
                ]
                kept = modules
                states = _states(one, tensors, with_lists=not extra)
            if not isinstance(one, LRScheduler) and (tensors or states) and id(one) not in ours:
                versions = [(weakref.ref(tensor), tensor._version) for tensor in tensors]
                kept.append(_Beside(weakref.ref(one), versions, states))
        self._look_for_schedulers([one for one in every if isinstance(one, LRScheduler)])
        self._hooks = [
            found
            for one in every
            if isinstance(one, nn.parallel.DistributedDataParallel) and id(one.module) in ours
            for hook, state in getattr(one, "_comm_hooks", ())
            if (found := _of_hook(hook, state)) is not None
        ]
        return modules

    def _look_for_schedulers(self, every: Iterable[LRScheduler]) -> None:
        given = [state.scheduler for state in self._host.schedulers]
        numbers = {id(state.optimizer): number for number, state in enumerate(self._host.optimizers)}
        known = {id(part) for one in (*every, *given) for part in getattr(one, "_schedulers", ())}
        known |= {*map(id, given)}
        self._schedulers = [
            f"the scheduler of optimizer {number}, {type(one).__qualname__}"
            for one in every
            if id(one) not in known and (number := numbers.get(id(one.optimizer))) is not None
        ]


def _of_hook(hook: Any, state: object) -> Difference | None:
    """Return what a restart makes of a communication hook of DDP, if it is more than a function."""
    if state is None or isinstance(state, ProcessGroup):
        return None
    kind = type(state).__qualname__
    if "LocalSGD" in kind:
        what = "lets ranks differ that are taken for replicas: give jitckpt.init shard and shards"
    else:
        what = "keeps in it what no save holds"
    return Difference(what, f"the communication hook {getattr(hook, '__name__', hook)} with its {kind}")


def _is_still_to_begin(module: object) -> bool:
    average = type(module).__name__ == AVERAGE
    return average and module.n_averaged._version == 0  # type: ignore[attr-defined]


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return what belongs to a module alone and torch counts the writes to: of a metric plain attributes."""
    own = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
    plain = [one for one in own if isinstance(one, Tensor) and type(one) in (Tensor, nn.Parameter)]
    return [one for one in plain if not one.is_inference()]


def _states(module: nn.Module, tensors: Collection[Tensor], *, with_lists: bool) -> dict[str, object]:
    """Return marks of what a module may replace: of these tensors its buffers, and a metric's states."""
    ids = {*map(id, tensors)}
    metrics = {name: getattr(module, name, None) for name in getattr(module, TORCHMETRICS, ())}
    found: dict[str, object] = {
        name: weakref.ref(one)
        for name, one in {**module._buffers, **metrics}.items()
        if isinstance(one, Tensor) and id(one) in ids
    }
    lists = {name: len(one) for name, one in metrics.items() if isinstance(one, list) and with_lists}
    return found | lists


def _is_same(mark: object, now: object) -> bool:
    return mark() is now if isinstance(mark, weakref.ref) else isinstance(now, list) and mark == len(now)


def _outermost(modules: Collection[object]) -> list[nn.Module]:
    """Return those that contain these, and are in no other."""
    if not modules:
        return []
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
