"""Trainings whose state is spread over four ranks: one is killed, and no bit of the result differs."""

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import gpt
import pytest
from final_lines import finals
from launcher import JITCKPT_RUN, Launcher, Result, until_told
from test_hosts import PAUSING

from jitckpt.saves import folders

TRAINING = str(Path(__file__).parent / "sharded_training.py")
RUN = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", "4", "--warm-spares", "0", "--warm-start"]
PROTECTED = [*RUN, "--checkpoint-dir", "ckpt", "--max-restarts", "1", TRAINING]
FORMS = ["fsdp2", "mixed", "coded", "fsdp1", "tensor", "pipeline", "zero"]
EIGHT_RANKS = ["--nproc-per-node", "8"]  # the last one holds


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"))
    return launcher.succeed(*RUN, "--max-restarts", "0", TRAINING, *FORMS, "--unprotected")


def disturbed(launcher: Launcher, form: str, fault: str, options: Sequence[str] = ()) -> Result:
    result = launcher.run(*PROTECTED[:-1], *options, "--fault", fault, TRAINING, form)
    assert result.status == 0, result.err
    assert "own state" not in result.err, "no rank lost what it alone knew"
    return result


def shards_of(folder: Path) -> dict[int, tuple[int, int, str]]:
    """Return, by rank, what `registered` says: shard and shards; and the layout of its newest save."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    layouts = {record.metadata.identity.layout for record in folders.find(folder) if record.metadata}
    assert len(layouts) == 1
    layout = layouts.pop()
    return {
        event["rank"]: (event["shard"], event["shards"], layout)
        for event in events
        if event["event"] == "registered"
    }


@pytest.mark.parametrize(
    ("form", "phase", "layout"),
    [
        ("fsdp2", "optimizer", "replicate=2 Replicate(), shard=2 Shard(dim=0)"),
        ("mixed", "backward", "replicate=2 Replicate(), shard=2 Shard(dim=0)"),
        ("coded", "backward", "replicate=2 Replicate(), shard=2 Shard(dim=0)"),
        ("fsdp1", "backward", "FSDP=2 FlatParameter"),
        ("tensor", "backward", "tensor=2 Shard(dim=0); tensor=2 Shard(dim=1)"),
        ("pipeline", "forward", "pipeline stage of 2"),
    ],
)
def test_a_killed_rank_changes_no_bit(
    launcher: Launcher, undisturbed: str, form: str, phase: str, layout: str
) -> None:
    result = disturbed(launcher, form, f"rank=2 step=4 phase={phase} kind=kill")
    assert finals(result.out, f"{form} rank ", 4) == finals(undisturbed, f"{form} rank ", 4)
    assert "The job succeeded after 1 restart." in result.err
    assert "no replica" not in result.err
    found = shards_of(launcher.directory / "ckpt")
    assert [found[rank] for rank in range(4)] == [
        (shard, 2, f"{layout}; replicas 0 2 | 1 3") for shard in (0, 1, 0, 1)
    ]


def test_three_ways_at_once_change_no_bit_either(launcher: Launcher) -> None:
    """Data, tensor and pipeline parallel: four shards, two replicas of each."""
    undisturbed = launcher.succeed(
        *RUN, *EIGHT_RANKS, "--max-restarts", "0", TRAINING, "three", "--unprotected"
    )
    result = disturbed(launcher, "three", "rank=2 step=5 phase=optimizer kind=kill", EIGHT_RANKS)
    assert finals(result.out, "three rank ", 8) == finals(undisturbed, "three rank ", 8)
    assert "The job succeeded after 1 restart." in result.err
    found = shards_of(launcher.directory / "ckpt")
    assert [found[rank][:2] for rank in range(8)] == [(rank % 4, 4) for rank in range(8)]
    assert found[0][2].endswith("tensor=2 Shard(dim=0); pipeline stage of 2; replicas 0 4 | 1 5 | 2 6 | 3 7")


def test_what_has_no_replica_comes_from_a_periodic_save(launcher: Launcher, undisturbed: str) -> None:
    fault = "rank=2 step=6 phase=forward kind=kill"
    options = ["--checkpoint-dir", "ckpt", "--max-restarts", "1", "--fault", fault]
    result = launcher.run(*RUN, *options, TRAINING, "zero", "--save-every", "2")
    assert result.status == 0, result.err
    assert finals(result.out, "zero rank ", 4) == finals(undisturbed, "zero rank ", 4)
    gone_on = re.search(r"Restart 1 went on from step (\d)", result.err)
    assert gone_on is not None, result.err
    assert int(gone_on[1]) in (2, 4)
    assert "own state" not in result.err
    found = folders.find(launcher.directory / "ckpt")
    assert {(record.step, record.rank) for record in found if record.kind == "rank"} == {
        (step, rank) for step in (6, 8) for rank in range(4)
    }
    assert all(folders.verify(record) is None for record in found)


def test_what_has_no_replica_begins_anew_where_nothing_was_saved_yet(
    launcher: Launcher, undisturbed: str
) -> None:
    """What the others save of the lost rank's step can't be used, and keeps nobody from that."""
    result = disturbed(launcher, "zero", "rank=2 step=4 phase=forward kind=kill")
    assert finals(result.out, "zero rank ", 4) == finals(undisturbed, "zero rank ", 4)
    assert "No whole state could be saved" in result.err
    assert "The job's first save was never finished: Step 3 has no whole save of shard 2." in result.err
    assert "Nothing older was ever saved, so the job begins anew" in result.err


# In the first start rank 2 is killed as it commits its part of a periodic save, once the others have theirs.
CUT = f"""
import os, runpy, signal, sys, time
from jitckpt.saves import folders

def cut(self):
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)

if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("2", "0"):
    folders.SaveFolder.commit = cut
sys.argv[0] = {str(TRAINING)!r}
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_first_periodic_save_that_is_cut_off_has_the_job_begin_anew(
    launcher: Launcher, undisturbed: str
) -> None:
    """The others have written their parts of it, and then save a later step, in which rank 2 lacks."""
    options = ["--checkpoint-dir", "ckpt", "--max-restarts", "1"]
    result = launcher.run(*RUN, *options, launcher.script(CUT), "zero", "--save-every", "3")
    assert result.status == 0, result.err
    assert finals(result.out, "zero rank ", 4) == finals(undisturbed, "zero rank ", 4)
    assert "No whole state could be saved" in result.err
    assert "Nothing older was ever saved, so the job begins anew" in result.err


def test_a_damaged_shard_has_all_ranks_go_on_from_an_older_step(launcher: Launcher, undisturbed: str) -> None:
    """Rank 1 alone reads its shard and finds it damaged; the others learn of that from it."""
    command = [*RUN, "--checkpoint-dir", "ckpt", "--max-restarts", "0", TRAINING, "zero", "--save-every", "2"]
    launcher.succeed(*command)
    folder = launcher.directory / "ckpt"
    newest, older = sorted({record.step for record in folders.find(folder)}, reverse=True)[:2]
    file = folders.look_at(folder, newest, "rank", 1).path / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    second = launcher.run(*command)
    assert second.status == 0, second.err
    assert finals(second.out, "zero rank ", 4) == finals(undisturbed, "zero rank ", 4)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    restored = [event["step"] for event in events if event["event"] == "restored"]
    assert restored == [older] * 4
    assert "tensors.safetensors is damaged" in second.err
    assert f"Step {newest} has no whole save of shard 1." in second.err


def test_a_first_save_that_was_never_finished_has_the_job_begin_anew(
    launcher: Launcher, undisturbed: str
) -> None:
    """Where nothing was ever saved whole, there is nothing that beginning anew could pass over."""
    command = [*RUN, "--checkpoint-dir", "ckpt", "--max-restarts", "0", TRAINING, "zero", "--save-every", "6"]
    in_the_way = launcher.directory / "ckpt/step-0000000006/unfinished-periodic-rank-00002"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    first = launcher.run(*command)
    assert first.status == 0, first.err
    assert "The periodic save of step 6 failed, and the training goes on" in first.err
    in_the_way.unlink()
    second = launcher.run(*command)
    assert second.status == 0, second.err
    assert "The job's first save was never finished: Step 6 has no whole save of shard 2." in second.err
    assert finals(second.out, "zero rank ", 4) == finals(undisturbed, "zero rank ", 4)
    launcher.succeed(*command)
    events = [json.loads(line) for line in (launcher.directory / "ckpt/events.jsonl").open()]
    assert [event["step"] for event in events if event["event"] == "restored"] == [6] * 4


def test_sigusr2_saves_one_step_on_all_ranks_and_the_training_goes_on(launcher: Launcher) -> None:
    size = ["--steps", "60", "--layers", "1", "--width", "32", "--length", "16"]
    pausing = launcher.script(PAUSING)
    process = launcher.start(*gpt.RUN, "--checkpoint-dir", "ckpt", pausing, str(gpt.EXAMPLE), *size)
    assert process.stdout is not None
    while process.stdout.readline() != "pauses\n":
        assert process.poll() is None
    process.send_signal(signal.SIGUSR2)
    said = until_told(process, "will be saved")
    (launcher.directory / "go").touch()
    result = launcher.finish(process)
    assert result.status == 0, said + result.err
    wanted = re.search(r"SIGUSR2: the state after step (\d+) will be saved", said)
    assert wanted is not None, said
    found = folders.find(launcher.directory / "ckpt")
    step = int(wanted[1])
    assert {(record.step, record.kind, record.rank) for record in found} == {
        (step, "rank", 0),
        (step, "local", 1),
    }
    assert all(folders.verify(record) is None for record in found)
