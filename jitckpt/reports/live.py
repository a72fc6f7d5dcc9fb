"""A job's present state for a terminal: ranks as a grid, what protects them, recoveries, where time went."""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jitckpt.reports import memory_states
from jitckpt.reports.present import CAUSES, Present, RankNow, RecoveryNow, shown_ranks, with_cause

# A rank in the grid: a letter, so that it reads without colours, and a colour.
LOOKS = {
    "training": ("#", "green"),
    "done": ("=", "green"),
    "starting": (".", "bright_black"),
    "loading": ("l", "cyan"),
    "late": ("L", "yellow"),
    "held": ("h", "cyan"),
    "saving": ("s", "blue"),
    "saved": ("S", "blue"),
    "failed": ("X", "bold red"),
    "ended": ("-", "bright_black"),
}
SHOWN_ROWS = 32  # of the grid
SHOWN_RECOVERIES = 6
SHOWN_WARNINGS = 3
NO_EVENT = "No job has written an event here yet."
BAR = 24  # characters


def view(present: Present | None, silent: float | None, problem: str, width: int = 80) -> RenderableType:
    """Return what to print; width: of the terminal."""
    if present is None:
        return Text(problem or NO_EVENT)
    parts: list[RenderableType] = [_heading(present, silent)]
    if problem:
        parts.append(Text(problem, style="yellow"))
    parts.append(_grid(present, width))
    parts.append(_protection(present))
    if present.recoveries:
        parts.append(_recoveries(present.recoveries))
    parts.append(_time(present))
    parts += [Text(f"! {warning}", style="yellow") for warning in present.warnings[-SHOWN_WARNINGS:]]
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def _heading(present: Present, silent: float | None) -> Text:
    style = {"training": "bold green", "succeeded": "bold green"}.get(present.state, "bold yellow")
    text = Text()
    text.append(present.state, style)
    if present.step is not None:
        text.append(f"  step {present.step}")
    if present.step_seconds is not None:
        text.append(f"  {present.step_seconds:.3g} s a step")
    text.append(
        f"  restart {present.restart} of {present.max_restarts}  after {seconds_in_words(present.seconds)}"
    )
    if present.goodput is not None:
        text.append(f"  {present.goodput:.1%} useful")
    if silent is not None:
        text.append(f"  its agent has been silent for {seconds_in_words(silent)}", "bold red")
    return text


def _grid(present: Present, width: int) -> RenderableType:
    """A letter a rank, a shard a row where there are several; below it what they mean, and who is late."""
    shards = [shard.ranks for shard in present.shards] or [tuple(range(present.world_size))]
    by_rank = {rank.rank: rank for rank in present.ranks}
    label = len(f"shard {len(shards) - 1} ")
    room = max(8, width - label)
    lines = []
    for number, ranks in enumerate(shards):
        for begin in range(0, len(ranks), room):
            line = Text()
            name = f"shard {number}" if len(shards) > 1 and begin == 0 else "" if begin else "ranks"
            line.append(f"{name:{label}}", "bright_black")
            for rank in ranks[begin : begin + room]:
                line.append(*_look(by_rank.get(rank)))
            lines.append(line)
    left_out = len(lines) - SHOWN_ROWS
    if left_out > 0:
        lines = [*lines[:SHOWN_ROWS], Text(f"and {left_out} more rows")]
    states = Counter(rank.state for rank in present.ranks)
    meaning = Text()
    for state, count in states.most_common():
        letter, style = LOOKS[state]
        meaning.append(f"{letter} ", style)
        meaning.append(f"{count} {state}  ")
    lines.append(meaning)
    lines += [
        Text(f"rank {rank.rank} is late: the others have waited for {rank.late:.0f} s", "yellow")
        for rank in present.late[:4]
    ]
    return Group(*lines)


def _look(rank: RankNow | None) -> tuple[str, str]:
    return LOOKS["starting"] if rank is None else LOOKS[rank.state]


def _protection(present: Present) -> Text:
    text = Text()
    living = [shard for shard in present.shards if shard.protected]
    bare = [shard for shard in present.shards if not shard.protected]
    if present.outcome is not None:
        text.append("the job is over; no rank holds its state any more")
    elif present.memory_step is not None:
        text.append(f"the memory tier has step {present.memory_step} of all ranks", "green")
        if states := memory_states.in_words(present.ranks):
            text.append(f": {states}")
    elif present.shards:
        text.append(
            f"{present.protected:.0%} of the ranks have a living replica", "green" if not bare else "yellow"
        )
        if living:
            fewest = min(len(shard.living) for shard in living)
            of = "the state" if len(living) == 1 else f"each of {len(living)} shards"
            text.append(f": {fewest} or more copies of {of}")
        if bare:
            text.append(f"; not so shard {shown_ranks([shard.number for shard in bare])}", "yellow")
    elif present.in_place:
        text.append(
            "failures of devices are recovered from in place; after the loss of a process the job begins at "
            "step 0, as no rank has come through jitckpt.init yet",
            "yellow",
        )
    else:
        text.append("nothing is protected yet: no rank has come through jitckpt.init", "yellow")
    where = f" in {present.checkpoint_dir}" if present.checkpoint_dir else ""
    text.append("\n")
    if present.safe_step is not None:
        text.append(f"step {present.safe_step} lies whole on the disk{where}")
    else:
        text.append("no step lies whole on the disk: a failure of all replicas would begin at step 0")
    for suspect in present.suspects:
        text.append(f"\ndevice {suspect.device} of {suspect.host} is suspect (rank {suspect.rank})", "yellow")
    for report in present.hang_reports[-1:]:
        text.append(f"\nwho waited for whom stands in {report.path}")
    return text


def _recoveries(recoveries: tuple[RecoveryNow, ...]) -> Table:
    shown = recoveries[-SHOWN_RECOVERIES:]
    title = (
        "recoveries"
        if len(shown) == len(recoveries)
        else f"the last {len(shown)} of {len(recoveries)} recoveries"
    )
    table = Table(
        "found", "what", "went on from", "seconds", "phases", title=title, title_justify="left", box=None
    )
    table.columns[3].justify = "right"
    for one in reversed(shown):
        table.add_row(
            datetime.fromtimestamp(one.found).strftime("%H:%M:%S"),
            escape(one.text),
            _source(one),
            one.outcome if one.seconds is None else f"{one.seconds:.2f}",
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in one.phases.items()),
        )
    return table


def _source(one: RecoveryNow) -> str:
    if one.step is None:
        return one.outcome
    redone = f", {one.redone} again" if one.redone else ""
    return f"step {one.step} ({one.tier.replace('_', ' ')}{redone})"


def _time(present: Present) -> Table:
    table = Table("where the time went", "", "seconds", "", box=None)
    table.columns[2].justify = table.columns[3].justify = "right"
    for cause, seconds in with_cause(present.spent):
        share = seconds / present.seconds if present.seconds else 0.0
        table.add_row(CAUSES[cause], "█" * round(share * BAR), f"{seconds:.1f}", f"{share:.1%}")
    return table


def seconds_in_words(seconds: float) -> str:
    """Return a duration for people."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts: Iterable[tuple[int, str]] = ((hours, "h"), (minutes, "min"), (rest, "s"))
    shown = [f"{number} {unit}" for number, unit in parts if number]
    return " ".join(shown[:2]) or f"{seconds:.1f} s"
