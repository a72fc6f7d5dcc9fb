"""The demo's picture: both loss curves, and both runs' progress over time, with the failure marked."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

FAILURE = "#d7301f"
UNDISTURBED: dict[str, Any] = {
    "color": "#9ecae1",
    "linewidth": 5,
    "solid_capstyle": "round",
    "label": "undisturbed",
}
KILLED: dict[str, Any] = {"color": "#08519c", "linewidth": 1.3, "label": "rank 1 killed, job restarted"}


@dataclass(frozen=True)
class Curve:
    """One run: its loss after each step, and (seconds, step) as its steps were announced."""

    losses: list[float]
    announced: tuple[tuple[float, int], ...]


def draw(file: Path, undisturbed: Curve, killed: Curve, *, failed_step: int, fault: str) -> None:
    """Writes the picture. failed_step: the one that the device was making when the rank was killed."""
    plt.rcParams |= {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
    }
    figure, (loss_axes, time_axes) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=(3, 2), dpi=160)
    draw_losses(loss_axes, undisturbed, killed, failed_step)
    draw_progress(time_axes, undisturbed, killed)
    loss_axes.legend(frameon=False, loc="upper right")
    figure.text(
        0.01, 0.01, f"two softgpu ranks, examples/train_gpt.py, --fault '{fault}'", color="0.45", size=7.5
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1), w_pad=3)
    figure.savefig(file)
    plt.close(figure)


def draw_losses(axes: Axes, undisturbed: Curve, killed: Curve, failed_step: int) -> None:
    steps = range(1, len(undisturbed.losses) + 1)
    axes.plot(steps, undisturbed.losses, **UNDISTURBED)
    axes.plot(steps, killed.losses, **KILLED)
    axes.axvline(failed_step, color=FAILURE, linewidth=1, linestyle=(0, (4, 3)))
    right_half = 2 * failed_step > len(undisturbed.losses)
    axes.annotate(
        f"rank 1 is killed while\nthe device makes step {failed_step}",
        (failed_step, 0.62),
        xycoords=("data", "axes fraction"),
        xytext=(-6 if right_half else 6, 0),
        textcoords="offset points",
        ha="right" if right_half else "left",
        color=FAILURE,
    )
    same = undisturbed.losses == killed.losses
    title = "The same losses, bit for bit" if same else "The losses differ"
    axes.set_title(title, loc="left", weight="bold", pad=18)
    axes.set(xlabel="optimizer step", ylabel="training loss of rank 0", xlim=(0, len(undisturbed.losses) + 1))


def draw_progress(axes: Axes, undisturbed: Curve, killed: Curve) -> None:
    axes.plot(*zip(*undisturbed.announced, strict=True), **UNDISTURBED)
    axes.plot(*zip(*killed.announced, strict=True), **KILLED)
    pause, before, after = longest_pause(killed.announced)
    axes.axvspan(before, after, color=FAILURE, alpha=0.12, linewidth=0)
    text = f"{pause:.1f} s without a step: detect, save, restart, restore"
    axes.text(0, 1.02, text, transform=axes.transAxes, color=FAILURE, size=8)
    axes.set_title("What the failure cost", loc="left", weight="bold", pad=18)
    axes.set(xlabel="seconds since the start", ylabel="optimizer steps done", xlim=(0, None), ylim=(0, None))


def longest_pause(announced: tuple[tuple[float, int], ...]) -> tuple[float, float, float]:
    """The longest time between two announced steps, and when it began and ended."""
    times = [seconds for seconds, _ in announced]
    return max((after - before, before, after) for before, after in itertools.pairwise(times))
