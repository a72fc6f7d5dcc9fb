"""Frozen dataclasses as JSON objects that name their type: how they are written, and checked when read.

Their fields may be frozen dataclasses, too. A reader ignores fields that it does not know.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, fields
from functools import cache
from math import isfinite
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from jitckpt.errors import JitckptError

INTEGERS = range(-(1 << 63), 1 << 64)


class ProtocolError(JitckptError):
    """A message that can't be sent or understood; the text is a sentence that says why."""


@dataclass(frozen=True)
class CheckedPart:
    """What is read has passed every check that there is: who acts on it need not look at its types again."""

    def problem(self) -> str | None:
        """Return what is wrong with it although each field is of its type, a clause; None if nothing is."""
        return None


@dataclass(frozen=True)
class Checked(CheckedPart):
    """What is a message by itself, and not a part of one."""

    type: ClassVar[str]


Kind = TypeVar("Kind", bound=Checked)
Part = TypeVar("Part", bound=CheckedPart)


def by_type(kinds: Iterable[type[Kind]]) -> dict[str, type[Kind]]:
    """Return the kinds by what a message calls them."""
    return {kind.type: kind for kind in kinds}


def content_of(message: Checked) -> dict[str, Any]:
    """Return what JSON is made of, the type first."""
    return {"type": message.type} | asdict(message)


def understood(kinds: Mapping[str, type[Kind]], content: object) -> Kind:
    """Return the message that came as this JSON value. Raises ProtocolError if it is none of these kinds."""
    name = _object(content, "message").get("type")
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"A message has the unknown type {name!r:.80}; known are {', '.join(kinds)}.")
    return part_of(kind, content, f"message of type {kind.type}")


def part_of(kind: type[Part], content: object, name: str) -> Part:
    """Return what came as this JSON value. Raises ProtocolError if it is not of this kind.

    name: what the user calls it.
    """
    content = _object(content, name)
    told = {one.name: content[one.name] for one in fields(kind) if one.name in content}
    missing = [one.name for one in fields(kind) if one.name not in told and _is_required(one)]
    if missing:
        raise ProtocolError(f"A {name} lacks {', '.join(missing)}.")
    values = {}
    for field_name, value in told.items():
        try:
            values[field_name] = _read(value, hints(kind)[field_name])
        except _UnfitError as error:
            raise ProtocolError(f"In a {name}, {field_name} can't be {value!r:.80}.") from error
    made = kind(**values)
    if problem := made.problem():
        raise ProtocolError(f"A {name} makes no sense: {problem}.")
    return made


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


def hints(kind: type[CheckedPart]) -> dict[str, Any]:
    """Return the types of a kind's fields."""
    return _hints(kind)


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _is_required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _object(content: object, name: str) -> dict[str, Any]:
    if isinstance(content, dict):
        return content
    raise ProtocolError(f"A {name} is not a JSON object but {type(content).__name__}.")


class _UnfitError(Exception):
    """A value is not of the type that it should be."""


def _read(value: Any, hint: Any) -> Any:
    """Return what came from JSON as a value of this type. Raises _UnfitError if it is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    match value:
        case _ if origin in (Union, UnionType):
            return _read_as_one_of(value, arguments)
        case list() if origin in (list, tuple):
            are_alike = origin is list or arguments[1:] == (...,)
            kinds = arguments[:1] * len(value) if are_alike else arguments
            if len(kinds) == len(value):
                return origin(map(_read, value, kinds))
        case dict() if origin is dict:
            return {key: _read(one, arguments[1]) for key, one in value.items()}
        case dict() if is_typeddict(hint):
            parts = get_type_hints(hint)
            if parts.keys() <= value.keys():
                return value | {name: _read(value[name], part) for name, part in parts.items()}
        case dict() if isinstance(hint, type) and issubclass(hint, CheckedPart):
            try:
                return part_of(hint, value, "part")
            except ProtocolError as error:
                raise _UnfitError from error
        case _ if hint is Any or (value in arguments if origin is Literal else _is(hint, value)):
            return value
    raise _UnfitError


def _read_as_one_of(value: Any, kinds: Iterable[Any]) -> Any:
    for kind in kinds:
        with suppress(_UnfitError):
            return _read(value, kind)
    raise _UnfitError


def _is(kind: Any, value: object) -> bool:
    if not isinstance(kind, type) or is_typeddict(kind):
        return False
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int):
        return kind in (int, float) and value in INTEGERS
    if kind is float:
        return isinstance(value, float) and isfinite(value)
    return isinstance(value, kind)
