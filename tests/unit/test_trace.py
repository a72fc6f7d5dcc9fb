"""The trace that Perfetto shows: whole, to scale, and in each lane one thing after the other."""

import json
from pathlib import Path

import pytest
from simulated_job import SimulatedJob

from jitckpt.cli import main
from jitckpt.events import read_events
from jitckpt.reports.trace import trace


@pytest.fixture
def job(tmp_path: Path) -> SimulatedJob:
    job = SimulatedJob(tmp_path, ranks=40, shards=4, started=1.8e9)  # more than a picture has room for
    job.begin()
    job.at = 30
    job.fail(1, 20)
    job.save(1, 20)
    job.begin(20)
    job.at = 60
    job.write("job_ended", outcome="succeeded")
    return job


def test_lanes_and_spans(job: SimulatedJob, capsys: pytest.CaptureFixture[str]) -> None:
    file = job.directory / "trace.json"
    assert main(["timeline", str(job.directory), "--trace", str(file), "--json"]) == 0
    capsys.readouterr()
    events = json.loads(file.read_text())["traceEvents"]
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert list(names.values()) == ["job", "agent", *(f"rank {rank}" for rank in range(40))]
    spans = [one for one in events if one["ph"] == "X"]
    of_job = [(one["name"], one["ts"] / 1e6, one["dur"] / 1e6) for one in spans if names[one["tid"]] == "job"]
    assert [name for name, _, _ in of_job] == ["starting", "useful steps", "a rank died", "useful steps"]
    assert sum(seconds for _, _, seconds in of_job) == pytest.approx(60)
    saves = {names[one["tid"]]: one for one in spans if one["name"] == "saving"}
    assert set(saves) == {"agent", *(f"rank {rank}" for rank in range(40) if rank != 1)}
    assert saves["rank 39"]["ts"] == pytest.approx(30.3e6)
    assert saves["rank 39"]["dur"] == pytest.approx(1.2e6)
    for lane in names:
        ends = 0.0
        for one in sorted((one for one in spans if one["tid"] == lane), key=lambda one: float(one["ts"])):
            assert one["ts"] >= ends - 1, "in a lane one thing is after the other"
            ends = one["ts"] + one["dur"]
    assert [one["name"] for one in events if one["ph"] == "i"] == ["detected", "saved", "restart"]


def test_pauses_for_snapshots_are_in_the_launchers_lane(job: SimulatedJob) -> None:
    job.write("snapshot_pause", step=8, stop=0.5, dump=2.0, device=1.0, seconds=3.5)  # until 60 s
    events, _ = read_events(job.directory)
    spans = [one for one in trace([events])["traceEvents"] if one.get("args") == {"snapshot": "after step 8"}]
    assert [(one["name"], one["ts"] / 1e6, one["dur"] / 1e6) for one in spans] == [
        ("coming to rest", pytest.approx(56.5), pytest.approx(0.5)),
        ("dumping the process", pytest.approx(57.0), pytest.approx(2.0)),
        ("getting devices again", pytest.approx(59.0), pytest.approx(1.0)),
    ]
    assert {one["tid"] for one in spans} == {1}


def test_jobs_are_processes_of_one_trace(job: SimulatedJob) -> None:
    events, _ = read_events(job.directory)
    later = [{**event, "time": event["time"] + 100} for event in events]
    both = trace([events, later])["traceEvents"]
    assert {one["pid"] for one in both} == {0, 1}
    assert min(one["ts"] for one in both if one["pid"] == 1 and one["ph"] == "X") == pytest.approx(100e6)
    assert trace([])["traceEvents"] == []


def test_a_file_that_can_not_be_written(job: SimulatedJob, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["timeline", str(job.directory), "--trace", "/nowhere/trace.json"])
    assert "/nowhere/trace.json can't be written: No such file" in capsys.readouterr().err
