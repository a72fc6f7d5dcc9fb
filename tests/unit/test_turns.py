"""Hosts that are left at the same time tell the others one after the other."""

import time
from dataclasses import replace

from test_hosts import PATIENCE, SECRET, Meeting, meeting

from jitckpt.hosts import connections
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.turns import Turns
from jitckpt.wire.agents import LeavesTurn, WantsTurn
from jitckpt.wire.hosts import Host

__all__ = ["meeting"]
SOON = 0.3  # seconds


def turns() -> tuple[Turns, list[int]]:
    given: list[int] = []
    return Turns(given.append), given


def test_a_turn_lasts_until_who_comes_has_come() -> None:
    made, given = turns()
    made.hear(1, WantsTurn())
    made.hear(2, WantsTurn())
    assert given == [1]
    made.over(2)  # is lost: it wants nothing more
    made.hear(3, WantsTurn())
    made.awaits(1)
    made.over(4)  # somebody else
    assert given == [1]
    made.over(1)
    assert given == [1, 3]


def test_a_turn_of_a_host_that_is_lost_or_does_not_leave_is_over() -> None:
    made, given = turns()
    for host in (0, 1, 2, 3):
        made.hear(host, WantsTurn())
    made.hear(2, LeavesTurn())
    made.hear(0, LeavesTurn())
    made.over(1)
    assert given == [0, 1, 3]
    made.awaits(4)  # one more, which comes for host 3's ranks
    made.hear(3, LeavesTurn())
    made.hear(0, WantsTurn())
    made.over(3)
    assert given == [0, 1, 3]
    made.over(4)
    assert given == [0, 1, 3, 0]
    made.hear(5, LeavesTurn())
    made.over(9)


def test_who_comes_for_one_host_knows_who_has_come_for_another(meeting: Meeting) -> None:
    """Both have been told of all hosts before: the second is told anew once it is its host's turn."""
    a, b, c = meeting.meet(3)
    listeners = [connections.listen("127.0.0.1") for _ in range(2)]
    to = [
        replace(host.all[host.index], port=listener.getsockname()[1])
        for host, listener in zip((b, c), listeners, strict=True)
    ]
    assert b.take_turn(PATIENCE)
    assert not c.take_turn(SOON)
    assert b.hand_over(to[0], PATIENCE)
    known = b.all
    assert not c.take_turn(SOON), "the one that comes has not come"
    came = Hosts(1, [known[0], to[0], known[2]], listeners[0], SECRET, PATIENCE, takes_place=True)
    meeting.hosts.append(came)
    came.connect(PATIENCE)
    assert c.take_turn(PATIENCE)
    assert c.hand_over(to[1], PATIENCE)
    assert c.all[1] == to[0]
    came_too = Hosts(2, [*c.all[:2], to[1]], listeners[1], SECRET, PATIENCE, takes_place=True)
    meeting.hosts.append(came_too)
    came_too.connect(PATIENCE)
    assert [set(one.lost) for one in (a, came, came_too)] == [set()] * 3
    assert [one.all[1:] for one in (a, came, came_too)] == [tuple(to)] * 3


def test_one_in_whose_place_nobody_listens_is_lost_at_once(meeting: Meeting) -> None:
    """Who was to come has died: the turn is over, and nobody waits for it."""
    a, b, c = meeting.meet(3)
    with connections.listen("127.0.0.1") as listener:
        to = Host("127.0.0.1", listener.getsockname()[1], (1,), 0)
    assert b.take_turn(PATIENCE)
    assert b.hand_over(to, PATIENCE)
    assert c.take_turn(PATIENCE / 2)
    assert 1 in a.lost


def test_one_in_a_place_that_was_taken_before_has_its_own_time_to_come(meeting: Meeting) -> None:
    a, b = meeting.prepare(2, silence=0.5)  # 3 s until one that is to come is lost
    b._thread.start()
    a.connect(PATIENCE)
    listeners = [connections.listen("127.0.0.1") for _ in range(2)]
    known = a.all
    for host, listener in zip([b, None], listeners, strict=True):
        to = replace(known[1], port=listener.getsockname()[1])
        leaves = host or meeting.hosts[-1]
        assert leaves.hand_over(to, PATIENCE)
        time.sleep(1.7)  # of the second one 3.4 s after the first was awaited
        assert a.lost == frozenset()
        meeting.hosts.append(Hosts(1, [known[0], to], listener, SECRET, PATIENCE, takes_place=True))
        meeting.hosts[-1].connect(PATIENCE)
        assert not meeting.hosts[-1].lost
