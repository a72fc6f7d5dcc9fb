"""Safe steps are counted up a tree: what is counted is true, and who is lost between does not stop it."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions import step_tree
from jitckpt.decisions.step_count import StepCount, above, below
from jitckpt.decisions.step_tree import FAN_OUT
from jitckpt.wire.agents import Counted, Keepers


@pytest.mark.parametrize("hosts", [1, 2, FAN_OUT + 1, FAN_OUT + 2, 1250])
def test_all_are_below_the_first_and_each_way_up_ends_there(hosts: int) -> None:
    assert sorted(below(0, hosts)) == list(range(1, hosts))
    for host in range(1, hosts):
        assert host in below(above(host, ()) or 0, hosts)
    lost = {1, 2}
    assert above(17, lost) == above(33, lost) == 0
    assert above(17, {0, 1}) is None


def test_what_is_said_of_strangers_is_nonsense() -> None:
    with pytest.raises(ValueError, match=r"hosts \[1, 2\] are not below host 1"):
        StepCount(1, 40).hear(Counted([1, 2], [5]))


class Network:
    """Hosts that come to steps and are lost; messages of a pair come in their order."""

    def __init__(self, hosts: int) -> None:
        self.counts = [StepCount(host, hosts) for host in range(hosts)]
        self.steps: list[list[int]] = [[] for _ in range(hosts)]
        self.lost: set[int] = set()
        self.links: dict[tuple[int, int], deque[Counted]] = {}
        self.messages = 0  # that the first host has heard

    def comes(self, host: int, step: int) -> None:
        """A host's ranks and their keepers have a step; those that are odd have other keepers since 3."""
        self.steps[host] = [*self.steps[host][-1:], step]
        kept = [Keepers(host, [host, 0], [])] if host % 2 and step >= 3 else []
        self.counts[host].hear(Counted([host], self.steps[host], kept, step, host / 100, 1 + host))
        self.tell(host)

    def lose(self, host: int) -> None:
        self.lost.add(host)
        for other in range(len(self.counts)):
            self.tell(other)

    def tell(self, host: int) -> None:
        if host in self.lost:
            return
        for other, said in self.counts[host].news(self.lost):
            self.links.setdefault((host, other), deque()).append(said)

    def deliver(self, number: int) -> bool:
        waiting = [pair for pair, queue in self.links.items() if queue and pair[1] not in self.lost]
        if not waiting:
            return False
        source, target = waiting[number % len(waiting)]
        self.messages += target == 0
        self.counts[target].hear(self.links[source, target].popleft())
        self.tell(target)
        newest = self.counts[0].everywhere
        assert not newest or all(newest in range(1, max(of, default=0) + 1) for of in self.steps)
        return True

    def deliver_all(self) -> None:
        while self.deliver(0):
            pass


@given(st.integers(1, 15), st.integers(1, 4), st.data())
def test_what_is_counted_is_true_and_in_the_end_all_is(hosts: int, fan_out: int, data: st.DataObject) -> None:
    """Those between may be lost at any moment, once what they have is told: the others' steps are counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_tree, "FAN_OUT", fan_out)
        network = Network(hosts)
        number = st.integers(0, 1000)
        last = data.draw(st.integers(1, 4))
        for step in range(1, last + 1):
            order = data.draw(st.permutations(range(hosts)))
            lost = data.draw(st.sets(st.sampled_from(range(hosts)))) - {0} if step == last else set()
            # What one has alone told another is lost with that one.
            lost = {host for host in lost if not any(host in below(other, hosts) for other in lost)}
            for host in sorted(lost):
                network.comes(host, step)
                network.deliver_all()  # or what they have is not known
            for host in order:
                if host not in lost:
                    network.comes(host, step)
                elif data.draw(st.booleans()):
                    network.lose(host)
                while data.draw(st.booleans()) and network.deliver(data.draw(number)):
                    pass
            while network.deliver(data.draw(number)):
                pass
            assert network.counts[0].everywhere == step
    for host in range(hosts):
        expected = Keepers(host, [host, 0], []) if host % 2 and last >= 3 else None
        assert network.counts[0].kept(host) == expected


def test_the_first_host_hears_few_messages_a_step() -> None:
    network = Network(300)
    for step in (1, 2):
        network.messages = 0
        for host in reversed(range(300)):
            network.comes(host, step)
        network.deliver_all()
        assert network.counts[0].everywhere == step
        assert network.messages == 2 * FAN_OUT


def test_how_long_the_slowest_snapshot_took_comes_up() -> None:
    count = StepCount(1, FAN_OUT + 3)
    for host in (17, 18):
        count.hear(Counted([host], [1], [], 1, host / 100, host))
    assert count.news(()) == [(0, Counted([17, 18], [1], [], 1, 0.18, 17))]
    assert count.news(()) == []


def test_parts_that_are_given_back_count_no_more_until_others_have_them() -> None:
    count = StepCount(0, 3)
    for host in range(3):
        count.hear(Counted([host], [1], [Keepers(2, [2], [0, 1])] if host == 2 else []))
    assert not count.give_up_parts({1, 2}, 2)
    assert count.give_up_parts({1, 2}, 1)
    assert count.kept(2) == Keepers(2, [2], [])
    count.hear(Counted([2], [1, 2], [Keepers(2, [2], [0, 1])]))
    assert count.kept(2) == Keepers(2, [2], [0, 1])
