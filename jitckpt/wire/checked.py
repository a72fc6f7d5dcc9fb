"""Frozen dataclasses as JSON objects that name their type: how they are written, and checked when read.

A reader ignores fields that it does not know.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from math import isfinite
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

from jitckpt.errors import JitckptError

INTEGERS = range(-(1 << 63), 1 << 64)


class ProtocolError(JitckptError):
    """A message that can't be sent or understood; the text is a sentence that says why."""


@dataclass(frozen=True)
class Checked:
    """What is read has passed every check that there is: who acts on it need not look at its types again."""

    type: ClassVar[str]

    def problem(self) -> str | None:
        """Return what is wrong with it although each field is of its type, a clause; None if nothing is."""
        return None


Kind = TypeVar("Kind", bound=Checked)


def by_type(kinds: Iterable[type[Kind]]) -> dict[str, type[Kind]]:
    """Return the kinds by what a message calls them."""
    return {kind.type: kind for kind in kinds}


def content_of(message: Checked) -> dict[str, Any]:
    """Return what JSON is made of, the type first."""
    return {"type": message.type} | {one.name: getattr(message, one.name) for one in fields(message)}


def understood(kinds: Mapping[str, type[Kind]], content: object) -> Kind:
    """Return the message that came as this JSON value. Raises ProtocolError if it is none of these kinds."""
    if not isinstance(content, dict):
        raise ProtocolError(f"A message is not a JSON object but {type(content).__name__}.")
    name = content.get("type")
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"A message has the unknown type {name!r:.80}; known are {', '.join(kinds)}.")
    values = {one.name: content[one.name] for one in fields(kind) if one.name in content}
    missing = [one.name for one in fields(kind) if one.name not in values and _is_required(one)]
    if missing:
        raise ProtocolError(f"A message of type {kind.type} lacks {', '.join(missing)}.")
    for field_name, value in values.items():
        if not _fits(value, hints(kind)[field_name]):
            raise ProtocolError(f"In a message of type {kind.type}, {field_name} can't be {value!r:.80}.")
    message = kind(**values)
    if problem := message.problem():
        raise ProtocolError(f"A message of type {kind.type} makes no sense: {problem}.")
    return message


def encoded(message: Checked, most_bytes: int) -> bytes:
    """Return the message as one JSON object without spaces.

    Raises ProtocolError if it would be longer than this or holds what JSON can't.
    """
    try:
        data = json.dumps(content_of(message), separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"A message of type {message.type} can't be written as JSON: {error}.") from error
    if len(data) > most_bytes:
        raise ProtocolError(
            f"A message of type {message.type} has {len(data)} bytes; at most {most_bytes} can be sent."
        )
    return data


def decoded(kinds: Mapping[str, type[Kind]], data: bytes, most_bytes: int) -> Kind:
    """Return the message that these bytes are.

    Raises ProtocolError for anything that is not one whole message of these kinds.
    """
    if len(data) > most_bytes:
        raise ProtocolError(f"A message has {len(data)} bytes; at most {most_bytes} are allowed.")
    try:
        content = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"A message is not JSON: {error}.") from error
    return understood(kinds, content)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def hints(kind: type[Checked]) -> dict[str, Any]:
    """Return the types of a kind's fields."""
    return _hints(kind)


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _is_required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (list, dict):
        parts = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(_fits(one, arguments[-1]) for one in parts)
    if origin is tuple:  # which JSON has as a list
        return isinstance(value, list) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if arguments:  # a union
        return any(_fits(value, part) for part in arguments)
    if is_typeddict(hint):
        return isinstance(value, dict) and all(
            name in value and _fits(value[name], part) for name, part in get_type_hints(hint).items()
        )
    return hint is Any or _is(hint, value)


def _is(kind: type[Any], value: object) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int):
        return kind in (int, float) and value in INTEGERS
    if kind is float:
        return isinstance(value, float) and isfinite(value)
    return isinstance(value, kind)
