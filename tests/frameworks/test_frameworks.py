"""Unchanged programs of training frameworks that are disturbed: they end as if nothing had been."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import (
    LATE,
    LOOPS_OF_THEIR_OWN,
    PROGRAMS,
    PROGRAMS_FOLDER,
    STATEFUL,
    WITHOUT_REPLICA,
    Case,
    all_cases,
)
from jobs import Ends, run, skip_unless_installed


@pytest.mark.parametrize("file", sorted(PROGRAMS_FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_the_program_knows_nothing_of_us(file: Path) -> None:
    assert "jitckpt" not in file.read_text().lower()


@pytest.mark.parametrize("case", [*all_cases()], ids=str)
def test_ends_as_undisturbed(case: Case, plain: Callable[[str, int], Ends], tmp_path: Path) -> None:
    program = PROGRAMS[case.program]
    skip_unless_installed(program)
    flags = [flag for fault in case.faults if fault != LATE for flag in ("--fault", fault)]
    late = {"LATE": f"{case.ranks // 2}:6"} if LATE in case.faults else {}
    if case.mode == "transparent":
        flags = ["--mode", "transparent", *flags]
    elif case.program in WITHOUT_REPLICA:
        flags = ["--save-every", "2", *flags]
    ends, said = run(program, case.ranks, tmp_path / "job", *flags, **late)
    assert ends == plain(case.program, case.ranks), said[-6000:]
    if case.mode == "transparent":
        assert said.count("All ranks went on from the state after step") == len(case.faults), said
        assert "Transparent mode is switched off" not in said
    else:
        says_what_it_protects(case, said)


def says_what_it_protects(case: Case, said: str) -> None:
    """One line says what was recognised and what of it is protected, in each start of the job."""
    framework = PROGRAMS[case.program].framework
    assert said.count(f"jitckpt: {framework} ") == 1 + len(case.faults), said
    assert ("recognised. Protected: model" in said) == case.is_protected, said
    assert ("recognised, but not protected: " in said) == (not case.is_protected), said
    assert ("Restart 1 went on from step" in said) == bool(case.faults)
    if framework in LOOPS_OF_THEIR_OWN or not case.faults:
        assert "RuntimeWarning: jitckpt" not in said, said
    assert ("the order of the samples may be another one" in said) == (case.program == "lightning" + STATEFUL)
    if case.program in WITHOUT_REPLICA:
        assert "each rank's part of the optimizer's state has no replica" in said
        if case.faults:
            assert "No whole state could be saved: rank 0 saved step 5 of shard 0 alone" in said
            assert "Restart 1 went on from step 4" in said
