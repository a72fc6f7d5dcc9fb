"""The recoveries of a job as a picture: a lane for the agent and each rank, their phases to scale.

It reads in black and white: phases differ by grey and hatching.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jitckpt.console import show_size
from jitckpt.decisions.check import InvalidInput
from jitckpt.events import Event
from jitckpt.reports.timeline import incidents
from jitckpt.reports.timeline_pauses import longest, pauses, title
from jitckpt.reports.timeline_transparent import TransparentRecovery, transparent_recoveries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# In the order in which they come; what a reader should see of each: grey (0 is black), hatching.
LOOKS = {
    "detect": ("0.95", "..."),
    "rest": ("0.8", ""),
    "save": ("0.35", ""),
    "end": ("0.6", "xxx"),
    "restart": ("1.0", "///"),
    "restore": ("0.5", ""),
    "first step": ("0.85", "\\\\\\"),
}
# Of a recovery in transparent mode; what is white there is waiting for other ranks.
IN_PLACE_LOOKS = {
    "stop": ("0.8", ""),
    "dump": ("0.7", "---"),
    "transfer": ("0.9", "oo"),
    "restore": ("0.95", "---"),
    "ending": ("0.6", "xxx"),
    "starting": ("1.0", "///"),
    "handles": ("0.85", "\\\\\\"),
    "image": ("0.5", ""),
    "communicators": ("0.9", "+++"),
    "replay": ("0.35", ""),
}
# Of a pause for a snapshot, and of the way back to one, beside what others have, too.
SNAPSHOT_LOOKS = {"devices": ("1.0", "///")}
ALL_LOOKS = LOOKS | IN_PLACE_LOOKS | SNAPSHOT_LOOKS
MEANINGS = {
    "detect": "failing, not yet found",
    "rest": "coming to rest",
    "save": "saving",
    "end": "saved, being ended",
    "restart": "starting",
    "restore": "restoring",
    "first step": "first new step",
    "stop": "coming to rest",
    "dump": "dumping the process",
    "transfer": "sending it to another host",
    "ending": "aborting",
    "starting": "starting a new server",
    "handles": "making streams, events, memory, kernels",
    "image": "loading the memory's content",
    "communicators": "making communicators",
    "replay": "making the calls again",
    "devices": "getting devices again",
}
SHOWN_RECOVERIES = 8
SHOWN_RANKS = 32
LEAST_SHARE = 0.004  # of the width: a shorter phase would be thinner than a line


@dataclass(frozen=True)
class Phase:
    """Seconds since the failure was found."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Lane:
    """What one of the job's processes did. failed: seconds at which it failed, None if it did not."""

    name: str
    phases: tuple[Phase, ...]
    failed: float | None


@dataclass(frozen=True)
class DrawnRecovery:
    """One recovery: when (by the launcher's clock), what happened, its lanes (the launcher's first, if it did
    something), and the ranks left out to save space."""

    found: float
    title: str
    lanes: tuple[Lane, ...]
    left_out: int


def recoveries(events: Sequence[Event], most_ranks: int = SHOWN_RANKS) -> list[DrawnRecovery]:
    """Return what is to be drawn of one job, of so many ranks at most."""
    by_start: dict[int, list[Event]] = {}
    for event in events:
        by_start.setdefault(event["restart"], []).append(event)
    found = []
    for _, later in incidents(events):
        start = later[0]["restart"]
        around = [*by_start[start], *by_start.get(start + 1, ())]
        found.append(_recovery(later[0], around, most_ranks))
    faults = [event for event in events if event["event"] == "fault"]
    found += [_recovery_in_place(faults, one, most_ranks) for one in transparent_recoveries(events)]
    return sorted(found, key=lambda one: one.found)


def _recovery_in_place(
    faults: Sequence[Event], recovery: TransparentRecovery, most_ranks: int
) -> DrawnRecovery:
    failed, at = recovery.rank, recovery.clock
    for fault in faults:
        if fault["fault"] == recovery.fault and fault["clock"] <= recovery.clock:
            failed, at = fault["rank"], fault["clock"]
    lanes = []
    for one in recovery.ranks[:most_ranks]:
        steps = [(step.name, step.begin - recovery.clock, step.seconds) for step in one.steps]
        phases = [Phase(name, begin, begin + seconds) for name, begin, seconds in steps if seconds > 0]
        if one.rank == failed and at < recovery.clock:
            phases.insert(0, Phase("detect", at - recovery.clock, 0.0))
        lanes.append(
            Lane(f"rank {one.rank}", tuple(phases), at - recovery.clock if one.rank == failed else None)
        )
    return DrawnRecovery(
        recovery.clock, recovery.cause, tuple(lanes), max(0, len(recovery.ranks) - most_ranks)
    )


def _recovery(detected: Event, around: Sequence[Event], most_ranks: int) -> DrawnRecovery:
    """around: the events of the start that failed, and of the one after it."""
    found, restart = detected["clock"], detected["restart"]

    index: dict[tuple[str, int, int | None], list[float]] = {}
    for event in around:
        for whose in {None, event.get("rank")}:
            key = (event["event"], event["restart"], whose)
            index.setdefault(key, []).append(event["clock"] - found)

    def times(name: str, start: int, rank: int | None = None) -> list[float]:
        """When an event came, seconds since the failure was found."""
        return index.get((name, start, rank), [])

    faults = [e for e in around if _is(e, "fault", restart) and e["clock"] <= found]
    hangs = [e["clock"] - found - e["seconds"] for e in around if _is(e, "hang", restart)]
    ranks = sorted({e["rank"] for e in around if "rank" in e and e["rank"] is not None})
    began = min([fault["clock"] - found for fault in faults] + hangs, default=None)
    ordered, restarted = _last(times("save_ordered", restart)), _last(times("restart", restart + 1))
    ended = _last(times("ranks_ended", restart))
    decided = _last(times("saved", restart) + times("not_saved", restart))
    after = ("registered", "restored", "first_step")
    back = next((event for event in around if _is(event, "gone_back", restart + 1)), None)
    went_on = None if back is None else back["clock"] - found  # from a snapshot
    there = None if back is None or went_on is None else went_on - back["seconds"]
    lanes = [
        _lane(
            "agent",
            None,
            [
                ("detect", began, 0.0),
                ("save", ordered, decided),
                ("end", decided, restarted if restarted is not None else ended),
                ("restore", restarted, there),
                ("devices", there, went_on),
            ],
            restarted,
            [_last(times(name, restart + 1)) for name in after],
        )
    ]
    for rank in ranks[:most_ranks]:
        begun, saved = (_last(times(f"save_{what}", restart, rank)) for what in ("begun", "ended"))
        failed = [fault["clock"] - found for fault in faults if fault["rank"] == rank]
        # A replica that another one was faster than is ended while it saves.
        before = [("rest", ordered, begun), ("save", begun, ended if saved is None else saved)]
        before.append(("end", saved, ended))
        if failed:
            before.insert(0, ("detect", failed[-1], 0.0))
        new = [_last(times(name, restart + 1, rank)) for name in after]
        lanes.append(_lane(f"rank {rank}", _last(failed), before, restarted, new))
    saved_bytes = sum(event["bytes"] for event in around if _is(event, "save_ended", restart))
    size = f", {show_size(saved_bytes)} saved" if saved_bytes else ""
    return DrawnRecovery(found, f"{detected['text']}{size}", tuple(lanes), max(0, len(ranks) - most_ranks))


def _lane(
    name: str,
    failed: float | None,
    before: Sequence[tuple[str, float | None, float | None]],
    restarted: float | None,
    after: Sequence[float | None],
) -> Lane:
    registered, restored, first_step = after
    whole = [
        *before,
        ("restart", restarted, registered),
        ("restore", registered, restored),
        ("first step", registered if restored is None else restored, first_step),
    ]
    phases = [
        Phase(what, begin, end)
        for what, begin, end in whole
        if begin is not None and end is not None and end > begin
    ]
    return Lane(name, tuple(phases), failed)


def _is(event: Event, name: str, restart: int) -> bool:
    return bool(event["event"] == name and event["restart"] == restart)


def _last(times: Sequence[float]) -> float | None:
    return max(times, default=None)


def draw(events: Sequence[Event], path: Path) -> None:
    """Draw the recoveries of one job and its pauses for snapshots.

    Raises InvalidInput if there are none, or the file can't be written.
    """
    from jitckpt.planning.pictures import new_figure, save_figure

    found, held = recoveries(events), _pauses(events)
    if not found and not held:
        raise InvalidInput(
            "there is no recovery to draw: the last job in this directory had no failure, nor a snapshot"
        )
    shown = [*found[:SHOWN_RECOVERIES], *held]
    heights = [len(recovery.lanes) + 2 for recovery in shown]
    figure, axes = new_figure(9.0, 0.32 * sum(heights) + 1.2)
    from matplotlib.patches import Patch  # which is there, as there is a figure

    axes.remove()
    for part, recovery in zip(
        figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0], shown, strict=True
    ):
        _draw_recovery(part, recovery)
    since = ["the failure was found"] * bool(found) + ["all ranks were held"] * bool(held)
    part.set_xlabel(f"seconds since {', or '.join(since)}")
    handles = [
        Patch(facecolor=grey, hatch=hatch, edgecolor="black", label=MEANINGS[name])
        for name, (grey, hatch) in ALL_LOOKS.items()
        if name in {phase.name for one in shown for lane in one.lanes for phase in lane.phases}
    ]
    figure.legend(handles=handles, ncols=4, loc="outside upper center", fontsize="small")
    if len(found) > SHOWN_RECOVERIES:
        figure.supxlabel(f"and {len(found) - SHOWN_RECOVERIES} more recoveries", fontsize="small")
    save_figure(figure, path)


def _pauses(events: Sequence[Event]) -> list[DrawnRecovery]:
    """Return the pauses of one job as one part of the picture, a lane a pause; nothing if there are none."""
    found = pauses(events)
    lanes = [
        Lane(f"step {pause.step}", tuple(Phase(*reach) for reach in pause.reaches), None)
        for pause in longest(found)
    ]
    return [DrawnRecovery(found[0].clock, title(found), tuple(lanes), 0)] if found else []


def _draw_recovery(axes: "Axes", recovery: DrawnRecovery) -> None:
    end = max((phase.end for lane in recovery.lanes for phase in lane.phases), default=1.0)
    begin = min([0.0, *(phase.begin for lane in recovery.lanes for phase in lane.phases)])
    least = LEAST_SHARE * (end - begin)
    for place, lane in enumerate(recovery.lanes):
        for phase in lane.phases:
            grey, hatch = ALL_LOOKS[phase.name]
            width = max(phase.end - phase.begin, least)
            axes.barh(place, width, left=phase.begin, height=0.7, color=grey, hatch=hatch, edgecolor="black")
            seconds = phase.end - phase.begin
            if seconds > 0.08 * (end - begin):
                label = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
                middle = (phase.begin + phase.end) / 2
                axes.text(middle, place, f"{seconds:.2f} s", ha="center", va="center", fontsize=8, bbox=label)
        if lane.failed is not None:
            axes.plot(lane.failed, place, marker="X", markersize=10, color="black", clip_on=False)
    axes.set_xlim(begin, end + 0.02 * (end - begin))
    axes.axvline(0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(recovery.lanes)), [lane.name for lane in recovery.lanes])
    axes.invert_yaxis()
    more = f" ({recovery.left_out} more ranks)" if recovery.left_out else ""
    axes.set_title(recovery.title + more, fontsize=9, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
