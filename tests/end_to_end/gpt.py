"""The small training that failures must not change."""

from pathlib import Path

from final_lines import finals
from launcher import JITCKPT_RUN

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
STEPS = 12
TRAINING = [str(EXAMPLE), "--steps", str(STEPS), "--layers", "1", "--width", "32", "--length", "16"]


def run_of(ranks: int) -> list[str]:
    """Return the command, without the training, that runs so many ranks on one host."""
    options = ["--nproc-per-node", str(ranks), "--warm-spares", "0", "--warm-start"]
    return [*JITCKPT_RUN, "--device", "softgpu", *options]


RUN = run_of(2)


def digests(out: str, ranks: int = 2) -> list[str]:
    """Return what all ranks print of their final parameters and buffers."""
    return finals(out, r"rank \d: parameters ", ranks)
