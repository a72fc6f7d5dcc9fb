"""A process of its own beside the agent, in which a job's metrics or its page are served.

It inherits a socket that listens. On its standard input it is told the checkpoint directory, as soon as that
is known; the end of that input is the end of the job, and of this process. Nobody waits for what it does.

Arguments: what to serve (metrics, page, spans), the socket's descriptor (-1 for spans, which are sent);
standard input: lines as wire/beside.py has them.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from jitckpt.console import say
from jitckpt.reports.following import Follower
from jitckpt.wire.beside import TO_SERVER, message_of
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.environment import PAGE_TOKEN

SPANS_SECONDS = 2.0  # between two looks for recoveries that are over
LAST_SECONDS = 1.0  # for the look that is under way as the job ends
NICENESS = 10  # the training comes first
MOST_CONNECTIONS = 64  # of scrapers at a time
# A scheduler sends them to all processes of a job; the agent then saves, which is worth a look.
ENDED_BY_THE_AGENT_ALONE = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
PATIENCE = 10.0  # seconds for a client to send its request, and to take the answer


class AgentTold:
    """What the agent has told so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._follower: Follower | None = None

    def follower(self) -> Follower | None:
        """Return what follows the job's directory, None while that is not known."""
        with self._lock:
            return self._follower

    def listen(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Hear the agent until it has ended; then end this process."""
        for line in sys.stdin.buffer:
            try:
                directory = message_of(TO_SERVER, line)
            except ProtocolError as error:
                say(f"the agent tells who serves its job what makes no sense: {error}")
                continue
            with self._lock:
                self._follower = Follower(Path(directory.path))
        at_end()
        os._exit(0)


def main(arguments: list[str]) -> None:
    """Serve until the agent ends."""
    what, descriptor = arguments
    os.nice(NICENESS)
    for number in ENDED_BY_THE_AGENT_ALONE:
        signal.signal(number, signal.SIG_IGN)
    told = AgentTold()
    if what == "spans":
        send_spans(told)
        return
    threading.Thread(target=told.listen, daemon=True).start()
    listening = socket.socket(fileno=int(descriptor))
    if what == "metrics":
        serve_metrics(told, listening)
    else:
        from jitckpt.web.page import serve_page

        serve_page(told.follower, listening, token=PAGE_TOKEN.get())


def send_spans(told: AgentTold) -> None:
    """Send a job's recoveries until it has ended."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from jitckpt.web.spans import RecoverySpans

    spans = RecoverySpans(OTLPSpanExporter())

    def send() -> None:
        if (follower := told.follower()) is not None:
            spans.send_new(follower)

    def send_last() -> None:
        over.set()
        sender.join(LAST_SECONDS)
        send()
        spans.close()

    def send_all() -> None:
        while not over.wait(SPANS_SECONDS):
            send()

    over = threading.Event()
    sender = threading.Thread(target=send_all, daemon=True)
    sender.start()
    told.listen(send_last)


def serve_metrics(told: AgentTold, listening: socket.socket) -> None:
    """Answer scrapers for ever."""
    from jitckpt.web.metrics import app

    answer = app(told.follower)
    one_at_a_time = threading.Lock()  # a directory is read by one

    def locked(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with one_at_a_time:
            parts: Iterable[bytes] = answer(environ, start_response)
            return parts

    server = _Server(listening.getsockname(), _Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    host, port = listening.getsockname()[:2]
    server.server_name, server.server_port = host, port
    server.setup_environ()
    server.set_app(locked)
    server.serve_forever()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a scraper, but not more than a few."""

    daemon_threads = True
    _places = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that goes away is no affair of the job's terminal."""


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, format: str, *args: object) -> None:
        """The job's terminal is not for requests."""


ServerHandler.server_software = "jitckpt"

if __name__ == "__main__":
    main(sys.argv[1:])
