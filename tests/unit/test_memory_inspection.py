"""What `jitckpt inspect --memory` says of what this host's memory has."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_job import SimulatedJob

from jitckpt.cli import main
from jitckpt.reports.memory_inspection import KeptShard, copies_in_words, in_words

ONE = KeptShard(1, "0123456789ab", 2, 0, 8, 100, 1.0, safe=True, own=True, timeline="a")


def test_it_says_what_a_start_would_go_on_from_and_why() -> None:
    other = replace(ONE, rank=1, own=False)
    older = [replace(ONE, step=7), replace(other, step=7)]
    assert in_words([ONE, other, *older]) == [
        "Job 01234567: all go on from step 8: rank 1 from what this host keeps for others; "
        "rank 0 from their own host's memory."
    ]
    assert in_words([replace(ONE, problem="Chunk 0 is damaged."), other, *older]) == [
        "Job 01234567: all go on from step 7: rank 1 from what this host keeps for others; "
        "rank 0 from their own host's memory. Step 8 is not whole: of rank 0 nothing of it is left. "
        "Step 8 of rank 0 in their own host's memory has failed its check."
    ]


def test_what_only_other_hosts_know_is_said() -> None:
    assert in_words([replace(ONE, world_size=4)]) == [
        "Job 01234567: all go on from step 8: rank 0 from their own host's memory, as far as this host "
        "knows, which has nothing of ranks 1, 2, 3."
    ]
    two_starts = [ONE, replace(ONE, rank=1, timeline="b")]
    assert in_words(two_starts) == ["Job 01234567: no step is whole here for all of its ranks."]
    assert in_words([replace(ONE, job="", problem="damaged")]) == []


def test_with_the_jobs_directory_it_says_in_which_state_its_ranks_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitckpt.reports.memory_inspection._keepers", lambda: [])
    job = SimulatedJob(tmp_path, ranks=4, shards=4, started=time.time() - 20)
    job.begin()
    job.at = 10
    job.keep_in_memory(5, ranks_of_a_host=2)
    job.write("memory_state", state="offline", ranks=[2, 3], step=5)
    main(["inspect", "--memory", str(tmp_path)])
    sentence = "Its ranks, by their snapshots in memory: 2 healthy, 2 offline (ranks 2, 3).\n"
    assert sentence in capsys.readouterr().out
    main(["watch", str(tmp_path)])
    assert "has step 5 of all ranks: 2 healthy, 2 offline (ranks 2, 3)" in capsys.readouterr().out
    job.progress(6, memory_states={"0": "snap", "1": "completed", "2": "snap"})
    main(["inspect", "--memory", "--json", str(tmp_path)])
    states = json.loads(capsys.readouterr().out)["states"]
    assert states == {"offline": [2, 3], "snap": [0], "completed": [1]}


def test_nothing_is_said_of_ranks_whose_agent_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been killed, with them; how they were then is no news."""
    monkeypatch.setattr("jitckpt.reports.memory_inspection._keepers", lambda: [])
    job = SimulatedJob(tmp_path, ranks=4, shards=4, started=time.time() - 100)
    job.begin()
    job.keep_in_memory(5, ranks_of_a_host=2)
    job.progress(6, memory_states={"0": "snap"})
    main(["inspect", "--memory", str(tmp_path)])
    assert "by their snapshots in memory" not in capsys.readouterr().out


def test_where_snapshots_were_copied_is_said_of_a_jobs_own_ranks() -> None:
    def one(rank: int, step: int, *, own: bool = True) -> KeptShard:
        copied = {"idle": 300, "computation": 100, "late": 0} if own else {}
        minibatch = {"in spans": 0.5 + rank / 10} if own else {}
        return KeptShard(
            1, "job", 2, rank, step, 9, 0.0, safe=True, own=own, copied=copied, minibatch=minibatch
        )

    found = [one(0, 1), one(0, 2), one(1, 2), one(2, 2, own=False)]
    assert copies_in_words(found) == [
        "Job job: its snapshots left the device so: 75% idle, 25% computation. A minibatch takes, by what it "
        "carries: in spans 0.6 s."
    ]
    assert copies_in_words([one(2, 2, own=False)]) == []
