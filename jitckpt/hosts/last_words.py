"""How this host, or its ranks, leave the others: it tells all in its turn, and hears their last words."""

import threading
from collections.abc import Callable, Collection

from jitckpt.hosts.turns import LEADER, Turns
from jitckpt.wire.agents import AgentMessage, LeavesTurn, Turn, WantsTurn


class Leave:
    """Of one host; its waits are for the thread that has the ranks leave, all else for the connections'."""

    def __init__(self, index: int, send: Callable[[int, AgentMessage], None]) -> None:
        self._index, self._send = index, send
        self.stays = False  # without its ranks
        self._turns = Turns(self._give_turn)  # which the first host alone gives
        self._has_turn, self._all_heard = threading.Event(), threading.Event()
        self._heard: set[int] = set()  # hosts that know that this one leaves, or its ranks do
        self._to_hear: frozenset[int] | None = None  # those that are to say so

    def wait_for_turn(self, within: float) -> bool:
        """Return whether it is this host's turn within so many seconds."""
        return self._has_turn.wait(within)

    def wait_for_all(self, within: float) -> bool:
        """Return whether all others that are not lost have said their last words within so many seconds."""
        return self._all_heard.wait(within)

    def ask(self, message: WantsTurn | LeavesTurn, lost: Collection[int]) -> None:
        """Tell the first host. Where it is lost nobody gives turns, and no job is to be left for long."""
        if self._index == LEADER:
            self._turns.hear(LEADER, message)
        elif LEADER in lost:
            self._has_turn.set()
        else:
            self._send(LEADER, message)

    def hear_of_turn(self, host: int, message: WantsTurn | LeavesTurn | Turn) -> None:
        """Another host wants its turn, or gives this one its own."""
        if isinstance(message, Turn):
            self._has_turn.set()
        else:
            self._turns.hear(host, message)

    def awaits(self, place: int) -> None:
        """Somebody has said who is about to come to that place."""
        self._turns.awaits(place)

    def comes(self, place: int) -> None:
        """Who was to come there has come."""
        self._turns.over(place)

    def begin(self, others: Collection[int], lost: Collection[int]) -> None:
        """These are told."""
        self._heard.clear()
        self._to_hear = frozenset(others)
        self._look(lost)

    def hear(self, host: int, lost: Collection[int]) -> None:
        """That host has said its last words to this one."""
        self._heard.add(host)
        self._look(lost)

    def lose(self, host: int, lost: Collection[int]) -> None:
        """A host is lost; these are by now."""
        self._look(lost)
        self._turns.over(host)
        if host == LEADER:
            self._has_turn.set()

    def _look(self, lost: Collection[int]) -> None:
        if self._to_hear is not None and self._heard >= self._to_hear - set(lost):
            self._all_heard.set()

    def _give_turn(self, host: int) -> None:
        if host == self._index:
            self._has_turn.set()
        else:
            self._send(host, Turn())
