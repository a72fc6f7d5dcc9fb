"""A model's part of a training's state: parameters, buffers, extra states and attributes, by name."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from jitckpt import _seen
from jitckpt._seen import Seen
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded, Json
from jitckpt.errors import CheckpointError
from jitckpt.state import inner_tensors, parallel, tensors_seen
from jitckpt.state.joined import is_of_average, joined
from jitckpt.state.module_attributes import owners_of
from jitckpt.state.plain_attributes import PlainAttributes
from jitckpt.state.unwrapping import unwrapped
from jitckpt.state.wrapped import Wrapped, check_as_built

_NONE = Encoded({}, {})
COUNT = "n_averaged"  # of an AveragedModel


def _ddps(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if isinstance(one, nn.parallel.DistributedDataParallel)]


class HeldParameters(NamedTuple):
    """The model's parameters after a step: what this rank holds of each by name, and which are frozen.

    frozen: those that do not require gradients. cuts: which part of one this rank holds, where it is not the
    whole (parallel.cuts). aliases: the other names of shared parameters, and the one that is used for them.
    One that is made of others is there by these, but in `frozen`.
    """

    parameters: dict[str, Tensor]
    frozen: tuple[str, ...]
    cuts: Mapping[str, Json] = MappingProxyType({})
    aliases: Mapping[str, str] = MappingProxyType({})


class ModelState:
    """A model's parameters, buffers, extra states and attributes, by name."""

    def __init__(self, model: nn.Module, averages: Collection[nn.Module] = ()) -> None:
        """averages: of its weights, that are kept with it."""
        inner = unwrapped(model)
        self._in_ddp = inner is not model and bool(_ddps(model))
        self._model = joined(inner, averages)
        self._buffers: list[tuple[str, dict[str, Tensor | None], str]] = []
        self._passing: list[tuple[str, dict[str, Tensor | None], str, object]] = []  # not persistent, so far
        self._with_extra_state: list[tuple[str, nn.Module]] = []
        self._averages: list[AveragedModel] = []
        self.has_averages = False
        self._captured: Encoded | None = None  # the buffers, and which they were and where they lay:
        self._seen = Seen()
        self._kept_elsewhere: PlainAttributes | None = None
        self._watched: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = (
            (),
            (),
        )  # the parameters, their memory
        self._storages: tuple[bytes, set[int]] = b"", set()  # where that lies, and the storages it is part of
        self.attributes = PlainAttributes(owners_of(self._model), lies_in_parameter=self.lies_in_parameter)
        self._captured_attributes = _NONE, self.attributes.changed()
        self._held: HeldParameters | None = None
        self._flags = b""
        self._versions = b""
        self._parameters = _parameters_of(self._model)
        # The parameters themselves, by name; another object once there are others.
        self.trained: Mapping[str, Tensor] = self._parameters
        self.memory: dict[str, Tensor] = {}  # by name; it counts what is written to the parameters
        self.around: dict[str, Tensor] = {}  # and so do those that are made of it
        self._places = b""  # where it lies
        self._called: dict[int, str] = {}
        self._structure = Seen()
        self._wrapped = Wrapped()  # parameters that are made of other tensors
        self._wrapped_built: Mapping[str, Json] = {}  # what belongs to these beside them, as they were built
        self._wrapped_buffers: dict[str, Json] = {}
        self.is_restructured = (
            False  # whether `follow` has seen that parameters have come, gone or been replaced
        )
        self._take_structure()
        self._wrapped_built = self._wrapped.descriptions()
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
        if self._kept_elsewhere is None:
            self.attributes.look_again(owners_of(self._model))
        self._averages = [one for one in self._model.modules() if isinstance(one, AveragedModel)]
        self.has_averages = bool(self._averages)
        for prefix, module in self._model.named_modules():
            for name in module._buffers:
                full = f"{prefix}.{name}".lstrip(".")
                if full in self._parameters or (name == COUNT and isinstance(module, AveragedModel)):
                    continue
                if full in kept or name not in module._non_persistent_buffers_set:
                    self._buffers.append((full, module._buffers, name))
                else:
                    self._passing.append((full, module._buffers, name, _mark(module._buffers[name])))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self._with_extra_state.append((prefix, module))

    @property
    def module(self) -> nn.Module:
        """The model without what wraps it, and its averages."""
        return self._model

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
        found = _parameters_of(self._model)
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
        self.trained = self._parameters
        self._look_at_wrappers()
        self._called = {id(one): f"model.{name}" for name, one in self._model.named_parameters()}
        self._called |= {id(one): f"model.{name}" for name, one in self._parameters.items()}
        # What FSDP1 writes to its flat parameters is counted nowhere that lasts.
        watched = {} if parallel.is_flattened(self._model) else self._parameters
        self.memory = {
            called: leaf
            for name, one in watched.items()
            for called, leaf in inner_tensors.leaves(parallel.memory_of(one), f"model.{name}").items()
        }
        # What is written to one that is made of others counts there, and not in these.
        self.around = {
            called: memory
            for name, one in watched.items()
            if inner_tensors.is_wrapper(memory := parallel.memory_of(one))
            for called in inner_tensors.leaves(memory, f"model.{name}")
        }
        self._watched = tuple(self._parameters.values()), tuple(self.memory.values())
        self._held = None

    def _look_at_wrappers(self) -> None:
        """Find the parameters that are made of others, and what follows from that."""
        self._wrapped, self._cuts, aliases = Wrapped(), {**parallel.cuts(self._model)}, _aliases(self._model)
        made_of: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            memory = parallel.memory_of(parameter)
            if not inner_tensors.is_wrapper(memory):
                continue
            made_of[name] = inner_tensors.leaves(memory, name)
            if inner_tensors.why_not(memory, name) is None:  # else a save function has it, or it is refused
                self._wrapped.add(name, memory)
            if self._cuts.pop(name, None) is not None:  # which part of what these are is not to be known
                self._cuts |= {
                    called: {"shape": list(leaf.shape), "offsets": None}
                    for called, leaf in made_of[name].items()
                }
        self._aliases = {
            f"{alias}{called.removeprefix(name)}": called
            for alias, name in aliases.items()
            for called in made_of.get(name, [name])
        }

    def held(self) -> HeldParameters:
        """Return what is held of the parameters now; the same object while that is the same memory.

        Raises TreeError for one that is made of others, and in another way than the script has built it.
        """
        if self._wrapped and not self._wrapped.is_same():
            self._take_structure()
            self._wrapped.check(self._wrapped_built)
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

    def lies_in_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a parameter: a row of it, or its `data`."""
        if inner_tensors.is_wrapper(tensor):
            return any(map(self.lies_in_parameter, inner_tensors.leaves(tensor, "").values()))
        memory = self._watched[1]
        places = tensors_seen.addresses(memory)
        if places != self._storages[0]:
            self._storages = places, {place for one in memory for place in parallel.storages(one)}
        return tensor.untyped_storage().data_ptr() in self._storages[1]

    def thawed(self) -> list[str]:
        """Return the parameters that are trained, but were frozen as DDP was built around the model."""
        return self._thawed if self._in_ddp else []

    def _frozen(self) -> tuple[str, ...]:
        return tuple([name for name, one in self._parameters.items() if not one.requires_grad])

    def parameters(self) -> dict[str, Tensor]:
        """Return what this rank holds of each parameter; a shared one is there once."""
        return {
            called: part
            for name, parameter in self._parameters.items()
            for called, part in parallel.held(parameter, name).items()
        }

    def restore_parameters(self, saved: Mapping[str, Tensor], frozen: Sequence[str]) -> None:
        """Put saved parameters in the place of the model's, as they lay, and which of them are frozen.

        Raises CheckpointError unless the names are the same, and the shapes and types where they can't be
        made so: of what a parallel wrapper holds in parts. Of averages those count that are here and there.
        """
        own, saved = _without_lone_averages(self.parameters(), saved)
        _check_names("parameters", own, saved)
        thawed = [name for name in self._frozen() if name in own and name not in frozen]
        if thawed and self._in_ddp:
            raise CheckpointError(
                f"{', '.join(thawed[:5])}: frozen as DistributedDataParallel was built around the model, but "
                "not in the save, so no gradients of it would be averaged. Give jitckpt.init the model "
                "without DistributedDataParallel, call job.restore(), and wrap it then."
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                for called, tensor in parallel.held(parameter, name).items():
                    if called in own:
                        _put_parameter(called, parameter, tensor, saved[called])
        for name, parameter in self._parameters.items():
            may_have = parameter.is_floating_point() or parameter.is_complex()
            is_there = name in own or not own.keys().isdisjoint(parallel.held(parameter, name))
            if is_there and may_have and parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)

    def restore_buffers(self, saved: Mapping[str, Tensor]) -> None:
        """Put saved buffers in the place of the model's; CheckpointError unless they are the same ones.

        One may have been None as the script built it, or of another shape: a memory bank grows.
        """
        for one in [*self._passing]:
            name, holder, key, _ = one
            if name in saved or any(called in saved for called in _held_of(holder.get(key), name)):
                self._passing.remove(one)
                self._buffers.append(one[:3])
                holder[key] = saved.get(name, holder[key])
        self._captured = None
        for name, holder, key in self._buffers:
            if name in saved and key in holder and holder[key] is None:
                holder[key] = saved[name]
        own, saved = _without_lone_averages(self.buffers(), saved)
        _check_names("buffers", own, saved)
        with torch.no_grad():
            for name, holder, key in self._buffers:
                buffer = holder.get(key)
                if buffer is None or name not in own:
                    for called, tensor in {} if buffer is None else _held_of(buffer, name).items():
                        if called in own:
                            _check_alike("buffers", called, tensor, saved[called])
                            tensor.copy_(saved[called])
                    continue
                value, tensor = saved[name], own[name]
                lies_so = (buffer.shape, buffer.stride()) == (value.shape, value.stride())
                is_same_kind = buffer.dtype == value.dtype
                # FSDP1 with mixed precision gives them another type in its first pass, in this way, too.
                is_cast = self.is_flattened and buffer.shape == value.shape and buffer.is_floating_point()
                if type(buffer) is Tensor and (is_cast if not is_same_kind else not lies_so):
                    buffer.data = value.to(buffer.device)
                else:
                    _check_alike("buffers", name, tensor, value)
                    tensor.copy_(value)

    def buffers(self) -> dict[str, Tensor]:
        found = ((name, holder.get(key)) for name, holder, key in self._buffers)
        return {
            called: part
            for name, buffer in found
            if buffer is not None
            for called, part in parallel.held(buffer, name).items()
        }

    def capture_buffers(self) -> Encoded:
        """Return the buffers under the name "buffers"; the same object while all are the same on a device."""
        # What was captured keeps its memory, so nothing else can come to lie there.
        if self._captured is None or not self._seen.is_same():
            self._captured, seen = None, Seen()
            for _, holder, key in self._buffers:
                seen.entry(holder, key)
            self._check_buffers()
            captured = tree_codec.encode(self.buffers(), "buffers")
            there = [buffer for _, holder, key in self._buffers if (buffer := holder.get(key)) is not None]
            if any(type(one) is not Tensor or one.device.type == "cpu" for one in there):
                return captured
            for buffer in there:
                seen.place(buffer)
            self._captured, self._seen = captured, seen
        return self._captured

    def _check_buffers(self) -> None:
        """Raise TreeError, which names it, for one that is made of others otherwise than it was at first."""
        for name, holder, key in self._buffers:
            buffer = holder.get(key)
            if buffer is not None and parallel.is_wrapper(buffer):
                memory = parallel.memory_of(buffer)
                description = inner_tensors.described(memory, name)
                check_as_built(name, memory, description, self._wrapped_buffers.setdefault(name, description))

    def buffer_versions(self) -> bytes:
        there = [buffer for _, holder, key in self._buffers if (buffer := holder.get(key)) is not None]
        inside = [
            leaf for one in there if parallel.is_wrapper(one) for leaf in parallel.held(one, "").values()
        ]
        return _seen.versions([*there, *inside]) if there else b""

    def counts_of_averages(self) -> list[int]:
        """Return of how many models each average is that counts them on the host."""
        return [int(one.n_averaged) for one in self._averages if one.n_averaged.is_cpu]

    def restore_counts_of_averages(self, counts: Sequence[int]) -> None:
        """Put these back, unless the save is of other averages."""
        on_host = [one.n_averaged for one in self._averages if one.n_averaged.is_cpu]
        for tensor, count in zip(on_host, counts, strict=True) if len(on_host) == len(counts) else ():
            tensor.fill_(count)

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

    def leave_attributes(self, to: PlainAttributes) -> None:
        """Keep the attributes no more: somebody else does, in these."""
        self._kept_elsewhere = to
        self.attributes.look_again({})

    def kept_attributes(self) -> set[object]:
        """Return which of them are kept, by whomever, as PlainAttributes.kept says it."""
        return (self._kept_elsewhere or self.attributes).kept()

    def capture_attributes(self) -> Encoded:
        """Return the attributes that have changed under that name; the same object while none has since."""
        changed = self.attributes.changed()
        if changed is not self._captured_attributes[1]:
            self._captured_attributes = tree_codec.encode(changed, "attributes"), changed
        return self._captured_attributes[0]

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


def _parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, and of averages how many models each is of, where that lies on a device.

    It has to be what it was with the average's parameters, which come from a replica.
    """
    averages = [(name, one) for name, one in model.named_modules() if isinstance(one, AveragedModel)]
    return parallel.parameters(model) | {
        f"{name}.{COUNT}".lstrip("."): one.n_averaged for name, one in averages if not one.n_averaged.is_cpu
    }


def _put_parameter(name: str, parameter: Tensor, here: Tensor, value: Tensor) -> None:
    """Put a value into a parameter, or a part that it is made of, which lies `here`."""
    lies = (here.shape, here.dtype, here.stride())
    if parallel.is_plain(parameter) and lies != (value.shape, value.dtype, value.stride()):
        parameter.data = value.to(parameter.device)
    else:
        _check_alike("parameters", name, here, value)
        here.copy_(value)


def _held_of(buffer: Tensor | None, name: str) -> dict[str, Tensor]:
    return {} if buffer is None else parallel.held(buffer, name)


def _without_lone_averages(
    own: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return both without what an average has that is not among the others."""
    return (
        {name: one for name, one in own.items() if name in saved or not is_of_average(name)},
        {name: one for name, one in saved.items() if name in own or not is_of_average(name)},
    )


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
