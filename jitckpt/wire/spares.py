"""What an agent, the template of its spares and each spare tell each other (worker/spare.py)."""

from dataclasses import dataclass

from jitckpt.wire import checked
from jitckpt.wire.checked import Checked


class ToSpare(Checked):
    """What an agent tells a template or a spare."""


class FromSpare(Checked):
    """What a template or a spare tells its agent."""


@dataclass(frozen=True)
class Import(ToSpare):
    """Import these modules; several messages make one list."""

    type = "import"
    modules: list[str]


@dataclass(frozen=True)
class Prepare(ToSpare):
    """To a spare, before it imports anything: what modules may ask for when they are imported.

    environment: as Become's. arguments: sys.argv.
    """

    type = "prepare"
    environment: dict[str, str | None]
    arguments: list[str]


@dataclass(frozen=True)
class Fork(ToSpare):
    """To a template: fork a spare, which gets the socket that comes with this."""

    type = "fork"


@dataclass(frozen=True)
class Become(ToSpare):
    """Become this worker.

    environment: variables to set, and those with None to remove. arguments: of Python, such as
    ["-u", "train.py", "--steps", "7"]. The file descriptors that come with it are named in `descriptors`.
    """

    type = "become"
    environment: dict[str, str | None]
    arguments: list[str]
    descriptors: list[str]


@dataclass(frozen=True)
class Forked(FromSpare):
    """The answer to Fork: the spare's process."""

    type = "forked"
    pid: int

    def problem(self) -> str | None:
        return None if 1 < self.pid < 1 << 31 else f"{self.pid} is no process"


@dataclass(frozen=True)
class NotForked(FromSpare):
    """The answer to Fork: why there is no spare, a clause."""

    type = "not_forked"
    why: str


@dataclass(frozen=True)
class Begins(FromSpare):
    """The answer to Become: what is left to do is the training's own."""

    type = "begins"


TO_SPARE = checked.by_type((Import, Prepare, Fork, Become))
FROM_SPARE = checked.by_type((Forked, NotForked, Begins))
