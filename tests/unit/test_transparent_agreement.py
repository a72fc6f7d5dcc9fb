"""Recoveries as the agent leads them, with proxies that answer as they should, in whatever order."""

import json
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transparent_proxies import PAIR, WORLD, Proxy

from jitckpt.agent.proxies.agreement import Agreement
from jitckpt.agent.proxies.validations import PATIENCE
from jitckpt.decisions.transparent import validation
from jitckpt.wire.proxy_messages import (
    HEALTHY,
    LEFT_OUT,
    LOST,
    SUSPECT,
    Ask,
    FromProxy,
    GiveUp,
    Making,
    Replay,
    Rest,
    Restart,
    Settle,
    Stop,
    ToProxy,
    encode,
)

DEADLINE = 60.0
First = Callable[[list[int]], int]


class Job:
    """Proxies and their agent, with a queue of messages each way for each rank."""

    def __init__(self, *proxies: Proxy, servers_stay: bool = False) -> None:
        """servers_stay: while all rest, if they can."""
        self.servers_stay = servers_stay
        self.proxies = {proxy.rank: proxy for proxy in proxies}
        self.now, self.second = 0.0, 1.0  # the time, and how long a message takes
        self.to: dict[int, deque[ToProxy]] = {rank: deque() for rank in self.proxies}
        self.said: dict[int, deque[FromProxy]] = {rank: deque() for rank in self.proxies}
        self.events: list[tuple[str, dict[str, object]]] = []
        self.deaf: set[int] = set()
        self.rests = 0
        self.goes_back = False  # whether another agreement takes over where all rest
        self.agreement = self.new_agreement()
        for rank, proxy in self.proxies.items():
            self.agreement.hear(rank, proxy.hello(), self.now)

    def new_agreement(self) -> Agreement:
        return Agreement(
            [*self.proxies],
            DEADLINE,
            lambda rank, order: self.to[rank].append(order),
            lambda event, **details: self.events.append((event, details)),
            servers_stay=self.servers_stay,
        )

    def alarm(self, rank: int, call: int = 0, error: str = "its server was ended by Killed") -> None:
        self.said[rank].append(self.proxies[rank].alarm(call, error))

    def pending(self) -> list[int]:
        """Return numbers: a rank's for an order on its way, ~rank for an answer."""
        orders = [rank for rank, queue in self.to.items() if queue and rank not in self.deaf]
        return [*orders, *(~rank for rank, queue in self.said.items() if queue)]

    def step(self, way: int) -> None:
        self.now += self.second
        if way < 0:
            self.agreement.hear(~way, self.said[~way].popleft(), self.now)
            if self.agreement.at_rest:
                self.rest()
        else:
            order, proxy = self.to[way].popleft(), self.proxies[way]
            answer = proxy.standing() if isinstance(order, Ask) else proxy.hear(order)
            if answer is not None:
                self.said[way].append(answer)
            if isinstance(order, Replay) and proxy.waits and not proxy.held:
                self.said[way].append(proxy.judges(bool(order.overwrite)))

    def rest(self) -> None:
        """All ranks are held, and nothing is on its way to them that they need; for a long time."""
        assert all(proxy.held for proxy in self.proxies.values())
        assert not any(isinstance(order, Replay) for queue in self.to.values() for order in queue)
        assert self.agreement.next_look is None  # else whoever waits for it would not sleep
        self.rests += 1
        if self.goes_back or not self.agreement.servers_stay:
            for proxy in self.proxies.values():
                proxy.loses_its_server()
        self.now += 1e6
        if not self.goes_back:
            self.agreement.go_on(self.now)
            return
        rest = json.loads(json.dumps(self.agreement.at_this_rest))
        for rank in self.proxies:
            self.to[rank].clear()
            self.said[rank].clear()
        self.agreement = self.new_agreement()
        self.agreement.go_on_from(rest, self.now)

    def run(self, choose: First = lambda ways: ways[0], most: int = 10_000) -> int:
        """Deliver messages until none is left, or so many; return how many."""
        for number in range(most):
            ways = self.pending()
            if not ways:
                return number
            self.step(choose(ways))
        return most

    def run_by_turns(self) -> None:
        """Deliver what there is, rank by rank, until there is nothing. Of many, `run` would take long."""
        while any(self.to.values()) or any(self.said.values()):
            for rank in self.proxies:
                while self.to[rank]:
                    self.step(rank)
            for rank in self.proxies:
                while self.said[rank]:
                    self.step(~rank)

    def servers(self) -> dict[int, int]:
        """Return how often each rank has got another server."""
        return {rank: proxy.server for rank, proxy in self.proxies.items()}

    def named(self, event: str) -> list[dict[str, object]]:
        return [details for name, details in self.events if name == event]

    def goes_on(self, state: int) -> None:
        """See that all ranks have come from one state, with servers of their own and the same ids."""
        for proxy in self.proxies.values():
            assert not proxy.held
            assert not proxy.given_up
            assert (proxy.state, proxy.recovery) == (state, self.proxies[0].recovery)
        last = [one for proxy in self.proxies.values() for one in proxy.orders if isinstance(one, Replay)]
        newest = [one for one in last if one.recovery == self.proxies[0].recovery]
        assert len(newest) == len(self.proxies)
        ids = {one for order in newest for one in order.ids}
        assert len(ids) == len({one.key for one in ids})  # the same for all
        for order in newest:
            assert {one.key for one in order.making if not one.parent} <= {one.key for one in order.ids}
        assert self.named("recovered")[-1]["state"] == state


def test_a_job_of_a_thousand_ranks_and_communicators_comes_back() -> None:
    """Each message has room for what its rank needs of all ids, and takes no look at all ranks."""
    size = 1000
    now = job(size)
    issued = tuple(f"{2 + number:032x}" for number in range(size))
    now.proxies[0].issues = (WORLD, *issued[: size // 2])
    for rank, proxy in now.proxies.items():
        proxy.couple = issued[rank // 2]
    now.alarm(3)
    now.run_by_turns()
    now.goes_on(7)
    for proxy in now.proxies.values():
        assert all(len(encode(order)) < 1000 for order in proxy.orders)


def job(size: int = 2) -> Job:
    return Job(*(Proxy(rank, size) for rank in range(size)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_go_back_to_the_newest_state_that_all_have(size: int) -> None:
    now = Job(*(Proxy(rank, size, kept=(5, 6) if rank == 1 else (6, 7)) for rank in range(size)))
    now.run()
    assert not any(proxy.orders for proxy in now.proxies.values())
    now.alarm(size - 1)
    now.run()
    now.goes_on(state=7 if size == 1 else 6)
    kinds = [type(order) for order in now.proxies[0].orders]
    assert kinds == [Stop, Rest, Restart, Replay]
    assert [name for name, _ in now.events] == [
        "device_alarm",
        "recovery_begun",
        *["rank_stopped"] * size,
        "recovery_planned",
        *["server_restarted"] * size,
        *["calls_made_again"] * size,
        "recovered",
    ]
    assert now.named("calls_made_again")[0]["replay"] == pytest.approx(4e-6)


def test_servers_stay_unless_that_has_not_helped() -> None:
    now = job()
    now.alarm(1)
    now.run()
    assert [proxy.server for proxy in now.proxies.values()] == [0, 0]
    now.alarm(0)  # before there is a newer state
    now.run()
    assert [proxy.server for proxy in now.proxies.values()] == [1, 1]
    for proxy in now.proxies.values():
        proxy.kept = (7, 8)
    now.alarm(0)
    now.run()
    now.goes_on(state=8)
    assert [proxy.server for proxy in now.proxies.values()] == [1, 1]


def test_communicators_are_made_where_they_lived_splits_after_their_parents() -> None:
    both, third = (Making("", 0, WORLD), Making(WORLD, 1, PAIR)), (Making("", 0, WORLD), Making(WORLD, 1, ""))
    now = job(3)
    now.alarm(0)
    now.run()
    assert [proxy.orders[3].making for proxy in now.proxies.values()] == [both, both, third]  # type: ignore[union-attr]
    # The pair was made after state 6: the log makes it.
    older = Job(Proxy(0, 2), Proxy(1, 2, kept=(5, 6)))
    older.alarm(0)
    older.run()
    assert older.proxies[0].orders[3].making == both[:1]  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_another_failure_at_every_moment_of_a_recovery(size: int) -> None:
    undisturbed = job(size)
    undisturbed.alarm(0)
    moments = undisturbed.run()
    for moment in range(moments + 1):
        for second in range(size):
            now = job(size)
            now.alarm(0)
            now.run(most=moment)
            now.alarm(second)
            now.run()
            now.goes_on(state=7)


@given(st.data())
def test_failures_at_any_time_with_messages_in_any_order(data: st.DataObject) -> None:
    now = job(data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(1, 5))):
        now.alarm(data.draw(st.sampled_from([*now.proxies])))
        now.run(lambda ways: data.draw(st.sampled_from(ways)), most=data.draw(st.integers(0, 12)))
    now.run(lambda ways: data.draw(st.sampled_from(ways)))
    now.goes_on(state=7)


def test_the_programs_own_error_is_given_to_it_the_second_time() -> None:
    now = job()
    now.proxies[1].failing = (40, "CUDA error 710: device-side assert triggered")
    now.alarm(1, *now.proxies[1].failing)
    now.run()
    now.goes_on(state=7)
    assert [proxy.got_error for proxy in now.proxies.values()] == [False, True]
    assert len(now.named("recovery_begun")) == 2


def test_failures_without_end_are_given_up() -> None:
    now = job()
    for _ in range(10):
        now.alarm(1)
        now.run()
        now.goes_on(state=7)
    now.alarm(1)
    now.run()
    for proxy in now.proxies.values():
        assert "10 recoveries in a row to the state after step 7 have failed" in proxy.given_up
        assert not proxy.held
    assert len(now.named("recovery_given_up")) == 1


def test_an_order_that_is_not_carried_out_in_time_begins_another_recovery() -> None:
    now = job()
    now.alarm(0)
    while not now.named("recovery_planned"):
        now.run(most=1)
    assert [type(orders[0]) for orders in now.to.values()] == [Restart, Restart]
    now.deaf = {1}
    now.run()
    assert now.agreement.next_look is not None
    now.agreement.look(now.agreement.next_look - 0.01)
    assert not now.named("deadline")
    now.now = now.agreement.next_look
    now.agreement.look(now.now)
    assert now.named("deadline") == [{"rank": 1, "order": "restart", "seconds": DEADLINE}]
    now.deaf = set()
    now.run()
    now.goes_on(state=7)
    assert now.proxies[0].recovery == (0, 2)
    assert now.agreement.next_look is None


def test_a_rank_that_does_not_come_to_rest_ends_it() -> None:
    now = job()
    now.deaf = {1}
    now.alarm(0)
    now.run()
    now.agreement.look(now.now + DEADLINE)
    now.run()
    assert "rank 1 is gone: it has not come to rest within 60 s" in now.proxies[0].given_up
    assert isinstance(now.to[1][-1], GiveUp)  # it hears of it, should it ever listen
    assert now.agreement.next_look is None


def test_a_worker_that_has_died_ends_it_one_that_has_ended_only_when_it_is_missed() -> None:
    now = job()
    now.agreement.leave(1, "its worker process ended with exit status 0", 0.0)
    now.run()
    assert not now.events
    now.alarm(0)
    now.run()
    assert "rank 1 is gone: its worker process ended with exit status 0" in now.proxies[0].given_up
    dead = job()
    dead.agreement.lose(1, "its worker process was killed by SIGKILL", 0.0)
    dead.run()
    assert "rank 1 is gone: its worker process was killed by SIGKILL" in dead.proxies[0].given_up
    dead.alarm(0)
    dead.run()
    assert len(dead.named("recovery_given_up")) == 1


def test_who_has_nothing_to_go_back_to_ends_it() -> None:
    now = Job(Proxy(0, 2, kept=()), Proxy(1, 2, kept=()))
    now.alarm(0, 3, "CUDA error 700")
    now.run()
    assert "(rank 0: CUDA error 700): no rank has a whole state" in now.proxies[1].given_up
    early = Job(Proxy(0, 2))
    told: dict[int, ToProxy] = {}
    late = Agreement([0, 1], DEADLINE, told.__setitem__, lambda event, **details: None)
    late.hear(0, early.proxies[0].hello(), 0.0)
    late.hear(0, early.proxies[0].alarm(), 0.0)
    assert isinstance(told[0], GiveUp)
    assert "rank 1 is gone: it has not used its device yet" in told[0].reason


def test_ranks_that_number_their_states_differently_go_back_to_one_state_of_the_job() -> None:
    """Rank 1 has left out a step: its state 6 is what the others call 7."""
    now = Job(
        Proxy(0, 3, kept=(6, 7), made={6: 60, 7: 70}),
        Proxy(1, 3, kept=(5, 6), made={5: 60, 6: 70}),
        Proxy(2, 3, kept=(6, 7), made={6: 60, 7: 70}),
    )
    now.alarm(0)
    now.run()
    assert [proxy.state for proxy in now.proxies.values()] == [7, 6, 7]
    assert not any(proxy.held for proxy in now.proxies.values())
    # Rank 1 is also behind: no state of rank 0 is as old as its newest.
    now = Job(Proxy(0, 2, kept=(6, 7), made={6: 60, 7: 70}), Proxy(1, 2, kept=(4, 5), made={4: 40, 5: 50}))
    now.alarm(0)
    now.run()
    for proxy in now.proxies.values():
        assert f"rank 0 has made 60 of the collectives in the communicator {WORLD}" in proxy.given_up
        assert "before its state 6, rank 1 50 before its state 5" in proxy.given_up


def waiting(now: Job, *ranks: int) -> None:
    """Some ranks have waited for too long, and tell that again and again."""
    for rank in ranks:
        now.proxies[rank].waited = 61_000_000
    for _ in range(3):
        for rank in ranks:
            now.said[rank].append(now.proxies[rank].standing())
        now.run()


def test_a_job_that_hangs_is_brought_back() -> None:
    now = Job(*(Proxy(rank, 3, made={0: 12}) for rank in range(3)))
    # Rank 2 has made the call too, and its host is busy; rank 1 makes its next one when it has this answer.
    now.proxies[2].made[0] = 13
    waiting(now, 0, 1)
    now.goes_on(state=7)
    assert now.named("device_alarm")[0] == {
        "rank": 0,
        "call": 0,
        "text": "the device has given no answer for 61 s",
    }
    assert not now.named("straggler")
    # Nobody knows which is at fault.
    assert [proxy.server for proxy in now.proxies.values()] == [len(now.named("recovery_begun"))] * 3


def test_questions_about_a_hang_come_to_an_end() -> None:
    """All ranks have waited for too long, and the agent reads all that one says before it reads the next."""
    now = Job(*(Proxy(rank, 4, made={0: 12}) for rank in range(4)))
    now.second = 0.001
    now.now = 100.0
    for proxy in now.proxies.values():
        proxy.waited = 61_000_000
    for rank in (0, 0, 1, 1, 2, 2, 3, 3):
        now.said[rank].append(now.proxies[rank].standing())
    reading = 0

    def choose(ways: list[int]) -> int:
        nonlocal reading
        if ways[0] >= 0:
            return ways[0]
        ranks = sorted(~way for way in ways)
        reading = next((rank for rank in ranks if rank >= reading), ranks[0])
        return ~reading

    assert now.run(choose, most=1000) < 100
    now.goes_on(state=7)


def test_a_question_about_a_hang_that_was_not_answered_is_asked_again() -> None:
    now = Job(*(Proxy(rank, 3, made={0: 12}) for rank in range(3)))
    now.deaf = {2}
    waiting(now, 0, 1)
    assert not now.named("device_alarm")
    now.deaf = set()
    now.to[2].clear()
    waiting(now, 0, 1)
    now.goes_on(state=7)


def test_a_rank_that_is_only_late_is_waited_for_and_named_once() -> None:
    now = Job(*(Proxy(rank, 3, made={0: 12}) for rank in range(3)))
    now.proxies[2].made[0] = 11
    waiting(now, 1)
    waiting(now, 0, 1)
    assert not now.named("recovery_begun")
    assert [(one["ranks"], one["seconds"]) for one in now.named("straggler")] == [([2], 61.0)]
    # It comes, and then the network is cut.
    now.proxies[2].made[0] = 12
    waiting(now, 0, 1)
    now.goes_on(state=7)
    assert [name for name, _ in now.events][:3] == ["straggler", "device_alarm", "hang_over"]


def ask_again(now: Job) -> None:
    """Let the time come at which the agent asks where all stand, though no rank has said anything."""
    due = now.agreement.next_look
    assert due is not None
    assert due <= now.now + 60, "by when a waiting rank would have said it itself"
    now.now = due
    now.agreement.look(due)
    now.run()


def test_that_late_ranks_have_come_is_found_by_asking() -> None:
    """Who goes on does not say so."""
    now = Job(*(Proxy(rank, 4, made={0: 12}) for rank in range(4)))
    now.proxies[2].made[0] = now.proxies[3].made[0] = 11
    waiting(now, 0, 1)
    assert [one["ranks"] for one in now.named("straggler")] == [[2, 3]]
    ask_again(now)
    assert len(now.events) == 1, "they are late still"
    now.proxies[2].made[0] = 12
    now.proxies[2].waited = 1_000_000  # it waits for rank 3, too
    ask_again(now)
    assert [one["ranks"] for one in now.named("straggler")] == [[2, 3], [3]]
    now.deaf = {1}  # for a moment
    for proxy in now.proxies.values():
        proxy.made[0], proxy.waited = 13, 0
    ask_again(now)
    assert not now.named("hang_over"), "not all have answered"
    now.deaf = set()
    now.run()
    assert [name for name, _ in now.events] == ["straggler", "straggler", "hang_over"]
    assert now.agreement.next_look is None
    now.proxies[3].made[0] = 12
    waiting(now, 0)
    assert [one["ranks"] for one in now.named("straggler")][2:] == [[3]], "it may be late again"


def test_late_ranks_that_have_ended_are_waited_for_no_more() -> None:
    now = Job(*(Proxy(rank, 2, made={0: 12}) for rank in range(2)))
    now.proxies[1].made[0] = 11
    waiting(now, 0)
    for rank in now.proxies:
        now.agreement.leave(rank, "its worker process has ended", now.now)
    ask_again(now)
    assert [name for name, _ in now.events] == ["straggler", "hang_over"]


def test_a_rank_that_has_not_used_its_device_yet_is_late() -> None:
    early = Job(Proxy(0, 2, made={0: 12}))
    events: list[str] = []
    late = Agreement(
        [0, 1], DEADLINE, lambda rank, order: None, lambda event, **details: events.append(event)
    )
    late.hear(0, early.proxies[0].hello(), 0.0)
    early.proxies[0].waited = 61_000_000
    late.hear(0, early.proxies[0].standing(), 100.0)
    assert events == ["straggler"]


def come(now: Job, *ranks: int) -> None:
    """Some ranks come to the place before their steps at which they validate."""
    for rank in ranks:
        now.said[rank].append(now.proxies[rank].validates())


def validated(now: Job) -> list[list[int]]:
    return [proxy.validated for proxy in now.proxies.values()]


def test_a_validation_begins_once_all_ranks_have_come_and_goes_on_until_none_has_anything_to_learn() -> None:
    now = job()
    now.proxies[1].lacks = 3
    come(now, 0)
    now.run()
    assert not now.proxies[0].orders
    come(now, 1)
    now.run()
    assert validated(now) == [[1], [1]]
    replays = [order.overwrite for order in now.proxies[0].orders if isinstance(order, Replay)]
    assert replays == [1, 1, 1]
    assert [proxy.server for proxy in now.proxies.values()] == [0, 0]
    # A user hears nothing but the outcome: nothing has failed.
    assert [name for name, _ in now.events] == ["validated", "validated"]
    assert now.agreement.next_look is None
    # Servers stay for the first failure after it, though it is to the same state.
    now.alarm(0)
    now.run()
    now.goes_on(state=7)
    assert [proxy.server for proxy in now.proxies.values()] == [0, 0]


def test_transparent_mode_is_switched_off_for_all_once_no_other_rank_has_anything_to_learn() -> None:
    now = job()
    now.proxies[0].lacks, now.proxies[1].wrong = 2, True
    come(now, 0, 1)
    now.run()
    assert len([order for order in now.proxies[0].orders if isinstance(order, Replay)]) == 2
    for proxy in now.proxies.values():
        assert "Transparent mode is switched off: what rank 1 has (rank 1). The training" in proxy.given_up
    assert [name for name, _ in now.events] == ["switched_off"]


@given(st.data())
def test_a_rank_whose_hook_has_failed_ends_it_for_all_once_nothing_is_under_way(data: st.DataObject) -> None:
    """Whatever the others do; in the middle of a recovery their devices would be lost."""
    now = job(data.draw(st.integers(1, 3)))
    rank = data.draw(st.sampled_from([*now.proxies]))
    come(now, *data.draw(st.sets(st.sampled_from([*now.proxies]))) - {rank})
    if data.draw(st.booleans()):
        now.alarm(data.draw(st.sampled_from([*now.proxies])))
    now.run(lambda ways: data.draw(st.sampled_from(ways)), most=data.draw(st.integers(0, 25)))
    now.said[rank].append(now.proxies[rank].fails())
    now.run(lambda ways: data.draw(st.sampled_from(ways)))
    for proxy in now.proxies.values():
        assert not proxy.held
        reason = f"Transparent mode is switched off: its hook has failed (rank {rank}). The training goes on"
        assert reason in proxy.given_up
        assert validation.RELIED not in proxy.given_up
    named = [name for name, _ in now.events]
    assert named.count("switched_off") == 1
    assert named.count("recovery_begun") == named.count("recovered")


@pytest.mark.parametrize("valid_since", [False, True])
def test_what_was_recovered_from_calls_that_can_not_be_repeated_sends_the_job_back(valid_since: bool) -> None:
    now = job()
    now.alarm(0)
    now.run()
    if valid_since:
        come(now, 0, 1)
        now.run()
    now.proxies[1].wrong = True
    come(now, 0, 1)
    now.run()
    for proxy in now.proxies.values():
        assert "Transparent mode is switched off" in proxy.given_up
        assert (validation.RELIED in proxy.given_up) != valid_since


@given(st.data())
def test_failures_in_a_validation_are_recovered_from_and_it_still_ends(data: st.DataObject) -> None:
    now = job(data.draw(st.integers(1, 3)))
    for proxy in now.proxies.values():
        proxy.lacks = data.draw(st.integers(0, 2))
    come(now, *now.proxies)
    for _ in range(data.draw(st.integers(1, 3))):
        now.run(lambda ways: data.draw(st.sampled_from(ways)), most=data.draw(st.integers(0, 25)))
        now.alarm(data.draw(st.sampled_from([*now.proxies])))
    now.run(lambda ways: data.draw(st.sampled_from(ways)))
    assert validated(now) == [[1]] * len(now.proxies)
    assert not any(proxy.held or proxy.given_up for proxy in now.proxies.values())
    # As often as the user hears of a failure it hears of its end.
    begun = [name for name, _ in now.events if name in ("recovery_begun", "recovered")]
    assert begun[-1:] != ["recovery_begun"]


def test_a_validation_is_left_out_where_not_all_ranks_come() -> None:
    now = job()
    come(now, 0)
    now.run()
    assert now.agreement.next_look == now.now + PATIENCE
    now.agreement.look(now.now + PATIENCE - 0.01)
    assert not now.named("validation_left_out")
    now.agreement.look(now.now + PATIENCE)
    now.run()
    assert validated(now) == [[0], []]
    assert "rank 1 has not come" in str(now.named("validation_left_out")[0]["text"])
    assert now.agreement.next_look is None
    # One that waits for what the other would send it has not to be waited for so long.
    come(now, 0)
    now.run()
    waiting(now, 1)
    assert validated(now) == [[0, 0], []]
    # Nor one that has ended.
    now = job()
    now.agreement.leave(1, "its worker process ended with exit status 0", 0.0)
    come(now, 0)
    now.run()
    assert validated(now) == [[0], []]


@pytest.mark.parametrize("fails", [True, False])
def test_a_rank_that_comes_to_a_place_that_others_have_left_does_not_wait_there(fails: bool) -> None:
    """Else they would wait for what it sends next, and it for them, until nobody has any patience left."""
    now = job(3)
    come(now, 0, 2)
    now.run()
    now.agreement.look(now.now + PATIENCE)
    now.run()
    assert validated(now) == [[0], [], [0]]
    if fails:  # its device, that is why it had not come
        now.alarm(1)
        now.run()
    come(now, 1)
    now.run()
    assert validated(now) == [[0], [0], [0]]
    assert len(now.named("validation_left_out")) == 1
    come(now, 0, 1, 2)
    now.run()
    assert validated(now) == [[0, 1], [0, 1], [0, 1]]


def test_a_rank_that_has_left_out_a_validation_comes_to_the_next_one() -> None:
    now = job()
    come(now, 0)
    now.run()
    now.agreement.look(now.now + PATIENCE)
    now.run()
    now.proxies[1].step += 1  # it validates seldom
    come(now, 0, 1)
    now.run()
    assert validated(now) == [[0, 1], [1]]


@pytest.mark.parametrize("compares", [True, False])
def test_a_rank_that_others_need_for_their_replays_does_not_wait_for_them(compares: bool) -> None:
    """The second stage of a pipeline is a minibatch ahead of the first, whose device hangs.

    compares: else a failure has taken away what the rank has said first.
    """
    now = job()
    come(now, 1)
    now.run()
    waiting(now, 0)
    assert validated(now) == [[], [0]]
    come(now, 1)
    now.run()
    waiting(now, 0)
    assert validated(now) == [[], [0, 0]]
    now.alarm(0)
    now.run(most=1)
    while not any(isinstance(order, Replay) for order in now.to[1]):
        now.run(most=1)
    now.deaf = {1}  # the replay comes to no end
    now.run()
    behind = now.proxies[0]
    for _ in range(2):
        first = behind.validates()
        said = first if compares else behind.says(LEFT_OUT, "its memory was not compared")
        now.said[0].append(said)
        now.run()
    assert validated(now) == [[0, 0], [0, 0]]
    # The next one is ahead of the other.
    come(now, 0)
    now.run()
    now.deaf = set()
    come(now, 1)
    now.run()
    assert validated(now) == [[0, 0, 1], [0, 0, 1]]


def test_a_rank_that_cant_compare_has_the_validation_left_out() -> None:
    now = job()
    come(now, 0)
    now.said[1].append(now.proxies[1].says(LEFT_OUT, "no room"))
    now.run()
    assert validated(now) == [[0], [0]]
    assert now.named("validation_left_out") == [{"text": "no room"}]


def test_an_id_that_nobody_renews_ends_it() -> None:
    now = job()
    now.proxies[0].issues = ()
    now.alarm(0)
    now.run()
    assert f"no rank can renew the id of the communicator {WORLD}" in now.proxies[1].given_up


@pytest.mark.parametrize(
    ("states", "unfit", "said"),
    [
        (("", ""), "", ""),  # nobody has asked for it
        (("a", ""), "a step waits for the device", "a step waits for the device (rank 1)"),
        (("a", "b"), "", "no other rank has the state of rank 0"),
        (("a", "a", "b"), "", "no other rank has the state of rank 2"),
    ],
)
def test_states_stay_in_images_where_they_are_not_safe_on_the_devices(
    states: tuple[str, ...], unfit: str, said: str
) -> None:
    now = Job(*(Proxy(rank, len(states), content=state) for rank, state in enumerate(states)))
    now.proxies[1].unfit = unfit
    come(now, *now.proxies)
    now.run()
    assert validated(now) == [[1]] * len(states)
    assert [one["text"] for one in now.named("state_in_images")] == ([said] if said else [])
    assert not now.named("state_stays")


def test_states_stay_in_images_of_ranks_that_make_unequally_many_steps() -> None:
    """They would wait for each other's steps for ever."""
    now = Job(
        Proxy(0, 2, kept=(6, 7), made={6: 60, 7: 70}, content="a"),
        Proxy(1, 2, kept=(5, 6), made={5: 60, 6: 70}, content="a"),
    )
    come(now, 0, 1)
    now.run()
    assert validated(now) == [[1], [1]]
    assert now.named("state_in_images") == [{"text": "not all ranks have made equally many steps"}]


def staying(size: int = 4) -> Job:
    """Return a job of two shards, with as many replicas, whose states stay on the devices."""
    now = Job(*(Proxy(rank, size, content="ab"[rank % 2 * (size > 3)]) for rank in range(size)))
    come(now, *now.proxies)
    now.run()
    assert validated(now) == [[2, 2]] * size
    groups = [[0, 2], [1, 3]] if size == 4 else [[*range(size)]]
    assert now.named("state_stays") == [{"replicas": groups}]
    return now


def ways(now: Job) -> object:
    return now.named("recovery_planned")[-1]["ways"]


def test_states_stay_in_place_where_no_device_has_failed() -> None:
    now = staying()
    now.alarm(1, 80, "ncclRemoteError")
    now.run()
    now.goes_on(state=7)
    assert ways(now) == ["in place"] * 4
    assert [proxy.server for proxy in now.proxies.values()] == [0] * 4
    assert not any(proxy.copies for proxy in now.proxies.values())


def test_a_lost_device_gets_its_state_from_a_replica_a_suspect_one_through_the_host() -> None:
    now = staying()
    now.proxies[1].loses_its_device()
    now.proxies[2].device = SUSPECT
    now.alarm(1)
    now.run()
    now.goes_on(state=7)
    assert ways(now) == ["in place", "from rank 3", "through the host", "in place"]
    assert [proxy.server for proxy in now.proxies.values()] == [0, 1, 1, 0]


def test_a_rank_that_was_ready_for_the_step_finishes_it() -> None:
    now = staying()
    for rank, proxy in now.proxies.items():
        proxy.kept, proxy.ready, proxy.ended = (7, 8), 8, 7 + (rank < 2)
        proxy.state = proxy.ended
    now.proxies[1].loses_its_device()
    now.alarm(1)
    now.run()
    now.goes_on(state=8)
    assert ways(now) == ["in place", "from rank 3", "finish", "finish"]
    assert [proxy.server for proxy in now.proxies.values()] == [0, 1, 0, 0]


def test_without_a_replica_that_holds_the_state_it_is_given_up_with_its_name() -> None:
    now = staying()
    for rank in (1, 3):
        now.proxies[rank].loses_its_device()
    now.alarm(3)
    now.run()
    for proxy in now.proxies.values():
        assert (
            "no device has the state after step 7 of shard 1 any more, held by ranks 1, 3" in proxy.given_up
        )


def test_servers_of_which_nobody_knows_which_is_at_fault_are_replaced_with_their_states_kept() -> None:
    now = staying()
    now.alarm(0)
    now.run()
    now.alarm(2)  # before there is a newer state
    now.run()
    now.goes_on(state=7)
    assert ways(now) == ["in place"] * 4
    assert [proxy.server for proxy in now.proxies.values()] == [1] * 4
    hanging = staying(2)
    for proxy in hanging.proxies.values():
        proxy.made[0] = 12
    waiting(hanging, 0, 1)
    hanging.goes_on(state=7)
    assert {proxy.server for proxy in hanging.proxies.values()} == {len(hanging.named("recovery_begun"))}


def test_a_server_that_was_to_stay_and_could_not_begins_another_recovery() -> None:
    now = staying(2)
    now.proxies[1].breaks = True
    now.alarm(0)
    now.run()
    now.goes_on(state=7)
    assert len(now.named("recovery_begun")) == 2
    assert ways(now) == ["in place", "from rank 0"]


@given(st.data())
def test_failures_upon_failures_of_states_that_stay(data: st.DataObject) -> None:
    """As long as of each shard one device or one copy is left."""
    now = staying(data.draw(st.sampled_from([2, 4])))
    steps = data.draw(st.lists(st.booleans(), min_size=len(now.proxies), max_size=len(now.proxies)))
    if data.draw(st.booleans()):  # all are ready for a step, which some have ended
        for stepped, proxy in zip(steps, now.proxies.values(), strict=True):
            proxy.kept, proxy.ready, proxy.ended = (7, 8), 8, 7 + stepped
            proxy.state = proxy.ended
    safe = data.draw(st.sampled_from([*now.proxies]))
    lost: set[int] = set()
    for _ in range(data.draw(st.integers(1, 4))):
        rank = data.draw(st.sampled_from([*now.proxies]))
        match data.draw(st.sampled_from(["transient", "suspect", "lost"])):
            case "suspect" if now.proxies[rank].device == HEALTHY:
                now.proxies[rank].device = SUSPECT
            case "lost" if rank % 2 != safe % 2:
                now.proxies[rank].loses_its_device()
                lost.add(rank)
        now.alarm(rank)
        now.run(lambda ways: data.draw(st.sampled_from(ways)), most=data.draw(st.integers(0, 12)))
    now.run(lambda ways: data.draw(st.sampled_from(ways)))
    if not now.named("recovery_given_up"):
        now.goes_on(state=max(proxy.ended for proxy in now.proxies.values()))
        return
    assert lost == {rank for rank in range(4) if rank % 2 != safe % 2}, now.events
    assert "no device has the state" in str(now.named("recovery_given_up")[0]["text"])


def test_a_rank_that_did_not_hear_that_states_stay_hears_it_again() -> None:
    now = staying(2)
    now.proxies[1].stays, now.proxies[1].waits, now.proxies[1].tries = False, True, True
    now.alarm(1)
    now.run()
    assert validated(now) == [[2, 2], [2, 2, 2]]
    # Once they have left, minibatches are validated as before.
    for proxy in now.proxies.values():
        proxy.stays, proxy.content = False, ""
    come(now, 0, 1)
    now.run()
    assert validated(now) == [[2, 2, 1], [2, 2, 2, 1]]


def test_a_rank_whose_first_word_a_failure_takes_away_is_not_told_of_an_older_validation() -> None:
    """Two ranks whose states stay come to another validation, and a server dies in it."""
    now = staying(2)
    for proxy in now.proxies.values():
        proxy.stays, proxy.kept = False, (7,)
    now.alarm(0)
    now.run()
    early = now.proxies[1]
    early.validates()  # which belonged to the time before the recovery, and was not heard
    now.said[1].append(early.says(LEFT_OUT, "its memory was not compared"))
    now.run()
    assert validated(now) == [[2, 2], [2, 2]]
    come(now, 0)
    now.run()
    assert validated(now) == [[2, 2, 0], [2, 2, 0]]
    assert now.named("validation_left_out") == [{"text": "its memory was not compared"}]


@given(st.data())
def test_all_ranks_hear_the_same_at_each_place_whatever_fails_between(data: st.DataObject) -> None:
    now = job(data.draw(st.integers(2, 3)))
    for proxy in now.proxies.values():
        proxy.content, proxy.compares = "a", data.draw(st.booleans())
    for step in range(1, data.draw(st.integers(2, 4))):
        for proxy in now.proxies.values():
            proxy.stays, proxy.device = False, LOST
        for rank in data.draw(st.permutations([*now.proxies])):
            if data.draw(st.booleans()):
                now.run(lambda ways: data.draw(st.sampled_from(ways)), most=data.draw(st.integers(0, 5)))
            if now.proxies[rank].held:  # it comes once it goes on
                now.run()
            come(now, rank)
            if data.draw(st.booleans()):
                now.alarm(data.draw(st.sampled_from([*now.proxies])))
        now.run(lambda ways: data.draw(st.sampled_from(ways)))
        places = {place for proxy in now.proxies.values() for place in proxy.heard}
        assert max(places) // 3 == step
        for place in places:
            assert len({proxy.heard[place] for proxy in now.proxies.values()}) == 1


def test_states_stay_in_images_where_the_first_step_shows_that_they_have_to() -> None:
    now = job()
    for proxy in now.proxies.values():
        proxy.content = "a"
    now.proxies[1].fails_trial = "step 5 has changed a count"
    come(now, 0, 1)
    now.run()
    assert validated(now) == [[2, 1], [2, 1]]
    assert now.named("state_in_images") == [{"text": "step 5 has changed a count (rank 1)"}]
    assert not now.named("state_stays")


def test_a_rank_that_does_not_come_to_the_end_of_that_step_leaves_the_states_in_images() -> None:
    now = job()
    for proxy in now.proxies.values():
        proxy.content = "a"
    come(now, 0, 1)
    while not all(proxy.tries for proxy in now.proxies.values()):
        now.run(most=1)
    late = now.said[1].pop()
    now.run()
    now.agreement.look(now.now + PATIENCE)
    now.run()
    assert validated(now) == [[2, 1], [2]]
    assert "rank 1 has not come" in str(now.named("state_in_images")[0]["text"])
    now.said[1].append(late)  # nobody waits for it any more, nor does it
    now.run()
    assert validated(now) == [[2, 1], [2, 1]]
    assert now.agreement.next_look is None


@given(st.data())
def test_failures_in_that_step_do_not_keep_states_from_staying(data: st.DataObject) -> None:
    now = job(data.draw(st.integers(2, 3)))
    for proxy in now.proxies.values():
        proxy.content = "a"
    come(now, *now.proxies)
    for _ in range(data.draw(st.integers(1, 3))):
        now.run(lambda ways: data.draw(st.sampled_from(ways)), most=data.draw(st.integers(0, 25)))
        now.alarm(data.draw(st.sampled_from([*now.proxies])))
    now.run(lambda ways: data.draw(st.sampled_from(ways)))
    assert validated(now) == [[2, 2]] * len(now.proxies)
    assert all(proxy.stays for proxy in now.proxies.values())
    assert len(now.named("state_stays")) == 1


def proven(size: int, *, stays: bool, servers_stay: bool = False) -> Job:
    """Return a job of which a minibatch was valid."""
    now = Job(*(Proxy(rank, size) for rank in range(size)), servers_stay=servers_stay)
    for proxy in now.proxies.values():
        proxy.content = "a" if stays else ""
    come(now, *now.proxies)
    now.run()
    assert all(proxy.stays == stays for proxy in now.proxies.values())
    return now


def come_to_rest(now: Job, *ranks: int) -> None:
    for rank in ranks:
        now.said[rank].append(now.proxies[rank].rests())


@pytest.mark.parametrize("servers_stay", [False, True])
@pytest.mark.parametrize("stays", [False, True])
def test_all_ranks_rest_behind_a_step_and_go_on_from_its_state_as_often_as_wanted(
    stays: bool, servers_stay: bool
) -> None:
    now = proven(2, stays=stays, servers_stay=servers_stay)
    before = now.servers()
    for times in (1, 2, 3):
        come_to_rest(now, 0)
        now.run()
        assert now.rests == times - 1
        come_to_rest(now, 1)
        now.run()
        assert now.rests == times
        for proxy in now.proxies.values():
            assert (proxy.held, proxy.waits, proxy.given_up, proxy.state) == (False, False, "", 7)
            proxy.step += 1
    assert len(now.named("rested")) == len(now.named("held")) == 3
    # To the user nothing has failed.
    assert not now.named("recovery_begun") + now.named("recovered") + now.named("no_rest")
    assert now.agreement.next_look is None
    assert (now.servers() == before) == servers_stay


@pytest.mark.parametrize("servers_stay", [False, True])
@pytest.mark.parametrize("stays", [False, True])
def test_another_agreement_goes_on_where_all_have_come_to_rest(stays: bool, servers_stay: bool) -> None:
    """As often as wanted, with failures afterwards."""
    now = proven(2, stays=stays, servers_stay=servers_stay)
    now.goes_back = True
    for times in (1, 2):
        come_to_rest(now, *now.proxies)
        now.run()
        assert now.rests == len(now.named("rested")) == times
        for proxy in now.proxies.values():
            assert (proxy.held, proxy.waits, proxy.given_up, proxy.state) == (False, False, "", 7)
            proxy.step += 1
    assert not now.named("recovery_begun") + now.named("no_rest")
    now.alarm(1)
    now.run()
    now.goes_on(7)


@given(st.data())
def test_failures_while_a_job_comes_to_rest_or_goes_on_are_recovered_from(data: st.DataObject) -> None:
    now = proven(
        data.draw(st.integers(2, 3)), stays=data.draw(st.booleans()), servers_stay=data.draw(st.booleans())
    )
    come_to_rest(now, *now.proxies)
    for _ in range(data.draw(st.integers(1, 3))):
        now.run(lambda ways: data.draw(st.sampled_from(ways)), most=data.draw(st.integers(0, 40)))
        now.alarm(data.draw(st.sampled_from([*now.proxies])))
    now.run(lambda ways: data.draw(st.sampled_from(ways)))
    assert now.rests == len(now.named("rested")) == 1
    assert not any(proxy.held or proxy.waits or proxy.given_up for proxy in now.proxies.values())


@pytest.mark.parametrize("stays", [False, True])
def test_a_server_that_ends_while_all_rest_is_replaced_once_they_go_on(stays: bool) -> None:
    now = proven(2, stays=stays, servers_stay=True)
    now.proxies[1].ends_at_rest = True
    come_to_rest(now, *now.proxies)
    now.run()
    now.goes_on(7)
    assert now.rests == len(now.named("rested")) == len(now.named("recovered")) == 1


def test_where_one_rank_can_not_rest_with_its_server_none_does() -> None:
    now = proven(2, stays=True, servers_stay=True)
    before = now.servers()
    now.proxies[1].unsettled = "its device has not come to rest"
    come_to_rest(now, *now.proxies)
    now.run()
    assert [details["rank"] for details in now.named("not_settled")] == [1]
    assert now.rests == len(now.named("rested")) == 1
    assert all(now.servers()[rank] > before[rank] for rank in now.proxies)
    assert not now.named("recovery_begun") + now.named("no_rest")


def test_nobody_waits_for_ever_for_a_rank_that_does_not_settle() -> None:
    now = proven(2, stays=True, servers_stay=True)
    come_to_rest(now, *now.proxies)
    now.run(most=2)
    assert [type(order) for order in now.to[1]] == [Settle]
    now.to[1].clear()
    now.run()
    assert now.rests == 0
    assert now.agreement.next_look == pytest.approx(now.now + PATIENCE, abs=5)
    now.agreement.look(now.now + PATIENCE)
    now.run()
    assert now.rests == len(now.named("rested")) == 1
    assert not any(proxy.held or proxy.waits for proxy in now.proxies.values())


def test_a_rank_that_is_lost_while_others_settle_leaves_no_recovery() -> None:
    now = proven(2, stays=True, servers_stay=True)
    come_to_rest(now, *now.proxies)
    now.run(most=2)
    now.to[1].clear()
    now.agreement.leave(1, "its device proxy has hung up", now.now)
    now.run()
    assert "rank 1 is gone" in str(now.named("recovery_given_up")[0]["text"])
    assert now.rests == 0
    assert now.proxies[0].given_up


def test_a_job_does_not_rest_where_not_all_can_and_goes_on() -> None:
    unproven = job()
    come_to_rest(unproven, 0, 1)
    unproven.run()
    assert "validated" in str(unproven.named("no_rest")[0]["text"])
    now = proven(2, stays=True)
    now.said[0].append(now.proxies[0].rests("it has said nothing"))
    come_to_rest(now, 1)
    now.run()
    now.proxies[0].step, now.proxies[1].step = 2, 3  # they come to different steps
    come_to_rest(now, 0, 1)
    now.run()
    now.proxies[0].step = 4
    come_to_rest(now, 0)  # the other does not come
    now.run()
    now.agreement.look(now.now + PATIENCE)
    now.run()
    texts = [str(details["text"]) for details in now.named("no_rest")]
    assert [text[:20] for text in texts] == [
        "it has said nothing ",
        "not all ranks have c",
        "rank 1 has not come ",
    ]
    assert (now.rests, now.named("rested")) == (0, [])
    assert not any(proxy.held or proxy.waits for proxy in now.proxies.values())
