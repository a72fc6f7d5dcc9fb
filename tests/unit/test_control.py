"""What the control thread knows of a start: facts of its ranks, who leads, whom it waits for."""

from types import SimpleNamespace
from typing import Any

import pytest

from jitckpt.agent.control.known import Known
from jitckpt.agent.control.nonsense import MOST_NONSENSE, Nonsense
from jitckpt.agent.control.other_hosts import OtherHosts
from jitckpt.agent.control.stopped_ranks import STOPPED_LOOK, StoppedRanks
from jitckpt.decisions.recovery import STOPPED_GRACE, KnownJob, Rank
from jitckpt.events import EventLog
from jitckpt.wire import agents, protocol


def known_of(*ranks: Rank) -> Known:
    return Known(KnownJob(ranks, now=0.0, save_deadline=60.0, restarts_left=1))


def test_facts_of_one_rank_change_no_other() -> None:
    known = known_of(Rank(0), Rank(1))
    known.change(1, registered=True, reachable=True)
    known.note(alarmed=True)
    assert [rank.registered for rank in known.job.ranks] == [False, True]
    assert (known.job.alarmed, known.askable(), known.absent()) == (True, (1,), (0,))
    known.change(1, finished=True)
    assert (known.askable(), known.absent()) == ((), (0, 1))
    with pytest.raises(KeyError, match="rank 7"):
        known.rank(7)


class Connections:
    """Of three hosts, of which this is the second, and one that has come for the first one's ranks."""

    def __init__(self) -> None:
        self.all = [SimpleNamespace(ranks_of=of) for of in (-1, -1, -1, 0)]
        self.index, self.sent = 1, list[tuple[int | None, agents.AgentMessage]]()

    def send(self, host: int, message: agents.AgentMessage) -> None:
        self.sent.append((host, message))

    def broadcast(self, message: agents.AgentMessage) -> None:
        self.sent.append((None, message))


def test_the_first_host_that_lives_leads_and_alone_is_told_what_only_one_acts_on() -> None:
    connections: Any = Connections()
    hosts = OtherHosts(connections)
    progress = protocol.Group(1, "a group", [0, 1])
    hosts.pass_on(1, progress)
    assert (hosts.leader(), hosts.leads(), connections.sent[-1][0]) == (0, False, 0)
    hosts.pass_on(1, protocol.AtEnd(1))
    assert connections.sent[-1][0] is None
    hosts.lost.add(0)
    hosts.leaving.update((2, 3))
    hosts.pass_on(1, progress)
    assert (hosts.leader(), hosts.leads(), len(connections.sent)) == (1, True, 2)
    assert hosts.gone == {0, 2}


def test_a_host_that_is_alone_leads_and_tells_nobody() -> None:
    hosts = OtherHosts(None)
    hosts.tell(agents.TakesIn("a host"))
    hosts.pass_on(0, protocol.AtEnd(0))
    assert (hosts.is_alone, hosts.leads(), hosts.this_agent()) == (True, True, "the agent")


def test_of_nonsense_without_end_so_much_is_noted() -> None:
    log = EventLog()
    nonsense = Nonsense(log)
    for _ in range(MOST_NONSENSE + 5):
        nonsense.note("rank 0", ValueError("no"))
    assert len(log.events) == MOST_NONSENSE
    assert log.events[0]["text"] == "rank 0 says what makes no sense: ValueError('no')"
    assert log.events[-1]["text"].endswith("No more of that is noted.")


def test_a_stopped_rank_that_alone_can_save_its_shard_is_named_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = known_of(
        *(
            Rank(rank, registered=True, reachable=True, shard=rank, shards=2, save="ordered")
            for rank in (0, 1)
        )
    )
    stopped = {0}
    workers: Any = {
        rank: SimpleNamespace(is_stopped=lambda rank=rank: rank in stopped, pid=100 + rank) for rank in (0, 1)
    }
    log = EventLog()
    looks = StoppedRanks(known, workers, log)
    assert looks.look() is None, "no save is waited for"
    known.note(save_ordered_at=0.0, now=1.0)
    assert looks.look() == 1.0 + STOPPED_LOOK
    assert capsys.readouterr().err == "", "it may be for a moment"
    for seconds in (0.0, 5.0):
        known.note(now=1.0 + STOPPED_GRACE + seconds)
        looks.look()
    assert capsys.readouterr().err.count("rank 0 is stopped by a signal, and no other rank can save") == 1
    stopped.clear()
    looks.look()
    assert known.rank(0).stopped_since is None
