"""What lies in a store counts only where, and if, an agent of the job has left it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.hosts.signed import MAX_BYTES, ForeignError, Signature

OURS = Signature("job", b"what only this job's agents know")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(json_values)
def test_what_was_left_is_found(content: object) -> None:
    assert OURS.read("place", OURS.write("place", content).encode()) == content


@pytest.mark.parametrize(
    ("signature", "place"),
    [
        (Signature("job", b"another"), "place"),
        (Signature("job"), "place"),
        (Signature("another job", OURS.secret), "place"),
        (OURS, "another place"),
    ],
    ids=["secret", "no secret", "job", "place"],
)
def test_what_was_signed_for_something_else_is_foreign(signature: Signature, place: str) -> None:
    entry = signature.write(place, "moved").encode()
    with pytest.raises(ForeignError, match="not signed with this job's secret"):
        OURS.read("place", entry)


@given(st.binary(max_size=200))
def test_garbage_is_foreign(garbage: bytes) -> None:
    with pytest.raises(ForeignError):
        OURS.read("place", garbage)


@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, b"\xff"])
def test_without_a_secret_all_can_sign_and_still_it_is_json(text: bytes) -> None:
    everybodys = Signature("job")
    with pytest.raises(ForeignError, match="not JSON"):
        everybodys.read("place", everybodys._of("place", text).encode() + text)


def test_an_entry_without_an_end_is_not_read() -> None:
    with pytest.raises(ForeignError, match="at most"):
        OURS.read("place", bytes(MAX_BYTES + 1))


def test_the_secret_is_in_no_text() -> None:
    assert "only" not in repr(OURS)
    assert "only" not in OURS.write("place", 1)
