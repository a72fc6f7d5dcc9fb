"""A rank dies between its part in an all-reduce and its own optimizer step, which its replica takes."""

import json
import re
from pathlib import Path

import pytest
from launcher import JITCKPT_RUN, Launcher
from programs_of_tests import text_of

from jitckpt.saves import folders

RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "0", "--warm-start"]
TRAINING = text_of("job_two_ranks")


def results(out: str) -> list[str]:
    found = sorted(line for line in out.splitlines() if line.startswith("rank "))
    assert len(found) == 2, out
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"))
    out = launcher.succeed(*RUN, launcher.script(TRAINING), "0", "0")
    return results(out)


@pytest.mark.parametrize("victim", [0, 1])
def test_its_own_state_is_that_of_the_step_that_its_replica_took(
    launcher: Launcher, undisturbed: list[str], victim: int
) -> None:
    script = launcher.script(TRAINING)
    result = launcher.run(*RUN, "--max-restarts", "1", script, "7", str(victim))
    assert result.status == 0, result.err
    assert results(result.out) == undisturbed
    assert re.search("went on from step [67],", result.err), result.err  # the other may be a step behind
    folder = launcher.directory / "ckpt"
    assert {record.rank for record in folders.find(folder) if record.kind == "rank"} == {1 - victim}
    local = folder / "step-0000000007" / f"local-{victim:05d}"
    document = json.loads((local / "state.json").read_bytes())["local"]
    assert document["final"] is False, "taken in the forward pass: the optimizer step never came"
    assert document["missing"] == document["left_out"] == []
    assert Path(local / "tensors.safetensors").stat().st_size > 0
