"""Has ranks whose devices are broken for good go on with others of their host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jitckpt.decisions.suspects import VARIABLE
from jitckpt.decisions.transparent.devices import Devices
from jitckpt.events import EventLog
from jitckpt.wire.proxy_messages import Stopped


@dataclass(frozen=True)
class ExchangeSettings:
    """What is done about devices that are broken. names: this host's devices, as in CUDA_VISIBLE_DEVICES.

    rehearsed: what a server finds in its environment on a device that is broken in a rehearsal. move: makes
    ranks' worker processes anew, too; None: they stay. check: says what would keep it from doing so.
    foretell: says what else is to be known of moves.
    """

    names: tuple[str, ...]
    rehearsed: Mapping[str, str]
    move: Callable[[Sequence[int]], None] | None = None
    check: Callable[[int], None] | None = None
    foretell: Callable[[], None] | None = None
    can_leave: Callable[[], bool] | None = None
    leave: Callable[[Mapping[int, bytes]], bool] | None = None


class Exchange:
    """Of one start of this host's ranks. Used by the supervisor's thread alone."""

    def __init__(
        self, settings: ExchangeSettings, ranks: list[int], log: EventLog, say: Callable[[str], None]
    ) -> None:
        """ranks: this host's, each with the device of the same place."""
        self._settings, self._log, self._say = settings, log, say
        self._devices = Devices.of_ranks(settings.names, ranks)
        self._first = self._devices.of
        self._rehearsed: set[str] = set()
        self.leaving = False  # all ranks of this host go on on another
        self._stays = False  # that was tried, and could not be done
        self._told: set[int] = set()  # ranks for which no device is free

    def variables(self, rank: int, environment: Mapping[str, str]) -> Mapping[str, str]:
        """Return what is another in the environment of a rank's server."""
        first, now = self._first[rank], self._devices.of[rank]
        changed = dict(self._settings.rehearsed) if now in self._rehearsed else {}
        if now != first:
            changed[VARIABLE] = self._devices.visible(first, now, environment.get(VARIABLE))
        return changed

    @property
    def broken(self) -> frozenset[str]:
        """The devices that are broken for good."""
        return self._devices.broken

    def rehearse(self, rank: int) -> None:
        """The rank's device is broken for good from now on, in a rehearsal."""
        self._rehearsed.add(self._devices.of[rank])

    def check(self) -> None:
        """Say what would keep ranks from being moved, as soon as their trainings are under way."""
        for rank in self._devices.of:
            if self._settings.check is not None:
                self._settings.check(rank)
        if self._settings.foretell is not None:
            self._settings.foretell()

    def hear(self, rank: int, stopped: Stopped) -> bool:
        """Take note of how a rank has come to rest; return whether it goes on with another device."""
        self._devices = self._devices.stopped(rank, stopped.kept_to, stopped.error)
        if not self._devices.is_broken(rank):
            return False
        if self._devices.free:
            return True
        if self.leaving or self._can_leave():
            self.leaving = True
            return True
        if rank not in self._told:
            self._told.add(rank)
            self._say(
                f"device {self._devices.of[rank]} of rank {rank} is broken: it fails with a new server, too. "
                "No other device of this host is free."
            )
        return False

    def _can_leave(self) -> bool:
        can_leave = self._settings.can_leave
        return can_leave is not None and not self._stays and can_leave()

    def leave(self, orders: Mapping[int, bytes]) -> bool:
        """Have all ranks go on on another host, with these orders; return whether they do."""
        assert self._settings.leave is not None
        self.leaving = False
        left = self._settings.leave(orders)
        self._stays = not left
        return left

    @property
    def due(self) -> set[int]:
        """The ranks that are to have other devices before they have other servers."""
        free = len(self._devices.free)
        return set(sorted(rank for rank in self._devices.of if self._devices.is_broken(rank))[:free])

    def carry_out(self, ranks: Sequence[int]) -> None:
        """Give ranks other devices; their servers have ended."""
        for rank in ranks:
            broken = self._devices.of[rank]
            exchanged = self._devices.exchanged(rank)
            assert exchanged is not None
            self._devices = exchanged
            device = exchanged.of[rank]
            self._log.write("device_exchanged", rank=rank, broken=broken, device=device)
            self._say(f"device {broken} of rank {rank} is broken; the rank goes on with device {device}.")
        if self._settings.move is not None:
            self._settings.move(ranks)
