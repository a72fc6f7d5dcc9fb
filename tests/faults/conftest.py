"""Jobs of one small training, with failures and without: the end has to be the same, bit for bit."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from jitckpt.rehearsal.runs import OUTPUT, Run, Strike, run_job
from jitckpt.rehearsal.trials import differences

TRAINING = Path(__file__).parent / "training.py"
QUICK = Path(__file__).parents[2] / "scripts" / "campaign_start"
LIMIT = 200.0  # seconds for any job

Undisturbed = Callable[..., Run]


@pytest.fixture(scope="session", autouse=True)
def quick_imports() -> Iterator[None]:
    """Have all Pythons import torch in two thirds of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(QUICK), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What the training ends with if nothing fails; by ranks and arguments, run when first asked for."""
    runs: dict[tuple[object, ...], Run] = {}

    def run(ranks: int, *arguments: str) -> Run:
        key = (ranks, *arguments)
        if key not in runs:
            runs[key] = train(tmp_path_factory.mktemp("undisturbed") / "job", ranks, *arguments)
            assert (runs[key].status, runs[key].restarts, runs[key].left_behind) == (0, 0, ())
        return runs[key]

    return run


def train(
    folder: Path,
    ranks: int,
    *arguments: str,
    options: Sequence[str] = (),
    launcher: Sequence[str] = (),
    faults: Sequence[str] = (),
    strikes: Sequence[Strike] = (),
    hang_timeout: float = 60,
) -> Run:
    """Run the training with these arguments.

    options: of `jitckpt run`. launcher: what starts that.
    """
    return run_job(
        [
            "--warm-spares",
            "0",
            "--warm-start",
            "--max-restarts",
            "9",
            *options,
            str(TRAINING),
            *arguments,
        ],
        folder,
        ranks=ranks,
        faults=faults,
        strikes=strikes,
        launcher=launcher,
        hang_timeout=hang_timeout,
        time_limit=LIMIT,
    )


def assert_as_if_nothing_had_been(run: Run, expected: Run, folder: Path) -> None:
    """The same end, on every rank and bit for bit; no minibatch done twice but the one that failed."""
    said = (folder / OUTPUT).read_text()
    assert run.status == 0, said
    assert differences(run, expected) == [], said
    assert [recovery.redone for recovery in run.recoveries if (recovery.redone or 0) > 1] == [], said
    assert run.left_behind == ()
    # A rank whose device has failed may say first that it keeps no more of its own state.
    lost = re.search("left no state of its own|did not keep of its own state", said)
    assert lost is None, "a rank has lost what it alone knew"
