"""Unchanged programs whose ranks hold parts without a replica: a killed one's comes from memory or a save."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import IN_MEMORY, IN_SAVES, KILLED, PROGRAMS, SHARDED
from jobs import Ends, run, skip_unless_installed

# Each place of a failure, and both ways, with some program; all with all take an hour.
TRIED = [
    ("transformers, FSDP", "backward", IN_SAVES),
    ("transformers, FSDP2", "forward", IN_MEMORY),
    ("transformers, FSDP2", "backward", IN_SAVES),
    ("accelerate, FSDP", "optimizer", IN_MEMORY),
    ("accelerate, FSDP2", "backward", IN_MEMORY),
    ("lightning, FSDP", "backward", IN_SAVES),
    ("lightning, FSDP", "forward", IN_MEMORY),
    ("lightning, FSDP2", "optimizer", IN_SAVES),
    ("deepspeed, ZeRO-1 in memory", "backward", IN_MEMORY),
    ("deepspeed, ZeRO-2 in memory", "optimizer", IN_MEMORY),
    ("megatron-core, distributed", "optimizer", IN_SAVES),
    ("megatron-core, distributed", "between", IN_MEMORY),
    ("megatron-core, overlapping", "backward", IN_MEMORY),
]
# What only a training with other parts needs to be told of, in a framework's own words.
TOLD_BY = ("deepspeed", "megatron-core")


@pytest.mark.parametrize(("name", "place", "protector"), TRIED, ids=str)
def test_ends_as_undisturbed(
    name: str, place: str, protector: tuple[str, str], plain: Callable[[str, int], Ends], tmp_path: Path
) -> None:
    program = SHARDED[name]
    skip_unless_installed(program)
    ends, said = run(PROGRAMS[name], 2, tmp_path / "job", *protector, "--fault", KILLED[place])
    assert ends == plain(name, 2), said[-6000:]
    assert said.count(f"jitckpt: {program.framework} ") == 2, said
    assert "recognised. Protected: model" in said
    assert "Restart 1 went on from step" in said
    assert ("from their own host's memory" in said) == (protector == IN_MEMORY), said
    if program.framework in TOLD_BY:
        assert said.count("each rank's part of the optimizer's state has no replica") == 2, said
        assert f"({' '.join(protector)})" in said


@pytest.mark.parametrize("name", ["deepspeed, ZeRO-1 in memory", "megatron-core, distributed"])
def test_the_start_says_that_nothing_protects_the_parts(name: str, tmp_path: Path) -> None:
    skip_unless_installed(SHARDED[name])
    _, said = run(SHARDED[name], 2, tmp_path / "job")
    assert "If a rank is lost, the job ends: start it with `jitckpt run --memory-tier auto`" in said
