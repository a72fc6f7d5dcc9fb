"""How often to make snapshots: the least loss of all intervals, from options or from a job's events."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.cli import main
from jitckpt.decisions.check import InvalidInput
from jitckpt.events import FILE_NAME
from jitckpt.planning.snapshots import SnapshotCosts, best_interval_seconds, best_minutes, lost_share

SEVERAL = [2 ** (power / 8) for power in range(-48, 49)]  # times an interval: from a 64th to 64 times

costs = st.builds(
    SnapshotCosts,
    pause=st.floats(0.1, 600),
    between_failures=st.floats(600, 1e7),
    come_back=st.floats(0, 600),
    written=st.floats(0, 3600),
)


@given(costs, st.floats(1, 1e7))
def test_no_other_interval_loses_less(costs: SnapshotCosts, another: float) -> None:
    best = best_interval_seconds(costs)
    others = [each for each in [another, *(best * factor for factor in SEVERAL)] if each >= costs.written]
    least = min(lost_share(costs, each) for each in others)
    assert best >= costs.written
    assert lost_share(costs, best) <= least + 1e-9


@given(costs)
def test_minutes_with_few_digits_lose_hardly_more(costs: SnapshotCosts) -> None:
    minutes, best = best_minutes(costs), best_interval_seconds(costs)
    assert minutes * 60 >= costs.written
    assert len(f"{minutes:g}".replace(".", "").strip("0")) <= 2
    more = 1.1 if best == costs.written else 1.01  # where more often is not possible it is rounded upwards
    assert lost_share(costs, minutes * 60) <= lost_share(costs, best) * more


def played(costs: SnapshotCosts, interval: float, generator: random.Random, cycles: int) -> float:
    """Play a job by the rules of the snapshots, failure by failure; return the share of time lost."""
    clock = 0.0
    for _ in range(cycles):
        needed = interval + costs.pause
        while (until := generator.expovariate(1 / costs.between_failures)) < needed:
            clock += until
            while (until := generator.expovariate(1 / costs.between_failures)) < costs.come_back:
                clock += until
            clock += costs.come_back
        clock += needed
    return 1 - cycles * interval / clock


@pytest.mark.parametrize("interval", [60.0, 300.0, 900.0])
def test_the_share_is_what_a_played_job_loses(interval: float) -> None:
    costs = SnapshotCosts(pause=20, between_failures=1800, come_back=90)
    seen = played(costs, interval, random.Random(5), 50_000)
    assert lost_share(costs, interval) == pytest.approx(seen, rel=0.02)


def test_rare_failures_lead_to_youngs_rule() -> None:
    costs = SnapshotCosts(pause=4, between_failures=86400)
    assert best_interval_seconds(costs) == pytest.approx(math.sqrt(2 * 4 * 86400), rel=0.01)
    assert best_minutes(costs) == 14


def test_a_job_that_never_comes_back_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the job would never end"):
        best_minutes(SnapshotCosts(pause=4, between_failures=1, come_back=1000))
    with pytest.raises(InvalidInput, match="the pause is 0"):
        SnapshotCosts(pause=0, between_failures=100)


class Job:
    """Events in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, event: str, at: float, restart: int = 0, **details: Any) -> None:
        line = {"event": event, "time": 1.7e9 + at, "clock": at, "restart": restart, **details}
        with (self.directory / FILE_NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def fail(self, at: float, restart: int = 0, cause: str = "died") -> None:
        self.write("detected", at, restart, cause=cause, text="rank 1 was killed by SIGKILL", first=True)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Two pauses of 3 and 5 s; two failures in 86400 s that were not rehearsed."""
    job = Job(tmp_path)
    job.write("job_started", 0, world_size=2, max_restarts=3)
    job.write("snapshot_pause", 600, step=5, stop=1, dump=1, device=1, seconds=3)
    job.write("snapshot", 610, step=5, bytes=9, stored=9, disk=9, seconds=12)
    job.fail(1000)
    job.write("gone_back", 1030, 1, step=5, seconds=4)
    job.write("fault", 1500, 1, rank=0, fault="rank=0 step=9 kind=kill", step=9)
    job.fail(1501, 1)
    job.write("gone_back", 1521, 2, step=5, seconds=4)
    job.write("snapshot_pause", 2000, 2, step=15, stop=1, dump=3, device=1, seconds=5)
    job.fail(43200, 2, cause="signal")
    job.write("job_ended", 43200, 2, outcome="interrupted")
    job.write("job_started", 50000, world_size=2, max_restarts=3)  # its launcher was lost
    job.write("snapshot", 93200, step=5, bytes=9, stored=9, disk=9, seconds=10)
    job.write("job_started", 93200, world_size=2, max_restarts=3)  # this one runs
    return job


def test_what_a_job_has_seen_is_reckoned_with(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "snapshots", "--json", str(job.directory)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"] == {"pause": 4, "between_failures": 43200, "come_back": 25, "written": 12}
    assert told["option"] == "--snapshot-every 9.8"
    half, best, twice = told["intervals"]
    assert (half["minutes"], best["minutes"], twice["minutes"]) == (4.9, 9.8, 19.6)
    assert best["lost_share"] < min(half["lost_share"], twice["lost_share"])
    assert (told["measured"]["failures"], told["measured"]["seconds"]) == (2, 86400)
    assert main(["plan", "snapshots", str(job.directory)]) == 0
    shown = capsys.readouterr().out
    assert "The pause: 4 s, the mean of 2 snapshots." in shown
    assert "Between failures: 12 h (2 in 1 days)." in shown
    assert "To come back: 25 s, the mean of 2 failures." in shown
    assert shown.splitlines()[-1] == "--snapshot-every 9.8"


def test_options_go_before_what_was_seen(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--pause", "4s", "--between-failures", "24h", "--come-back", "30s"]
    for directory in ([], [str(job.directory)]):
        assert main(["plan", "snapshots", *options, *directory]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "--snapshot-every 14"
        (row,) = [line for line in lines if line.startswith("│               14 ")]
        assert re.findall(r"[\w.%]+", row) == ["14", "0.994%", "14.3", "min"]


def test_a_slow_disk_sets_the_limit(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.write("snapshot", 93800, step=25, bytes=9, stored=9, disk=9, seconds=1990)
    assert main(["plan", "snapshots", str(job.directory)]) == 0
    shown = capsys.readouterr().out
    assert "Not more often, as a snapshot was on the disk only after 33.2 min at most" in shown
    assert shown.splitlines()[-1] == "--snapshot-every 34"
    assert shown.count("%") == 2  # at half of it there are not so many snapshots


def test_what_is_not_known_is_asked_for(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "snapshots", "--pause", "4s"])
    assert "or give --pause and --between-failures" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "snapshots", str(tmp_path / "nothing")])
    assert "can't be read" in capsys.readouterr().err
    assert main(["plan", "snapshots", "--pause", "4", str(job.directory)]) == 2
    assert "--pause is '4': it must be a number and a unit" in capsys.readouterr().err
    new = Job(tmp_path / "new")
    new.directory.mkdir()
    new.write("job_started", 0, world_size=2, max_restarts=3)
    assert main(["plan", "snapshots", "--between-failures", "24h", str(new.directory)]) == 2
    assert "no snapshot was made according to" in capsys.readouterr().err
    new.write("snapshot_pause", 600, step=5, stop=1, dump=1, device=1, seconds=3)
    assert main(["plan", "snapshots", str(new.directory)]) == 2
    assert f"nothing has failed in 10 min of {new.directory}" in capsys.readouterr().err
    assert main(["plan", "snapshots", "--between-failures", "24h", str(new.directory)]) == 0
    assert "The time to come back is not known" in capsys.readouterr().out
