"""Transparent mode: trainings of many ways to be parallel live on in the same processes."""

from pathlib import Path

from jitckpt.rehearsal import CHECKPOINTS, OUTPUT, ServerStrike, run_job

TRAINING = Path(__file__).parent / "in_place.py"
FORMS = ("mixed_precision", "fsdp2", "tensor", "pipeline")
RANKS = 4


def test_every_way_to_be_parallel_lives_on_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    options = ["--mode", "transparent", "--warm-spares", "0", "--warm-start"]
    options += ["--checkpoint-dir", str(folder / CHECKPOINTS)]
    # While the first recovery is under way another server is killed.
    strike = ServerStrike(3, "recovery_begun", 0.02)
    run = run_job([*options, str(TRAINING)], folder, ranks=RANKS, strikes=[strike])
    said = (folder / OUTPUT).read_text()
    assert run.status == 0, said
    expected = {f"{form}, rank {rank}, equal: True" for form in FORMS for rank in range(RANKS)}
    assert expected <= set(said.splitlines()), said
    assert "left out and made: True" in said
    assert run.struck == (strike,)
    assert run.left_behind == ()

    named = [event["event"] for event in run.events]
    assert named.count("recovered") >= len(FORMS), said
    assert named.count("proxy_connected") == RANKS  # the workers are the same
    assert not {"restart", "recovery_given_up"} & set(named)
    assert "switched off" not in said
