"""What the worker's sentences name as a remedy.

These are arguments of jitckpt.init; where a framework has the training in hand, and the script calls no
jitckpt.init, it is what helps there.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """Each follows "Do this:", as it were. exact: a sentence, or nothing."""

    save_every: str = "give jitckpt.init save_every=..."
    keep: str = "keep them in `extra` (an object with state_dict and load_state_dict, given to jitckpt.init)"
    counter: str = " A counter of optimizer steps can begin with job.restore()."
    exact_at_epochs_end: str = " At the end of an epoch of job.epochs it would be exact."


BY_INIT = Advice()
_current = BY_INIT


def of_framework(keep: str) -> None:
    """A framework has the training in hand; keep: where what the script carries on is kept."""
    global _current  # noqa: PLW0603
    _current = Advice("start it with `jitckpt run --save-every N`", keep, "", "")


def current() -> Advice:
    """Return what helps in this process."""
    return _current
