"""Unchanged programs of training frameworks, a rank of which is killed: they end as if nothing had been."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
FRAMEWORKS = {
    "transformers": PROGRAMS / "transformers_trainer.py",
    "accelerate": PROGRAMS / "accelerate_loop.py",
    "lightning": PROGRAMS / "lightning_fit.py",
    "deepspeed": PROGRAMS / "deepspeed_engine.py",
    "megatron-core": PROGRAMS / "megatron_loop.py",
}
LOOPS_OF_THEIR_OWN = ("transformers", "lightning")  # so that no restart leaves a doubt
# An epoch has 4 steps, so step 6 is in the middle of one, and 4 the last of another.
DISTURBANCES = {
    "undisturbed": None,
    "killed in forward": "rank=1 step=6 phase=forward kind=kill",
    "in backward": "rank=1 step=6 phase=backward kind=kill",
    "in the optimizer": "rank=1 step=6 phase=optimizer kind=kill",
    "behind it": "rank=1 step=6 phase=between kind=kill",
    "at an epoch's end": "rank=0 step=4 phase=between kind=kill",
    "after the others' step": "late",
}
MAIN = "import sys; from jitckpt.cli import main; sys.exit(main())"
LIMIT = 280.0  # seconds: to find what hangs, however slow the machine

Ends = dict[str, Any]


def run(program: Path, folder: Path, *flags: str, **environment: str) -> tuple[Ends, str]:
    """Run a program on two ranks of softgpu; return what each says of its end, and all that was printed."""
    (folder / "out").mkdir(parents=True)
    command = [
        sys.executable,
        "-c",
        MAIN,
        "run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--device",
        "softgpu",
    ]
    # It may be slow on its way to the first step; who waits for it must not take that for a hang.
    command += ["--hang-timeout", "60", *flags, str(program), "out"]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"SOFTGPU_DEVICES": "2", "HF_HUB_OFFLINE": "1", **environment},
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
    return {file.name: json.loads(file.read_text()) for file in (folder / "out").glob("end-*.json")}, said


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what a program ends with that nobody protects."""
    known: dict[str, Ends] = {}

    def ends(framework: str) -> Ends:
        if framework not in known:
            folder = tmp_path_factory.mktemp(framework) / "plain"
            known[framework], _ = run(FRAMEWORKS[framework], folder, "--no-frameworks")
        return known[framework]

    return ends


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_program_knows_nothing_of_us(framework: str) -> None:
    for file in (FRAMEWORKS[framework], PROGRAMS / "ends.py"):
        assert "jitckpt" not in file.read_text().lower()


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ends_as_undisturbed(framework: str, disturbance: str, plain: Any, tmp_path: Path) -> None:
    try:
        importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{framework} is not installed: scripts/test --frameworks makes an environment with it")
    fault = DISTURBANCES[disturbance]
    flags = [] if fault in (None, "late") else ["--fault", str(fault)]
    late = {"LATE": "1:6"} if fault == "late" else {}
    ends, said = run(FRAMEWORKS[framework], tmp_path / "job", *flags, **late)
    assert said.count(f"jitckpt: {framework} ") == 1 + (fault is not None), said
    assert "recognised. Protected: model" in said
    if fault is None or framework in LOOPS_OF_THEIR_OWN:
        assert "RuntimeWarning: jitckpt" not in said, said
    assert ends == plain(framework), said[-6000:]
    assert ("Restart 1 went on from step" in said) == (fault is not None)


def test_shards_of_zero_go_back_to_a_save_of_all(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="scripts/test --frameworks makes an environment with it")
    program = FRAMEWORKS["deepspeed"]
    undisturbed, _ = run(program, tmp_path / "plain", "--no-frameworks", ZERO="1")
    fault = str(DISTURBANCES["in backward"])
    ends, said = run(program, tmp_path / "job", "--save-every", "2", "--fault", fault, ZERO="1")
    assert "each rank's part of the optimizer's state has no replica" in said
    assert "No whole state could be saved: rank 0 saved step 5 of shard 0 alone" in said
    assert "Restart 1 went on from step 4" in said
    assert ends == undisturbed
