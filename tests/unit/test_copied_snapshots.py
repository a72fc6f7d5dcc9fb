"""Copies of hosts' parts of snapshots on other hosts: what they are good for, and when they go."""

from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.copied_snapshots import (
    Copied,
    Copying,
    given_up,
    having,
    in_turn,
    kept,
    protected,
    to_be_had,
)
from jitckpt.decisions.placement import Machine
from jitckpt.decisions.whole_snapshots import Named, common

MOST = 4  # hosts
NAMED = st.tuples(st.integers(0, 3), st.sampled_from("ab"))
PARTS = st.lists(st.lists(NAMED, max_size=4), min_size=1, max_size=MOST)
COPIED = st.tuples(st.integers(0, MOST - 1), st.integers(0, 3), st.sampled_from("ab"))


@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[list[Named]], list[list[Copied]]]:
    """Return what each host has of its own part and of others'."""
    parts = draw(PARTS)
    copies = draw(st.lists(st.lists(COPIED, max_size=6), min_size=len(parts), max_size=len(parts)))
    return parts, copies


@given(hosts())
def test_what_is_gone_back_to_is_to_be_had_for_each_host(
    there: tuple[list[list[Named]], list[list[Copied]]],
) -> None:
    parts, copies = there
    found = common(to_be_had(parts, copies))
    for named in {named for own in parts for named in own} | {one[1:] for of in copies for one in of}:
        everywhere = all(named in own or having(copies, host, named) for host, own in enumerate(parts))
        assert (named in found) == everywhere


@given(hosts(), st.integers(1, MOST - 1), st.data())
def test_any_so_many_hosts_can_be_lost_of_what_is_protected(
    there: tuple[list[list[Named]], list[list[Copied]]], wanted: int, data: st.DataObject
) -> None:
    parts, copies = there
    lost = data.draw(st.sets(st.integers(0, len(parts) - 1), max_size=wanted))
    left_parts = [[] if host in lost else own for host, own in enumerate(parts)]
    left_copies = [[] if host in lost else of for host, of in enumerate(copies)]
    safe = protected(parts, copies, wanted)
    assert set(safe) <= set(common(to_be_had(left_parts, left_copies)))


def test_a_hosts_copy_of_its_own_part_protects_nothing() -> None:
    assert protected([[(4, "a")]] * 2, [[(0, 4, "a")], [(0, 4, "a")]], 1) == []
    assert protected([[(4, "a")]] * 2, [[(1, 4, "a")], [(0, 4, "a")]], 1) == [(4, "a")]


@given(st.lists(NAMED, unique=True).map(sorted), st.sets(NAMED), st.integers(1, 2))
def test_the_newest_stay_and_the_newest_that_are_protected(
    there: list[Named], guarded: set[Named], stays: int
) -> None:
    left = kept(there, guarded, stays)
    assert left == sorted(left)
    assert left[-stays:] == there[-stays:]
    assert [one for one in left if one in guarded][-stays:] == [one for one in there if one in guarded][
        -stays:
    ]
    assert len(left) <= 2 * stays


@given(st.sets(COPIED), st.sets(COPIED), st.sets(NAMED))
def test_no_copy_goes_of_what_its_host_has_or_may_have_next(
    held: set[Copied], left: set[Copied], named: set[Named]
) -> None:
    gone = given_up(held, left, named)
    assert not {one[1:] for one in gone} & named
    newest = max((step for step, _ in named), default=None)
    if newest is None:
        assert gone == []
    else:
        assert all(one[1] <= newest or one in left for one in gone)
        assert all(one in gone for one in held if one[1:] not in named and one[1] <= newest)


@given(st.lists(st.integers(0, 100) | st.just(float("inf")), min_size=2, max_size=6), st.data())
def test_a_part_goes_to_all_other_hosts_in_turn(rooms: list[float], data: st.DataObject) -> None:
    machines = [Machine((f"rack-{at % 2}",), room) for at, room in enumerate(rooms)]
    owner = data.draw(st.integers(0, len(rooms) - 1))
    copies = data.draw(st.integers(1, len(rooms) - 1))
    turn = in_turn(machines, owner, copies, data.draw(st.integers(0, 50)))
    assert sorted([owner, *turn]) == list(range(len(rooms)))
    if copies == 1 and set(rooms) == {float("inf")}:
        assert machines[turn[0]].domains != machines[owner].domains


def test_a_part_goes_where_there_is_room() -> None:
    machines = [Machine((str(host),), room) for host, room in enumerate([80.0, 20.0, 80.0])]
    assert [in_turn(machines, owner, 1, 10)[0] for owner in range(3)] == [2, 0, 0]
    assert sorted(in_turn(machines, 0, 1, 1000)) == [1, 2], "they say themselves that they have none"


def test_a_round_is_over_once_all_hosts_have_answered() -> None:
    now = Copying((8, "a"), frozenset({0, 1})).heard(1, "", 5).heard(1, "again", 5)
    assert (now.is_over, now.is_protected, now.bytes) == (False, False, 5)
    assert now.heard(0, "", 1).is_protected
    full = now.heard(0, "host 1 is full", 0)
    assert (full.is_over, full.is_protected, full.lacking) == (True, False, ("host 1 is full",))
