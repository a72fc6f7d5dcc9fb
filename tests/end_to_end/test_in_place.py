"""Transparent mode: trainings of many ways to be parallel live on in the same processes."""

from pathlib import Path

from jitckpt.rehearsal.runs import CHECKPOINTS, OUTPUT, ServerStrike, run_job

TRAINING = Path(__file__).parent / "in_place.py"
PIPELINE = Path(__file__).parents[2] / "scripts" / "campaign_trainings" / "pipeline.py"
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


def test_a_stage_that_is_ahead_at_the_validation_gets_what_its_replay_needs(tmp_path: Path) -> None:
    """The first stage hangs in the minibatch that is to be validated; the second has gone on from there."""
    training = ["--warm-spares", "0", "--warm-start", str(PIPELINE), "--steps", "8"]
    undisturbed = run_job(training, tmp_path / "undisturbed", ranks=RANKS)
    assert undisturbed.status == 0
    folder = tmp_path / "job"
    options = ["--mode", "transparent", "--checkpoint-dir", str(folder / CHECKPOINTS)]
    fault = "rank=0 step=3 phase=backward kind=collective-hang call=2"
    run = run_job([*options, *training], folder, ranks=RANKS, faults=[fault], hang_timeout=5.0)
    said = (folder / OUTPUT).read_text()
    assert run.status == 0, said

    ends = [
        sorted(line for line in (one / OUTPUT).read_text().splitlines() if "final state" in line)
        for one in (folder, tmp_path / "undisturbed")
    ]
    assert len(ends[0]) == RANKS, said
    assert ends[0] == ends[1]
    named = [event["event"] for event in run.events]
    assert "recovered" in named
    # A replay of the second stage that the first does not go on for is broken off, or goes on after long.
    texts = [str(event.get("text", "")) for event in run.events]
    assert not any("come to no end" in text or "has not come to its" in text for text in texts), texts
