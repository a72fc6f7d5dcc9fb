"""The state of a training job that the host holds: taken without waiting for the device, and put back.

Rank-local: random numbers, `extra`, module buffers; the ranks of one shard differ in them. Shared: what the
optimizers keep on the host (Adam counts its steps there), hyperparameters, schedulers; replicas agree on it.
Tensors on a device are taken by reference: whoever reads them minds the device's own order.
"""

import inspect
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from jitckpt import _seen, tree_codec
from jitckpt._seen import Seen
from jitckpt.errors import CheckpointError
from jitckpt.hooks import torch_parallel
from jitckpt.random_state import RandomState
from jitckpt.tensor_file import to_host
from jitckpt.tree_codec import Encoded, Json

SCHEDULED = frozenset({"lr", "momentum", "betas"})  # the hyperparameters that torch's schedulers set
PLAIN = frozenset({type(None), bool, int, float, str})
# How Python's array calls the types of torch that it has too.
ARRAY_TYPES = {torch.float32: "f", torch.float64: "d", torch.int64: "q", torch.int32: "i", torch.uint8: "B"}


class Stateful(Protocol):
    """What `extra` and schedulers have to offer."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


_NONE = Encoded({}, {})
_NONE_OTHERS = Encoded([], {})


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile, whose names are the same with and without them."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class ModelState:
    """A model's parameters, persistent buffers and extra states, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrapped(model)
        self._parameters = torch_parallel.parameters(self._model)
        self._buffers: list[tuple[str, dict[str, Tensor | None], str]] = []
        self._with_extra_state: list[tuple[str, nn.Module]] = []
        self._captured: Encoded | None = None  # the buffers, and which they were and where they lay:
        self._seen = Seen()
        self.look_again()

    def look_again(self) -> None:
        """Find the buffers anew; for after the first forward pass, which may have made some."""
        self._captured = None
        self._buffers.clear()
        self._with_extra_state.clear()
        for prefix, module in self._model.named_modules():
            for name in module._buffers:
                if name not in module._non_persistent_buffers_set:
                    self._buffers.append((f"{prefix}.{name}".lstrip("."), module._buffers, name))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self._with_extra_state.append((prefix, module))

    def parameters(self) -> dict[str, Tensor]:
        """Return what this rank holds of each parameter; a shared one is there once."""
        return {name: torch_parallel.local(parameter) for name, parameter in self._parameters.items()}

    def buffers(self) -> dict[str, Tensor]:
        found = ((name, holder.get(key)) for name, holder, key in self._buffers)
        return {name: torch_parallel.local(buffer) for name, buffer in found if buffer is not None}

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

    def extra_states(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self._with_extra_state}

    def unchanged(self) -> Seen | None:
        """Return what tells that all lies where it was last captured; None where more has to be asked."""
        return None if self._captured is None or self._with_extra_state else self._seen

    def capture_extra_states(self) -> Encoded:
        """Return the extra states under the name "modules"; the same object while there are none."""
        return tree_codec.encode(self.extra_states(), "modules") if self._with_extra_state else _NONE

    def restore_extra_states(self, states: Mapping[str, Any]) -> None:
        modules = dict(self._with_extra_state)
        _check_names("extra states of modules", modules, states)
        for name, state in states.items():
            modules[name].set_extra_state(state)


class OptimizerPart(NamedTuple):
    """What an optimizer's state was after a step.

    numbers: by key (such as Adam's "step") the type of the tensors of one number on the host, whose they are,
    by the parameters' numbers, and their values (an array takes little memory). others: what else is on the
    host. device: tensors there, by reference and name; of DTensors this rank's part, and in `placements` how
    they lie.
    """

    numbers: dict[str, tuple[torch.dtype, list[int], Sequence[Any]]]
    others: Encoded
    device: dict[str, Tensor]
    placements: dict[str, Json]

    def on_host(self) -> Encoded:
        """Return what is on the host, for the save."""
        listed = {key: (dtype, where, [*values]) for key, (dtype, where, values) in self.numbers.items()}
        numbers = tree_codec.encode(listed, "numbers")
        tree = {"numbers": numbers.tree, "others": self.others.tree, "placements": self.placements}
        return Encoded(tree, self.others.tensors)


class OptimizerState:
    """An optimizer's state by the parameters' numbers, in the order of its parameter groups."""

    def __init__(self, optimizer: Optimizer, index: int) -> None:
        self.optimizer = optimizer
        self._name = f"optimizer.{index}"
        self._parameters: list[Tensor] = []
        self._seen: Seen | None = None  # tells when a tensor of the state is replaced
        self._device: dict[str, Tensor] = {}
        self._placements: dict[str, Json] = {}
        self._numbers: dict[str, tuple[list[int], list[Tensor]]] = {}
        self._others: list[tuple[int, dict[str, Any], str]] = []
        self._named: dict[str, Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # where it hangs on an optimizer that is copied or pickled: no part of it

    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups' hyperparameters."""
        groups = []
        for group in self.optimizer.param_groups:
            own = {**group, "parameters": len(group["params"])}
            del own["params"]
            groups.append(own)
        return groups

    def is_as_named(self) -> bool:
        """Return whether named_tensors would return what it just did."""
        return bool(self._named) and self._seen is not None and self._seen.is_same()

    @property
    def seen(self) -> Seen | None:
        """What tells that named_tensors would return what it just did; None if it has not been called."""
        return self._seen if self._named else None

    def named_tensors(self) -> dict[str, Tensor]:
        """Return its parameters and what it keeps on a device, by name; the same dict while nothing changes.

        Raises CheckpointError if it keeps tensors in a list or the like, where they have no name.
        """
        if not self.is_as_named():
            self._look()
            for number, state, key in self._others:
                if any(isinstance(one, Tensor) for one in _elements(state[key])):
                    raise CheckpointError(
                        f"the {_spelled(self._name)} keeps tensors in {key!r} of parameter {number}, a "
                        f"{type(state[key]).__name__}"
                    )
            parameters = {
                f"{self._name}.parameter.{number}": torch_parallel.local(parameter)
                if torch_parallel.is_distributed(parameter)
                else parameter
                for number, parameter in enumerate(self._parameters)
            }
            self._named = parameters | self._device
        return self._named

    def capture(self) -> "OptimizerPart":
        if not self._is_as_seen():
            self._look()
        others = _NONE_OTHERS
        if self._others:
            listed = [(number, key, state[key]) for number, state, key in self._others]
            others = tree_codec.encode(listed, f"{self._name}.others")
        return OptimizerPart(
            numbers={
                key: (found[0].dtype, where, _values(found)) for key, (where, found) in self._numbers.items()
            },
            others=others,
            device=self._device,
            placements=self._placements,
        )

    def restore(
        self, tree: Json, tensors: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]], whole: bool
    ) -> None:
        """Put a captured state back; `whole`: in place of all that is there, else the host's part alone.

        Raises CheckpointError if the parameter groups are not alike.
        """
        own = self.groups()
        if [group["parameters"] for group in own] != [group["parameters"] for group in groups]:
            raise CheckpointError(
                f"The {_spelled(self._name)} has parameter groups of "
                f"{[group['parameters'] for group in own]} parameters; the save has "
                f"{[group['parameters'] for group in groups]}. Build it as it was when the save was made."
            )
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "parameters"})
        parameters = self.parameters()
        state = torch_parallel.own_state(self.optimizer)
        if whole:
            state.clear()
        device = parameters[0].device if parameters else None
        for number, values in optimizer_part(tree, tensors, device).items():
            state[parameters[number]].update(values)
        prefix = f"{self._name}.state."
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                place, key = name.removeprefix(prefix).split(".", 1)
                parameter = parameters[int(place)]
                part = tensor.to(parameter.device)
                state[parameter][key] = torch_parallel.placed(part, parameter, tree["placements"].get(name))

    def _is_as_seen(self) -> bool:
        return self._seen is not None and self._seen.is_same()

    def _look(self) -> None:
        self._parameters = self.parameters()
        self._seen, seen = None, Seen()
        for keeper, attribute in torch_parallel.way_to_state(self.optimizer):
            seen.attribute(keeper, attribute)
        seen.attribute(self.optimizer, "param_groups")
        seen.size(self.optimizer.param_groups)
        for group in self.optimizer.param_groups:
            seen.entry(group, "params")
            seen.size(group["params"])
        seen.values(torch_parallel.own_state(self.optimizer))
        self._numbers, self._others, self._device, self._placements, self._named = {}, [], {}, {}, {}
        for number, state in self._states():
            seen.size(state)
            for key, value in state.items():
                if isinstance(value, Tensor):
                    seen.entry(state, key)
                    how = torch_parallel.placement(value)
                    if value.device.type != "cpu" or how is not None:
                        name = f"{self._name}.state.{number}.{key}"
                        self._device[name] = torch_parallel.local(value)
                        if how is not None:
                            self._placements[name] = how
                        continue
                    where, found = self._numbers.get(key, ([], []))
                    if _is_number(value) and (not found or found[0].dtype == value.dtype):
                        seen.place(value)
                        where.append(number)
                        found.append(value)
                        self._numbers[key] = where, found
                        continue
                self._others.append((number, state, key))
        self._seen = seen

    def _states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        for parameter, state in torch_parallel.own_state(self.optimizer).items():
            if parameter not in numbers:
                raise CheckpointError(
                    f"The {_spelled(self._name)} keeps state under {parameter!r:.80}, which is none of its "
                    "parameters; jitckpt can't save that."
                )
            yield numbers[parameter], state


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
    """What replicas agree on, after one step.

    `counts`: of each scheduler, how often it had been stepped when the optimizer step ended; `groups`: the
    hyperparameters then. `progress`: tells what HostState.progress said once the host had begun the next
    minibatch; before that there is more to come.
    """

    optimizers: tuple[OptimizerPart, ...]
    counts: tuple[int, ...]
    groups: list[list[dict[str, Any]]]
    progress: Callable[[], Encoded] | None = None


class Unchanged(NamedTuple):
    """What tells that a rank-local state is as it was taken: nothing looks otherwise than it did.

    generator: of the device's random numbers, which may have gone on, the name in the state, and a function
    that returns their bytes now.
    """

    looks: tuple[Seen, ...]
    generator: tuple[str, Callable[[], bytes]] | None


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
    ) -> None:
        self.model = None if model is None else ModelState(model)
        self.optimizers = [OptimizerState(optimizer, index) for index, optimizer in enumerate(optimizers)]
        self.schedulers = [SchedulerState(scheduler) for scheduler in schedulers]
        self.scaler = scaler
        self.extra = extra
        self.device = device
        self.random = RandomState(device)
        # A thread that is inside one of these is changing what progress() and scaler_state() return. None: of
        # something that is not written in Python.
        changing = [type(scheduler).step for scheduler in schedulers]  # type: ignore[attr-defined]
        changing += [] if scaler is None else [type(scaler).update]
        self.changing_code = {getattr(inspect.unwrap(one), "__code__", None) for one in changing}

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self.optimizers.append(OptimizerState(optimizer, len(self.optimizers)))

    def local(self) -> dict[str, Encoded]:
        """Return the rank-local state in named parts."""
        parts: dict[str, Encoded] = {}
        if self.extra is not None:
            parts["extra"] = tree_codec.encode(self.extra.state_dict(), "extra")
        if self.model is not None:
            parts["buffers"] = self.model.capture_buffers()
            parts["modules"] = self.model.capture_extra_states()
        return {"random": self.random.capture(), **parts}

    def unchanged(self) -> Unchanged | None:
        """Return what tells that `local` would return what it just did; None if nothing can."""
        of_model = None if self.model is None else self.model.unchanged()
        of_random, generator = self.random.unchanged()
        if self.extra is not None or of_random is None or (self.model is not None and of_model is None):
            return None
        return Unchanged((of_random,) if of_model is None else (of_random, of_model), generator)

    def shared(self) -> Shared:
        """Return the shared state as the optimizer step leaves it."""
        parts = tuple([optimizer.capture() for optimizer in self.optimizers])
        return Shared(parts, self.counts(), self.groups())

    def groups(self) -> list[list[dict[str, Any]]]:
        """Return the hyperparameters of each optimizer's parameter groups."""
        return [optimizer.groups() for optimizer in self.optimizers]

    def progress(self) -> Encoded:
        """Return what may still change between an optimizer step and the next minibatch."""
        return self.take_progress(self.groups())()

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
        self, document: Mapping[str, Json], tensors: Mapping[str, Tensor], whole: bool
    ) -> None:
        """Put back optimizers, schedulers and scaler, and step schedulers as often as the save says is due.

        whole: all of the optimizers, not only what they keep on the host.

        Raises CheckpointError if there are more or fewer of them, or they are not alike.
        """
        progress = tree_codec.decode(document["progress"], tensors)
        if whole or self.optimizers:  # else they were found as they made their first step
            _check_count("optimizers", len(self.optimizers), len(document["optimizers"]))
            for optimizer, tree, groups in zip(
                self.optimizers, document["optimizers"], progress["groups"], strict=True
            ):
                optimizer.restore(tree, tensors, groups, whole)
        _check_count("schedulers", len(self.schedulers), len(progress["schedulers"]))
        for scheduler, state in zip(self.schedulers, progress["schedulers"], strict=True):
            scheduler.scheduler.load_state_dict(state)
        for scheduler, due in zip(self.schedulers, document["scheduler_steps_due"], strict=True):
            scheduler.step(due)
        saved_scaler = document["scaler"]
        if (saved_scaler is None) != (self.scaler is None):
            there, here = ("no", "one") if saved_scaler is None else ("a", "none")
            raise CheckpointError(f"The save has {there} gradient scaler; jitckpt.init was given {here}.")
        if saved_scaler:
            self.scaler.load_state_dict(saved_scaler)

    def restore_local(self, parts: Mapping[str, Any]) -> None:
        """Put back the rank-local state, random numbers last."""
        if (self.extra is None) != ("extra" not in parts):
            there, here = ("none", "an") if "extra" not in parts else ("some", "no")
            raise CheckpointError(
                f"The save has {there} state of `extra`; jitckpt.init was given {here} extra."
            )
        if self.model is not None:
            load_tensors("buffers", self.model.buffers(), parts.get("buffers", {}))
            self.model.restore_extra_states(parts.get("modules", {}))
        if self.extra is not None:
            self.extra.load_state_dict(parts["extra"])
        self.random.restore(parts["random"])


def differ_by_hand(
    before: Sequence[Sequence[Mapping[str, Any]]],
    after: Sequence[Sequence[Mapping[str, Any]]],
    *,
    scheduled: bool,
) -> bool:
    """Whether groups' hyperparameters differ by more than a scheduler sets; scheduled: one was stepped.

    In doubt they do: of a tensor only its device could tell.
    """
    then, now = [*chain(*before)], [*chain(*after)]
    if len(then) != len(now):
        return True
    for old, new in zip(then, now, strict=True):
        if old.keys() != new.keys():
            return True
        for key, value in old.items():
            other = new[key]
            if value is other and type(value) in PLAIN:
                continue
            if not (scheduled and key in SCHEDULED) and not _is_kept(value, other):
                return True
    return False


def _is_kept(before: object, after: object) -> bool:
    if isinstance(before, tuple) and isinstance(after, tuple):  # a list could be changed in its place
        return len(before) == len(after) and all(map(_is_kept, before, after))
    return type(before) is type(after) and type(before) in PLAIN and before == after


def load_tensors(what: str, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into the job's own; CheckpointError unless names, shapes and types are the same."""
    _check_names(what, own, saved)
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise CheckpointError(
                f"{name} of the {what} is {tensor.dtype} of shape {list(tensor.shape)}; in the save it is "
                f"{saved[name].dtype} of shape {list(saved[name].shape)}."
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def optimizer_part(
    tree: Json, tensors: Mapping[str, Tensor], device: torch.device | None
) -> dict[int, dict[str, Any]]:
    """Return what an optimizer keeps beside its tensors on the device, keyed by the parameters' numbers."""
    state: dict[int, dict[str, Any]] = {}
    for key, (dtype, where, values) in tree_codec.decode(tree["numbers"], tensors).items():
        for number, value in zip(where, values, strict=True):
            state.setdefault(number, {})[key] = torch.tensor(value, dtype=dtype, device="cpu")
    for number, key, value in tree_codec.decode(tree["others"], tensors, device):
        state.setdefault(number, {})[key] = value
    return state


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
            {"state": optimizer_part(tree, tensors, None), "param_groups": groups}
            for tree, groups in optimizers
        ],
        "schedulers": progress["schedulers"],
        "scheduler_steps_due": list(document["scheduler_steps_due"]),
        "scaler": document["scaler"],
    }


def fingerprint(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> str:
    """Return what tells this rank's part of a model and its optimizers from all others; "" for none."""
    if model is None and not optimizers:
        return ""
    return torch_parallel.digest(torch_parallel.pieces(model and unwrapped(model), optimizers))


def _is_number(value: Tensor) -> bool:
    """Whether it is one number that its memory tells."""
    return value.dim() == 0 and type(value) is Tensor and value.layout == torch.strided and not value.is_neg()


def _values(numbers: list[Tensor]) -> Sequence[Any]:
    """Return the values of tensors of one number."""
    code = ARRAY_TYPES.get(numbers[0].dtype)
    return [*map(Tensor.item, numbers)] if code is None else array(code, _seen.numbers(numbers))


def _elements(value: object) -> Iterator[object]:
    """Yield what lies in lists and dicts, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _elements(one)
            yield one


def _check_names(what: str, own: Mapping[str, object], saved: Mapping[str, object]) -> None:
    lacking, unknown = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if lacking or unknown:
        parts = [f"lacks {', '.join(lacking[:5])}"] if lacking else []
        parts += [f"has {', '.join(unknown[:5])}, which the model has not"] if unknown else []
        raise CheckpointError(f"The save does not fit the model: of its {what} it {' and '.join(parts)}.")


def _check_count(what: str, own: int, saved: int) -> None:
    if own != saved:
        raise CheckpointError(f"The save has {saved} {what}; jitckpt.init was given {own}.")


def _spelled(name: str) -> str:
    return f"optimizer number {name.rsplit('.', 1)[1]} (from 0)"
