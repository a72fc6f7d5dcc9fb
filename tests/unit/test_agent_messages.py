"""What agents tell each other is read as it was written, or refused in a sentence."""

import json
import re
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_protocol import json_values, values_for

from jitckpt.wire import agents, checked, moves, visits
from jitckpt.wire.checked import Checked, ProtocolError

KINDS: dict[str, type[Checked]] = {
    **agents.FIRST_WORDS,
    **agents.KINDS,
    **checked.by_type(
        one
        for one in (*vars(visits).values(), *vars(moves).values())
        if isinstance(one, type) and issubclass(one, Checked) and hasattr(one, "type")
    ),
}


def messages() -> st.SearchStrategy[Checked]:
    return st.one_of(
        [
            st.builds(kind, **{one.name: values_for(checked.hints(kind)[one.name]) for one in fields(kind)})
            for kind in KINDS.values()
            if kind not in (moves.Move, moves.HandOver)  # few are right: test_leaving.py has one of each
        ]
    ).filter(lambda message: message.problem() is None)


@given(messages())
def test_what_was_encoded_is_decoded(message: Checked) -> None:
    assert checked.understood(KINDS, json.loads(json.dumps(checked.content_of(message)))) == message


@st.composite
def headers(draw: st.DrawFn) -> Any:
    """What is a message but for parts of it, or anything at all."""
    if draw(st.booleans()):
        return draw(json_values)
    kind = draw(st.sampled_from([*KINDS.values()]))
    hints = checked.hints(kind)
    values = {one.name: values_for(hints[one.name]) | json_values for one in fields(kind)}
    said = {name: draw(value) for name, value in values.items() if draw(st.integers(0, 9))}
    return json.loads(json.dumps({"type": kind.type} | said, default=asdict))


def has_said(said: Any, understood: Any) -> bool:
    """Whether all that was said of what is understood is in it as it was; parts of it may have defaults."""
    if isinstance(said, dict) and isinstance(understood, dict):
        return all(has_said(said[key], understood[key]) for key in said.keys() & understood.keys())
    if isinstance(said, list) and isinstance(understood, list):
        return len(said) == len(understood) and all(map(has_said, said, understood))
    return bool(said == understood)


@given(headers())
def test_anything_is_a_message_or_refused_in_a_sentence(header: Any) -> None:
    refused = ""
    try:
        message = checked.understood(KINDS, header)
    except ProtocolError as error:
        refused = str(error)
    if refused:
        assert re.fullmatch(r"(A|In a) message .*\.", refused, re.DOTALL)
    else:
        content = json.loads(json.dumps(checked.content_of(message)))
        assert has_said(header, content)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ([], "A message is not a JSON object but list."),
        (
            {"type": "steps_come", "come": {"recovery_and_step": -1}},
            "come can't be {'recovery_and_step': -1}",
        ),
        ({"type": "steps_come", "come": {"whole_from": 1 << 64}}, "come can't be"),
        ({"type": "steps_come", "come": [1, 2, False]}, "come can't be [1, 2, False]"),
        ({"type": "takes_place", "address": "a", "port": 0}, "makes no sense: 0 is no port."),
        ({"type": "safe", "safe": 1, "settled": 1, "keepers": [[0], ["a"]]}, "keepers can't be"),
        ({"type": "safe", "safe": 1, "settled": 1, "every": -1}, "every -1 steps is no rule"),
        ({"type": {}}, "has the unknown type {}"),
    ],
)
def test_what_is_no_message_is_refused(header: Any, why: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        agents.decode(header)
    assert why in str(caught.value)
