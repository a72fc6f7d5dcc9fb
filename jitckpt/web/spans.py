"""Recoveries as OpenTelemetry spans, sent to where the usual variables say (OTEL_EXPORTER_OTLP_ENDPOINT ...).

A recovery is a trace: its span reaches from the failure's finding until all ranks trained again, and has one
below it for each phase of the agent and of each rank.
"""

from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context

from jitckpt.reports.following import Follower
from jitckpt.reports.present import RecoveryNow
from jitckpt.reports.timeline_picture import MEANINGS, Lane, recoveries

NANOSECONDS = 10**9
LAST_SECONDS = 3.0  # for the last spans to be sent
SAME = 0.5  # seconds between two tellings of when a recovery was found


class RecoverySpans:
    """Sends each recovery of the directory's jobs once, when it is over."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jitckpt"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("jitckpt", version("jitckpt"))
        self._sent: set[float] = set()  # when they were found

    def send_new(self, follower: Follower) -> None:
        """Look at the directory, and send what is over and not sent yet."""
        follower.look()
        present = follower.present()
        new = [
            one
            for one in (() if present is None else present.recoveries)
            if one.outcome != "under way" and one.found not in self._sent
        ]
        if not new or present is None:
            return
        begun = follower.events[0]["clock"]
        drawn = recoveries(follower.events)
        for one in new:
            self._sent.add(one.found)
            lanes = [each.lanes for each in drawn if abs(each.found - begun - one.at) < SAME]
            self._send(one, lanes[0] if lanes else (), present.checkpoint_dir)

    def _send(self, recovery: RecoveryNow, lanes: Sequence[Lane], directory: str) -> None:
        attributes: dict[str, str | int] = {
            "jitckpt.cause": recovery.cause,
            "jitckpt.scope": recovery.scope,
            "jitckpt.tier": recovery.tier,
            "jitckpt.text": recovery.text,
            "jitckpt.outcome": recovery.outcome,
            "jitckpt.checkpoint_dir": directory,
        }
        known = {
            "step": recovery.step,
            "saved_step": recovery.saved_step,
            "minibatches_repeated": recovery.redone,
        }
        attributes |= {f"jitckpt.{name}": value for name, value in known.items() if value is not None}
        whole = self._tracer.start_span(
            "recovery", attributes=attributes, start_time=_nanoseconds(recovery.found)
        )
        if recovery.outcome != "recovered":
            whole.set_status(Status(StatusCode.ERROR, recovery.outcome))
        context = set_span_in_context(whole)
        for lane in lanes:
            for phase in lane.phases:
                span = self._tracer.start_span(
                    phase.name,
                    context,
                    attributes={"jitckpt.process": lane.name, "jitckpt.meaning": MEANINGS[phase.name]},
                    start_time=_nanoseconds(recovery.found + phase.begin),
                )
                span.end(_nanoseconds(recovery.found + phase.end))
        whole.end(_nanoseconds(recovery.found + (recovery.seconds or 0.0)))

    def close(self) -> None:
        """Send what is left, but wait for nobody long."""
        self._provider.force_flush(int(1000 * LAST_SECONDS))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * NANOSECONDS)
