"""What an agent and the keeper of the memory tier's memfds (tiers/keeper.py) tell each other."""

from dataclasses import dataclass

from jitckpt.wire import checked
from jitckpt.wire.checked import Checked


class ToKeeper(Checked):
    """What an agent tells the keeper."""


class FromKeeper(Checked):
    """What the keeper tells who has connected."""


@dataclass(frozen=True)
class Hold(ToKeeper):
    """The memfd that comes with this is the rank's, in the place of one before."""

    type = "hold"
    rank: int


@dataclass(frozen=True)
class LetGo(ToKeeper):
    """The rank's memfd is needed no more."""

    type = "drop"
    rank: int


@dataclass(frozen=True)
class LetAllGo(ToKeeper):
    """Nothing is needed any more."""

    type = "end"


@dataclass(frozen=True)
class Busy(FromKeeper):
    """Another agent is connected."""

    type = "busy"


@dataclass(frozen=True)
class Holds(FromKeeper):
    """The memfd that comes with this is the rank's."""

    type = "holds"
    rank: int


@dataclass(frozen=True)
class HoldsNoMore(FromKeeper):
    """That was all that is held."""

    type = "holds_no_more"


TO_KEEPER = checked.by_type((Hold, LetGo, LetAllGo))
FROM_KEEPER = checked.by_type((Busy, Holds, HoldsNoMore))
