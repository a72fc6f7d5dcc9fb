"""All hosts of a job go back to a snapshot, or none: each hears whether the others' ranks are there again."""

import select
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

from jitckpt.hosts.connections import Arrived, HostLost, Hosts, Unclear
from jitckpt.wire.agents import RanksMadeAgain

Value = TypeVar("Value")
LOOK_SECONDS = 0.5  # between two looks whether the job was told to end meanwhile


class AllMadeAgain:
    """Of one start. others: what else was heard, which is the supervisor's to hear."""

    def __init__(
        self, hosts: Hosts, is_interrupted: Callable[[], bool], heed: Callable[[], None] = lambda: None
    ) -> None:
        """heed: raises what ends this launcher, if it is interrupted."""
        self._hosts, self._is_interrupted, self._heed = hosts, is_interrupted, heed
        self.others: list[Arrived | Unclear | HostLost] = []

    @property
    def connected(self) -> Hosts:
        """The connections to all of them."""
        return self._hosts

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Return what it returns, or raise what it raises, or what ends this launcher."""
        future = self._hosts.start(coroutine)
        try:
            while not future.done():
                wait([future], LOOK_SECONDS)
                self._heed()  # the others must not hear that it could not be done
        finally:
            future.cancel()
        return future.result()

    @property
    def hosts(self) -> int:
        """How many there are."""
        return len(self._hosts.all)

    def why_not(self, name: str, own: str) -> str:
        """Return why not all hosts have gone back to the snapshot of this name; "" if they have.

        own: why this one has not. Where a host is lost, or the job is to end, the others are not waited for:
        this start is over anyway, and the next goes back to the same one.
        """
        self._hosts.broadcast(RanksMadeAgain(name, own))
        heard = {self._hosts.index: own}
        while len(heard) < len(self._hosts.all) and not self._is_over():
            select.select([self._hosts.wake], [], [], LOOK_SECONDS)
            for arrived in self._hosts.take():
                match arrived:
                    case Arrived(host, RanksMadeAgain(of, why)) if of == name:
                        heard[host] = why
                    case _:
                        self.others.append(arrived)
        return next((_said(self._hosts, host, why) for host, why in sorted(heard.items()) if why), "")

    def _is_over(self) -> bool:
        return self._is_interrupted() or any(isinstance(one, HostLost) for one in self.others)


def _said(hosts: Hosts, host: int, why: str) -> str:
    return why if host == hosts.index else f"{why} ({hosts.name(host)})"
