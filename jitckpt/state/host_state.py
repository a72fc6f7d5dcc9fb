"""The state of a training job that the host holds: taken without waiting for the device, and put back.

Rank-local: random numbers, `extra`, module buffers and attributes; the ranks of one shard differ in them.
Shared: what the optimizers keep on the host (Adam counts its steps there), hyperparameters, schedulers;
replicas agree on it.
Tensors on a device are taken by reference: whoever reads them minds the device's own order.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt import _seen
from jitckpt._seen import Seen
from jitckpt.data.loop import NUMBERS, Loop
from jitckpt.data.random_state import RandomState
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded, Json
from jitckpt.errors import CheckpointError
from jitckpt.state import (
    counters,
    earlier_loops,
    kept_variables,
    parallel,
    plain_values,
    script_generators,
    tensors_seen,
    zero_gradients,
)
from jitckpt.state.kept import NOTHING, SCALER, Kept, names_in
from jitckpt.state.kept_variables import KeptVariables
from jitckpt.state.model_state import HeldParameters, ModelState
from jitckpt.state.optimizer_state import (
    OptimizerPart,
    OptimizerState,
    on_host,
    put_hyperparameters,
    states_of,
)
from jitckpt.state.plain_attributes import PlainAttributes, what_tells
from jitckpt.state.process_parts import ProcessParts
from jitckpt.state.schedules import SchedulerState, Stateful, scaler_state, scaler_update_is_due
from jitckpt.state.script_generators import ScriptGenerators
from jitckpt.state.unwrapping import unwrapped
from jitckpt.state.zero_gradients import Gradients, GradientsSeen

SCHEDULED = frozenset({"lr", "momentum", "betas"})  # the hyperparameters that torch's schedulers set
_NOTHING: frozenset[str] = frozenset()
PLAIN = frozenset({type(None), bool, int, float, str})


_NONE = Encoded({}, {})


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

    looks: are asked in one call. others: where more than a look is needed. going_on: of what may have gone on
    (the device's random numbers, and the loop's), the names in the state, and functions that return their
    bytes now.
    """

    looks: tuple[Seen, ...]
    others: tuple[PlainAttributes | ScriptGenerators | KeptVariables, ...] = ()
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
        self.model = None if model is None else ModelState(model, kept.averages())
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
        self.variables: KeptVariables | None = None  # of the script, where they are kept
        self._extra_tensors: list[Tensor] = []  # on a device, as they were last captured
        self.device = device
        self.random, self.of_process = RandomState(device, tensors_seen.counter_of), ProcessParts()
        self._gradients = GradientsSeen()
        # What tells whose they are: of the model, and of the optimizers.
        self._gradients_of: tuple[object, list[object]] = None, []
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
            parts["attributes"] = self.model.capture_attributes()
        if self.loop is not None and self.loop.is_used:
            parts["loop"] = self.loop.capture()
        if self.generators is not None:
            parts[script_generators.PART] = self.generators.capture()
        if self.variables is not None:
            parts[kept_variables.PART] = self.variables.capture()
            parts[counters.PART] = self.variables.capture_counters()
            parts[earlier_loops.PART] = self.variables.earlier.capture()
        return {"random": self.random.capture(), **parts, **self.of_process.capture()}

    def kept_names(self) -> list[str]:
        """Return what is kept though it was not given; of the script what it has used or changed by now."""
        generators = [] if self.generators is None else self.generators.names()
        variables = [] if self.variables is None else self.variables.names()
        return [*self.kept.names(), *(f"the generator {name}" for name in generators), *variables]

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

    def numbers_drawn(self) -> tuple[Any, ...]:
        """Return what is another once a generator of random numbers is used, of the process or the script."""
        every = [self.random.capture(), *([] if self.generators is None else self.generators.now())]
        tensors = [sorted(one.tensors.items()) for one in every]
        return [one.tree for one in every], [
            (name, part.numpy().tobytes()) for of in tensors for name, part in of
        ]

    def unchanged(self) -> Unchanged | None:
        """Return what tells that `local` would return what it just did; None if nothing can."""
        of_model = None if self.model is None else self.model.unchanged()
        of_random, generator = self.random.unchanged()
        of_process = self.of_process.look()
        is_blind = self.model is not None and of_model is None
        if self.extra is not None or is_blind or of_random is None or of_process is None:
            return None
        going_on = [] if generator is None else [generator]
        of_loop = None
        if self.loop is not None and self.loop.is_used:
            of_loop = self.loop.look()
            going_on.append((NUMBERS, self.loop.numbers))
        every: list[tuple[Seen | None, PlainAttributes | ScriptGenerators | KeptVariables]] = []
        if self.model is not None:
            every.append((what_tells(self.model.attributes), self.model.attributes))
        every += [(one.told, one) for one in (self.generators, self.variables) if one is not None]
        looks = [of_loop, of_random, of_model, of_process, *(told for told, _ in every)]
        others = tuple([one for told, one in every if told is None])
        return Unchanged(tuple([one for one in looks if one is not None]), others, tuple(going_on))

    def shared(self) -> Shared:
        """Return the shared state as the optimizer step leaves it."""
        parts = tuple(map(OptimizerState.capture, self.optimizers))  # with no function that goes through them
        held = HeldParameters({}, ()) if self.model is None else self.model.held()
        return Shared(parts, self.counts(), self.groups(), held)

    def shared_again(self, shared: Shared) -> Shared:
        """Return it with what was changed after the optimizers' own steps: by wrappers, and groups added."""
        for part, optimizer in zip(shared.optimizers, self.optimizers, strict=False):
            if optimizer.may_change_later or optimizer.has_new_parameters(part):
                break
        else:
            return shared
        shared = self.with_new_groups(shared)
        parts = [
            part._replace(beside=optimizer.beside()) if optimizer.may_change_later else part
            for part, optimizer in zip(shared.optimizers, self.optimizers, strict=False)
        ]
        return shared._replace(optimizers=(*parts, *shared.optimizers[len(parts) :]))

    def with_new_groups(self, shared: Shared) -> Shared:
        """Return it with the names of parameters that groups were given since, as `groups` tells of these."""
        known = zip(shared.optimizers, self.optimizers, strict=False)
        parts = [optimizer.with_new_groups(part) for part, optimizer in known]
        return shared._replace(optimizers=(*parts, *shared.optimizers[len(parts) :]))

    def gradients(self) -> Gradients:
        """Return which parameters have a gradient now."""
        trained = None if self.model is None else self.model.trained
        is_same = trained is self._gradients_of[0] and len(self.optimizers) == len(self._gradients_of[1])
        for one, called in zip(self.optimizers, self._gradients_of[1], strict=False):
            is_same = is_same and one.called is called
        if not is_same:
            self._gradients_of = trained, [one.called for one in self.optimizers]
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

    def optimized(self) -> dict[str, Tensor]:
        """Return the parameters that the optimizers have, by name."""
        every = [one.named_parameters() for one in self.optimizers]
        return {name: parameter for named in every for name, parameter in named.items()}

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
        return [] if self.model is None or not self.model.has_averages else self.model.updates_of_averages()

    def groups(self) -> list[list[dict[str, Any]]]:
        """Return the hyperparameters of each optimizer's parameter groups."""
        return [*map(OptimizerState.groups, self.optimizers)]

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
        schedulers = [*map(SchedulerState.state, self.schedulers)]
        model = self.model
        averages = [] if model is None or not model.has_averages else model.counts_of_averages()
        value = {"groups": groups, "schedulers": schedulers, "averages": averages}
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
        return tuple(map(SchedulerState.count, self.schedulers))

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
        """Put back schedulers, scaler and counts, and step schedulers as often as the save says is due."""
        self._restore_counts(progress)
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
        self._restore_counts(said)

    def _restore_counts(self, progress: Mapping[str, Any]) -> None:
        if self.model is not None:
            self.model.restore_counts_of_averages(progress.get("averages", []))

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
            self.model.attributes.restore(parts.get("attributes", {}))
        if self.extra is not None:
            self.extra.load_state_dict(parts["extra"])
        self.of_process.restore(parts)
        if self.generators is not None:
            self.generators.restore(parts.get(script_generators.PART))
        if self.variables is not None:
            told = (parts.get(name) for name in (kept_variables.PART, counters.PART, earlier_loops.PART))
            self.variables.restore(*told)
        self.random.restore(parts["random"])


def differ_by_hand(
    before: list[list[dict[str, Any]]],
    after: list[list[dict[str, Any]]],
    *,
    scheduled: bool,
) -> bool:
    """Whether groups' hyperparameters differ by more than a scheduler sets; scheduled: one was stepped.

    In doubt they do: of a tensor only its device could tell.
    """
    return not _seen.same_settings(before, after, SCHEDULED if scheduled else _NOTHING)


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
    local = local_parts(document["local"], tensors, None)
    if "attributes" in local:
        local["attributes"] = plain_values.spelled_out(local["attributes"])
    return local | {
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


def _check_count(what: str, own: int, saved: int) -> None:
    if own != saved:
        raise CheckpointError(f"The save has {saved} {what}; jitckpt.init was given {own}.")
