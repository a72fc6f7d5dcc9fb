import json
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.wire import checked, protocol
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.protocol import (
    FROM_AGENT,
    FROM_WORKER,
    MAX_BYTES,
    CommunicatorPlace,
    InFlight,
    Message,
    decode,
    encode,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
short_text = st.text(st.characters(), max_size=40)


integers = st.integers(checked.INTEGERS.start, checked.INTEGERS.stop - 1)
pairs = st.lists(st.lists(integers, min_size=2, max_size=2), max_size=3)
exchanges = st.lists(st.tuples(st.booleans(), integers, integers).map(list), max_size=3)


def values_for(hint: Any) -> st.SearchStrategy[Any]:
    by_hint = {
        bool: st.booleans(),
        int: integers,
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: short_text,
        type(None): st.none(),
        list[Any]: st.lists(json_values, max_size=3),
        list[int]: st.lists(integers, max_size=3),
        list[list[int]]: st.lists(st.lists(integers, max_size=3), max_size=3),
        dict[str, str | None]: st.dictionaries(short_text, st.none() | short_text, max_size=3),
        list[str]: st.lists(short_text, max_size=3),
        list[list[str]]: st.lists(st.lists(short_text, min_size=2, max_size=2), max_size=3),
        list[CommunicatorPlace]: st.lists(
            st.fixed_dictionaries(
                {"communicator": short_text, "rank": integers, "ranks": integers, "sequence": integers}
                | dict.fromkeys(("sends", "receives"), st.none() | pairs)
            ),
            max_size=3,
        ),
        list[InFlight]: st.lists(
            st.fixed_dictionaries(
                {"communicator": short_text, "sequence": integers, "operation": short_text}
                | {"bytes": integers, "seconds": st.floats(0, 1e9), "exchanges": exchanges}
            ),
            max_size=3,
        ),
    }
    if hint in by_hint:
        return by_hint[hint]
    if isinstance(hint, UnionType):
        return st.one_of([values_for(part) for part in hint.__args__])
    if hint == tuple[int, int]:
        return st.tuples(integers, integers).map(list)  # as JSON has it
    if get_origin(hint) is list and is_typeddict(part := get_args(hint)[0]):
        return st.lists(
            st.fixed_dictionaries({key: values_for(one) for key, one in get_type_hints(part).items()}),
            max_size=3,
        )
    if get_origin(hint) is dict:
        return st.dictionaries(short_text, values_for(get_args(hint)[1]), max_size=3)
    return st.sampled_from(get_args(hint))


def messages() -> st.SearchStrategy[Message]:
    return st.one_of(
        [
            st.builds(cls, **{f.name: values_for(get_type_hints(cls)[f.name]) for f in fields(cls)})
            for cls in (*FROM_WORKER, *FROM_AGENT)
        ]
    ).filter(lambda message: message.problem() is None)


@given(messages())
def test_what_was_encoded_is_decoded(message: Message) -> None:
    assert decode(encode(message)) == message


@given(messages())
def test_the_type_comes_first_for_the_preloaded_library(message: Message) -> None:
    assert encode(message).startswith(b'{"type":"' + message.type.encode() + b'"')


@given(messages(), st.dictionaries(short_text.map(lambda name: "x" + name), json_values, max_size=3))
def test_unknown_fields_are_ignored(message: Message, extra: dict[str, Any]) -> None:
    assert decode(json.dumps(extra | json.loads(encode(message))).encode()) == message


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_an_error_in_a_sentence(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^A message .*\.$"):
        decode(data)


@given(messages(), st.data())
def test_a_field_of_a_wrong_type_is_named(message: Message, data: st.DataObject) -> None:
    content = json.loads(encode(message))
    name = data.draw(st.sampled_from([name for name in content if name != "type"]))
    content[name] = {"not": "this"}
    with pytest.raises(ProtocolError, match=f"{name} can't be"):
        decode(json.dumps(content).encode())


@given(messages(), st.data())
def test_a_missing_field_is_named(message: Message, data: st.DataObject) -> None:
    content = json.loads(encode(message))
    name = data.draw(st.sampled_from([name for name in content if name != "type"]))
    del content[name]
    field = next(field for field in fields(message) if field.name == name)
    if field.default is not MISSING or field.default_factory is not MISSING:
        assert getattr(decode(json.dumps(content).encode()), name) is not None
    else:
        with pytest.raises(ProtocolError, match=f"lacks {name}"):
            decode(json.dumps(content).encode())


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "true", '"0.5"', "null"])
def test_seconds_are_a_number(value: str) -> None:
    with pytest.raises(ProtocolError):
        decode(b'{"type":"save","save_id":1,"reason":"r","deadline":' + value.encode() + b"}")


def registered(**changed: Any) -> bytes:
    known = {"rank": 0, "pid": 1, "world_size": 2, "shard": 0, "shards": 1, "fingerprint": ""}
    return json.dumps(
        {"type": "registered", "saver": "builtin", "checkpoint_dir": "/ckpt"} | known | changed
    ).encode()


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 2},
        {"rank": -1},
        {"shards": 3},
        {"shard": 1},
        {"world_size": 1 << 21, "shards": 1 << 21},
        {"checkpoint_dir": "a\0b"},
        {"checkpoint_dir": "\ud800"},
    ],
)
def test_a_rank_that_there_can_not_be_is_refused(changed: dict[str, Any]) -> None:
    assert decode(registered()).type == "registered"
    with pytest.raises(ProtocolError, match="makes no sense"):
        decode(registered(**changed))


@pytest.mark.parametrize("number", [1 << 64, -(1 << 63) - 1, 10**400])
def test_a_number_without_end_is_refused(number: int) -> None:
    text = str(number).encode()
    for data in (
        b'{"type":"at_end","rank":' + text + b"}",
        b'{"type":"held","save_id":1,"seconds":' + text + b"}",
    ):
        with pytest.raises(ProtocolError):
            decode(data)


def test_deep_nesting_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="JSON"):
        decode(b"[" * 30000 + b"]" * 30000)


def test_too_long_messages_are_refused_on_both_sides() -> None:
    with pytest.raises(ProtocolError, match="at most 65536"):
        encode(protocol.Save(save_id=1, reason="x" * MAX_BYTES, deadline=1.0))
    with pytest.raises(ProtocolError, match="at most 65536"):
        decode(b" " * (MAX_BYTES + 1))


@given(st.text(min_size=1).map(lambda text: text * 70000))
def test_long_tracebacks_are_shortened_not_refused(text: str) -> None:
    message = protocol.SaveFailed(save_id=1, rank=0, reason=text, traceback=text)
    assert "[... shortened ...]" in message.traceback
    assert decode(encode(message)) == message
    warning = protocol.Warning(rank=0, text=text)
    assert decode(encode(warning)) == warning
