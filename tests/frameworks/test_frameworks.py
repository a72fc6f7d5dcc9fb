"""Unchanged programs of training frameworks that are disturbed: they end as if nothing had been."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import (
    LATE,
    LOOPS_OF_THEIR_OWN,
    PROGRAMS,
    PROGRAMS_FOLDER,
    STATEFUL,
    WITHOUT_REPLICA,
    Case,
    Program,
    all_cases,
)

MAIN = "import sys; from jitckpt.cli import main; sys.exit(main())"
LIMIT = 280.0  # seconds: to find what hangs, however slow the machine

Ends = dict[str, Any]


def run(program: Program, ranks: int, folder: Path, *flags: str, **environment: str) -> tuple[Ends, str]:
    """Run a program on ranks of softgpu; return what each says of its end and its losses, and all printed."""
    (folder / "out").mkdir(parents=True)
    command = [sys.executable, "-c", MAIN, "run", "--standalone", "--nproc-per-node", str(ranks)]
    # It may be slow on its way to the first step; who waits for it must not take that for a hang.
    command += ["--device", "softgpu", "--hang-timeout", "60", *flags, str(program.path), "out"]
    variables = {"SOFTGPU_DEVICES": str(ranks), "HF_HUB_OFFLINE": "1", **program.environment, **environment}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            said, _ = job.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
            said, _ = job.communicate(timeout=60)
            pytest.fail(f"the job did not end in {LIMIT:.0f} s:\n{said[-6000:]}")
        finally:
            if job.poll() is None:  # the tests are interrupted
                os.killpg(job.pid, signal.SIGTERM)
    assert job.returncode == 0, said[-6000:]
    ends = {file.name: json.loads(file.read_text()) for file in (folder / "out").glob("end-*.json")}
    assert len(ends) == ranks
    return ends | {file.name: losses(file) for file in (folder / "out").glob("loss-*.jsonl")}, said


def losses(file: Path) -> dict[str, float]:
    """Return the losses by steps; one that was computed again after a failure has to be what it was."""
    found: dict[str, float] = {}
    for step, loss in map(json.loads, file.read_text().splitlines()):
        assert found.setdefault(str(step), loss) == loss, f"{file.name}, step {step}"
    return found


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Ends]:
    """Return what a program ends with that nobody protects; it runs once for all tests."""
    known: dict[tuple[str, int], Ends] = {}

    def ends(name: str, ranks: int) -> Ends:
        if (name, ranks) not in known:
            folder = tmp_path_factory.mktemp("plain") / "job"
            known[name, ranks], _ = run(PROGRAMS[name], ranks, folder, "--no-frameworks")
        return known[name, ranks]

    return ends


@pytest.mark.parametrize("file", sorted(PROGRAMS_FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_the_program_knows_nothing_of_us(file: Path) -> None:
    assert "jitckpt" not in file.read_text().lower()


@pytest.mark.parametrize("case", [*all_cases()], ids=str)
def test_ends_as_undisturbed(case: Case, plain: Callable[[str, int], Ends], tmp_path: Path) -> None:
    program = PROGRAMS[case.program]
    for package in program.needs:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed: scripts/test --frameworks makes an environment with it")
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
