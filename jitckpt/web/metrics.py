"""A job's present state as Prometheus metrics; base units, and names that stay."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jitckpt.reports.following import Follower
from jitckpt.reports.memory_states import ranks_by_state
from jitckpt.reports.present import Present, RecoveryNow

STATES = ("starting", "training", "late", "recovering", "ending", "over")
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # seconds
ALL_PHASES = "all"  # of a recovery: from its finding until all ranks trained again


class JobCollector(Collector):
    """Looks at a directory when it is asked. `follower` gives None while the directory is not known."""

    def __init__(self, follower: Callable[[], Follower | None]) -> None:
        self._follower = follower

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        follower = self._follower()
        yield _gauge(
            "jitckpt_up", "Whether there is a job whose events can be read", int(follower is not None)
        )
        if follower is None:
            return
        follower.look()
        present = follower.present()
        yield _gauge(
            "jitckpt_agent_silent_seconds", "How long the agent has not been heard", follower.silent() or 0
        )
        yield CounterMetricFamily(
            "jitckpt_damaged_events", "Lines of events.jsonl that can't be read", value=follower.damaged
        )
        if present is not None:
            yield from metrics_of(present)


def app(follower: Callable[[], Follower | None]) -> Any:
    """Return the WSGI application that answers a scraper."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(follower))
    return make_wsgi_app(registry)


def metrics_of(present: Present) -> Iterator[Metric]:
    """Yield the metrics of one job."""
    info = {
        **{name: present.versions.get(name, "") for name in ("jitckpt", "torch", "python")},
        "versions_hash": present.versions.get("hash", ""),
        "fingerprint": present.fingerprint,
        "checkpoint_dir": present.checkpoint_dir,
    }
    yield InfoMetricFamily("jitckpt_job", "What the job is", value=info)
    state = "over" if present.outcome is not None else present.state
    yield _by(
        "jitckpt_job_state", "1 for the state that the job is in", "state", ((s, s == state) for s in STATES)
    )
    yield _gauge("jitckpt_restarts", "How often the workers have been started again", present.restart)
    yield _gauge("jitckpt_restarts_left", "Restarts left", present.max_restarts - present.restart)
    states = Counter(rank.state for rank in present.ranks)
    yield _by("jitckpt_ranks", "Ranks by what they do", "state", sorted(states.items()))
    in_memory = {state: len(those) for state, those in ranks_by_state(present.ranks).items()}
    what = "Ranks by how far their snapshots in memory are"
    yield _by("jitckpt_memory_ranks", what, "state", in_memory.items())
    yield from _steps(present)
    yield _gauge(
        "jitckpt_protected_ratio", "The share of the ranks that have a living replica", present.protected
    )
    if present.goodput is not None:
        yield _gauge("jitckpt_goodput_ratio", "Useful time over all time", present.goodput)
    yield _by("jitckpt_time_seconds", "Where the job's time went", "cause", present.spent.items())
    yield from _recoveries(present.recoveries)
    yield CounterMetricFamily(
        "jitckpt_minibatches_repeated", "Minibatches done again after failures", value=present.repeated
    )
    late = [(str(rank.rank), rank.late) for rank in present.late]
    yield _by("jitckpt_rank_late_seconds", "How long others have waited for a rank", "rank", late)
    yield CounterMetricFamily("jitckpt_hang_reports", "Reports of hangs", value=len(present.hang_reports))
    memory = {"log": present.log_bytes, "images": present.image_bytes, "memory_tier": present.memory_bytes}
    what = "Host memory: log and images of the rank that has most in transparent mode, memory tier of a host"
    yield _by("jitckpt_memory_bytes", what, "kind", memory.items())
    suspects = GaugeMetricFamily(
        "jitckpt_suspect_device", "Devices that ranks failed on twice", labels=("uuid", "host", "rank")
    )
    for suspect in present.suspects:
        suspects.add_metric((suspect.device, suspect.host, str(suspect.rank)), 1)
    yield suspects


def _steps(present: Present) -> Iterator[Metric]:
    if present.step is not None:
        yield _gauge("jitckpt_step", "The newest optimizer step of any rank", present.step)
    if present.step_seconds is not None:
        yield _gauge("jitckpt_step_seconds", "How long a step takes of late", present.step_seconds)
    if present.memory_step is not None:
        what = "The newest step that the memory tier has of all ranks"
        yield _gauge("jitckpt_memory_safe_step", what, present.memory_step)
        what = "Bytes of this start's snapshots on the first host, by what the device did as they left it"
        yield _by("jitckpt_memory_copied_bytes", what, "beside", present.memory_copied.items())
        what = "How long a minibatch takes of late, by whether it carries a snapshot"
        yield _by("jitckpt_memory_minibatch_seconds", what, "carries", present.memory_minibatch.items())
    if present.safe_step is not None:
        yield _gauge("jitckpt_safe_step", "The newest step that lies whole on the disk", present.safe_step)


def _recoveries(recoveries: Sequence[RecoveryNow]) -> Iterator[Metric]:
    over = [one for one in recoveries if one.outcome == "recovered"]
    total = CounterMetricFamily(
        "jitckpt_recoveries", "Recoveries that ended well", labels=("tier", "scope", "cause")
    )
    for labels, count in sorted(Counter((one.tier, one.scope, one.cause) for one in over).items()):
        total.add_metric(labels, count)
    yield total
    failed = sum(one.outcome in ("given up", "ended") for one in recoveries)
    yield CounterMetricFamily(
        "jitckpt_recoveries_failed", "Recoveries that another failure or the job's end ended", value=failed
    )
    seconds: dict[str, list[float]] = {ALL_PHASES: [one.seconds for one in over if one.seconds is not None]}
    for one in over:
        for phase, length in one.phases.items():
            seconds.setdefault(phase, []).append(length)
    histogram = HistogramMetricFamily("jitckpt_recovery_seconds", "What recoveries took", labels=("phase",))
    for phase, took in sorted(seconds.items()):
        limits = [(str(limit), float(sum(one <= limit for one in took))) for limit in BUCKETS]
        histogram.add_metric((phase,), [*limits, ("+Inf", float(len(took)))], sum(took))
    yield histogram


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)


def _by(name: str, what: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(name, what, labels=(label,))
    for key, value in values:
        family.add_metric((key,), float(value))
    return family
