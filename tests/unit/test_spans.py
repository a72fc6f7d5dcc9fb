"""Recoveries reach a collector as spans, by OTLP itself; a collector that never answers costs nothing."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from simulated_job import SimulatedJob

from jitckpt.web.beside import traced

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `spans` is not installed")
LIMIT = 60


class Collector:
    """Takes spans as a collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.asked = threading.Event()
        self.answers = True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.set()
                if not outer.answers:
                    time.sleep(LIMIT)
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                outer.spans += [
                    span
                    for one in request.resource_spans
                    for scope in one.scope_spans
                    for span in scope.spans
                ]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector()
    url = f"http://127.0.0.1:{found.server.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def job(tmp_path: Path) -> SimulatedJob:
    job = SimulatedJob(tmp_path, ranks=2, shards=1, started=1.8e9)
    job.begin()
    job.at = 30
    job.fail(1, 20)
    job.save(1, 20)
    job.begin(20)
    return job


def test_a_recovery_is_a_trace_with_its_phases(collector: Collector, job: SimulatedJob) -> None:
    with traced(lambda: job.directory):
        end = time.monotonic() + LIMIT
        while not collector.spans and time.monotonic() < end:
            time.sleep(0.1)
        job.at = 60
        job.fail(0, 40)  # and the job ends before anything comes of it
        job.write("job_ended", outcome="failed")
    whole = [span for span in collector.spans if span.name == "recovery"]
    assert len(whole) == 2
    first, second = whole
    assert first.start_time_unix_nano == (10**9) * (1_800_000_030)
    assert first.end_time_unix_nano - first.start_time_unix_nano == pytest.approx(6.4e9, abs=1000)
    told = {one.key: one.value for one in first.attributes}
    assert told["jitckpt.cause"].string_value == "died"
    assert told["jitckpt.tier"].string_value == "just_in_time"
    assert told["jitckpt.step"].int_value == 20
    assert (first.status.code, second.status.code) == (0, 2)
    children = [span for span in collector.spans if span.parent_span_id == first.span_id]
    assert {"save", "restart", "restore", "first step"} <= {span.name for span in children}
    assert {span.trace_id for span in children} == {first.trace_id}
    assert first.trace_id != second.trace_id


def test_a_collector_that_never_answers_costs_a_few_seconds_at_most(
    collector: Collector, job: SimulatedJob
) -> None:
    collector.answers = False
    with traced(lambda: job.directory):
        assert collector.asked.wait(LIMIT)
        begun = time.monotonic()
    assert time.monotonic() - begun < 20


def test_without_the_extra_a_sentence_says_so(tmp_path: Path) -> None:
    program = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'opentelemetry.sdk' else find(name, *rest)\n"
        "from jitckpt.web.beside import traced\n"
        "with traced(lambda: None): print('the job')\n"
    )
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT,
    )
    assert done.stdout == "the job\n"
    assert "pip install 'jitckpt[spans]'" in done.stderr
    assert json.dumps(done.stderr).count("jitckpt:") == 1
