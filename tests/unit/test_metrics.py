"""What a scraper is told of a job, and that the dashboard and the guide have all of it."""

import json
import time
from pathlib import Path

import pytest
from simulated_job import SimulatedJob

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from jitckpt.reports.following import Follower
from jitckpt.web.metrics import JobCollector

ROOT = Path(__file__).parents[2]


@pytest.fixture
def job(tmp_path: Path) -> SimulatedJob:
    """With all that a job can have: failures, a memory tier, a rank that is late."""
    job = SimulatedJob(tmp_path, ranks=16, shards=2, started=time.time() - 60)
    job.begin()
    job.at = 20
    job.fail(1, 10)
    job.save(1, 10)
    job.begin(10)
    job.keep_in_memory(30)
    job.at = 50
    job.progress(40)
    job.write("hang", rank=0, operation="ncclAllReduce", seconds=8.0)
    job.write("straggler", ranks=[3], text="rank 3 is late")
    job.write("suspect", rank=1, device="GPU-1", host="node1")
    return job


def told(job: SimulatedJob) -> dict[str, Metric]:
    follower = Follower(job.directory)
    return {metric.name: metric for metric in JobCollector(lambda: follower).collect()}


def shown_names(metrics: dict[str, Metric]) -> list[str]:
    """Return the names as a scraper sees them, of which the dashboard's queries consist."""
    endings = {"counter": "_total", "info": "_info", "histogram": ""}
    return [name + endings.get(metric.type, "") for name, metric in metrics.items()]


def test_every_metric_is_on_the_dashboard_and_in_the_guide(job: SimulatedJob) -> None:
    names = shown_names(told(job))
    assert len(names) > 20
    dashboard = json.loads((ROOT / "examples" / "grafana" / "jitckpt.json").read_text())
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    assert [name for name in names if name not in queries] == []
    guide = (ROOT / "docs" / "guides" / "watching.md").read_text()
    assert [name for name in names if f"`{name}" not in guide] == []


def test_the_dashboards_panels_have_names_and_places_of_their_own() -> None:
    panels = json.loads((ROOT / "examples" / "grafana" / "jitckpt.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "no panel lies on another"
    assert all(x < 24 for x, _ in cells)


def test_the_memory_tier_late_ranks_and_suspects_are_told(job: SimulatedJob) -> None:
    metrics = told(job)
    memory = {one.labels["kind"]: one.value for one in metrics["jitckpt_memory_bytes"].samples}
    assert memory == {"log": 0, "images": 0, "memory_tier": 1 << 30}
    assert metrics["jitckpt_memory_safe_step"].samples[0].value == 30
    copied = {one.labels["beside"]: one.value for one in metrics["jitckpt_memory_copied_bytes"].samples}
    assert copied == {"idle": 1 << 28, "late": 0}
    [minibatch] = metrics["jitckpt_memory_minibatch_seconds"].samples
    assert (minibatch.labels, minibatch.value) == ({"carries": "in spans"}, 0.5)
    [healthy] = metrics["jitckpt_memory_ranks"].samples
    assert (healthy.labels, healthy.value) == ({"state": "healthy"}, 16)
    [late] = metrics["jitckpt_rank_late_seconds"].samples
    assert late.labels == {"rank": "3"}
    assert late.value == pytest.approx(18, abs=10)  # 8 s when it was found, 10 s ago
    [suspect] = metrics["jitckpt_suspect_device"].samples
    assert (suspect.labels, suspect.value) == ({"uuid": "GPU-1", "host": "node1", "rank": "1"}, 1)


def test_without_a_job_it_is_said_that_there_is_none() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(lambda: None))
    assert registry.get_sample_value("jitckpt_up") == 0
