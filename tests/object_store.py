"""An S3 server for tests, moto's, in a process of its own, behind a door through which faults come in."""

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PATIENCE = 60.0
_SERVER = """\
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

SLOW_SECONDS = 5.0  # who has less patience asks again


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # with its query


@dataclass
class Door:
    """Passes requests on to the server, but for those that a fault wants. endpoint: its URL.

    fault: is asked about each request; returns what to do to it: "" for nothing, "500", "501", "slow",
    "cut request", "cut answer", "change request" or "change answer".
    """

    endpoint: str = ""
    fault: Callable[[Request], str] = lambda request: ""
    seen: list[Request] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def once(self, what: str, wanted: Callable[[Request], bool], times: int = 1) -> None:
        """Do this to the first such requests."""
        left = [times]
        lock = threading.Lock()

        def fault(request: Request) -> str:
            with lock:
                if not wanted(request) or not left[0]:
                    return ""
                left[0] -= 1
                return what

        self.fault = fault


def is_part(request: Request) -> bool:
    return request.method == "PUT" and "partNumber=" in request.path


def is_read_of(name: str) -> Callable[[Request], bool]:
    return lambda request: request.method == "GET" and request.path.split("?")[0].endswith(name)


@contextmanager
def object_store() -> Iterator[Door]:
    """Serve an empty store behind a door."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("AWS_")},
    )
    assert process.stdout is not None
    door = Door()
    try:
        port = int(process.stdout.readline())
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(door, port))
        server.daemon_threads = True
        door.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            _ask(port, "PUT", "/saves", b"", {})
            yield door
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
    finally:
        process.communicate()


def _ask(
    port: int, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()
    finally:
        connection.close()


def _handler(door: Door, port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_expect_100(self) -> bool:
            self.send_response_only(100)
            self.end_headers()
            return True

        def pass_on(self) -> None:
            request = Request(self.command, self.path)
            what = door.fault(request)
            door.seen.append(request)
            if what:
                door.done.append(what)
            if what == "cut request":
                self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if what == "500":
                self.answer(500, [], b"<Error><Code>InternalError</Code></Error>")
                return
            if what == "501":  # as of a store that knows no conditions
                self.answer(501, [], b"<Error><Code>NotImplemented</Code></Error>")
                return
            if what == "slow":
                time.sleep(SLOW_SECONDS)
            if what == "change request":
                body = changed(body)
            headers = {key: value for key, value in self.headers.items() if key.lower() != "expect"}
            status, given, content = _ask(port, self.command, self.path, body, headers)
            if what == "change answer":
                content = changed(content)
            self.answer(status, given, content, cut=what == "cut answer")

        def answer(
            self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False
        ) -> None:
            self.send_response_only(status)
            length = str(len(content))
            for key, value in headers:
                if key.lower() == "content-length":
                    length = value if self.command == "HEAD" else length
                elif key.lower() not in ("transfer-encoding", "connection", "date", "server"):
                    self.send_header(key, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if cut else content)
            self.wfile.flush()
            if cut:
                self.close_connection = True
                self.connection.close()

        def log_message(self, *_: object) -> None:
            pass

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    return Handler


def changed(content: bytes) -> bytes:
    """Return other bytes, as many."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
