"""The state of one optimizer: what it keeps of each parameter, by its name, and what it keeps beside.

A parameter is called as its model calls it. So its state is found again where a start gives the optimizer its
parameters in another order, and what can't be found is named instead of put in another one's place.
"""

import operator
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt import _seen
from jitckpt._seen import Seen
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded, Json
from jitckpt.errors import CheckpointError
from jitckpt.state import inner_tensors, parallel, tensors_seen
from jitckpt.state.attributes import ChangedAttributes
from jitckpt.state.wrapped import Wrapped, make_wrapped, place_of

# How Python's array calls the types of torch that it has too.
ARRAY_TYPES = {torch.float32: "f", torch.float64: "d", torch.int64: "q", torch.int32: "i", torch.uint8: "B"}
SHOWN_NAMES = 5
PLAIN = (Tensor, nn.Parameter)
_NONE = Encoded([], {})
_UNWRAPPED: Mapping[str, Json] = MappingProxyType({})
Names = Callable[[], Mapping[int, str]]  # what a model calls its parameters, by their id()
Find = Callable[[str], Tensor | None]  # the parameter that a model calls so


class OptimizerPart(NamedTuple):
    """What an optimizer's state was after a step.

    numbers: by key (such as Adam's "step") the type of the tensors of one number on the host, whose they are,
    by the parameters' numbers, and their values (an array takes little memory). others: what else is on the
    host. device: tensors there, by reference and name; of DTensors this rank's part, and in `placements` how
    they lie. names: of the parameters, group by group; that is what numbers them.
    beside: what it keeps under no parameter, its own state_dict where its class defines one, and attributes
    that have changed. same: names of tensors that are the very tensor of another name.
    wrapped: tensors that are made of others, by name, as inner_tensors describes them; these are among the
    others. around: of such on a device, by the names of what they are made of, what counts writes, too.
    """

    numbers: dict[str, tuple[torch.dtype, list[int], Sequence[Any]]]
    others: Encoded
    device: dict[str, Tensor]
    placements: dict[str, Json]
    names: list[list[str]]
    beside: Encoded
    same: Mapping[str, str] = MappingProxyType({})
    wrapped: Mapping[str, Json] = MappingProxyType({})
    around: Mapping[str, Tensor] = MappingProxyType({})

    def on_host(self) -> Encoded:
        """Return what is on the host, for the save, with those tensors on a device that `device` lacks."""
        listed = {key: (dtype, where, [*values]) for key, (dtype, where, values) in self.numbers.items()}
        tree = {
            "names": self.names,
            "numbers": tree_codec.encode(listed, "numbers").tree,
            "others": self.others.tree,
            "placements": self.placements,
            "beside": self.beside.tree,
            "same": dict(self.same),
            "wrapped": dict(self.wrapped),
        }
        return Encoded(tree, self.others.tensors | self.beside.tensors)


class OptimizerState:
    """Takes an optimizer's state after each of its steps, and puts it back."""

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        *,
        names: Names | None = None,
        find: Find = lambda name: None,
        attributes: Sequence[ChangedAttributes] = (),
    ) -> None:
        """name: how its tensors' names begin, optimizer.0. attributes: of it, and of objects around it.

        Without `names` parameters are told apart by their places alone.
        """
        self.optimizer = optimizer
        self.name = name
        self._names, self._find = names, find
        self._has_own_dict = _has_own_dict(optimizer)
        self._attributes = attributes
        self.looks = any(one.looks for one in attributes)  # whether it may have `problems`
        # Whether it has a wrapper, which may change its own attributes after the optimizer's own step.
        self.may_change_later = any(one.looks for one in attributes[1:])
        self._parameters: list[Tensor] = []
        self._seen: Seen | None = None  # tells when a tensor of the state is replaced
        self._unchanged: tuple[Seen, ...] = ()  # tell that nothing but numbers is new, if there are any
        self._beside = _NONE  # as it was captured last
        # What the parameters were called as it was last captured; another object if they may be others.
        self.called: list[list[str]] = []
        self._device: dict[str, Tensor] = {}
        self._placements: dict[str, Json] = {}
        self._numbers: dict[str, tuple[torch.dtype, list[int], tuple[Tensor, ...]]] = {}
        self._on_host: tuple[Tensor, ...] = ()  # all of the latter
        self._others: list[tuple[int, dict[str, Any], str]] = []
        self._loose: list[tuple[Any, Any]] = []  # what lies in the state under something else
        self._named: dict[str, Tensor] = {}
        self._same: dict[str, str] = {}
        self._wrapped, self._around = Wrapped(), dict[str, Tensor]()
        # What is there before a save is put back, which is put into its memory.
        own = parallel.own_state(optimizer)
        kept = [value for state in own.values() if isinstance(state, dict) for value in state.values()]
        self._built = [weakref.ref(one) for one in kept if isinstance(one, Tensor)]
        self.refusal: str | None = None  # why no save can hold this state
        self._elsewhere: list[tuple[str, Tensor, int]] = []  # attributes have its memory, too; its version
        self._built_groups = self.names()
        self.is_restructured = False  # whether its groups have other parameters than the script gave them

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # where it hangs on an optimizer that is copied or pickled: no part of it

    def why_not_cut_anew(self) -> str | None:
        """Return why its state can't be put together from parts that others had, if so."""
        if len(parallel.way_to_state(self.optimizer)) > 1:
            return "what a rank holds of its state follows from the number of ranks (ZeroRedundancyOptimizer)"
        if self._has_own_dict:
            return f"{type(self.optimizer).__name__} says by itself what its state is"
        if self.own_parameters():
            return "it has parameters of its own, which are not the model's"
        if self._wrapped:
            return f"{next(iter(self._wrapped.descriptions()))} is made of other tensors"
        return None

    def look_again(self) -> None:
        """Its state is made of others than before."""
        self._seen, self._unchanged = None, ()

    def parameters(self) -> list[Tensor]:
        return parameters_of(self.optimizer)

    def named_parameters(self) -> dict[str, Tensor]:
        """Return its parameters by name."""
        called = [name for names in self.names() for name in names]
        return dict(zip(called, self.parameters(), strict=True))

    def with_new_groups(self, part: OptimizerPart) -> OptimizerPart:
        """Return what was captured with the names of parameters that were added since, as last ones."""
        if not self.has_new_parameters(part):
            return part
        names, known = self.names(), sum(map(len, part.names))
        are_last = [*chain(*names)][:known] == [*chain(*part.names)]
        return part._replace(names=names) if are_last else part

    def has_new_parameters(self, part: OptimizerPart) -> bool:
        """Whether its groups have more parameters, or fewer, than as this was captured."""
        known = sum(map(len, part.names))
        for group in self.optimizer.param_groups:
            known -= len(group["params"])
        return known != 0

    def own_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that are not the model's (fp32 masters, flat partitions), by name."""
        if self._names is None:
            return {}
        known = self._names()
        own = [parameter for parameter in self.parameters() if id(parameter) not in known]
        return {f"own.{number}": parameter for number, parameter in enumerate(own)}

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups' hyperparameters."""
        if (plain := _seen.settings_of(self.optimizer.param_groups)) is not None:
            return plain
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
    def told(self) -> Seen | None:
        """What tells whether all is where it was captured last; another object after each look."""
        return self._seen

    @property
    def seen(self) -> Seen | None:
        """What tells that named_tensors would return what it just did; None if it has not been called."""
        return self._seen if self._named else None

    def named_tensors(self) -> dict[str, Tensor]:
        """Return its parameters and what it keeps on a device, by name; the same dict while nothing changes.

        Raises CheckpointError if it keeps tensors in a list or the like, or under something that is none of
        its parameters: there they have no name.
        """
        if not self.is_as_named():
            self._look()
            for number, state, key in self._others:
                if any(isinstance(one, Tensor) for one in _elements(state[key])):
                    raise CheckpointError(
                        f"the {self} keeps tensors in {key!r} of parameter {number}, a "
                        f"{type(state[key]).__name__}"
                    )
            for loose, value in self._loose:
                if any(isinstance(one, Tensor) for one in _elements([value])):
                    raise CheckpointError(
                        f"the {self} keeps tensors under {loose!r:.80}, which is none of its parameters"
                    )
            parameters: dict[str, Tensor] = {}
            for number, parameter in enumerate(self._parameters):
                name, is_plain = f"{self.name}.parameter.{number}", type(parameter) in PLAIN
                parameters |= {name: parameter} if is_plain else parallel.held(parameter, name)
            self._named = parameters | self._device
        return self._named

    def capture(self) -> OptimizerPart:
        """Take the state as it is now. Raises TreeError, naming the place, for what can't be saved."""
        tensors_seen.fetch(self._on_host)
        if self._wrapped and not self._wrapped.is_same():
            self.look_again()
        if not (self._unchanged and _seen.all_same(self._unchanged)):
            self._take()
        for key, tensor, version in self._elsewhere:
            if tensor._version != version:  # else it is a table that never changes
                self.refusal = (
                    f"The {self} has the memory of its state {key!r} in an attribute, too, and that is built "
                    "after jitckpt.init, so after a restart the two would be apart. Build the state in the "
                    "optimizer's __init__, or give the class state_dict and load_state_dict of its own."
                )
        others = _NONE
        if self._others:
            listed = [(number, key, state[key]) for number, state, key in self._others]
            others = tree_codec.encode(listed, f"{self.name}.others")
        return OptimizerPart(  # by their places, which takes less time
            _with_values(self._numbers),
            others,
            self._device,
            self._placements,
            self.called,
            self._beside,
            self._same,
            self._wrapped.descriptions() if self._wrapped else _UNWRAPPED,
            self._around,
        )

    def _take(self) -> None:
        """Take all but numbers."""
        if self._seen is None or not self._seen.is_same():
            self._look()
        self._beside = self.beside()
        told = [one.told for one in self._attributes if one.told is not None]
        can_tell = len(told) == len(self._attributes) and not (self._has_own_dict or self._loose)
        self._unchanged = (self._seen, *told) if can_tell and self._seen is not None else ()

    def problems(self) -> list[str]:
        """Return sentences that name the attributes which change and can't be saved."""
        return [problem for attributes in self._attributes for problem in attributes.problems]

    def restore(
        self,
        tree: Json,
        tensors: Mapping[str, Tensor],
        groups: Sequence[Mapping[str, Any]],
        whole: bool,
        *,
        for_a_while: bool = False,
    ) -> None:
        """Put a captured state back; `whole`: in place of all that is there, else the host's part alone.

        for_a_while: nothing is done on the device, and the tensors there stay as they are.
        Groups that the training added later, of the model's parameters, are added. Raises CheckpointError if
        some of the optimizer's parameters or of the save's are not to be found in the other.
        """
        self._put_groups(tree["names"], groups, None if for_a_while else {})
        parameters = self.parameters()
        state = parallel.own_state(self.optimizer)
        device = parameters[0].device if parameters else None
        beside = {
            key: tree_codec.decode(one, tensors, device)
            for key, one in (tree["beside"] or {}).items()
            if whole or key != "own"
        }
        built: dict[tuple[int, str], Tensor] = {}
        if whole and self._has_own_dict:
            self.optimizer.load_state_dict(beside["own"])
        elif whole:
            built = _tensors_once(parameters, state)
            state.clear()
        _put_state(state, parameters, tree, tensors, prefix=f"{self.name}.state.", built=built, whole=whole)
        for key, value in beside.get("loose", []):
            state[key] = value
        if whole:
            self._put_own(tensors)
        for attributes, saved in zip(self._attributes, beside.get("attributes", []), strict=False):
            attributes.restore(saved, in_place=not for_a_while)
        self._seen, self._unchanged = None, ()

    def __str__(self) -> str:
        return f"optimizer number {self.name.removeprefix('optimizer.')} (from 0)"

    def beside(self) -> Encoded:
        """Take what it keeps under no parameter, as it is now."""
        if not (self.looks or self._has_own_dict or self._loose):
            return _NONE
        attributes = [one.changed() for one in self._attributes] if self.looks else []
        beside: dict[str, Any] = {}
        if self._has_own_dict:
            beside["own"] = self.optimizer.state_dict()
        if self._loose:
            beside["loose"] = self._loose
        if any(attributes):
            beside["attributes"] = attributes
        return tree_codec.encode(beside, f"{self.name}.beside") if beside else _NONE

    def _put_own(self, tensors: Mapping[str, Tensor]) -> None:
        own, prefix = self.own_parameters(), f"{self.name}.own."
        saved = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if not _put_alike([parallel.held(one, f"{self.name}.{name}") for name, one in own.items()], saved):
            raise CheckpointError(
                f"The {self} has {len(own)} parameters that are not the model's; the save has {len(saved)}, "
                "or of other shapes and types. Build it as it was when the save was made."
            )

    def _put_groups(
        self,
        names: Sequence[Sequence[str]],
        groups: Sequence[Mapping[str, Any]],
        written: dict[int, Tensor] | None,
    ) -> None:
        """Make the parameter groups what they were, in their order, which numbers the parameters.

        written: as for put_hyperparameters.
        """
        own = self.optimizer.param_groups
        if len(names) != len(groups):
            raise CheckpointError(
                f"The save tells of {len(names)} parameter groups of the {self}, and of hyperparameters of "
                f"{len(groups)}: groups were taken away between an optimizer step and the next minibatch."
            )
        if self._names is None and [len(group["params"]) for group in own] == [*map(len, names)]:
            for one, saved in zip(own, groups, strict=True):  # their places are all that is known of them
                put_hyperparameters(one, saved, written)
            return
        here = {
            name: parameter
            for called, group in zip(self.names(), self.optimizer.param_groups, strict=True)
            for name, parameter in zip(called, group["params"], strict=True)
        }
        self._check_names(here, names)
        of_group = {
            id(parameter): group for group in self.optimizer.param_groups for parameter in group["params"]
        }
        ordered: list[dict[str, Any]] = []
        for called, saved in zip(names, groups, strict=True):
            parameters = [here[name] if name in here else self._find(name) for name in called]
            found = {id(group): group for one in parameters if (group := of_group.get(id(one))) is not None}
            hyperparameters = {key: value for key, value in saved.items() if key != "parameters"}
            if len(found) > 1 or any(one is group for group in found.values() for one in ordered):
                raise CheckpointError(
                    f"The {self} has {', '.join(called[:SHOWN_NAMES])} in other groups than the save. Build "
                    "it as it was when the save was made."
                )
            if found:
                (group,) = found.values()
                self._put_order(group, parameters)
            else:
                self.optimizer.add_param_group({"params": parameters, **hyperparameters})
                group = self.optimizer.param_groups[-1]
            put_hyperparameters(group, hyperparameters, written)
            ordered.append(group)
        if [*map(id, ordered)] != [*map(id, self.optimizer.param_groups)]:
            self.optimizer.param_groups[:] = ordered

    def _put_order(self, group: dict[str, Any], parameters: Sequence[Tensor | None]) -> None:
        if [*map(id, group["params"])] == [*map(id, parameters)]:
            return
        if len(parallel.way_to_state(self.optimizer)) > 1:
            raise CheckpointError(
                f"The {self} has its parameters in another order than the save, and what a rank holds of its "
                "state follows from that order. Build it as it was when the save was made."
            )
        group["params"][:] = parameters

    def _check_names(self, here: Mapping[str, Tensor], names: Sequence[Sequence[str]]) -> None:
        saved = [name for called in names for name in called]
        lacking = [name for name in saved if name not in here and self._find(name) is None]
        unknown = sorted(here.keys() - set(saved))
        if lacking or unknown:
            counts = [len(group["params"]) for group in self.optimizer.param_groups]
            parts = [f"lacks {', '.join(lacking[:SHOWN_NAMES])}"] if lacking else []
            parts += [f"has {', '.join(unknown[:SHOWN_NAMES])}, which the save has not"] if unknown else []
            raise CheckpointError(
                f"The {self} has parameter groups of {counts} parameters; the save has "
                f"{[*map(len, names)]}: it {' and '.join(parts)}. Build it as it was when the save was made."
            )

    def names(self) -> list[list[str]]:
        """Return the parameters' names, group by group."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        if self._names is None:
            places = iter(range(sum(map(len, groups))))
            return [[f"parameter.{next(places)}" for _ in group] for group in groups]
        known, own = self._names(), iter(self.own_parameters())
        return [[known.get(id(one)) or next(own) for one in group] for group in groups]

    def _look(self) -> None:
        self._parameters = self.parameters()
        self._seen, self._unchanged, seen = None, (), Seen()
        for keeper, attribute in parallel.way_to_state(self.optimizer):
            seen.attribute(keeper, attribute)
        seen.attribute(self.optimizer, "param_groups")
        seen.size(self.optimizer.param_groups)
        for group in self.optimizer.param_groups:
            seen.entry(group, "params")
            seen.elements(group["params"])
        self.called = self.names()
        self.is_restructured |= self.called != self._built_groups
        self._numbers, self._others, self._device, self._placements, self._named = {}, [], {}, {}, {}
        self._loose, self._same, self._wrapped, self._around = [], {}, Wrapped(), {}
        for name, parameter in self.own_parameters().items():
            self._device |= parallel.held(parameter, f"{self.name}.{name}")
        if not self._has_own_dict:
            seen.values(parallel.own_state(self.optimizer))
            self._look_at_state(seen)
        self._on_host = tuple([one for *_, found in self._numbers.values() for one in found])
        self._seen = seen

    def _look_at_state(self, seen: Seen) -> None:
        first: dict[int, str] = {}
        found_there: dict[str, Tensor] = {}
        numbers: dict[str, tuple[torch.dtype, list[int], list[Tensor]]] = {}
        for number, state in self._states():
            seen.size(state)
            for key, value in state.items():
                if isinstance(value, Tensor):
                    seen.entry(state, key)
                    called = f"{self.name}.state.{number}.{key}"
                    if first.setdefault(id(value), called) != called:
                        self._same[called] = first[id(value)]
                        continue
                    if type(value) not in PLAIN and self._is_wrapper(called, value, first):
                        continue
                    found_there[called] = value
                    how = parallel.placement(value)
                    if value.device.type != "cpu" or how is not None:
                        name = f"{self.name}.state.{number}.{key}"
                        self._device[name] = parallel.local(value)
                        if how is not None:
                            self._placements[name] = how
                        continue
                    dtype, where, found = numbers.get(key, (value.dtype, [], []))
                    if _is_number(value) and dtype == value.dtype:
                        seen.place(value)
                        where.append(number)
                        found.append(value)
                        numbers[key] = dtype, where, found
                        continue
                self._others.append((number, state, key))
        self._numbers = {key: (dtype, where, (*found,)) for key, (dtype, where, found) in numbers.items()}
        before = {id(tensor): version for _, tensor, version in self._elsewhere}
        self._elsewhere = [
            (key, tensor, before.get(id(tensor), version))
            for key, tensor, version in self._known_elsewhere(found_there)
        ]

    def _is_wrapper(self, called: str, value: Tensor, first: dict[int, str]) -> bool:
        """Look at a tensor of the state that may be made of others; returns whether it is.

        Raises TreeError, which names it, for one that can't be saved. first: names of tensors, by their ids.
        """
        memory, how = parallel.memory_of(value), parallel.placement(value)
        if not inner_tensors.is_wrapper(memory):
            inner_tensors.described(memory, called)
            return False
        self._wrapped.add(called, memory)
        if how is not None:
            self._placements[called] = how
        prefix = f"{self.name}.state."
        for name, leaf in inner_tensors.leaves(memory, called).items():
            if first.setdefault(id(leaf), name) != name:
                self._same[name] = first[id(leaf)]
            elif leaf.device.type != "cpu":
                self._device[name], self._around[name] = leaf.detach(), memory
            else:
                number, key = place_of(name, prefix)
                self._others.append((number, {key: leaf}, key))
        return True

    def _known_elsewhere(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor, int]]:
        """Return the state whose memory an attribute has, too: a save has only values.

        What the script builds before the save is put back has that memory again.
        """
        beside = [
            one
            for name, value in vars(self.optimizer).items()
            if name not in ("state", "param_groups", "defaults")
            for one in (value, *_elements(value))
            if isinstance(one, Tensor)
        ]
        if not beside:
            return []
        built = {id(one) for reference in self._built if (one := reference()) is not None}
        parameters = {id(one) for one in self._parameters}
        spans: dict[int, list[tuple[int, int]]] = {}  # by the storage
        for one in beside:
            if id(one) not in parameters and (span := _span(one)) is not None:
                spans.setdefault(one.untyped_storage().data_ptr(), []).append(span)
        found = []
        for name, tensor in tensors.items():
            if id(tensor) in built or (span := _span(tensor)) is None:
                continue
            others = spans.get(tensor.untyped_storage().data_ptr(), [])
            if any(begin < span[1] and span[0] < end for begin, end in others):
                found.append((name.removeprefix(f"{self.name}.state."), tensor, tensor._version))
        return found

    def _states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        for key, state in parallel.own_state(self.optimizer).items():
            number = numbers.get(id(key))
            if number is not None:
                yield number, state
            elif not isinstance(key, Tensor):  # a parameter that is in no group any more is never stepped
                self._loose.append((key, state))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def states_of(
    optimizer: Optimizer,
    name: str,
    *,
    names: Names | None = None,
    find: Find = lambda name: None,
    wrappers: Sequence[object] = (),
) -> list[OptimizerState]:
    """Return the state of an optimizer and of those that it has inside."""
    found = []
    for called, one in with_inner(optimizer, name):
        around = wrappers if one is optimizer else ()
        attributes = [ChangedAttributes(each, one, around) for each in (one, *around)]
        found.append(OptimizerState(one, called, names=names, find=find, attributes=attributes))
    return found


def with_inner(optimizer: Optimizer, name: str) -> Iterator[tuple[str, Optimizer]]:
    """Yield an optimizer and those that it keeps in its attributes (such as Lookahead's), by their names."""
    yield name, optimizer
    if type(optimizer).__module__.startswith("torch.") or _has_own_dict(optimizer):
        return  # torch's own are known; one with a state_dict of its own says there what is inside
    for attribute, inner in inside(optimizer):
        if inner.state is not optimizer.state:
            yield from with_inner(inner, f"{name}.{attribute}")


def inside(owner: object) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers that an object keeps in its attributes, under their names there."""
    for attribute, value in [*vars(owner).items()]:
        if isinstance(value, list | tuple):
            for number, one in enumerate(value):
                if isinstance(one, Optimizer) and one is not owner:
                    yield f"{attribute}.{number}", one
        elif isinstance(value, Optimizer) and value is not owner:
            yield attribute, value


def on_host(
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


def _put_alike(here: Iterable[Mapping[str, Tensor]], saved: Mapping[str, Tensor]) -> bool:
    """Put saved tensors into those that are here; return False, and do nothing, if these are not alike."""
    own = {name: tensor for parts in here for name, tensor in parts.items()}
    alike = [{name: (one.shape, one.dtype) for name, one in each.items()} for each in (own, saved)]
    if alike[0] != alike[1]:
        return False
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    return True


def _put_state(
    state: dict[Any, dict[str, Any]],
    parameters: Sequence[Tensor],
    tree: Json,
    tensors: Mapping[str, Tensor],
    *,
    prefix: str,
    built: Mapping[tuple[int, str], Tensor],
    whole: bool,
) -> None:
    """Put what a save has of the parameters into an optimizer's state. built: what was there before."""
    here = built if whole else _tensors_once(parameters, state)
    saved = _found_in(tree, tensors, prefix, parameters)
    found, same = make_wrapped(tree.get("wrapped", {}), tree["same"], prefix, saved, here, in_place=whole)
    for (number, key), value in found.items():
        how = tree["placements"].get(f"{prefix}{number}.{key}")
        kept = _into(built.get((number, key)), value) if how is None else value
        state[parameters[number]][key] = parallel.placed(kept, parameters[number], how)
    for (number, key), (first, first_key) in same.items():
        state[parameters[number]][key] = state[parameters[first]][first_key]


def _found_in(
    tree: Json, tensors: Mapping[str, Tensor], prefix: str, parameters: Sequence[Tensor]
) -> dict[tuple[int, str], Any]:
    """Return what a save has of an optimizer's state, by the parameters' numbers and the keys."""
    device = parameters[0].device if parameters else None
    found = {
        (number, key): value
        for number, values in on_host(tree, tensors, device).items()
        for key, value in values.items()
    }
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            number, key = place_of(name, prefix)
            found[number, key] = tensor.to(parameters[number].device)
    return found


def _has_own_dict(optimizer: Optimizer) -> bool:
    """Whether its class says by itself what its state is. ZeroRedundancyOptimizer's takes a collective."""
    kind = type(optimizer)
    return (
        kind.state_dict is not Optimizer.state_dict
        and kind.load_state_dict is not Optimizer.load_state_dict
        and len(parallel.way_to_state(optimizer)) == 1
    )


def _is_number(value: Tensor) -> bool:
    """Whether it is one number that its memory tells."""
    return value.dim() == 0 and type(value) is Tensor and value.layout == torch.strided and not value.is_neg()


def _with_values(
    numbers: Mapping[str, tuple[torch.dtype, list[int], tuple[Tensor, ...]]],
) -> dict[str, tuple[torch.dtype, list[int], Sequence[Any]]]:
    """Return them with the values of tensors of one number in the place of these."""
    found: dict[str, tuple[torch.dtype, list[int], Sequence[Any]]] = {}
    for key, (dtype, where, tensors) in numbers.items():
        code = ARRAY_TYPES.get(dtype)
        values = [*map(Tensor.item, tensors)] if code is None else array(code, tensors_seen.numbers(tensors))
        found[key] = dtype, where, values
    return found


def _elements(value: object) -> Iterator[object]:
    """Yield what lies in lists and dicts, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _elements(one)
            yield one


def _tensors_once(
    parameters: Sequence[Tensor], state: Mapping[Any, Mapping[str, Any]]
) -> dict[tuple[int, str], Tensor]:
    """Return the tensors of the state by parameter and key; one that is there twice is left out."""
    found: dict[tuple[int, str], Tensor] = {}
    seen: set[int] = set()
    for number, parameter in enumerate(parameters):
        for key, value in (state.get(parameter) or {}).items():
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                found[number, key] = value
    return found


def put_hyperparameters(
    group: dict[str, Any], saved: Mapping[str, Any], written: dict[int, Tensor] | None
) -> None:
    """Make a group's hyperparameters what was saved; tensors keep their device, and their memory if they can.

    written: what the groups' tensors have got so far, by id, as groups may share one. None: for a while
    alone; nothing is done on the device, and the tensors there stay as they are.
    """
    for key, value in saved.items():
        if key != "parameters":
            group[key] = value if written is None else _placed(group.get(key), value, written)


def _placed(here: Any, value: Any, written: dict[int, Tensor]) -> Any:
    if isinstance(here, tuple) and isinstance(value, tuple) and len(here) == len(value):
        return tuple(_placed(*pair, written) for pair in zip(here, value, strict=True))
    if not (isinstance(here, Tensor) and isinstance(value, Tensor)):
        return value
    if "meta" in (here.device.type, value.device.type):  # a description alone
        return value
    alike = here.shape == value.shape and here.dtype == value.dtype and here is not value
    if alike and torch.equal(written.setdefault(id(here), value), value):
        with torch.no_grad():
            return here.copy_(value)
    return value.to(here.device)


def _into(here: Tensor | None, value: Any) -> Any:
    """Put a value into the memory of what is there, if it fits, as others may know that."""
    if not (isinstance(value, Tensor) and type(here) is Tensor and value.device.type != "meta"):
        return value
    lies = (here.shape, here.dtype, here.device, here.stride())
    if lies != (value.shape, value.dtype, value.device, value.stride()):
        return value
    with torch.no_grad():
        return here.copy_(value)


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Return where the memory of a tensor begins and ends; None for one that has none of its own."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    if not tensor.numel():
        return None
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()


class TensorsOfOptimizers:
    """Of these, by names that they have in all starts (plain_attributes.OptimizersTensors)."""

    def __init__(self, optimizers: Sequence[OptimizerState]) -> None:
        self._optimizers = optimizers
        self._looked: list[object] = []  # what told, as they were captured last, where all is
        self._names: dict[int, str] = {}  # by ids
        self._places: set[int] = set()  # of their memory

    def have_moved(self) -> bool:
        moved = any(one.told is None or not one.told.is_same() for one in self._optimizers)
        if moved:
            self._look()
        return moved

    def name_of(self, tensor: Tensor) -> str | None:
        self._look_if_new()
        return self._names.get(id(tensor))

    def has_memory_of(self, tensor: Tensor) -> bool:
        self._look_if_new()
        return not self._places.isdisjoint(parallel.storages(tensor))

    def tensor_of(self, name: str) -> Tensor:
        for called, one in self._all():
            if called == name:
                return one
        raise LookupError(name)

    def _look_if_new(self) -> None:
        seen = [one.told for one in self._optimizers]
        if len(seen) != len(self._looked) or any(map(operator.is_not, seen, self._looked)):
            self._look()

    def _look(self) -> None:
        self._looked = [one.told for one in self._optimizers]
        self._names = {id(one): name for name, one in self._all()}
        self._places = {place for _, one in self._all() for place in parallel.storages(one)}

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the states have under parameters, by the names of these and the keys."""
        for one in self._optimizers:
            names = dict(zip(map(id, one.parameters()), chain(*one.names()), strict=True))
            for parameter, state in parallel.own_state(one.optimizer).items():
                for key, value in state.items() if id(parameter) in names and isinstance(state, dict) else ():
                    if isinstance(value, Tensor):
                        yield f"{one.name}.{names[id(parameter)]}.{key}", value
