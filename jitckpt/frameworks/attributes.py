"""What a framework's objects that are of the script's own classes keep in plain attributes."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from jitckpt.frameworks import protection
from jitckpt.state.module_attributes import is_kept, names_of_others
from jitckpt.state.plain_attributes import Owner, PlainAttributes
from jitckpt.system import installed


def owners_among(objects: Mapping[str, Any]) -> dict[str, Owner]:
    """Return those of the script's own classes, by what they are called here."""
    return {
        name: Owner(one, partial(is_kept, names_of_others(type(one))))
        for name, one in objects.items()
        if installed.is_scripts_class(type(one))
    }


def numbered(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return callbacks under names for them."""
    return {f"callback {number}": one for number, one in enumerate(callbacks)}


def say_problems(attributes: PlainAttributes) -> None:
    """Name, once, what is not kept any more."""
    for problem in attributes.problems:
        protection.tell(problem)
    attributes.problems.clear()
