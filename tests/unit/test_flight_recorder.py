"""What torch's own tool reads in a hang's report is what the report says."""

import pickle
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir

from jitckpt.decisions.flight_recorder import OPERATIONS, dumps
from jitckpt.decisions.hang import Diagnosis, Waiting

NOW = 1.8e9


def waiting(
    rank: int, late: tuple[int, ...], operation: str = "ncclAllReduce", sequence: int = 12, ranks: int = 4
) -> Waiting:
    there = tuple(one for one in range(ranks) if one not in late)
    return Waiting(rank, operation, "ec8a", there, ranks, sequence, 4096, 7.5, late, "data")


def written(folder: Path, diagnosis: Diagnosis, ranks: int = 4) -> Path:
    for rank, dump in dumps(diagnosis, range(ranks), NOW).items():
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    return folder


def test_torchfrtrace_names_the_late_rank(tmp_path: Path) -> None:
    waits = tuple(waiting(rank, (2,)) for rank in (0, 1, 3))
    written(tmp_path, Diagnosis(waits, late=(2,), silent=()))
    tool = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    tool += [str(tmp_path), "--prefix", "rank_"]
    done = subprocess.run(tool, capture_output=True, text=True, check=False, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "missing ranks: {2}" in said
    assert "collective: nccl:all_reduce" in said
    assert "group info: ec8a:data" in said


def test_where_all_have_arrived_nobody_is_missing(tmp_path: Path) -> None:
    waits = tuple(waiting(rank, ()) for rank in range(3))  # the last has not yet waited long
    written(tmp_path, Diagnosis(waits, (), ()))
    args = JobConfig().parse_args([str(tmp_path), "--prefix", "rank_"])
    details, version = read_dir(args)
    database = build_db(details, args, version)
    [collective] = database.collectives
    assert (collective.pass_check, collective.missing_ranks) == (True, None)
    assert collective.collective_seq_id == 12
    assert {call.global_rank for call in database.ncclcalls} == {0, 1, 2, 3}


late = st.sets(st.integers(0, 3), max_size=3)
operation = st.sampled_from([*OPERATIONS, "ncclSend"])


@given(late, operation, st.integers(0, 10**9))
def test_every_rank_has_what_it_waits_in(late: set[int], operation: str, sequence: int) -> None:
    there = [rank for rank in range(4) if rank not in late]
    waits = tuple(waiting(rank, tuple(late), operation, sequence) for rank in there)
    found = dumps(Diagnosis(waits, tuple(late), ()), range(4), NOW)
    assert sorted(found) == [0, 1, 2, 3]
    known = operation in OPERATIONS
    assert [len(found[rank]["entries"]) for rank in range(4)] == [
        known and rank in there for rank in range(4)
    ]
    if known:
        assert all(found[rank]["pg_config"]["ec8a"]["ranks"] == "[0, 1, 2, 3]" for rank in range(4))
