"""Where the parts of copies go that no host has room for as a whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions import spreading
from jitckpt.decisions.spreading import HostRoom, Spread, spread

UNIT = 10


def check(rooms: dict[int, HostRoom], found: Spread) -> None:
    """See that each chunk is at one other host, and nobody has more than there is room for."""
    taken: dict[tuple[int, bool], int] = {}
    for host, one in rooms.items():
        for rank, size in one.needs.items():
            parts = [part for part in found.parts if part.rank == rank]
            if rank in found.lacking:
                assert not parts
                continue
            assert [part.first for part in parts] == [
                sum(part.count for part in parts[:number]) for number in range(len(parts))
            ]
            assert sum(part.count for part in parts) == -(-size // UNIT)
            assert host not in {part.host for part in parts}
    for part in found.parts:
        place = (part.host, part.in_directory)
        taken[place] = taken.get(place, 0) + part.count * UNIT
    for (host, in_directory), size in taken.items():
        assert size <= (rooms[host].directory if in_directory else rooms[host].memory)


def test_what_one_has_no_room_for_goes_to_several_at_once() -> None:
    rooms = {0: HostRoom({0: 100}), 1: HostRoom(memory=60), 2: HostRoom(memory=60)}
    found = spread(rooms, UNIT)
    check(rooms, found)
    assert [part.count for part in found.parts] == [5, 5]
    assert found.seconds == pytest.approx(50 / spreading.USUAL_RATE)


def test_more_goes_over_the_faster_link_and_what_is_left_to_the_directory() -> None:
    rooms = {
        0: HostRoom({0: 90}, rates={1: 20.0, 2: 10.0}),
        1: HostRoom(memory=1000),
        2: HostRoom(memory=1000),
    }
    found = spread(rooms, UNIT)
    assert {part.host: part.count for part in found.parts} == {1: 6, 2: 3}
    rooms[1] = HostRoom(memory=20, directory=1000, into_directory=5.0)
    rooms[2] = HostRoom()
    found = spread(rooms, UNIT)
    check(rooms, found)
    assert {part.in_directory: part.count for part in found.parts} == {False: 2, True: 7}


def test_a_rank_for_which_there_is_no_room_is_left_out_and_named() -> None:
    rooms = {0: HostRoom({0: 100, 1: 30}), 1: HostRoom(memory=50)}
    found = spread(rooms, UNIT)
    check(rooms, found)
    assert found.lacking == (0,)
    assert [part.rank for part in found.parts] == [1]


@given(st.data())
@pytest.mark.parametrize("few", [0, 24])
def test_all_is_somewhere_and_nothing_is_overfilled(few: int, data: st.DataObject) -> None:
    before, spreading.FEW = spreading.FEW, few
    try:
        hosts = data.draw(st.integers(1, 6))
        rooms = {
            host: HostRoom(
                {
                    2 * host + number: data.draw(st.integers(1, 200))
                    for number in range(data.draw(st.integers(0, 2)))
                },
                data.draw(st.integers(0, 200)),
                data.draw(st.sampled_from([0, 0, 50, 1000])),
                0,
                {other: data.draw(st.floats(1, 100)) for other in range(0, hosts, 2)},
                data.draw(st.floats(1, 100)),
            )
            for host in range(hosts)
        }
        found = spread(rooms, UNIT)
        check(rooms, found)
        if few and not found.lacking:
            spreading.FEW = 0
            # The least time is no longer than the greedy way's, but for what whole chunks cost.
            other = spread(rooms, UNIT)
            slowest = min([1.0, *(rate for one in rooms.values() for rate in one.rates.values())])
            if not other.lacking:
                assert found.seconds <= other.seconds + UNIT / slowest + 1e-6
    finally:
        spreading.FEW = before
