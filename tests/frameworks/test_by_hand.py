"""A line in the script in the place of what `jitckpt run` does by itself, for other launchers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import PROGRAMS, PROGRAMS_FOLDER, Program
from jobs import Ends, run, skip_unless_installed

LINES = {
    "transformers": "frameworks.transformers.Callback()",
    "accelerate": "frameworks.accelerate.protect()",
    "lightning": "frameworks.lightning.Callback()",
    "deepspeed": "frameworks.deepspeed.protect()",
    "megatron-core": "frameworks.megatron.protect()",
    "torchtitan": "frameworks.torchtitan.protect()",
}
SCRIPT = """
import runpy
import sys

from jitckpt import frameworks

{line}
sys.path.insert(0, {folder!r})
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.parametrize("name", LINES)
def test_ends_as_undisturbed(name: str, plain: Callable[[str, int], Ends], tmp_path: Path) -> None:
    program = PROGRAMS[name]
    skip_unless_installed(program)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(line=LINES[name], folder=str(PROGRAMS_FOLDER), path=str(program.path)))
    fault = "rank=1 step=6 phase=backward kind=kill"
    ends, said = run(
        Program(program.needs, str(script)), 2, tmp_path / "job", "--no-frameworks", "--fault", fault
    )
    assert ends == plain(name, 2), said[-6000:]
    assert said.count(f"jitckpt: {name} ") == 2, said
    assert "Restart 1 went on from step" in said
