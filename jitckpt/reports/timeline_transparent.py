"""The recoveries of a job in transparent mode, from its events: what failed, and what took how long."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.table import Table

from jitckpt.console import show_size
from jitckpt.events import Event

# What a rank does in a recovery, in this order; how a sentence calls it.
STEPS = {
    "stop": "to stop",
    "ending": "to abort what was under way",
    "starting": "for a new server",
    "handles": "for streams, events, memory and kernels",
    "image": "for the memory's content",
    "communicators": "for communicators",
    "replay": "for the calls since then",
}
# What the worker of a rank whose device is broken goes through before the others, where CRIU makes it anew;
# "transfer" where that is on another host.
MOVE_STEPS = {"dump": "to be dumped", "transfer": "to be sent", "restore": "to be restored"}
MOVES = ("worker_moved", "ranks_moved")
# The steps between an order to a rank and the event that says that it is carried out.
_PARTS = {
    "rank_stopped": ("stop",),
    "worker_moved": ("dump", "restore"),
    "ranks_moved": ("dump", "transfer", "restore"),
    "server_restarted": ("ending", "starting"),
    "calls_made_again": ("handles", "image", "communicators", "replay"),
}


@dataclass(frozen=True)
class RecoveryStep:
    """One of STEPS or MOVE_STEPS, of a rank. begin: by the launcher's monotonic clock."""

    name: str
    begin: float
    seconds: float


@dataclass(frozen=True)
class RankSteps:
    """What one rank did in the last attempt of a recovery, as far as it came, and its move before.

    Between the steps it waited for other ranks. replaced: whether its server was.
    """

    rank: int
    replaced: bool
    steps: tuple[RecoveryStep, ...]


@dataclass(frozen=True)
class TransparentRecovery:
    """From a failure until all ranks went on, or were told to give up. Times in seconds.

    found: wall time. attempts: how often it was begun anew, failures during it included. state: the optimizer
    steps after which the ranks went on; None if they gave up. steps: what the slowest rank took for each of
    STEPS in the last attempt, and of MOVE_STEPS if there were any. replaced: the ranks whose servers were
    ended in it. exchanged: what has another device or host since, a sentence each. clock: the launcher's
    monotonic clock when the failure was found.
    """

    restart: int
    cause: str
    rank: int | None
    found: float
    clock: float
    fault: str | None
    attempts: int
    state: int | None
    seconds: float
    steps: dict[str, float]
    ranks: list[RankSteps]
    replaced: list[int]
    exchanged: list[str]
    given_up: str | None


def transparent_recoveries(events: Sequence[Event]) -> list[TransparentRecovery]:
    """Return those of one job, in order; one that is under way at the end is left out."""
    found = []
    under_way: list[Event] = []
    fault: str | None = None
    for event in events:
        name = event["event"]
        if name == "fault":
            fault = event["fault"]
        elif name == "detected" and not under_way:
            fault = None  # what it led to was no such recovery
        if under_way or name in ("device_alarm", "recovery_begun"):
            under_way.append(event)
        if name in ("recovered", "recovery_given_up") and under_way:
            found.append(_recovery(under_way, fault))
            under_way, fault = [], None
    return found


def _recovery(events: Sequence[Event], fault: str | None) -> TransparentRecovery:
    first, last = events[0], events[-1]
    begun = [event for event in events if event["event"] == "recovery_begun"]
    newest = begun[-1]["recovery"] if begun else None
    # A move stays made, whatever becomes of the attempt in which it was.
    ranks = _ranks(
        [one for one in events if one["event"] in MOVES or (begun and one.get("recovery") == newest)]
    )
    steps = {
        name: max((step.seconds for one in ranks for step in one.steps if step.name == name), default=0.0)
        for name in _names(ranks)
    }
    recovered = last["event"] == "recovered"
    return TransparentRecovery(
        restart=first["restart"],
        cause=first.get("text", "a recovery was ordered"),
        rank=first.get("rank"),
        found=first["time"],
        clock=first["clock"],
        fault=fault,
        attempts=len(begun),
        state=last["state"] if recovered else None,
        seconds=last["clock"] - first["clock"],
        steps=steps,
        ranks=ranks,
        replaced=[one.rank for one in ranks if one.replaced],
        exchanged=[
            _exchanged(event) for event in events if event["event"] in ("device_exchanged", "ranks_moved")
        ],
        given_up=None if recovered else last["text"],
    )


def _exchanged(event: Event) -> str:
    if event["event"] == "ranks_moved":
        ranks = f"rank{'s' if len(event['ranks']) > 1 else ''} {', '.join(map(str, event['ranks']))}"
        is_one_more = event.get("ranks_of", -1) >= 0
        who = f"has come for host {event['ranks_of']}," if is_one_more else "is another one since,"
        return f"Host {event['host']} {who} with {ranks}: {show_size(event['bytes'])} came there"
    device, broken = event["device"], event["broken"]
    return f"Rank {event['rank']} has device {device} in the place of device {broken}, which is broken"


def _names(ranks: Sequence[RankSteps]) -> list[str]:
    """Return the steps that ranks may have made, in their order."""
    made = {step.name for one in ranks for step in one.steps}
    moved = [name for name in MOVE_STEPS if name in made]
    return ["stop", *moved, *(name for name in STEPS if name != "stop")]


def _ranks(events: Sequence[Event]) -> list[RankSteps]:
    """Return what the ranks did in one attempt, whose events these are."""
    found: dict[int, list[RecoveryStep]] = {}
    replaced = set()
    for event in events:
        if event["event"] not in _PARTS:
            continue
        if event["event"] == "server_restarted" and not event.get("stays"):
            replaced.add(event["rank"])
        parts: list[RecoveryStep] = []
        begin = event["clock"]
        for name in reversed(_PARTS[event["event"]]):  # one after the other, the last until the event
            seconds = event["seconds"] if name == "stop" else event.get(name, 0.0)
            begin -= seconds
            parts.insert(0, RecoveryStep(name, begin, seconds))
        for rank in event["ranks"] if event["event"] == "ranks_moved" else [event["rank"]]:
            found.setdefault(rank, []).extend(parts)
    return [RankSteps(rank, rank in replaced, tuple(steps)) for rank, steps in sorted(found.items())]


def steps_table(recovery: TransparentRecovery) -> Table:
    """Return the seconds of each rank and step, a rank a row."""
    title = f"Recovery after {recovery.cause}, seconds"
    names = _names(recovery.ranks)
    result = Table("rank", *names, "server", title=title, title_justify="left", box=None, pad_edge=False)
    for column in result.columns[:-1]:
        column.justify = "right"
    for one in recovery.ranks:
        seconds = {step.name: f"{step.seconds:.3f}" for step in one.steps}
        server = "new" if one.replaced else "same"
        result.add_row(str(one.rank), *(seconds.get(name, "") for name in names), server)
    return result


def told(recovery: TransparentRecovery) -> list[str]:
    """Return the sentences that tell of one recovery."""
    when = datetime.fromtimestamp(recovery.found).strftime("%H:%M:%S")
    where = "" if recovery.rank is None else f" (rank {recovery.rank})"
    rehearsed = f" (rehearsed: {recovery.fault})" if recovery.fault else ""
    begun = f"{when}: {recovery.cause}{where}{rehearsed}."
    if recovery.given_up is not None:
        return [begun, recovery.given_up]
    again = f", at attempt {recovery.attempts}" if recovery.attempts > 1 else ""
    words = STEPS | MOVE_STEPS
    parts = ", ".join(f"{seconds:.2f} s {words[name]}" for name, seconds in recovery.steps.items())
    return [
        begun,
        f"All ranks went on from the state after step {recovery.state} in the same processes, "
        f"{recovery.seconds:.2f} s later{again}. The slowest rank took {parts}. "
        f"{_servers(recovery.replaced)}.",
        *(f"{sentence}." for sentence in recovery.exchanged),
    ]


def _servers(replaced: Sequence[int]) -> str:
    if not replaced:
        return "All servers stayed"
    whose = "rank" if len(replaced) == 1 else "ranks"
    return f"New servers: of {whose} {', '.join(map(str, replaced))}"
