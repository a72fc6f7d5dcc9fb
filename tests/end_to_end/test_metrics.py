"""A real Prometheus scrapes a real job with three failures; the dashboard shows what the events say."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher import JITCKPT_RUN, LIMIT, Launcher
from prometheus_client.parser import text_string_to_metric_families

from jitckpt.events import read_events
from jitckpt.reports.following import Follower
from jitckpt.reports.timeline import recoveries
from jitckpt.system.versions import versions

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "jitckpt.json"
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import jitckpt

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
model = DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.AdamW(model.parameters())
job = jitckpt.init(model=model, optimizer=optimizer, checkpoint_dir="ckpt")
for step in job.steps(16):
    model(torch.randn(4, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
    while step == 12 and not Path("go_on").exists():
        time.sleep(0.1)
torch.distributed.destroy_process_group()
"""
FAULTS = ("rank=1 step=3 phase=backward kind=kill", "rank=0 step=6 phase=backward kind=exception",
          "rank=1 step=9 phase=backward kind=kill")  # fmt: skip
# What no fault here makes: no rank is late for long, no device fails twice... those of user-level mode.
MAY_BE_EMPTY = ("jitckpt_rank_late_seconds", "jitckpt_suspect_device")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=LIMIT) as answer:
        return bytes(answer.read())


def queries() -> list[str]:
    """Return the dashboard's queries, for all instances."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [one["expr"] for one in dashboard["annotations"]["list"]]
    return [query.replace("$instance", ".*") for query in found]


class Prometheus:
    """Debian's, in a folder of the test's own."""

    def __init__(self, folder: Path, target: str, launcher: Launcher) -> None:
        scrape = {"job_name": "jitckpt", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
        (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML
        self.port = free_port()
        self.process = launcher.start(
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=error",
        )

    def ask(self, query: str, at: float | None = None) -> list[dict[str, Any]]:
        """Return the samples that a query gives."""
        words = {"query": query} | ({} if at is None else {"time": str(at)})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode(words)}"
        answer = json.loads(get(url))
        assert answer["status"] == "success", (query, answer)
        samples: list[dict[str, Any]] = answer["data"]["result"]
        return samples

    def value(self, query: str) -> float:
        """Return the only sample's value."""
        [sample] = self.ask(query)
        return float(sample["value"][1])

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=LIMIT)


@pytest.fixture
def prometheus_port(launcher: Launcher) -> Iterator[int]:
    yield free_port()
    for process in launcher.started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=LIMIT)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_shows_what_the_events_say(launcher: Launcher, prometheus_port: int) -> None:
    folder = launcher.directory
    faults = [word for fault in FAULTS for word in ("--fault", fault)]
    job = launcher.start(
        *JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--metrics", str(prometheus_port),
        *faults, launcher.script(SCRIPT),
    )  # fmt: skip
    prometheus = Prometheus(folder, f"127.0.0.1:{prometheus_port}", launcher)
    follower = Follower(folder / "ckpt")

    def at_rest() -> bool:
        follower.look()
        seen = follower.present()
        return seen is not None and seen.restart == 3 and seen.state == "training" and seen.step == 13

    launcher.wait_until(at_rest)
    time.sleep(3)  # seconds: two scrapes
    events, damages = read_events(folder / "ckpt")
    assert damages == []
    told = recoveries(events)
    assert len(told) == 3

    assert prometheus.value("sum(jitckpt_recoveries_total)") == 3
    assert prometheus.value("jitckpt_safe_step") == told[-1].saved_step == 8
    assert prometheus.value("jitckpt_minibatches_repeated_total") == sum(one.redone or 0 for one in told)
    assert prometheus.value("jitckpt_restarts_left") == 0
    assert prometheus.value("jitckpt_protected_ratio") == 1
    assert prometheus.value("jitckpt_step") == 13
    seconds = [one.first_step_seconds or 0.0 for one in told]
    whole = 'jitckpt_recovery_seconds_sum{phase="all"}'
    assert prometheus.value(whole) == pytest.approx(sum(seconds), abs=0.1)
    saving = 'jitckpt_recovery_seconds_sum{phase="save"}'
    assert prometheus.value(saving) == pytest.approx(sum(one.save_seconds or 0.0 for one in told), abs=0.1)
    causes = Counter(event["cause"] for event in events if event["event"] == "detected" and event["first"])
    by_cause = {
        one["metric"]["cause"]: float(one["value"][1]) for one in prometheus.ask("jitckpt_recoveries_total")
    }
    assert by_cause == causes
    present = follower.present()
    assert present is not None
    for sample in prometheus.ask("jitckpt_time_seconds"):
        cause, value = sample["metric"]["cause"], float(sample["value"][1])
        assert value == pytest.approx(present.spent[cause], abs=10.0 if cause == "useful" else 0.1)
    assert prometheus.value("sum(jitckpt_time_seconds)") == pytest.approx(
        time.time() - present.started, abs=5
    )
    empty = [query for query in queries() if not prometheus.ask(query)]
    assert [query for query in empty if not query.startswith((*MAY_BE_EMPTY, "changes("))] == []
    restarts = "max_over_time((changes(jitckpt_restarts[1m]) > 0)[5m:1s])"
    assert prometheus.ask(restarts), "the annotation's query has seen the restarts"

    (folder / "go_on").touch()
    result = launcher.finish(job)
    assert result.status == 0, result.err
    prometheus.stop()
    assert launcher.survivors() == []


def test_metrics_are_whole_and_who_does_not_read_them_holds_up_nothing(
    launcher: Launcher, prometheus_port: int
) -> None:
    """A scraper that sends half a request, many that never read, and the job ends as ever."""
    (launcher.directory / "go_on").touch()
    job = launcher.start(
        *JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--metrics", str(prometheus_port),
        "--fault", FAULTS[0], launcher.script(SCRIPT),
    )  # fmt: skip
    address = ("127.0.0.1", prometheus_port)

    def answers() -> bool:
        try:
            return b"jitckpt_step " in get(f"http://127.0.0.1:{prometheus_port}/metrics")
        except (urllib.error.URLError, ConnectionError):
            return False

    launcher.wait_until(answers)
    text = get(f"http://127.0.0.1:{prometheus_port}/metrics").decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    assert {"jitckpt_goodput_ratio", "jitckpt_recoveries", "jitckpt_recovery_seconds"} <= set(families)
    [job_is] = families["jitckpt_job_info"].samples
    assert job_is.labels["torch"] == versions()["torch"]
    assert job_is.labels["versions_hash"] == versions()["hash"]
    idle = [socket.create_connection(address) for _ in range(100)]
    for one in idle[:50]:
        one.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
    try:
        result = launcher.finish(job)
    finally:
        for one in idle:
            one.close()
    assert result.status == 0, result.err
    [recovery] = recoveries(read_events(launcher.directory / "ckpt")[0])
    assert recovery.saved_step == 2
    assert launcher.survivors() == []


def test_a_port_that_is_taken_is_said_before_anything_starts(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = launcher.run(*JITCKPT_RUN, "--device", "softgpu", "--metrics", port, launcher.script(SCRIPT))
    assert result.status == 2
    assert f"--metrics 127.0.0.1:{port}: Address already in use" in result.err


def test_without_the_extra_it_is_said_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    call = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'prometheus_client' else find(name, *rest)\n"
        "import jitckpt.cli; sys.exit(jitckpt.cli.main(sys.argv[1:]))"
    )
    run = ("run", "--standalone", "--device", "softgpu", "--metrics", "0", "script.py")
    done = subprocess.run(
        [sys.executable, "-c", call, *run], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "jitckpt run: --metrics needs prometheus_client: pip install 'jitckpt[metrics]'",
    )
