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
from etcd_cluster import free_ports
from launcher import JITCKPT, JITCKPT_RUN, LIMIT, Launcher
from programs_of_tests import text_of
from prometheus_client.parser import text_string_to_metric_families

from jitckpt.events import Event, read_events
from jitckpt.reports.following import Follower
from jitckpt.reports.present import PHASES, Present
from jitckpt.reports.timeline import recoveries
from jitckpt.system.versions import versions
from jitckpt.web.metrics import BUCKETS

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "jitckpt.json"
SCRIPT = text_of("metrics")
FAULTS = ("rank=1 step=3 phase=backward kind=kill", "rank=0 step=6 phase=backward kind=exception",
          "rank=1 step=9 phase=backward kind=kill")  # fmt: skip
HANG_TIMEOUT = 3.0


def free_port() -> int:
    return free_ports("127.0.0.1", 1)[0]


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=LIMIT) as answer:
        return bytes(answer.read())


def queries() -> list[str]:
    """Return the queries of the dashboard's panels."""
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def labels(sample: dict[str, Any]) -> list[str]:
    """Return a sample's labels, without those that a scraper adds."""
    added = ("__name__", "instance", "job")
    return [f"{name}={text}" for name, text in sample["metric"].items() if name not in added]


def what_the_events_say(events: list[Event], present: Present, at: float) -> dict[str, dict[str, Any]]:
    """Return what each query of the dashboard has to give at a time: by labels, a number."""
    told = recoveries(events)
    assert len(told) == 3
    of = '{instance=~"$instance"}'
    job = f"checkpoint_dir={present.checkpoint_dir},fingerprint={present.fingerprint}"
    job += f",jitckpt={versions()['jitckpt']},python={versions()['python']},torch={versions()['torch']}"
    causes = Counter(event["cause"] for event in events if event["event"] == "detected" and event["first"])
    whole = [one.first_step_seconds or 0.0 for one in told]
    mean = {f"phase={name}": near(sum(one.phases[name] for one in present.recoveries) / 3) for name in PHASES}
    mean["phase=all"] = near(sum(whole) / 3)
    assert mean["phase=save"] == sum(one.save_seconds or 0.0 for one in told) / 3
    highest = next(limit for limit in BUCKETS if limit >= max(whole))
    lowest = max([0.0, *(limit for limit in BUCKETS if limit < max(whole))])
    # On a busy machine a rank may have been late before.
    *_, late = (event for event in events if event["event"] == "straggler")
    waited = at - late["time"] + HANG_TIMEOUT
    [suspect] = (event for event in events if event["event"] == "suspect")
    device = f"host={suspect['host']},rank={suspect['rank']},uuid={suspect['device']}"
    passed = at - events[0]["time"]
    spent = {cause: near(seconds, 10) for cause, seconds in present.spent.items()}
    return {
        f"jitckpt_job_state{of} == 1": {"state=late": 1},
        f"jitckpt_step{of}": {"": 14},  # rank 0 is in its next step
        f"jitckpt_safe_step{of}": {"": max(event["step"] for event in events if event["event"] == "saved")},
        f"jitckpt_memory_safe_step{of}": {},  # all have replicas
        f"jitckpt_memory_copied_bytes{of}": {},  # the same
        f"jitckpt_memory_minibatch_seconds{of}": {},
        f"jitckpt_protected_ratio{of}": {"": 1},
        f"jitckpt_goodput_ratio{of}": {"": near(present.spent["useful"] / passed)},
        f"jitckpt_restarts_left{of}": {"": 0},
        f"jitckpt_restarts{of}": {"": sum(event["event"] == "restart" for event in events)},
        f"sum by (cause) (jitckpt_time_seconds{of})": {f"cause={one}": spent[one] for one in spent},
        f"sum by (state) (jitckpt_ranks{of})": {"state=late": 1, "state=training": 1},
        f"sum by (state) (jitckpt_memory_ranks{of})": {},  # all have replicas
        f"sum by (tier, scope, cause) (jitckpt_recoveries_total{of})": {
            f"cause={cause},scope=restart,tier=just_in_time": count for cause, count in causes.items()
        },
        f"jitckpt_recoveries_failed_total{of}": {"": 0},
        f"sum by (phase) (jitckpt_recovery_seconds_sum{of})"
        f" / sum by (phase) (jitckpt_recovery_seconds_count{of})": mean,
        'histogram_quantile(0.95, sum by (le) (jitckpt_recovery_seconds_bucket{instance=~"$instance"'
        ',phase="all"}))': {"": near((highest + lowest) / 2, (highest - lowest) / 2)},
        f"jitckpt_minibatches_repeated_total{of}": {"": sum(one.redone or 0 for one in told)},
        f"jitckpt_step_seconds{of}": {"": near(present.step_seconds or 0.0, 5)},
        f"jitckpt_rank_late_seconds{of}": {"rank=1": near(waited, 5)},
        f"jitckpt_suspect_device{of}": {device: 1},
        f"jitckpt_agent_silent_seconds{of}": {"": 0},
        f"jitckpt_hang_reports_total{of}": {"": sum(event["event"] == "hang_report" for event in events)},
        f"jitckpt_memory_bytes{of}": {"kind=log": 0, "kind=images": 0, "kind=memory_tier": 0},
        f"jitckpt_up{of}": {"": 1},
        f"jitckpt_damaged_events_total{of}": {"": 0},
        f"jitckpt_job_info{of}": {f"{job},versions_hash={versions()['hash']}": 1},
    }


def near(value: float, reach: float = 0.1) -> Any:
    return pytest.approx(value, abs=reach)


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
        "--hang-timeout", str(HANG_TIMEOUT), *faults, launcher.script(SCRIPT),
    )  # fmt: skip
    prometheus = Prometheus(folder, f"127.0.0.1:{prometheus_port}", launcher)
    follower = Follower(folder / "ckpt")

    def at_rest() -> bool:
        follower.look()
        seen = follower.present()
        return seen is not None and seen.restart == 3 and seen.state == "late"

    launcher.wait_until(at_rest)
    scraped = time.time()
    launcher.wait_until(lambda: prometheus.ask("timestamp(jitckpt_rank_late_seconds)") != [])
    launcher.wait_until(
        lambda: float(prometheus.ask("timestamp(jitckpt_up)")[0]["value"][1]) > scraped + 1  # a whole scrape
    )
    events, damages = read_events(folder / "ckpt")
    assert damages == []
    at = time.time()
    present = follower.present(at)
    assert present is not None
    answers = what_the_events_say(events, present, at)
    assert sorted(answers) == sorted(queries()), "each of the dashboard's queries is known here"
    for query, wanted in answers.items():
        samples = prometheus.ask(query.replace("$instance", ".*"), at)
        got = {",".join(sorted(labels(sample))): float(sample["value"][1]) for sample in samples}
        assert got == wanted, query
    [annotation] = json.loads(DASHBOARD.read_text())["annotations"]["list"]
    assert annotation["expr"] == 'changes(jitckpt_restarts{instance=~"$instance"}[1m]) > 0'
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
    (launcher.directory / "go_on").touch()
    try:
        result = launcher.finish(job)
    finally:
        for one in idle:
            one.close()
    assert result.status == 0, result.err
    [recovery] = recoveries(read_events(launcher.directory / "ckpt")[0])
    assert recovery.saved_step == 2
    assert launcher.survivors() == []


# Rank 1 does something else before its third step, for as long as it is told to.
LATE = text_of("metrics_late")


def test_who_is_late_in_transparent_mode_is_seen_everywhere_until_it_comes(
    launcher: Launcher, prometheus_port: int
) -> None:
    folder, page_port = launcher.directory, free_port()
    job = launcher.start(
        *JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent",
        "--warm-spares", "0", "--hang-timeout", "4", "--checkpoint-dir", "ckpt",
        "--metrics", str(prometheus_port), "--page", str(page_port), launcher.script(LATE),
    )  # fmt: skip

    def late_ranks() -> dict[str, float]:
        text = get(f"http://127.0.0.1:{prometheus_port}/metrics").decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        late = families.get("jitckpt_rank_late_seconds")
        return {one.labels["rank"]: one.value for one in late.samples} if late is not None else {}

    events = folder / "ckpt" / "events.jsonl"
    launcher.wait_until(lambda: events.exists() and '"straggler"' in events.read_text())
    launcher.wait_until(lambda: late_ranks() != {})
    [(rank, seconds)] = late_ranks().items()
    assert rank == "1"
    assert seconds >= 4
    shown = launcher.run(*JITCKPT, "watch", "ckpt")
    assert "rank 1 is late: the others have waited for" in shown.out, shown.out
    told = json.loads(get(f"http://127.0.0.1:{page_port}/present.json"))["job"]
    assert [(one["rank"], one["state"]) for one in told["ranks"]] == [(0, "training"), (1, "late")]
    assert told["state"] == "late"
    assert told["spent"]["late"] >= 4
    (folder / "come").touch()
    launcher.wait_until(lambda: '"hang_over"' in events.read_text())
    launcher.wait_until(lambda: late_ranks() == {})
    (folder / "go_on").touch()
    result = launcher.finish(job)
    assert result.status == 0, result.err


def test_a_port_that_is_taken_is_said_before_anything_starts(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = launcher.run(*JITCKPT_RUN, "--device", "softgpu", "--metrics", port, launcher.script(SCRIPT))
    assert result.status == 2
    assert f"--metrics 127.0.0.1:{port}: another program has this port; give another one" in result.err


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
