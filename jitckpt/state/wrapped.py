"""Tensors that are made of others: whether they still are of the same ones, and made anew from a save."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from jitckpt._seen import Seen
from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import TreeError
from jitckpt.state import inner_tensors, parallel

CHANGED = (
    "{name} is a {kind}, and what belongs to it beside its inner tensors is other than as the script built "
    "it, so a restart can't put these into what the script builds: {way}"
)
Place = tuple[int, str]  # of an optimizer's state: the parameter's number, and the key


class Wrapped:
    """Some such tensors. Added one by one, by name."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Tensor, Json]] = {}
        self._seen = Seen()

    def __bool__(self) -> bool:
        return bool(self._known)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def add(self, name: str, tensor: Tensor) -> Json:
        """Look at a tensor, and return how it is described. Raises TreeError where it can't be."""
        description = inner_tensors.described(tensor, name)
        self._known[name] = tensor, description
        for one, inner in inner_tensors.wrappers(tensor):
            for attribute in inner:
                self._seen.attribute(one, attribute)
        for leaf in inner_tensors.leaves(tensor, name).values():
            self._seen.place(leaf)
        return description

    def descriptions(self) -> dict[str, Json]:
        return {name: description for name, (_, description) in self._known.items()}

    def is_same(self) -> bool:
        """Whether all are made of the very same tensors, and what belongs to these is the same."""
        return self._seen.is_same() and not self._others()

    def check(self, built: Mapping[str, Json]) -> None:
        """Raise TreeError, which names it, for one that is described otherwise than as it was built."""
        for name, (tensor, description) in self._known.items():
            check_as_built(name, tensor, description, built.get(name))

    def _others(self) -> bool:
        known = self._known.items()
        return any(inner_tensors.described(tensor, name) != before for name, (tensor, before) in known)


def check_as_built(name: str, tensor: Tensor, description: Json, built: Json | None) -> None:
    """Raise TreeError if a tensor is described otherwise than it was; None: nobody knows how."""
    if built not in (None, description):
        kind = type(tensor).__name__
        raise TreeError(CHANGED.format(name=name, kind=kind, way=inner_tensors.SAVE_FUNCTION))


def place_of(name: str, prefix: str) -> Place:
    """Return where a tensor of the state belongs, by its name in a save."""
    number, key = name.removeprefix(prefix).split(".", 1)
    return int(number), key


def make_wrapped(
    wrapped: Mapping[str, Json],
    same: Mapping[str, str],
    prefix: str,
    found: Mapping[Place, Any],
    here: Mapping[Place, Tensor],
    *,
    in_place: bool,
) -> tuple[dict[Place, Any], dict[Place, Place]]:
    """Return what a save has of a state, with the tensors that are made of others in the place of these.

    And `same`, of all that is not made so. wrapped, same: as of an OptimizerPart. here: what is there so far,
    where what was not found is taken from. in_place: in the memory of that, if it fits.
    """
    place_in = {name: place_of(name, prefix) for pair in same.items() for name in pair}
    around = {
        place_of(leaf, prefix): name
        for name, one in wrapped.items()
        for leaf in inner_tensors.names_in(one, name)
    }
    others: dict[Place, Place] = {}
    all_found = {**found}
    for name, first in same.items():
        place, other = place_in[name], place_in[first]
        if place not in around and other not in around:
            others[place] = other
        elif other in all_found:
            all_found[place] = all_found[other]
    result: dict[Place, Any] = {}
    inside = around.keys() & all_found.keys()
    own = {f"{prefix}{number}.{key}": all_found[number, key] for number, key in inside}
    for place, value in all_found.items():
        called = around.get(place)
        if called is None:
            result[place] = value
        elif (top := place_of(called, prefix)) not in result:
            result[top] = _made(wrapped[called], called, own, here.get(top), in_place=in_place)
    return result, others


def _made(
    description: Json, name: str, found: Mapping[str, Any], here: Tensor | None, *, in_place: bool
) -> Tensor:
    memory = None if here is None else parallel.memory_of(here)
    is_own = in_place and memory is here  # and no part of a DTensor
    if is_own and memory is not None and inner_tensors.put(memory, description, name, found):
        return memory
    kept = {} if in_place or memory is None else inner_tensors.leaves(memory, name)
    return inner_tensors.made(description, name, {**kept, **found})
