"""What the events of a job mean: its recoveries with their costs, a table, and plain words."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jitckpt.console import show_size
from jitckpt.decisions.hang import named
from jitckpt.events import Event
from jitckpt.reports.timeline_transparent import told, transparent_recoveries

# What every event has, and what the table shows in columns of its own or nowhere.
_COMMON = ("event", "time", "clock", "restart", "rank")
_LONG = (
    "pid",
    "save_id",
    "fingerprint",
    "saver",
    "versions",
    "stack_signal",
    "stack_fd",
    "checkpoint_dir",
    "named_directory",
    "path",
    "collectives",
    "traceback",
    "first",
    "at_exit",
)
_NOT_IN_DETAILS = frozenset(_COMMON + _LONG)


@dataclass(frozen=True)
class Recovery:
    """One failure and what followed. Times in seconds, sizes in bytes; None where it did not come to that.

    found: the wall time at which it was found. saved_by: the ranks whose saves ended. save_seconds: from the
    order until every shard was saved. saved_step: the newest that every shard was saved of. step: the step
    that the job went on from, or would go on from. redone: at most so many minibatches were done again, the
    one under way included. lost: the same where nothing could be saved. went_on: ranks were back in their
    training. directory: theirs, where it was another than before. first_step_seconds: from the finding
    until the slowest rank's first new step was done. kept_step: what the memory tier had of all ranks.
    in_files: it was written to files from there. from_memory: why the ranks went on from memory, and where
    each had it; "" if they did not.
    """

    restart: int
    cause: str
    found: float
    fault: str | None
    saved_by: tuple[int, ...]
    save_bytes: int
    save_seconds: float | None
    not_saved: str | None
    saved_step: int | None
    step: int | None
    redone: int | None
    lost: int | None
    restarted: bool
    went_on: bool
    directory: str | None
    first_step_seconds: float | None
    kept_step: int | None = None
    in_files: bool = False
    from_memory: str = ""


def jobs(events: Iterable[Event]) -> list[list[Event]]:
    """Return the events of each job in the file, in order."""
    found: list[list[Event]] = []
    for event in events:
        if event["event"] == "job_started" or not found:
            found.append([])
        found[-1].append(event)
    return found


def incidents(events: Sequence[Event]) -> list[tuple[Sequence[Event], Sequence[Event]]]:
    """Return for each failure of one job what came since the one before it, and what until the next."""
    starts = [index for index, event in enumerate(events) if event["event"] == "detected" and event["first"]]
    limits = [0, *starts, len(events)]
    return [
        (events[before:start], events[start:end])
        for before, start, end in zip(limits, starts, limits[2:], strict=False)
    ]


def recoveries(events: Sequence[Event]) -> list[Recovery]:
    """Return the recoveries of one job, in order."""
    found = []
    directories: set[str] = set()  # that ranks have registered with before
    for earlier, later in incidents(events):
        directories |= _directories(earlier)
        found.append(_recovery(earlier, later, directories))
    return found


def _directories(events: Iterable[Event]) -> set[str]:
    return {event.get("checkpoint_dir", "") for event in _of(events, "registered")}


def _recovery(earlier: Sequence[Event], events: Sequence[Event], directories: Set[str]) -> Recovery:
    detected = events[0]
    faults = _of(earlier, "fault", restart=detected["restart"])
    before = [event for event in events if event["restart"] == detected["restart"]]
    after = [event for event in events if event["restart"] == detected["restart"] + 1]
    ended = _of(before, "save_ended")
    whole = _of(before, "saved")
    ordered = _of(before, "save_ordered")
    not_saved = _of(before, "not_saved")
    restored = _of(after, "restored")
    first_steps = _of(after, "first_step")
    saved_step = whole[0]["step"] if whole else None
    step = saved_step
    if restored:
        step = restored[0]["step"]
    elif first_steps:
        step = first_steps[0]["step"] - 1
    newest = max((event["step"] for event in ended), default=None)
    kept = _of(before, "kept_in_memory")
    begun = not_saved[0].get("step") if not_saved else kept[0]["newest"] if kept else None
    gathered = _of([*before, *after], "memory_sources")
    in_memory = restored[0].get("in_memory", "") if restored else ""
    return Recovery(
        restart=detected["restart"],
        cause=detected["text"],
        found=detected["time"],
        fault=faults[-1]["fault"] if faults else None,
        saved_by=tuple(event["rank"] for event in ended),
        save_bytes=sum(event["bytes"] for event in ended),
        save_seconds=whole[0]["clock"] - ordered[0]["clock"] if whole and ordered else None,
        not_saved=not_saved[0]["text"] if not_saved else None,
        saved_step=saved_step,
        step=step,
        redone=None if step is None or newest is None else newest - step + 1,
        lost=None if begun is None else max(0, begun - (step or 0)),
        restarted=bool(after),
        went_on=bool(restored or first_steps),
        directory=min(_directories(after) - directories - _directories(before), default=None),
        first_step_seconds=first_steps[-1]["clock"] - detected["clock"] if first_steps else None,
        kept_step=kept[0]["step"] if kept else None,
        in_files=bool(_of(before, "memory_written")),
        from_memory=gathered[-1]["reason"] if in_memory and gathered else in_memory,
    )


def in_words(events: Sequence[Event], directory: str) -> list[str]:
    """Return the sentences that tell what happened to one job and what it cost."""
    chapters = [(one.found, told(one)) for one in transparent_recoveries(events)]
    chapters += [(one.found, _told(one)) for one in recoveries(events)]
    sentences = [sentence for _, chapter in sorted(chapters, key=lambda one: one[0]) for sentence in chapter]
    return sentences + _snapshots(events) + _memory(events) + _ending(events, directory)


def _told(recovery: Recovery) -> list[str]:
    when = datetime.fromtimestamp(recovery.found).strftime("%H:%M:%S")
    rehearsed = f" (rehearsed: {recovery.fault})" if recovery.fault else ""
    sentences = [f"{when}: {recovery.cause}{rehearsed}."]
    if recovery.saved_step is not None and not recovery.saved_by:
        # Before the host that was to tell of it was known to be lost.
        sentences.append(f"The state after step {recovery.saved_step} was saved.")
    elif recovery.save_seconds is not None:
        sentences.append(
            f"The state after step {recovery.saved_step} was saved in {recovery.save_seconds:.2f} s: "
            f"{show_size(recovery.save_bytes)} by {_ranks(recovery.saved_by)}."
        )
    elif recovery.not_saved is not None:
        sentences.append(f"No whole state could be saved: {recovery.not_saved}.")
    elif recovery.kept_step is not None:
        then = "and was written to files from there" if recovery.in_files else "so no file was written"
        sentences.append(f"The state after step {recovery.kept_step} was in memory, {then}.")
    if recovery.went_on:
        number = recovery.redone or recovery.lost
        redone = "" if not number else f", with {_minibatches(number)} done again"
        took = recovery.first_step_seconds  # unknown if the next failure came before it could be told
        told = f"; its first new step was done {took:.1f} s after the failure was found" if took else ""
        step, saved = recovery.step or 0, recovery.saved_step or 0
        how = f"went on from step {step}"
        if step < saved:
            where = f", in {recovery.directory}" if recovery.directory else ""
            how = f"did not go on from the state after step {saved}, but from step {step}{where}"
        sentences.append(f"Restart {recovery.restart + 1} {how}{redone}{told}.")
        if recovery.from_memory:
            sentences.append(f"That was in memory: {recovery.from_memory}.")
    return sentences


def _snapshots(events: Sequence[Event]) -> list[str]:
    """Tell of those to which ranks go back whose processes die."""
    made, pauses, back = (_of(events, name) for name in ("snapshot", "snapshot_pause", "gone_back"))
    sentences = []
    if made:
        sizes = show_size(max(event["bytes"] for event in made))
        were = "snapshots were" if len(made) > 1 else "snapshot was"
        sentences.append(f"{len(made)} {were} made, of at most {sizes}.")
        if "stored" in made[-1]:
            stored, disk = show_size(made[-1]["stored"]), show_size(made[-1]["disk"])
            sentences.append(
                f"Of the last one {stored} were new; with those before it took {disk} of the disk."
            )
    if pauses:
        longest = max(event["seconds"] for event in pauses)
        held = sum(event["seconds"] for event in pauses)
        sentences.append(f"The ranks were held for them {longest:.2f} s at most, and {held:.2f} s in all.")
        stop, dump, device = (sum(event[name] for event in pauses) for name in ("stop", "dump", "device"))
        sentences.append(
            f"Of that it took {stop:.2f} s until their devices were at rest, {dump:.2f} s to write their "
            f"processes to memory, and {device:.2f} s until all had gone on."
        )
    sentences += [
        f"All ranks went back to the snapshot after step {event['step']}, in {event['seconds']:.2f} s."
        for event in back
    ]
    return sentences


def _memory(events: Sequence[Event]) -> list[str]:
    told = [event for event in events if "image_bytes" in event]
    if not told:
        return []
    log, images = (max(event[name] for event in told) for name in ("log_bytes", "image_bytes"))
    return [
        f"A rank has taken at most {show_size(log)} of host memory for the log of its calls and "
        f"{show_size(images)} for images of its device's memory."
    ]


def _ending(events: Sequence[Event], directory: str) -> list[str]:
    ended = _of(events, "job_ended")
    if not ended:
        return ["The job has not ended, or its agent was killed."]
    restarts = ended[-1]["restart"]
    after = f" after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    sentences = [f"The job {ended[-1]['outcome']}{after}."]
    last = _of(events, "saved") if ended[-1]["outcome"] != "succeeded" else []
    if last:
        goes_on = (
            "once what is said above is mended, the same command goes on from there."
            if _of(events, "incurable")
            else "the same command goes on from there."
        )
        sentences.append(f"The state after step {last[-1]['step']} lies in {directory}; {goes_on}")
    return sentences


HEADINGS = ("seconds", "restart", "rank", "event", "details")
LEAST_WIDTH = 30  # of the details
FEW = 8  # ranks that a sentence names one by one


def rows(events: Sequence[Event], width: int | None) -> Iterator[str]:
    """Yield the events of one job as the lines of a table; times in seconds since its start.

    width: of the screen, by which details are broken into lines; None: each event is one line. A job that
    runs for months has a hundred thousand events, so this is done without a library that measures each cell.
    """
    cells = [_cells(event, events[0]["clock"]) for event in events]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *cells, strict=True)][:-1]
    left = None if width is None else max(LEAST_WIDTH, width - sum(widths) - 2 * len(widths))
    for seconds, restart, rank, name, details in (HEADINGS, *cells):
        shown = (
            seconds.rjust(widths[0]),
            restart.ljust(widths[1]),
            rank.ljust(widths[2]),
            name.ljust(widths[3]),
        )
        lines = [details] if left is None or len(details) <= left else textwrap.wrap(details, left)
        yield "  ".join([*shown, lines[0]]).rstrip()
        for line in lines[1:]:
            yield " " * (sum(widths) + 2 * len(widths)) + line


def _cells(event: Event, begun: float) -> tuple[str, str, str, str, str]:
    shown = (one for one in event.items() if one[0] not in _NOT_IN_DETAILS and one[1] not in ([], ""))
    details = _printable(", ".join(f"{name} {_value(name, value)}" for name, value in shown))
    seconds = f"{event['clock'] - begun:.3f}"
    rank, restart = _printable(str(event.get("rank", ""))), str(event["restart"])
    return seconds, restart, rank, _printable(event["event"]), details


def _printable(text: str) -> str:
    """What is in a log must not command a terminal."""
    return text if text.isprintable() else "".join(one if one.isprintable() else " " for one in text)


def _of(events: Iterable[Event], name: str, **fields: object) -> list[Event]:
    return [e for e in events if e["event"] == name and all(e[key] == value for key, value in fields.items())]


def _value(name: str, value: Any) -> str:
    if (name == "bytes" or name.endswith("_bytes")) and isinstance(value, int):
        return show_size(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_value(name, one)}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > FEW:
        return named(ranks)  # in runs
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _minibatches(number: int) -> str:
    return f"at most {number} minibatch{'es' if number > 1 else ''}"
