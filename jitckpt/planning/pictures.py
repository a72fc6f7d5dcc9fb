"""Pictures of plans, reproductions and simulations.

They read in black and white: lines differ by their dashes and marks, bars by their hatching.
"""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from jitckpt.decisions.check import InvalidInput
from jitckpt.planning.papers import Reproduction
from jitckpt.planning.plan import Analysis
from jitckpt.planning.simulator import CAUSES, TRAINING, Result
from jitckpt.planning.units import DAY_SECONDS, HOUR_SECONDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHES = ("-", "--", "-.", ":")
_MARKS = ("o", "s", "^", "D", "v", "x", "+", "*", "P", "<", "p", ">")
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "+++")
_GREYS = ("0.1", "0.85", "0.5", "0.7", "0.95", "0.35", "0.6")


def new_figure(width: float = 8.0, height: float = 4.5) -> "tuple[Figure, Axes]":
    """An empty picture, drawn without a screen."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("pictures need matplotlib: run `pip install jitckpt[plot]`") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a picture; its kind follows from the file's name (.png, .svg, .pdf)."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"the picture {path} cannot be written: {error}") from error


def draw_plan(rows: Sequence[Analysis], path: Path) -> None:
    """Wasted share of each policy, cut by what a failure costs and what protection costs."""
    figure, axes = new_figure(8.0, 0.45 * len(rows) + 1.6)
    names = [row.policy.text for row in reversed(rows)]
    parts: dict[str, list[float]] = {"redone work": [], "recovery": [], "saving and overhead": []}
    for row in reversed(rows):
        failures = sum(outcome.per_day for outcome in row.outcomes) / DAY_SECONDS
        redone, recovery = failures * row.redone_seconds, failures * row.outage_seconds
        costs_nothing = row.policy.files is None and row.policy.overhead_share == 0
        # Of useful time, by the failures one by one; what they leave is the price of protection.
        scale = row.wasted_share / (redone + recovery) if redone + recovery else 0.0
        if not costs_nothing:
            scale = min(scale, 1 - row.wasted_share)
        redone, recovery = scale * redone, scale * recovery
        for part, share in zip(parts, (redone, recovery, row.wasted_share - redone - recovery), strict=True):
            parts[part].append(100 * share)
    left = [0.0] * len(rows)
    for (part, widths), hatch, grey in zip(parts.items(), _HATCHES, _GREYS, strict=False):
        axes.barh(names, widths, left=left, label=part, hatch=hatch, color=grey, edgecolor="black")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    # What the worst waste must not hide the others.
    second, most = sorted(left)[-2:] if len(left) > 1 else (left[0], left[0])
    limit = 1.25 * (second if most > 5 * second > 0 else most) or 1.0
    axes.set_xlim(0, limit)
    for index, total in enumerate(left):
        inside = total <= limit
        place = (total, index) if inside else (limit, index)
        box = None if inside else {"facecolor": "white", "edgecolor": "none"}
        axes.annotate(f" {total:.3g} % ", place, va="center", ha="left" if inside else "right", bbox=box)
    axes.set_xlabel("wasted share of GPU time (%)")
    axes.legend()
    save_figure(figure, path)


def draw_reproduction(reproduction: Reproduction, path: Path) -> None:
    """Our curves, or bars where each has one point."""
    figure, axes = new_figure()
    if all(len(curve.x) == 1 for curve in reproduction.curves):
        for curve, hatch, grey in zip(reproduction.curves, cycle(_HATCHES), cycle(_GREYS), strict=False):
            axes.bar(curve.name, curve.y[0], hatch=hatch, color=grey, edgecolor="black")
            axes.annotate(f"{curve.y[0]:.4g}", (curve.name, curve.y[0]), ha="center", va="bottom")
    else:
        draw_curves(axes, [(curve.name, curve.x, curve.y) for curve in reproduction.curves])
        figure.legend(loc="outside lower center", ncols=3, fontsize="small")  # never over a line
    if reproduction.x_is_logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if reproduction.y_is_logarithmic:
        axes.set_yscale("log")
    axes.set_xlabel(reproduction.x_label)
    axes.set_ylabel(reproduction.y_label)
    axes.set_title(reproduction.title)
    save_figure(figure, path)


def draw_curves(axes: "Axes", curves: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> None:
    """Lines that can be told apart without colour."""
    for index, (name, x, y) in enumerate(curves):
        axes.plot(
            x,
            y,
            label=name,
            color="black" if index % 2 == 0 else "0.45",
            linestyle=_DASHES[index // 2 % len(_DASHES)],
            marker=_MARKS[index % len(_MARKS)],
            markevery=(index, max(1, len(x) // 15)) if len(x) > 40 else None,
            linewidth=1.2,
            markersize=4,
        )


def draw_simulation(result: Result, minibatch_seconds: float, title: str, path: Path) -> None:
    """Above: the time lost so far, and the outages. Below: where the time went."""
    figure, axes = new_figure(9.0, 5.5)
    axes.remove()
    above, below = figure.subplots(2, 1, height_ratios=(4, 1))
    days = [seconds / DAY_SECONDS for seconds, _ in result.progress]
    lost = [(seconds - done * minibatch_seconds) / HOUR_SECONDS for seconds, done in result.progress]
    above.plot(days, lost, color="black", linewidth=1.2)
    mark = -0.03 * max(lost, default=0.0)
    by_tier: dict[str, list[float]] = {}
    for outage in result.outages:
        by_tier.setdefault(outage.tier, []).append(outage.start_seconds / DAY_SECONDS)
    for index, (tier, starts) in enumerate(by_tier.items()):
        above.plot(
            starts,
            [mark * (index + 1)] * len(starts),
            linestyle="none",
            marker=_MARKS[(index + 4) % len(_MARKS)],
            color="0.2",
            markersize=3,
            label=f"outage, ended by {tier}",
        )
    above.set_ylabel("hours lost so far")
    above.set_xlabel("days")
    if by_tier:
        above.legend(loc="upper left")
    above.set_title(title)
    left = 0.0
    wasted = [cause for cause in CAUSES if cause != TRAINING]
    for cause, hatch, grey in zip(wasted, _HATCHES, _GREYS, strict=False):
        width = 100 * result.seconds[cause] / result.wall_seconds
        below.barh([""], [width], left=left, hatch=hatch, color=grey, edgecolor="black", label=cause)
        left += width
    below.set_yticks([])
    below.set_xlabel(f"wasted share of time (%): {left:.3g} in all")
    below.legend(ncols=len(wasted), loc="upper center", bbox_to_anchor=(0.5, 1.6), fontsize="small")
    save_figure(figure, path)
