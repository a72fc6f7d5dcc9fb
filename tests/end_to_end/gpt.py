"""The small training on two ranks that failures must not change."""

import re
from pathlib import Path

from launcher import JITCKPT_RUN

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0"]
STEPS = 12
TRAINING = [str(EXAMPLE), "--steps", str(STEPS), "--layers", "1", "--width", "32", "--length", "16"]


def digests(out: str) -> list[str]:
    """Return what both ranks print of their final parameters and buffers."""
    lines = sorted(line for line in out.splitlines() if re.match(r"rank \d: parameters ", line))
    assert len(lines) == 2, out
    return lines
