"""Tells Kubeflow Trainer how far a training is, where it keeps that (KEP-2779).

Nobody waits for that server: it is spoken to on a thread of its own, for which the job's end waits a few
seconds at most.
"""

import http.client
import json
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
SECONDS = 10.0  # between two reports; as much as double, and double again, where they fail
MOST_SECONDS = 320.0
ANSWER_SECONDS = 5.0
LAST_SECONDS = 5.0  # that the end of the job waits for the last report
MOST_ANSWER = 2000  # bytes that are read of one
LARGEST = (1 << 31) - 1


@dataclass(frozen=True)
class StepsMade:
    """How far the ranks are. step_seconds: what a step takes, as far as is known."""

    step: int
    step_seconds: float | None
    restarts: int


@dataclass(frozen=True)
class StatusServer:
    """Where it is; certificate: of the authority by which it is known, and token: by which it knows this pod.

    Both are files, and the token's is written anew every hour.
    """

    url: str
    certificate: str
    token: str

    def send(self, status: Mapping[str, Any]) -> None:
        """Report. Raises OSError, ValueError or HTTPException where it is not taken."""
        parts = urlsplit(self.url)
        if parts.scheme != "https" or parts.hostname is None:
            raise ValueError("its address is not https://..., and the token goes nowhere else")
        trusted = ssl.create_default_context(cafile=self.certificate)
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=ANSWER_SECONDS, context=trusted
        )
        headers = {
            "Authorization": f"Bearer {Path(self.token).read_text().strip()}",
            "Content-Type": "application/json",
        }
        try:
            connection.request("POST", parts.path, json.dumps({"trainerStatus": status}), headers)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                said = answer.read(MOST_ANSWER).decode(errors="replace")
                raise ValueError(f"it answers {answer.status} {answer.reason} {said:.200}".strip())
        finally:
            connection.close()


def server_of(environment: Mapping[str, str]) -> StatusServer | None:
    """Return the server that Kubeflow names; None if it has given none."""
    if not all(environment.get(name) for name in (URL, CERTIFICATE, TOKEN)):
        return None
    return StatusServer(environment[URL], environment[CERTIFICATE], environment[TOKEN])


def status_of(progress: StepsMade, total: int, *, succeeded: bool = False) -> dict[str, Any]:
    """Return what is reported of a training that makes so many steps."""
    share = 100 * progress.step // total
    status: dict[str, Any] = {
        "progressPercentage": 100 if succeeded else min(share, 99),
        "metrics": [
            {"name": "step", "value": str(progress.step)},
            {"name": "restarts", "value": str(progress.restarts)},
        ],
        "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if succeeded:
        status["estimatedRemainingSeconds"] = 0
    elif progress.step_seconds is not None:
        status["metrics"].append({"name": "step_seconds", "value": f"{progress.step_seconds:.3g}"})
        remaining = max(total - progress.step, 0) * progress.step_seconds
        status["estimatedRemainingSeconds"] = min(round(remaining), LARGEST)
    return status


class KubeflowReporter:
    """Reports what was noted last, now and then; says once that it can't."""

    def __init__(self, server: StatusServer, total: int, say: Callable[[str], None]) -> None:
        self._server, self._total, self._say = server, total, say
        self._noted: StepsMade | None = None
        self._wakes = threading.Condition()
        self._succeeded = self._ends = self._has_failed = False
        self._thread: threading.Thread | None = None

    def note(self, step: int, step_seconds: float | None, restarts: int) -> None:
        """Take note of how far the ranks are; returns at once. Only the first rank's host does."""
        with self._wakes:
            self._noted = StepsMade(step, step_seconds, restarts)
            if self._thread is None:
                self._thread = threading.Thread(target=self._report, name="jitckpt-kubeflow", daemon=True)
                self._thread.start()

    def finish(self, *, succeeded: bool) -> None:
        """Report for the last time; waits for that no longer than `LAST_SECONDS`."""
        with self._wakes:
            self._succeeded, self._ends = succeeded, True
            self._wakes.notify_all()
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)

    def _report(self) -> None:
        pause, last = SECONDS, None
        while True:
            with self._wakes:
                noted, self._noted = self._noted, None
                ends, succeeded = self._ends, self._succeeded
            last = noted or last
            # Where another host is the first by now nothing new is noted here, and that one reports.
            if last is not None and (noted is not None or succeeded):
                pause = SECONDS if self._has_sent(last, succeeded) else min(2 * pause, MOST_SECONDS)
            if ends:
                return
            with self._wakes:
                self._wakes.wait_for(lambda: self._ends, pause)

    def _has_sent(self, progress: StepsMade, succeeded: bool) -> bool:
        try:
            self._server.send(status_of(progress, self._total, succeeded=succeeded))
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._has_failed:
                self._has_failed = True
                why = str(error) or type(error).__name__
                self._say(
                    f"Kubeflow can't be told at {self._server.url} how far the training is: {why}. The "
                    "training goes on, and it is tried again."
                )
            return False
        return True
