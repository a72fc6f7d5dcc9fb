"""Programs as users write them that are killed at a place in them: they end as if nothing had been."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import PROGRAMS
from jobs import Ends, run, skip_unless_installed

# By the program: the rank that dies, the place, and as it comes there for which time.
PLACES = {
    "transformers, accumulated": (
        "1/substep ends/5",
        "1/optimizer step/6",
        "1/log/2",
        "1/evaluated/3",
        "1/saved/3",
        "0/epoch ends/1",
        "1/training ends/1",  # the best parameters are in the place of the last
    ),
    "transformers, logged": ("1/epoch ends/1",),  # just behind the log of its last step
    "transformers, two networks": ("1/between optimizers/8",),
    "trl": ("1/log/3", "1/optimizer begins/6"),
    "lightning, a GAN": ("1/step begins/6", "1/between optimizers/6"),
    "lightning, hooks": ("1/step begins/3", "1/step begins/7"),
    "lightning, checkpoints": ("1/step begins/4", "0/validates/9", "1/step begins/8"),
    "lightning, accumulated": ("1/step begins/14", "1/step begins/19"),
    "lightning, a datamodule": ("1/step begins/6", "1/validates/11", "1/tests/2", "0/predicts/3"),
    "lightning, loaders made anew": ("1/step begins/9", "1/step begins/14"),
    "lightning, a stream": ("1/step begins/3",),
    "deepspeed, fp16": ("1/step begins/8",),
    "accelerate, a trigger": ("1/triggered/1", "1/left/1"),
    "accelerate, variables": ("1/step begins/6", "0/epoch ends/2"),
}


# Of what a program does, and of what its own tool for being killed counts.
KNOWN = (
    "Several optimizer steps are made in one iteration",
    "The loop changes variables of the script that no save holds: _passed.",
    "Parameters or optimizer state are changed in the middle of a minibatch",
    "The 1 batches that a DataLoader gave before the failure are read again",
    # Of "transformers, logged", which dies as it writes that down; a Trainer's own is made up all the same.
    "Rank 1 may have failed between its optimizer step 4 and the end of that iteration.",
    # Of "accelerate, a trigger": it goes on with the flags of a rank that came to that end.
    "Rank 1 may have failed between its optimizer step 11 and the end of that iteration.",
)
# There a failure leaves nothing to save: the job goes back to its newest periodic save.
NOTHING_TO_SAVE = {"1/between optimizers/8"}


@pytest.mark.parametrize(
    ("name", "place"),
    [(name, place) for name, places in PLACES.items() for place in places],
)
def test_ends_as_undisturbed(
    name: str, place: str, plain: Callable[[str, int], Ends], tmp_path: Path
) -> None:
    skip_unless_installed(PROGRAMS[name])
    flags = ("--save-every", "2") if place in NOTHING_TO_SAVE else ()
    ends, said = run(PROGRAMS[name], 2, tmp_path / "job", *flags, DIE=place)
    assert ends == plain(name, 2), said[-6000:]
    assert "Restart 1 went on from step" in said
    warnings = {line.partition("RuntimeWarning: jitckpt: ")[2] for line in said.splitlines()} - {""}
    assert all(one.startswith(KNOWN) for one in warnings), said
