"""The recoveries of a job in transparent mode, from its events: what failed, and what took how long."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from jitckpt.events import Event

# The steps of a recovery, by the event that ends one of a rank.
STEPS = {
    "rank_stopped": "to stop",
    "server_restarted": "for its server",
    "calls_made_again": "for images, communicators and the calls since then",
}


@dataclass(frozen=True)
class TransparentRecovery:
    """From a failure until all ranks went on, or were told to give up. Times in seconds.

    found: wall time. attempts: how often it was begun anew, failures during it included. state: the optimizer
    steps after which the ranks went on; None if they gave up. steps: what the slowest rank took for each of
    STEPS in the last attempt. replaced: the ranks whose servers were ended in it.
    """

    restart: int
    cause: str
    rank: int | None
    found: float
    fault: str | None
    attempts: int
    state: int | None
    seconds: float
    steps: dict[str, float]
    replaced: list[int]
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
    steps = {
        name: max(
            (e["seconds"] for e in events if e["event"] == name and e["recovery"] == newest), default=0.0
        )
        for name in STEPS
    }
    recovered = last["event"] == "recovered"
    return TransparentRecovery(
        restart=first["restart"],
        cause=first.get("text", "a recovery was ordered"),
        rank=first.get("rank"),
        found=first["time"],
        fault=fault,
        attempts=len(begun),
        state=last["state"] if recovered else None,
        seconds=last["clock"] - first["clock"],
        steps=steps,
        replaced=sorted(
            e["rank"]
            for e in events
            if e["event"] == "server_restarted" and e["recovery"] == newest and not e.get("stays")
        ),
        given_up=None if recovered else last["text"],
    )


def told(recovery: TransparentRecovery) -> list[str]:
    """Return the sentences that tell of one recovery."""
    when = datetime.fromtimestamp(recovery.found).strftime("%H:%M:%S")
    where = "" if recovery.rank is None else f" (rank {recovery.rank})"
    rehearsed = f" (rehearsed: {recovery.fault})" if recovery.fault else ""
    begun = f"{when}: {recovery.cause}{where}{rehearsed}."
    if recovery.given_up is not None:
        return [begun, recovery.given_up]
    again = f", at attempt {recovery.attempts}" if recovery.attempts > 1 else ""
    parts = ", ".join(f"{seconds:.2f} s {STEPS[name]}" for name, seconds in recovery.steps.items())
    return [
        begun,
        f"All ranks went on from the state after step {recovery.state} in the same processes, "
        f"{recovery.seconds:.2f} s later{again}. The slowest rank took {parts}. "
        f"{_servers(recovery.replaced)}.",
    ]


def _servers(replaced: Sequence[int]) -> str:
    if not replaced:
        return "All servers stayed"
    whose = "rank" if len(replaced) == 1 else "ranks"
    return f"New servers: of {whose} {', '.join(map(str, replaced))}"
