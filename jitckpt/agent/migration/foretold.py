"""What is said of moves to another host once a training is under way, long before one is needed."""

from collections.abc import Callable

from jitckpt.events import EventLog
from jitckpt.hosts.connections import Hosts

LEADER = 0

CALLS_INIT = (
    "the script has called jitckpt.init, so ranks of this host do not go on on another one: where a device "
    "is broken, and none is free here, the job starts again from its newest save (save_every)."
)
NO_SECRET = "ranks of this host can't go on on another one without --secret-file, the same on all hosts."
STAYS = (
    "if this host's ranks go on on another one its launcher stays, as it has the lead and the ranks' store: "
    "don't switch it off before the job is over."
)
ON_DEVICE = (
    "parameters and optimizer state are on the devices alone: if all hosts that have a rank's are left in "
    "one recovery, it is lost; --no-state-on-device keeps it in host memory, which comes along."
)


def calls_init(log: EventLog) -> bool:
    """Return whether the script of the ranks here has."""
    return any(event["event"] == "registered" for event in log.events)


def tell(
    log: EventLog,
    say: Callable[[str], None],
    hosts: Hosts,
    secret: bytes | None,
    state_on_device: bool,
) -> None:
    """Say it on this host."""
    for sentence in sentences(
        calls_init=calls_init(log),
        has_secret=secret is not None,
        leads=hosts.index == LEADER,
        state_on_device=state_on_device,
    ):
        say(sentence)


def sentences(*, calls_init: bool, has_secret: bool, leads: bool, state_on_device: bool) -> list[str]:
    """Return what is to be said on a host of several. leads: it is the first, which speaks for all."""
    if calls_init:
        return [CALLS_INIT]
    if not has_secret:
        return [NO_SECRET]
    return [STAYS, *([ON_DEVICE] if state_on_device else [])] if leads else []
