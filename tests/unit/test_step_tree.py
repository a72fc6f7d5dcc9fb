"""The tree in which hosts hear that all have come: in whatever order, what is heard is true."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.step_tree import FAN_OUT, TreePlace, children, merged, parent
from jitckpt.wire.agents import Come

BITS = 40


def joined(recovery: int, step: int) -> int:
    return recovery << BITS | step


@pytest.mark.parametrize("hosts", [1, 2, FAN_OUT + 1, FAN_OUT + 2, 1250])
def test_each_host_but_the_first_has_one_parent(hosts: int) -> None:
    assert parent(0) is None
    told = [(child, host) for host in range(hosts) for child in children(host, hosts)]
    assert sorted(told) == [(host, parent(host)) for host in range(1, hosts)]


def test_hosts_of_different_recoveries_have_not_come() -> None:
    assert merged([Come(joined(1, 5)), Come(joined(1, 7), 9)], BITS) == Come(joined(1, 5), 9)
    assert merged([Come(joined(1, 5)), Come(joined(2, 4), 0, left=True)], BITS) == Come(0, 0, left=True)
    assert merged([Come(1, 9), Come(2, 8)], BITS) == Come(1, 8)


def test_who_is_no_neighbour_is_not_listened_to() -> None:
    with pytest.raises(KeyError, match="host 5 is no neighbour of host 20"):
        TreePlace(20, 30, BITS).hear(5, Come())


class Network:
    """Hosts whose ranks come to steps, and go back in recoveries; a pair's messages come in their order."""

    def __init__(self, hosts: int) -> None:
        self.places = [TreePlace(host, hosts, BITS) for host in range(hosts)]
        self.own = [Come() for _ in range(hosts)]
        self.links: dict[tuple[int, int], deque[Come]] = {}
        self.came: list[set[int]] = [{0} for _ in range(hosts)]  # what each host has ever come to
        self.at = [*range(hosts)]  # where the ranks of each are now

    def here(self, host: int, come: Come) -> None:
        self.own[host] = come
        self.came[host].add(come.recovery_and_step)
        self.take(self.at[host], *self.places[self.at[host]].here(come))

    def give_ranks(self, host: int) -> None:
        """The host's ranks go on on one more, and it stays."""
        hosts, now = len(self.own), len(self.places)
        before = self.places[host]
        self.places[host] = replace(before, ranks_at=now)
        said, of_all = before.own, before.everywhere
        self.places.append(TreePlace(now, hosts, BITS, said, {}, said, of_all, ranks_of=host))
        self.at[host] = now

    def take(self, host: int, place: TreePlace, said: object) -> None:
        self.places[host] = place
        for other, come in said:  # type: ignore[attr-defined]
            self.links.setdefault((host, other), deque()).append(come)
        self.check(host)

    def deliver(self, number: int) -> bool:
        waiting = [pair for pair, queue in self.links.items() if queue]
        if not waiting:
            return False
        source, target = waiting[number % len(waiting)]
        come = self.links[source, target].popleft()
        self.take(target, *self.places[target].hear(source, come))
        return True

    def check(self, host: int) -> None:
        """What a host holds for true of all has been so: each was there, or further in the same recovery."""
        everywhere = self.places[host].everywhere.recovery_and_step
        end = ((everywhere >> BITS) + 1) << BITS
        assert all(any(everywhere <= one < end for one in came) for came in self.came if everywhere)


@given(st.integers(1, 40), st.data())
def test_all_hear_the_truth_and_in_the_end_all_of_it(hosts: int, data: st.DataObject) -> None:
    network = Network(hosts)
    number = st.integers(0, 1000)
    recovery = 0
    steps = [0] * hosts
    for _ in range(data.draw(st.integers(0, 60))):
        action = data.draw(
            st.sampled_from(["come", "come", "deliver", "deliver", "recover", "leave", "give ranks"])
        )
        host = data.draw(number) % hosts
        own = network.own[host]
        if action == "deliver":
            network.deliver(data.draw(number))
        elif action == "come":
            if own.recovery_and_step >> BITS == recovery:
                steps[host] += 1
            network.here(host, Come(joined(recovery, steps[host]), own.whole_from, own.left))
        elif action == "give ranks":
            if network.at[host] == host:
                network.give_ranks(host)
        elif action == "recover":
            recovery += 1
            steps = [min(steps)] * hosts
        else:
            network.here(host, Come(own.recovery_and_step, data.draw(number), left=data.draw(st.booleans())))
    last = max(steps) + 1
    for host in range(hosts):
        own = network.own[host]
        network.here(host, Come(joined(recovery, last), own.whole_from, own.left))
    while network.deliver(data.draw(number)):
        pass
    all_of_it = merged(network.own, BITS)
    assert all_of_it.recovery_and_step == joined(recovery, last)
    assert {place.everywhere for place in network.places} == {all_of_it}


@given(st.integers(2, 40), st.data())
def test_who_goes_on_has_heard_what_was_said_before(hosts: int, data: st.DataObject) -> None:
    network = Network(hosts)
    speaker, whole_from = data.draw(st.integers(0, hosts - 1)), 7
    network.here(speaker, Come(0, whole_from))
    for host in data.draw(st.permutations(range(hosts))):
        network.here(host, Come(5, network.own[host].whole_from))
        while data.draw(st.booleans()) and network.deliver(data.draw(st.integers(0, 1000))):
            pass
    while network.deliver(data.draw(st.integers(0, 1000))):
        for place in network.places:
            assert place.everywhere.recovery_and_step < 5 or place.everywhere.whole_from == whole_from
    assert {place.everywhere for place in network.places} == {Come(5, whole_from)}
