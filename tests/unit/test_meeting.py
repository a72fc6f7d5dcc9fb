"""Who takes part in the next start: a pure decision."""

from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.meeting import AgreedStart, Member, next_start


def member(after: int = 0, place: int | None = None, since: int = 1, address: str = "") -> Member:
    return Member(after, place, since, 0, address)


LAST = AgreedStart(4, ("a", "b"), 20)


def test_starts_are_numbered_on_from_what_a_directory_knows_of() -> None:
    """The job has met elsewhere before."""
    members = {"a": member(), "b": Member(0, None, 1, 0, start=7), "c": Member(0, None, 9, 0, start=30)}
    assert next_start(members, None, False, (), 2) == AgreedStart(8, ("a", "b"), 0)
    assert next_start(members, AgreedStart(9, ("a", "b"), 0), True, ("a", "b"), 2) is None
    over = {"a": member(after=9), "b": Member(9, None, 1, 0, start=7)}
    assert next_start(over, AgreedStart(9, ("a", "b"), 0), True, (), 2) == AgreedStart(10, ("a", "b"), 0)


def test_the_first_start_is_in_the_order_of_addresses_and_the_last_to_come_stand_by() -> None:
    members = {
        "late": member(since=3, address="1"),
        "a": member(since=2, address="2"),
        "b": member(since=1, address="3"),
    }
    assert next_start(members, None, False, (), 2) == AgreedStart(1, ("a", "b"), 0)
    assert next_start({"a": member()}, None, False, (), 2) is None


def test_places_are_as_wished() -> None:
    members = {"a": member(place=1), "b": member(), "c": member(place=0)}
    assert next_start(members, None, False, (), 3) == AgreedStart(1, ("c", "a", "b"), 0)
    both = {"a": member(place=0, since=1), "b": member(place=0, since=2)}
    assert next_start(both, None, False, (), 2) is None


def test_who_has_what_a_place_needs_gets_it_but_takes_any() -> None:
    members = {"a": Member(0, None, 1, 0, "1", had=1), "b": member(address="2")}
    assert next_start(members, None, False, (), 2) == AgreedStart(1, ("b", "a"), 0)
    both = {"a": Member(0, None, 1, 0, "1", had=1), "b": Member(0, None, 2, 0, "2", had=1)}
    assert next_start(both, None, False, (), 2) == AgreedStart(1, ("b", "a"), 0)
    beyond = {"a": Member(0, None, 1, 0, "1", had=7), "b": Member(0, None, 2, 0, "2", had=0)}
    assert next_start(beyond, None, False, (), 2) == AgreedStart(1, ("b", "a"), 0)
    lost = {"b": member(after=4), "c": Member(0, None, 1, 0, "0", had=1)}
    assert next_start(lost, LAST, True, (), 2) == AgreedStart(5, ("c", "b"), 20), "any place that is free"


def test_who_had_a_place_keeps_it_and_a_spare_takes_the_lost_ones() -> None:
    members = {"b": member(after=4, address="1"), "c": member(address="0")}
    assert next_start(members, LAST, True, (), 2) == AgreedStart(5, ("c", "b"), 20)
    wished = {"b": member(after=4), "c": member(place=1)}
    assert next_start(wished, LAST, True, (), 2) is None, "its place is taken"


def test_no_start_follows_one_that_is_not_over() -> None:
    members = {"c": member(), "d": member()}
    assert next_start(members, LAST, False, ("a", "b"), 2) is None
    assert next_start(members, LAST, True, ("a", "b"), 2) == AgreedStart(5, ("c", "d"), 20)


def test_all_who_come_at_the_same_time_get_the_same_places_in_every_process() -> None:
    names = tuple("abcdefgh")  # a set of strings has another order in each process
    assert next_start({name: member() for name in reversed(names)}, None, False, (), 8) == AgreedStart(
        1, names, 0
    )


def test_an_agent_that_is_there_is_waited_for_unless_it_is_seen_no_more() -> None:
    members = {"a": member(after=3), "b": member(after=4), "c": member(after=3)}
    assert next_start(members, LAST, True, (), 2) is None, "a still ends its ranks"
    assert next_start(members, LAST, True, ("a",), 2) == AgreedStart(5, ("c", "b"), 20)


@given(
    st.dictionaries(
        st.sampled_from("abcdefg"),
        st.builds(
            Member,
            st.integers(0, 5),
            st.none() | st.integers(0, 3),
            st.integers(1, 9),
            st.integers(0, 99),
            st.sampled_from(["", "1", "2"]),
            had=st.none() | st.integers(0, 3),
        ),
    ),
    st.none()
    | st.builds(AgreedStart, st.integers(1, 5), st.permutations("abc").map(tuple), st.integers(0, 99)),
    st.booleans(),
    st.sets(st.sampled_from("abc")),
)
def test_a_start_has_all_its_places_and_comes_after_the_last(
    members: dict[str, Member], last: AgreedStart | None, is_over: bool, lost: set[str]
) -> None:
    start = next_start(members, last, is_over, lost, 3)
    if start is None:
        return
    assert len(set(start.agents)) == 3
    assert set(start.agents) <= set(members)
    if last is not None:
        assert is_over
        assert start.number == last.number + 1
        assert start.step >= last.step
        running = [a for a in last.agents if a in members and members[a].after < last.number]
        assert not set(running) & set(start.agents), "whose ranks may run takes no part"
        assert set(running) <= lost
