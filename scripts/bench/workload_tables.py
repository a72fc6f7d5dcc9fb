"""Tables 4 to 7 of the paper on just-in-time checkpointing: its figures, and ours from the events of jobs.

A record is what was measured of one workload: a line of docs/data/workloads.jsonl.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitckpt.events import Event
from jitckpt.reports.timeline import incidents
from jitckpt.reports.timeline_transparent import transparent_recoveries

Record = dict[str, Any]
Figures = dict[str, float]

# Seconds, as the paper prints them. Where it says that no overhead could be measured, 0.
USER = ("checkpoint", "restore", "recovery", "minibatch", "overhead")
PAPER_USER = {
    "GPT2-S": (3.8, 7.2, 10.35, 0.629, 0.00001),
    "BERT-B-FT": (1.4, 8.8, 10.1, 0.416, 0),
    "T5-3B": (7.6, 35.25, 42.65, 0.498, 0),
    "ViT": (4.6, 20.2, 24.4, 0.292, 0),
}
TRANSPARENT = ("recovery", "minibatch", "overhead")
PAPER_TRANSPARENT = {  # on eight V100
    "GPT2-S": (9.1, 0.270, 0.001),
    "GPT2-S-3D": (16.4, 0.209, 0),
    "BERT-B-FT": (2.1, 0.279, 0),
    "PyramidNet": (1.9, 0.315, 0),
}
MOVE = ("healthy", "failed", "minibatch")
PAPER_MOVE = {  # on eight V100
    "GPT2-S": (23.97, 20.85, 0.210),
    "GPT2-S-3D": (23.07, 18.11, 0.156),
    "BERT-B-FT": (25.72, 21.02, 0.243),
    "PyramidNet": (38.42, 30.34, 0.270),
}
# Each step of Table 7, and which of jitckpt's steps of a recovery are in it.
PHASES = {
    "Stop the ranks": ("stop",),
    "Delete communicators and GPU handles": ("ending",),
    "Recreate NCCL communicators": ("starting", "communicators"),
    "Reset GPU buffers": ("image",),
    "Recreate GPU handles": ("handles",),
    "Replay minibatch APIs": ("replay",),
}
PAPER_PHASES = {  # in the order of PHASES; the paper has no first one
    "GPT2-S": (None, 0.779, 8.340, 0.001, 0.004, 0.004),
    "GPT2-S-3D": (None, 0.831, 15.54, 0.001, 0.004, 0.002),
    "BERT-B-FT": (None, 1.013, 1.054, 0.001, 0.006, 0.006),
    "PyramidNet": (None, 0.850, 1.038, 0.002, 0.027, 0.004),
}
# Of the paper's hard errors: what shows it for one workload, and how long that takes.
MOVE_COMMAND = (
    "SOFTGPU_DEVICES=3 jitckpt run --mode transparent --broken-device move --nproc-per-node 2 "
    "--device softgpu --checkpoint-dir ckpt --fault 'rank=1 step=8 phase=backward kind=device-lost-hard' "
    "examples/workloads/gpt2_s.py"
)


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings."""

    title: str
    headings: Sequence[str]
    rows: list[list[str]]


def user_figures(events: Sequence[Event]) -> Figures:
    """Return the medians of a job's recoveries in user-level mode, in seconds.

    checkpoint: from the order to save until every shard is saved. restore: from the new start until the
    slowest rank has its state back, so the start of processes and of the training is in it. recovery: from
    the finding of the failure until then. Raises ValueError where a failure did not lead to all that.
    """
    found: dict[str, list[float]] = {"checkpoint": [], "restore": [], "recovery": []}
    for _, later in incidents(events):
        restart = later[0]["restart"]
        clocks = {
            "ordered": _clocks(later, "save_ordered", restart)[:1],
            "saved": _clocks(later, "saved", restart)[:1],
            "started": _clocks(later, "restart", restart + 1)[:1],
            "restored": _clocks(later, "restored", restart + 1),
        }
        if missing := [name for name, own in clocks.items() if not own]:
            raise ValueError(f"after {later[0]['text']!r} nothing was {missing[0]}")
        restored = max(clocks["restored"])
        found["checkpoint"].append(clocks["saved"][0] - clocks["ordered"][0])
        found["restore"].append(restored - clocks["started"][0])
        found["recovery"].append(restored - later[0]["clock"])
    if not found["recovery"]:
        raise ValueError("nothing failed")
    return {name: statistics.median(values) for name, values in found.items()}


def _clocks(events: Iterable[Event], name: str, restart: int) -> list[float]:
    return [one["clock"] for one in events if one["event"] == name and one["restart"] == restart]


def transparent_figures(events: Sequence[Event]) -> tuple[float, dict[str, float]]:
    """Return the median of a job's transparent recoveries, and by PHASES those of their slowest ranks.

    Raises ValueError where one was given up, or none was.
    """
    recoveries = transparent_recoveries(events)
    if not recoveries:
        raise ValueError("nothing failed")
    if given_up := [one.given_up for one in recoveries if one.given_up is not None]:
        raise ValueError(given_up[0])
    phases = {
        phase: statistics.median(
            max(sum(step.seconds for step in rank.steps if step.name in names) for rank in recovery.ranks)
            for recovery in recoveries
        )
        for phase, names in PHASES.items()
    }
    return statistics.median(one.seconds for one in recoveries), phases


def overhead(plain: Sequence[float], with_jitckpt: Sequence[float]) -> list[float]:
    """Return, of steps that were made in turn, the median of what each pair differs by, and the quartiles."""
    differences = [b - a for a, b in zip(plain, with_jitckpt, strict=True)]
    if len(differences) < 2:
        return [*differences * 3]
    low, middle, high = statistics.quantiles(differences, n=4, method="inclusive")
    return [middle, low, high]


def tables(records: Sequence[Record]) -> list[Table]:
    """Return the paper's tables 4 to 7 with our figures, in seconds; the paper's stand in parentheses."""
    four = _table("Table 4: user-level mode", USER, "user", PAPER_USER, records)
    five = _table(
        "Table 5: a transient failure in transparent mode",
        TRANSPARENT,
        "transparent",
        PAPER_TRANSPARENT,
        records,
    )
    six = _table("Table 6: a hard failure in transparent mode, by CRIU", MOVE, "move", PAPER_MOVE, records)
    measured = [one for one in records if one["transparent"] is not None]
    seven = Table(
        "Table 7: the steps of a transient recovery, each of its slowest rank",
        ["step", *(one["workload"] for one in measured)],
        [
            [
                phase,
                *(
                    beside(one["transparent"]["phases"][phase], _paper(PAPER_PHASES, one, number))
                    for one in measured
                ),
            ]
            for number, phase in enumerate(PHASES)
        ],
    )
    return [one for one in (four, five, six, seven) if one.rows]


def _table(
    title: str,
    columns: Sequence[str],
    kind: str,
    paper: Mapping[str, Sequence[float | None]],
    records: Sequence[Record],
) -> Table:
    rows = []
    for one in records:
        if one[kind] is None and one["workload"] not in paper:
            continue
        cells = [
            beside(None if one[kind] is None else one[kind][column], _paper(paper, one, number))
            for number, column in enumerate(columns)
        ]
        rows.append([one["workload"], *cells])
    return Table(title, ["workload", *columns], rows)


def _paper(paper: Mapping[str, Sequence[float | None]], record: Record, number: int) -> float | None:
    return paper[record["workload"]][number] if record["workload"] in paper else None


def beside(ours: float | Sequence[float] | None, paper: float | None) -> str:
    """Return a cell: our figure, of an overhead with its quartiles, and the paper's."""
    if ours is None:
        shown = "not measured"
    elif isinstance(ours, int | float):
        shown = f"{ours:.3g}"
    else:
        middle, low, high = ours
        shown = f"{middle:.3g} [{low:.3g} to {high:.3g}]"
    return f"{shown} ({'none' if paper is None else f'{paper:g}'})"
