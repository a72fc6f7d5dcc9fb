"""Optimizers of torchao, whose state is made of codes and scales: a killed rank costs no bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import IN_CODES, IN_MEMORY, IN_SAVES, KILLED, PROGRAMS
from jobs import Ends, run, skip_unless_installed


@pytest.mark.parametrize("name", IN_CODES)
def test_a_replica_has_the_state_of_few_bits(
    name: str, plain: Callable[[str, int], Ends], tmp_path: Path
) -> None:
    program = PROGRAMS[name]
    skip_unless_installed(program)
    ends, said = run(program, 2, tmp_path / "job", "--fault", KILLED["backward"])
    assert ends == plain(name, 2), said[-6000:]
    assert "Restart 1 went on from step 5" in said, said
    assert "the state of no rank is saved" not in said
    assert "No state of this rank is saved" not in said


@pytest.mark.parametrize("protector", [IN_MEMORY, IN_SAVES], ids=str)
def test_fsdp2_has_it_in_parts(
    protector: tuple[str, str], plain: Callable[[str, int], Ends], tmp_path: Path
) -> None:
    program = PROGRAMS["torchao, FSDP2"]
    skip_unless_installed(program)
    ends, said = run(program, 2, tmp_path / "job", *protector, "--fault", KILLED["backward"])
    assert ends == plain("torchao, FSDP2", 2), said[-6000:]
    assert "Restart 1 went on from step" in said
    assert ("from their own host's memory" in said) == (protector == IN_MEMORY), said
