"""The commands around a job, on one that has really failed: verify makes it, the others look at it."""

import json
from pathlib import Path

from launcher import JITCKPT, Launcher

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train_convnet.py")


def test_a_training_is_verified_inspected_and_drawn(launcher: Launcher, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    verify = [*JITCKPT, "verify", "--device", "softgpu", "--trials", "1", "--seed", "1", "--kinds", "kill"]
    script = ["--warm-spares", "0", EXAMPLE, "--steps", "6", "--batch", "4", "--channels", "4"]
    verified = launcher.run(*verify, "--keep", str(kept), "--", *script)
    assert verified.status == 0, verified.out + verified.err
    assert verified.out.endswith("\n1 of 1\n")
    assert not (tmp_path / "ckpt").exists(), "the script's own directory is not touched"

    checkpoints = str(kept / "trial-1" / "ckpt")
    inspected = launcher.run(*JITCKPT, "inspect", "--verify", "--json", checkpoints)
    assert inspected.status == 0, inspected.err
    found = json.loads(inspected.out)
    timeline = launcher.run(*JITCKPT, "timeline", "--json", checkpoints)
    (recovery,) = json.loads(timeline.out)["jobs"][0]["recoveries"]
    assert found["restart"] == recovery["step"] in range(1, 6)
    assert [load["rank"] for load in found["loads"]] == [0, 1]
    assert all(load["local"] for load in found["loads"])


def test_a_script_that_jitckpt_does_not_protect_is_told_so(launcher: Launcher) -> None:
    script = launcher.script("print('step 1 of 1')")
    refused = launcher.run(*JITCKPT, "verify", "--device", "softgpu", "--nproc-per-node", "1", "--", script)
    assert refused.status == 2
    assert "was not under jitckpt's protection on every rank" in refused.err
    assert "step 1 of 1" in refused.err
