"""For how long all ranks were held for snapshots of their processes, and what that time went into."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from jitckpt.events import Event

# The parts of a pause, in this order: as the event has them, as the pictures call them, and in a bar of text.
PARTS = {"stop": ("stop", "░"), "dump": ("dump", "█"), "device": ("devices", "▒")}
SHOWN_PAUSES = 8
BAR = 32  # characters of the longest pause


@dataclass(frozen=True)
class Pause:
    """For a snapshot after `step`. clock: the launcher's, when the last rank was held. In seconds.

    phases: one after the other, by the pictures' names.
    """

    restart: int
    step: int
    clock: float
    seconds: float
    phases: dict[str, float]

    @property
    def reaches(self) -> list[tuple[str, float, float]]:
        """The phases with the seconds since the beginning at which each begins and ends."""
        found: list[tuple[str, float, float]] = []
        at = 0.0
        for name, seconds in self.phases.items():
            found.append((name, at, at + seconds))
            at += seconds
        return found


def pauses(events: Iterable[Event]) -> list[Pause]:
    """Return those of one job, in order."""
    return [
        Pause(
            restart=event["restart"],
            step=event["step"],
            clock=event["clock"] - event["seconds"],
            seconds=event["seconds"],
            phases={name: event[part] for part, (name, _) in PARTS.items()},
        )
        for event in events
        if event["event"] == "snapshot_pause"
    ]


def longest(found: Sequence[Pause]) -> list[Pause]:
    """Return the few that there is room for, in order."""
    kept = sorted(found, key=lambda pause: pause.seconds)[-SHOWN_PAUSES:]
    return [pause for pause in found if pause in kept]


def title(found: Sequence[Pause]) -> str:
    """Return what is said above them."""
    few = len(found) <= SHOWN_PAUSES
    return "All ranks held for snapshots" + ("" if few else f", the {SHOWN_PAUSES} longest of {len(found)}")


def pauses_table(found: Sequence[Pause]) -> Table:
    """Return the seconds of each part, a pause a row, with a bar to scale."""
    legend = ", ".join(f"{mark} {part}" for part, (_, mark) in PARTS.items())
    heading = f"{title(found)}, seconds"
    result = Table("after step", *PARTS, "in all", legend, title=heading, title_justify="left", box=None)
    result.pad_edge = False
    for column in result.columns[:-1]:
        column.justify = "right"
    shown = longest(found)
    scale = BAR / (max(pause.seconds for pause in shown) or 1.0)
    for pause in shown:
        seconds = [f"{one:.3f}" for one in (*pause.phases.values(), pause.seconds)]
        marks = zip(pause.reaches, PARTS.values(), strict=True)
        bar = "".join(
            mark * (round(end * scale) - round(begin * scale)) for (_, begin, end), (_, mark) in marks
        )
        result.add_row(str(pause.step), *seconds, bar)
    return result
