"""Hosts that stand by are asked one after the other who takes ranks."""

import asyncio
import time
from collections.abc import Callable

import pytest

from jitckpt.agent.migration import who_takes
from jitckpt.agent.migration.who_takes import NotNowError, first_that_takes
from jitckpt.hosts.link import LinkError
from jitckpt.hosts.standbys import Standby

A, B, C = (Standby(name, 1) for name in "abc")


class Standing:
    """Hosts that stand by. asked: in this order; does: what each answers, or raises."""

    def __init__(self, *there: Standby) -> None:
        self.there, self.asked = [*there], list[Standby]()
        self.does: dict[Standby, list[Callable[[], str]]] = {}
        self.said: list[str] = []
        self.tell: Callable[[str], None] = self.said.append
        self.is_over = False

    def will(self, one: Standby, *does: str | Exception) -> None:
        self.does[one] = [lambda what=what: _done(what) for what in does]  # type: ignore[misc]

    async def ask(self, one: Standby) -> str:
        self.asked.append(one)
        does = self.does[one]
        return (does.pop(0) if len(does) > 1 else does[0])()

    def found(self, wait: float = 0.0) -> str:
        return asyncio.run(
            first_that_takes(
                lambda: self.there,
                self.ask,
                self.tell,
                wait=wait,
                is_over=lambda: self.is_over,
            )
        )


def _done(what: str | Exception) -> str:
    if isinstance(what, Exception):
        raise what
    return what


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(who_takes, "LOOK_SECONDS", 0.01)


def test_one_that_is_busy_is_passed_over_and_none_of_those_that_may_fail() -> None:
    hosts = Standing(A, B, C)
    hosts.will(A, NotNowError("It takes others."))
    hosts.will(B, LinkError("It can't."))
    hosts.will(C, "c")
    assert hosts.found() == "c"
    assert hosts.said == ["b could not take this host's ranks, so another is asked: It can't."]


def test_only_so_many_get_the_images() -> None:
    hosts = Standing(A, B, C)
    for one in (A, B, C):
        hosts.will(one, LinkError(f"{one.address} can't."))
    with pytest.raises(LinkError, match=r"^b can't\.$"):
        hosts.found(wait=60.0)
    assert hosts.asked == [A, B]


def test_one_that_was_busy_is_asked_again_for_as_long_as_ranks_may_be_held() -> None:
    hosts = Standing(A, B)
    hosts.will(A, NotNowError("It is busy."), NotNowError("It is busy."), "a")
    hosts.will(B, LinkError("It can't."))
    assert hosts.found(wait=60.0) == "a"
    assert hosts.asked == [A, B, A, A]
    assert hosts.said == [
        "no host that stands by can take this host's ranks now, so they are held: a: It is busy.; It can't."
    ]


def test_one_that_comes_is_asked() -> None:
    hosts = Standing()
    hosts.will(A, "a")

    def said(text: str) -> None:
        hosts.there.append(A)

    hosts.tell = said
    assert hosts.found(wait=60.0) == "a"


@pytest.mark.parametrize("there", [(A,), ()])
def test_where_none_has_room_in_time_that_is_said(there: tuple[Standby, ...]) -> None:
    hosts = Standing(*there)
    hosts.will(A, NotNowError("It takes others."))
    begun = time.monotonic()
    with pytest.raises(LinkError, match=r"No host that stands by can be reached, or has room \(.+\)\.$"):
        hosts.found(wait=0.1)
    assert 0.1 <= time.monotonic() - begun < 30
    hosts.is_over = True  # the job is told to end
    with pytest.raises(LinkError, match="No host that stands by"):
        hosts.found(wait=60.0)


def test_why_the_only_one_can_not_is_what_is_said_in_the_end() -> None:
    hosts = Standing(A)
    hosts.will(A, LinkError("It can't."))
    with pytest.raises(LinkError, match=r"^It can't\.$"):
        hosts.found(wait=0.05)
    assert hosts.asked == [A]
