"""The state of a training job that the host holds: taken without waiting for the device, and put back.

Rank-local: random numbers, `extra`, module buffers; the ranks of one shard differ in them. Shared: what the
optimizers keep on the host (Adam counts its steps there), hyperparameters, schedulers; replicas agree on it.
Tensors on a device are taken by reference: whoever reads them minds the device's own order.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from jitckpt import _seen
from jitckpt._seen import Seen
from jitckpt.data.loop import NUMBERS, Loop
from jitckpt.data.random_state import RandomState
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tensor_file import to_host
from jitckpt.encoding.tree_codec import Encoded, Json
from jitckpt.errors import CheckpointError
from jitckpt.state import parallel, script_generators, tensors_seen, trackers, zero_gradients
from jitckpt.state.kept import NOTHING, SCALER, Kept, names_in
from jitckpt.state.optimizer_state import (
    OptimizerPart,
    OptimizerState,
    on_host,
    put_hyperparameters,
    states_of,
)
from jitckpt.state.script_generators import ScriptGenerators
from jitckpt.state.zero_gradients import Gradients, GradientsSeen

SCHEDULED = frozenset({"lr", "momentum", "betas"})  # the hyperparameters that torch's schedulers set
_NOTHING: frozenset[str] = frozenset()
PLAIN = frozenset({type(None), bool, int, float, str})


class Stateful(Protocol):
    """What `extra` and schedulers have to offer."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


_NONE = Encoded({}, {})


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile, whose names are the same with and without them."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _ddps(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if isinstance(one, nn.parallel.DistributedDataParallel)]


class HeldParameters(NamedTuple):
    """The model's parameters after a step: what this rank holds of each by name, and which are frozen.

    frozen: those that do not require gradients. cuts: which part of one this rank holds, where it is not the
    whole (parallel.cuts). aliases: the other names of shared parameters, and the one that is used for them.
    """

    parameters: dict[str, Tensor]
    frozen: tuple[str, ...]
    cuts: Mapping[str, Json] = MappingProxyType({})
    aliases: Mapping[str, str] = MappingProxyType({})


class ModelState:
    """A model's parameters, buffers and extra states, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrapped(model)
        self._in_ddp = self._model is not model and bool(_ddps(model))
        self._buffers: list[tuple[str, dict[str, Tensor | None], str]] = []
        self._passing: list[tuple[str, dict[str, Tensor | None], str, object]] = []  # not persistent, so far
        self._with_extra_state: list[tuple[str, nn.Module]] = []
        self._averages: list[AveragedModel] = []
        self._captured: Encoded | None = None  # the buffers, and which they were and where they lay:
        self._seen = Seen()
        self._held: HeldParameters | None = None
        self._flags = b""
        self._versions = b""
        self._parameters = parallel.parameters(self._model)
        self.memory: dict[str, Tensor] = {}  # by name; it counts what is written to the parameters
        self._places = b""  # where it lies
        self._watched: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = ((), ())  # the parameters, and that
        self._called: dict[int, str] = {}
        self._structure = Seen()
        self.is_restructured = (
            False  # whether `follow` has seen that parameters have come, gone or been replaced
        )
        self._take_structure()
        self.built = frozenset(self._parameters)  # what the script has built, by the parameters' names
        self._built_frozen = self._frozen()
        self._thawed: list[str] = []
        self.is_thawed = False  # whether there are any of `thawed`
        self.look_again()

    def look_again(self) -> None:
        """Find the buffers anew; for after the first forward pass, which may have made some."""
        kept = {name for name, *_ in self._buffers}
        self._captured = None
        self._buffers.clear()
        self._passing.clear()
        self._with_extra_state.clear()
        self._averages = [one for one in self._model.modules() if isinstance(one, AveragedModel)]
        for prefix, module in self._model.named_modules():
            for name in module._buffers:
                full = f"{prefix}.{name}".lstrip(".")
                if full in kept or name not in module._non_persistent_buffers_set:
                    self._buffers.append((full, module._buffers, name))
                else:
                    self._passing.append((full, module._buffers, name, _mark(module._buffers[name])))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self._with_extra_state.append((prefix, module))

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """The parameters themselves, by name; another object once there are others."""
        return self._parameters

    @property
    def is_flattened(self) -> bool:
        """Whether FSDP1 has flat parameters in it."""
        return parallel.is_flattened(self._model)

    def names(self) -> Mapping[int, str]:
        """Return what the parameters are called, by their id()."""
        return self._called

    def find(self, name: str) -> Tensor | None:
        """Return the parameter that is called so."""
        return self._parameters.get(name)

    def follow(self) -> bool:
        """After a step: see whether parameters have come, gone or been replaced, and buffers changed.

        A buffer that is not persistent is kept from its first change on: what never changes the script makes
        again. Returns whether the names of the parameters are others than before.
        """
        for one in [*self._passing]:
            name, holder, key, mark = one
            if _mark(holder.get(key)) != mark:
                self._passing.remove(one)
                self._buffers.append((name, holder, key))
                self._captured = None
        if self._structure.is_same():
            return False
        self.is_restructured = True
        names = self._parameters.keys()
        self._take_structure()
        self.look_again()
        return self._parameters.keys() != names

    def structure(self) -> tuple[list[str], list[str]]:
        """Return the parameters that have come and those that have gone since the script built the model."""
        return sorted(self._parameters.keys() - self.built), sorted(self.built - self._parameters.keys())

    def _take_structure(self) -> None:
        self._structure, seen = Seen(), Seen()
        if not parallel.is_flattened(self._model):  # FSDP1 puts others in their place in every pass
            for module in self._model.modules():
                for members in (module._parameters, module._modules):
                    seen.values(members)
                seen.size(module._buffers)
        self._structure = seen
        found = parallel.parameters(self._model)
        before = self._parameters
        # FSDP puts whole parameters in the place of their parts, and need not take them away before the step.
        self._parameters = {
            name: before[name]
            if name in before
            and parallel.is_distributed(before[name])
            and not parallel.is_distributed(parameter)
            else parameter
            for name, parameter in found.items()
        }
        self._cuts = parallel.cuts(self._model)
        self._aliases = _aliases(self._model)
        self._called = {id(one): f"model.{name}" for name, one in self._model.named_parameters()}
        self._called |= {id(one): f"model.{name}" for name, one in self._parameters.items()}
        # What FSDP1 writes to its flat parameters is counted nowhere that lasts.
        watched = {} if parallel.is_flattened(self._model) else self._parameters
        self.memory = {f"model.{name}": parallel.memory_of(one) for name, one in watched.items()}
        self._watched = tuple(self._parameters.values()), tuple(self.memory.values())
        self._held = None

    def held(self) -> HeldParameters:
        """Return what is held of the parameters now; the same object while that is the same memory."""
        parameters, memory = self._watched
        flags, places = tensors_seen.gradients_required(parameters), tensors_seen.addresses(memory)
        known = self.memory.keys() or not self._parameters
        if self._held is None or self._flags != flags or self._places != places or not known:
            self._flags, self._places = flags, places
            frozen = self._frozen()
            self._thawed = sorted({*self._built_frozen}.difference(frozen))
            self.is_thawed = self._in_ddp and bool(self._thawed)
            self._held = HeldParameters(self.parameters(), frozen, self._cuts, self._aliases)
        return self._held

    def thawed(self) -> list[str]:
        """Return the parameters that are trained, but were frozen as DDP was built around the model."""
        return self._thawed if self._in_ddp else []

    def _frozen(self) -> tuple[str, ...]:
        return tuple([name for name, one in self._parameters.items() if not one.requires_grad])

    def parameters(self) -> dict[str, Tensor]:
        """Return what this rank holds of each parameter; a shared one is there once."""
        return {name: parallel.local(parameter) for name, parameter in self._parameters.items()}

    def restore_parameters(self, saved: Mapping[str, Tensor], frozen: Sequence[str]) -> None:
        """Put saved parameters in the place of the model's, as they lay, and which of them are frozen.

        Raises CheckpointError unless the names are the same, and the shapes and types where they can't be
        made so: of what a parallel wrapper holds in parts.
        """
        own = self.parameters()
        _check_names("parameters", own, saved)
        thawed = [name for name in self._frozen() if name not in frozen]
        if thawed and self._in_ddp:
            raise CheckpointError(
                f"{', '.join(thawed[:5])}: frozen as DistributedDataParallel was built around the model, but "
                "not in the save, so no gradients of it would be averaged. Give jitckpt.init the model "
                "without DistributedDataParallel, call job.restore(), and wrap it then."
            )
        with torch.no_grad():
            for name, tensor in own.items():
                parameter, value = self._parameters[name], saved[name]
                lies = (tensor.shape, tensor.dtype, tensor.stride())
                if parallel.is_plain(parameter) and lies != (value.shape, value.dtype, value.stride()):
                    parameter.data = value.to(parameter.device)
                else:
                    _check_alike("parameters", name, tensor, value)
                    tensor.copy_(value)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)

    def restore_buffers(self, saved: Mapping[str, Tensor]) -> None:
        """Put saved buffers in the place of the model's; CheckpointError unless they are the same ones.

        One may have been None as the script built it, or of another shape: a memory bank grows.
        """
        for one in [one for one in self._passing if one[0] in saved]:
            self._passing.remove(one)
            self._buffers.append(one[:3])
            one[1][one[2]] = saved[one[0]]
        self._captured = None
        for name, holder, key in self._buffers:
            if name in saved and key in holder and holder[key] is None:
                holder[key] = saved[name]
        own = self.buffers()
        _check_names("buffers", own, saved)
        with torch.no_grad():
            for name, holder, key in self._buffers:
                buffer = holder.get(key)
                if buffer is None:
                    continue
                value, tensor = saved[name], own[name]
                lies_so = (buffer.shape, buffer.stride()) == (value.shape, value.stride())
                if type(buffer) is Tensor and buffer.dtype == value.dtype and not lies_so:
                    buffer.data = value.to(buffer.device)
                else:
                    _check_alike("buffers", name, tensor, value)
                    tensor.copy_(value)

    def buffers(self) -> dict[str, Tensor]:
        found = ((name, holder.get(key)) for name, holder, key in self._buffers)
        return {name: parallel.local(buffer) for name, buffer in found if buffer is not None}

    def capture_buffers(self) -> Encoded:
        """Return the buffers under the name "buffers"; the same object while all are the same on a device."""
        # What was captured keeps its memory, so nothing else can come to lie there.
        if self._captured is None or not self._seen.is_same():
            self._captured, seen = None, Seen()
            for _, holder, key in self._buffers:
                seen.entry(holder, key)
            captured = tree_codec.encode(self.buffers(), "buffers")
            there = [buffer for _, holder, key in self._buffers if (buffer := holder.get(key)) is not None]
            if any(type(one) is not Tensor or one.device.type == "cpu" for one in there):
                return captured
            for buffer in there:
                seen.place(buffer)
            self._captured, self._seen = captured, seen
        return self._captured

    def buffer_versions(self) -> bytes:
        there = [buffer for _, holder, key in self._buffers if (buffer := holder.get(key)) is not None]
        return _seen.versions(there) if there else b""

    def updates_of_averages(self) -> list[int]:
        """Return what is another once an AveragedModel has been updated, without asking the device."""
        return [one.n_averaged._version for one in self._averages]

    def extra_states(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self._with_extra_state}

    def unchanged(self) -> Seen | None:
        """Return what tells that all lies where it was last captured; None where more has to be asked."""
        return None if self._captured is None or self._with_extra_state else self._seen

    def capture_extra_states(self) -> Encoded:
        """Return the extra states under the name "modules"; the same object while there are none."""
        return tree_codec.encode(self.extra_states(), "modules") if self._with_extra_state else _NONE

    def extra_state_names(self) -> list[str]:
        """Return the modules that have an extra state, by name."""
        return [name for name, _ in self._with_extra_state]

    @property
    def has_stages(self) -> bool:
        """Whether it is cut into stages of a pipeline, of which this rank has some."""
        return parallel.has_stages(self._model)

    def restore_extra_states(self, states: Mapping[str, Any]) -> None:
        modules = dict(self._with_extra_state)
        _check_names("extra states of modules", modules, states)
        for name, state in states.items():
            modules[name].set_extra_state(state)


class SchedulerState:
    """A learning-rate scheduler, and how often it was stepped."""

    def __init__(self, scheduler: Stateful) -> None:
        self.scheduler = scheduler
        parameters = list(inspect.signature(type(scheduler).step).parameters.values())[1:]  # type: ignore[attr-defined]
        self.can_step = all(parameter.default is not parameter.empty for parameter in parameters)

    def count(self) -> int:
        """Return how many steps it has made."""
        for name in ("_step_count", "last_epoch"):
            value = getattr(self.scheduler, name, None)
            if isinstance(value, int):
                return value
        return 0

    def step(self, times: int) -> None:
        for _ in range(times):
            self.scheduler.step()  # type: ignore[attr-defined]

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what its state_dict said, however often."""
        if type(self.scheduler).__name__ == "OptimizerParamScheduler":
            self.scheduler.num_steps = 0  # type: ignore[attr-defined]  # Megatron's adds the steps to its own
        self.scheduler.load_state_dict(state)


def scaler_state(scaler: Any, update_is_due: bool) -> dict[str, Any]:
    """Return a GradScaler's state as its load_state_dict takes it. Reads the device, which must be at rest.

    `update_is_due`: the optimizer step is done but scaler.update() is not: what it would do is done to the
    copy that is returned.
    """
    if not scaler.is_enabled():
        return {}
    scale, growth = scaler._scale, scaler._growth_tracker
    if scale is not None:
        scale, growth = to_host(scale), to_host(growth)
        found = [
            to_host(found)
            for state in scaler._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        ]
        if update_is_due and found:
            torch._amp_update_scale_(
                scale,
                growth,
                sum(found[1:], found[0]),
                scaler.get_growth_factor(),
                scaler.get_backoff_factor(),
                scaler.get_growth_interval(),
            )
    return {
        "scale": scaler._init_scale if scale is None else float(scale),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": scaler._init_growth_tracker if growth is None else int(growth),
    }


def scaler_update_is_due(scaler: Any) -> bool:
    """Return whether scaler.step() was called and scaler.update() was not yet."""
    return scaler.is_enabled() and any(
        state["stage"] is OptState.STEPPED for state in scaler._per_optimizer_states.values()
    )


class Shared(NamedTuple):
    """What replicas agree on, after one step. `held`: the model's parameters.

    `counts`: of each scheduler, how often it had been stepped when the optimizer step ended; `groups`: the
    hyperparameters then. `progress`: tells what HostState.progress said once the host had begun the next
    minibatch; before that there is more to come. `gradients`: which there were then.
    """

    optimizers: tuple[OptimizerPart, ...]
    counts: tuple[int, ...]
    groups: list[list[dict[str, Any]]]
    held: HeldParameters = HeldParameters({}, ())
    progress: Callable[[], Encoded] | None = None
    gradients: Gradients = Gradients()

    def all_tensors(self) -> dict[str, Tensor]:
        """Return `tensors` and those on a device that optimizers keep in lists and attributes."""
        return self.tensors() | self.in_documents()

    def in_documents(self) -> dict[str, Tensor]:
        """Return what lies on a device and is named in a save's document alone."""
        found = self.rates()
        for optimizer in self.optimizers:
            others = optimizer.others.tensors | optimizer.beside.tensors
            found |= {name: tensor for name, tensor in others.items() if tensor.device.type != "cpu"}
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return what lies on the device of model and optimizers, under its names in a save."""
        found = {f"model.{name}": tensor for name, tensor in self.held.parameters.items()}
        for optimizer in self.optimizers:
            found |= optimizer.device
        return found | self.rates()

    def rates(self) -> dict[str, Tensor]:
        """Return the hyperparameters that are tensors on a device, under their names in `progress`."""
        found: dict[str, Tensor] = {}
        if _seen.plain_copy(self.groups) is not None:
            return found  # there is no tensor in them
        for index, groups in enumerate(self.groups):
            for number, group in enumerate(groups):
                for key, value in group.items():
                    if type(value) not in PLAIN:
                        found |= _on_device(f"progress.groups.{index}.{number}.{key}", value)
        return found


class Unchanged(NamedTuple):
    """What tells that a rank-local state is as it was taken: nothing looks otherwise than it did.

    going_on: of what may have gone on (the device's random numbers, and the loop's), the names in the state,
    and functions that return their bytes now.
    """

    looks: tuple[Seen | ScriptGenerators, ...]
    going_on: tuple[tuple[str, Callable[[], bytes]], ...] = ()


class HostState:
    """All objects of a job whose state is kept."""

    def __init__(
        self,
        *,
        model: nn.Module | None,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Stateful],
        scaler: Any,
        extra: Stateful | None,
        device: torch.device | None,
        loop: Loop | None = None,
        wrappers: Mapping[int, Sequence[object]] | None = None,
        kept: Kept = NOTHING,
        finds_generators: bool = False,
    ) -> None:
        """wrappers: what lies around an optimizer, by its id(), and may have attributes that change.

        kept: what is kept though it was not given. finds_generators: those of the script are found, and kept.
        """
        self.loop = loop
        self.model = None if model is None else ModelState(model)
        self.optimizers: list[OptimizerState] = []
        self._wrappers = wrappers or {}
        self.given: list[Optimizer] = []  # `optimizers` are these and those that they have inside
        for optimizer in optimizers:
            self.add_optimizer(optimizer)
        self.kept = kept
        every = [*schedulers, *kept.schedulers.values()]
        self.schedulers = [SchedulerState(scheduler) for scheduler in every]
        self.scaler = kept.scaler if scaler is None else scaler
        self.extra = extra
        self.generators = ScriptGenerators() if finds_generators else None
        self._extra_tensors: list[Tensor] = []  # on a device, as they were last captured
        self.device = device
        self.random = RandomState(device)
        self._gradients = GradientsSeen()
        self._gradients_of: list[object] = []  # what tells whose they are
        self._restored_gradients: Mapping[str, int] = {}
        # A thread that is inside one of these is changing what progress() and scaler_state() return. None: of
        # something that is not written in Python.
        changing = [type(scheduler).step for scheduler in schedulers]  # type: ignore[attr-defined]
        changing += [] if scaler is None else [type(scaler).update]
        self.changing_code = {getattr(inspect.unwrap(one), "__code__", None) for one in changing}

    @property
    def is_restructured(self) -> bool:
        """Whether the training has changed what the script had built: parameters, or optimizers' groups."""
        model = self.model is not None and self.model.is_restructured
        return model or any(one.is_restructured for one in self.optimizers)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Keep the state of this one, too, and of those that it has inside."""
        self.optimizers += states_of(
            optimizer,
            f"optimizer.{len(self.given)}",
            names=None if self.model is None else self.model.names,
            find=self.find,
            wrappers=self._wrappers.get(id(optimizer), ()),
        )
        self.given.append(optimizer)

    def find(self, name: str) -> Tensor | None:
        """Return the model's parameter that optimizers know as `name`."""
        return None if self.model is None else self.model.find(name.removeprefix("model."))

    def local(self) -> dict[str, Encoded]:
        """Return the rank-local state in named parts."""
        parts: dict[str, Encoded] = {}
        if self.extra is not None:
            parts["extra"] = self.capture_extra()
        if self.model is not None:
            parts["buffers"] = self.model.capture_buffers()
            parts["modules"] = self.model.capture_extra_states()
        if self.loop is not None and self.loop.is_used:
            parts["loop"] = self.loop.capture()
        if self.generators is not None:
            parts[script_generators.PART] = self.generators.capture()
        return {"random": self.random.capture(), **parts, **trackers.capture()}

    def kept_names(self) -> list[str]:
        """Return what is kept though it was not given; generators as far as they were used by now."""
        generators = [] if self.generators is None else self.generators.names()
        return [*self.kept.names(), *(f"the generator {name}" for name in generators)]

    def capture_extra(self) -> Encoded:
        """Return the state of `extra`, which there is, under that name."""
        assert self.extra is not None
        captured = tree_codec.encode(self.extra.state_dict(), "extra")
        self._extra_tensors = [tensor for tensor in captured.tensors.values() if not tensor.is_cpu]
        return captured

    def extra_may_hold(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether `extra` has a tensor of each one's shape and type, which it may be a copy of."""
        if self.extra is None:
            return False
        kept = {(one.shape, one.dtype) for one in self.capture_extra().tensors.values()}
        return all((one.shape, one.dtype) in kept for one in tensors)

    @property
    def extra_is_on_device(self) -> bool:
        """Whether a part of `extra` lies on a device, where only torch's own writes can be seen."""
        return bool(self._extra_tensors)

    def extra_now(self) -> tuple[Any, ...]:
        """Return what is another once `extra` has changed, as far as that can be seen."""
        tree, tensors = self.capture_extra()
        on_host = {name: tensor.numpy().tobytes() for name, tensor in tensors.items() if tensor.is_cpu}
        return tree, on_host, _seen.versions(self._extra_tensors) if self._extra_tensors else b""

    def unchanged(self) -> Unchanged | None:
        """Return what tells that `local` would return what it just did; None if nothing can."""
        of_model = None if self.model is None else self.model.unchanged()
        of_random, generator = self.random.unchanged()
        if self.extra is not None or of_random is None or (self.model is not None and of_model is None):
            return None
        if trackers.are_there():
            return None
        going_on = [] if generator is None else [generator]
        of_loop = None
        if self.loop is not None and self.loop.is_used:
            of_loop = self.loop.look()
            going_on.append((NUMBERS, self.loop.numbers))
        looks = tuple([one for one in (of_loop, of_random, of_model, self.generators) if one is not None])
        return Unchanged(looks, tuple(going_on))

    def shared(self) -> Shared:
        """Return the shared state as the optimizer step leaves it."""
        parts = tuple([optimizer.capture() for optimizer in self.optimizers])
        held = HeldParameters({}, ()) if self.model is None else self.model.held()
        return Shared(parts, self.counts(), self.groups(), held)

    def shared_again(self, shared: Shared) -> Shared:
        """Return the shared state with what wrappers have changed after their optimizers' own steps."""
        for optimizer in self.optimizers:
            if optimizer.may_change_later:
                break
        else:
            return shared
        known = zip(shared.optimizers, self.optimizers, strict=False)
        parts = [
            part._replace(beside=optimizer.beside()) if optimizer.may_change_later else part
            for part, optimizer in known
        ]
        return shared._replace(optimizers=(*parts, *shared.optimizers[len(parts) :]))

    def gradients(self) -> Gradients:
        """Return which parameters have a gradient now."""
        of: list[object] = [one.called for one in self.optimizers]
        of += [] if self.model is None else [self.model.trained]
        if [*map(id, of)] != [*map(id, self._gradients_of)]:
            self._gradients_of = of
            self._gradients.follow(self.trained())
        return self._gradients.look()

    def trained(self) -> dict[str, Tensor]:
        """Return the parameters that may have gradients of their own, by name."""
        found: dict[str, Tensor] = {}
        if self.model is not None and not self.model.is_flattened:  # else the optimizers have them, or parts
            found = {f"model.{name}": one for name, one in self.model.trained.items()}
        for optimizer in self.optimizers:
            for name, one in optimizer.named_parameters().items():
                found.setdefault(name if name.startswith("model.") else f"{optimizer.name}.{name}", one)
        return found

    def restore_gradients(self, saved: Mapping[str, int]) -> None:
        """Let those have gradients, of zeros, that had some as the save's minibatch ended."""
        self._restored_gradients = saved
        self.put_gradients()

    def put_gradients(self) -> None:
        """Do it again: the script may have made others since."""
        zero_gradients.put(self.trained(), self._restored_gradients)

    def buffer_versions(self) -> bytes:
        """Return what changes with every write to a buffer that torch counts."""
        return b"" if self.model is None else self.model.buffer_versions()

    def updates_of_averages(self) -> list[int]:
        """Return what is another once an average of the model's has been updated."""
        return [] if self.model is None else self.model.updates_of_averages()

    def groups(self) -> list[list[dict[str, Any]]]:
        """Return the hyperparameters of each optimizer's parameter groups."""
        return [optimizer.groups() for optimizer in self.optimizers]

    def progress(self) -> Encoded:
        """Return what may still change between an optimizer step and the next minibatch."""
        return self.take_progress(self.groups())()

    def copied_progress(self) -> Encoded:
        """Return the same, with copies of rates on the device: the script may change them in their place."""
        tree, tensors = self.progress()
        return Encoded(tree, {name: one.clone() for name, one in tensors.items()})

    def take_progress(self, groups: list[list[dict[str, Any]]]) -> Callable[[], Encoded]:
        """Take what `progress` says now, and return what returns it. groups: as groups() says now.

        That of hardly any step is ever wanted, so as a rule it is copied and no more.
        """
        schedulers = [scheduler.scheduler.state_dict() for scheduler in self.schedulers]
        value = {"groups": groups, "schedulers": schedulers}
        copied = _seen.plain_copy(value)
        if copied is not None:
            return partial(tree_codec.encode, copied, "progress")
        encoded = tree_codec.encode(value, "progress")
        return lambda: encoded

    def restore_parameters(self, tensors: Mapping[str, Tensor], frozen: Sequence[str]) -> None:
        """Put the model's parameters back; CheckpointError if they are others than the save's."""
        if self.model is not None:
            saved = {
                name.removeprefix("model."): tensor
                for name, tensor in tensors.items()
                if name.startswith("model.")
            }
            self.model.restore_parameters(saved, frozen)

    def parameters(self) -> dict[str, Tensor]:
        """Return the model's parameters under their names in a save."""
        own = {} if self.model is None else self.model.parameters()
        return {f"model.{name}": tensor for name, tensor in own.items()}

    def scaler_update_is_due(self) -> bool:
        return self.scaler is not None and scaler_update_is_due(self.scaler)

    def scaler_state(self, update_is_due: bool) -> dict[str, Any] | None:
        return None if self.scaler is None else scaler_state(self.scaler, update_is_due)

    def counts(self) -> tuple[int, ...]:
        return tuple([scheduler.count() for scheduler in self.schedulers])

    def restore_shared(
        self,
        document: Mapping[str, Json],
        tensors: Mapping[str, Tensor],
        whole: bool,
        *,
        for_a_while: bool = False,
    ) -> None:
        """Put back optimizers, schedulers and scaler, and step schedulers as often as the save says is due.

        whole: all of the optimizers, not only what they keep on the host. for_a_while: nothing is done on the
        device, and the tensors there stay as they are.

        Raises CheckpointError if there are more or fewer of them, or they are not alike.
        """
        progress = tree_codec.decode(document["progress"], tensors, self.device)
        if whole or self.optimizers:  # else they were found as they made their first step
            self.check_optimizers(document)
            for optimizer, tree, groups in zip(
                self.optimizers, document["optimizers"], progress["groups"], strict=True
            ):
                optimizer.restore(tree, tensors, groups, whole, for_a_while=for_a_while)
        self.restore_schedules(document, progress)

    def check_optimizers(self, document: Mapping[str, Json]) -> None:
        """Raise CheckpointError if the save has more optimizers or fewer."""
        _check_count("optimizers", len(self.optimizers), len(document["optimizers"]))

    def restore_schedules(self, document: Mapping[str, Json], progress: Mapping[str, Any]) -> None:
        """Put back schedulers and scaler, and step schedulers as often as the save says is due."""
        saved = [
            (scheduler, place)
            for scheduler, place in zip(self.schedulers, self._places(document), strict=True)
            if place is not None
        ]
        for scheduler, place in saved:
            scheduler.restore(progress["schedulers"][place])
        for scheduler, place in saved:
            scheduler.step(document["scheduler_steps_due"][place])
        saved_scaler = document["scaler"]
        was_given = not (self.kept.scaler or document.get("kept", {}).get("scaler"))
        if (saved_scaler is None) != (self.scaler is None) and was_given:
            there, here = ("no", "one") if saved_scaler is None else ("a", "none")
            raise CheckpointError(f"The save has {there} gradient scaler; jitckpt.init was given {here}.")
        if saved_scaler and self.scaler is not None:
            self.scaler.load_state_dict(saved_scaler)

    def usual_scheduler_steps(self, document: Mapping[str, Json]) -> list[int]:
        """Return how often each scheduler was stepped after every optimizer step as a save was made."""
        usual = document["usual_scheduler_steps"]
        return [0 if place is None else usual[place] for place in self._places(document)]

    def undo_steps(self, counts: Sequence[int], progress: Encoded) -> tuple[dict[str, int], bool]:
        """Undo the steps of those that were not given, if one has made more than one, and no other any.

        counts, progress: what counts() and progress() had said before. Returns how many steps each has made
        that has made more than one, and whether they are undone.
        """
        given = len(self.schedulers) - len(self.kept.schedulers)
        made = [now - before for now, before in zip(self.counts(), counts, strict=True)]
        own = zip(self.kept.schedulers, made[given:], strict=True)
        stepped = {name: steps for name, steps in own if steps > 1}
        is_undone = bool(stepped) and not any(made[:given])
        if is_undone:
            self.restore_progress(progress)
        return stepped, is_undone

    def unlike_saved(self, document: Mapping[str, Json]) -> list[str]:
        """Return sentences on what is kept without having been given, if the save has other such things."""
        saved, own = names_in(document.get("kept", {})), self.kept.names()
        if document["scaler"] is not None and self.scaler is not None:
            saved, own = [*saved, SCALER], [*own, SCALER]  # given or not
        lacking, unknown = sorted({*own} - {*saved}), sorted({*saved} - {*own})
        without = (
            f"The save has no state of {', '.join(lacking)}, which jitckpt.init was not given: it is as the "
            "script builds it, so this run may differ from an undisturbed one."
        )
        other = (
            f"The save has the state of {', '.join(unknown)}, which is not there as jitckpt.init is "
            "called: it is put into nothing. Build it before jitckpt.init, as in the start that has saved."
        )
        return [*([without] if lacking else []), *([other] if unknown else [])]

    def _places(self, document: Mapping[str, Json]) -> list[int | None]:
        """Return which of the save's schedulers each one is; None for one that it has not.

        Raises CheckpointError if jitckpt.init was given more or fewer of them.
        """
        found = document.get("kept", {}).get("schedulers", [])
        given = len(self.schedulers) - len(self.kept.schedulers)
        saved = len(document["scheduler_steps_due"]) - len(found)
        _check_count("schedulers", given, saved)
        places = {name: saved + number for number, name in enumerate(found)}
        return [*range(given), *(places.get(name) for name in self.kept.schedulers)]

    def restore_progress(self, progress: Encoded) -> None:
        """Put hyperparameters and schedulers back to what `progress` said."""
        said = tree_codec.decode(progress.tree, progress.tensors, self.device)
        written: dict[int, Tensor] = {}
        for state, groups in zip(self.optimizers, said["groups"], strict=True):
            for group, own in zip(state.optimizer.param_groups, groups, strict=True):
                put_hyperparameters(group, own, written)
        for scheduler, saved in zip(self.schedulers, said["schedulers"], strict=True):
            scheduler.restore(saved)

    def restore_local(self, parts: Mapping[str, Any]) -> None:
        """Put back the rank-local state, random numbers last."""
        if (self.extra is None) != ("extra" not in parts):
            there, here = ("none", "an") if "extra" not in parts else ("some", "no")
            raise CheckpointError(
                f"The save has {there} state of `extra`; jitckpt.init was given {here} extra."
            )
        if self.model is not None:
            self.model.restore_buffers(parts.get("buffers", {}))
            self.model.restore_extra_states(parts.get("modules", {}))
        if self.extra is not None:
            self.extra.load_state_dict(parts["extra"])
        trackers.restore(parts.get(trackers.PART))
        if self.generators is not None:
            self.generators.restore(parts.get(script_generators.PART))
        self.random.restore(parts["random"])


def differ_by_hand(
    before: Sequence[Sequence[dict[str, Any]]],
    after: Sequence[Sequence[dict[str, Any]]],
    *,
    scheduled: bool,
) -> bool:
    """Whether groups' hyperparameters differ by more than a scheduler sets; scheduled: one was stepped.

    In doubt they do: of a tensor only its device could tell.
    """
    then, now = [*chain(*before)], [*chain(*after)]
    besides = SCHEDULED if scheduled else _NOTHING
    return len(then) != len(now) or not all(map(_seen.same_settings, then, now, repeat(besides)))


def _on_device(name: str, value: object) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {} if value.device.type == "cpu" else {name: value}
    parts = enumerate(value) if isinstance(value, tuple | list) else ()
    return {
        f"{name}.{number}": part
        for number, part in parts
        if isinstance(part, Tensor) and part.device.type != "cpu"
    }


def local_parts(
    document: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device | None
) -> dict[str, Any]:
    """Return the named parts of a saved rank-local state."""
    return {name: tree_codec.decode(tree, tensors, device) for name, tree in document["trees"].items()}


def spelled_out(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a saved document as a user's save function gets it, in SaveContext.host_state."""
    progress = tree_codec.decode(document["progress"], tensors)
    optimizers = zip(document["optimizers"], progress["groups"], strict=True)
    return local_parts(document["local"], tensors, None) | {
        "optimizers": [
            {"state": on_host(tree, tensors, None), "param_groups": groups} for tree, groups in optimizers
        ],
        "schedulers": progress["schedulers"],
        "scheduler_steps_due": list(document["scheduler_steps_due"]),
        "scaler": document["scaler"],
    }


def fingerprint(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> str:
    """Return what tells this rank's part of a model and its optimizers from all others; "" for none."""
    if model is None and not optimizers:
        return ""
    return parallel.digest(parallel.pieces(None if model is None else unwrapped(model), optimizers))


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the names of parameters that have another one, and that one, which stands for all of them."""
    first = {id(one): name for name, one in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(one)] for name, one in every if first[id(one)] != name}


def _mark(buffer: Tensor | None) -> object:
    """Return what changes when a buffer is changed."""
    return None if buffer is None else (id(buffer), buffer._version)


def _check_alike(what: str, name: str, own: Tensor, saved: Tensor) -> None:
    if own.shape != saved.shape or own.dtype != saved.dtype:
        raise CheckpointError(
            f"{name} of the {what} is {own.dtype} of shape {list(own.shape)}; in the save it is "
            f"{saved.dtype} of shape {list(saved.shape)}."
        )


def _check_names(what: str, own: Mapping[str, object], saved: Mapping[str, object]) -> None:
    lacking, unknown = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if lacking or unknown:
        parts = [f"lacks {', '.join(lacking[:5])}"] if lacking else []
        parts += [f"has {', '.join(unknown[:5])}, which the model has not"] if unknown else []
        raise CheckpointError(f"The save does not fit the model: of its {what} it {' and '.join(parts)}.")


def _check_count(what: str, own: int, saved: int) -> None:
    if own != saved:
        raise CheckpointError(f"The save has {saved} {what}; jitckpt.init was given {own}.")
