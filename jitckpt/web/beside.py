"""Starts what serves a job to those who look at it, beside the agent, and ends it with the job."""

import errno
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from jitckpt.console import say
from jitckpt.errors import JitckptError
from jitckpt.wire.beside import JobDirectory, line_of
from jitckpt.wire.environment import PAGE_TOKEN

LOOPBACK = "127.0.0.1"
LOOK_SECONDS = 0.5  # between two looks whether the checkpoint directory is known
LAST_SECONDS = 6.0  # that the process has for its end, in which it sends the last spans
NEEDED = {
    "metrics": ("prometheus_client",),
    "page": ("starlette", "uvicorn"),
    "spans": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
SPANS_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SPANS_OFF = ("OTEL_SDK_DISABLED", "true")  # a variable of OpenTelemetry's, and its value


class WebError(JitckptError):
    """What can't be served; the text says why, and what to do."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `[HOST:]PORT`; loopback if there is no host. Raises ValueError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is not a port from 0 to 65535, or HOST:PORT")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def missing(what: str) -> list[str]:
    """Return the modules that are not there, of those that serve this."""
    return [name for name in NEEDED[what] if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what it is in
        return False


def check_installed(what: str) -> None:
    """Raise WebError if what serves this is not there."""
    if names := missing(what):
        raise WebError(f"--{what} needs {' and '.join(names)}: pip install 'jitckpt[{what}]'")


def listen(what: str, address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens there. Raises WebError."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "another program has this port; give another one, or 0 for any that is free"
        raise WebError(f"--{what} {shown(address[0])}:{address[1]}: {why}") from error


def shown(host: str) -> str:
    """Return a host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def url_of(listening: socket.socket, token: str | None = None) -> str:
    """Return the address to open."""
    host, port = listening.getsockname()[:2]
    return f"http://{shown(host)}:{port}/" + (f"?token={quote(token)}" if token else "")


def token_for(host: str) -> str | None:
    """Return what a client has to know: the user's token, else nothing on loopback, else a new one."""
    return PAGE_TOKEN.get() or (None if is_loopback(host) else secrets.token_urlsafe(24))


@contextmanager
def served(
    what: str, address: tuple[str, int] | None, directory: Callable[[], Path | None]
) -> Iterator[None]:
    """Serve metrics or page meanwhile, if an address is given; directory: None while it is not known.

    Raises WebError before anything is started. The process that serves may die; nothing else comes of it.
    """
    if address is None:
        yield
        return
    check_installed(what)
    token = token_for(address[0]) if what == "page" else None
    with listen(what, address) as listening:
        process = _start(what, listening, {} if token is None else PAGE_TOKEN.to(token))
        url = url_of(listening, token)
    say(f"{what}: {url + 'metrics' if what == 'metrics' else url}")
    with _told(process, directory):
        yield


@contextmanager
def traced(directory: Callable[[], Path | None]) -> Iterator[None]:
    """Send spans of the job's recoveries meanwhile, if OpenTelemetry's own variables say where to."""
    name, value = SPANS_OFF
    if not any(map(os.environ.get, SPANS_VARIABLES)) or os.environ.get(name, "").lower() == value:
        yield
    elif names := missing("spans"):  # the variables may be there for the training alone
        say(f"no spans of recoveries are sent, without {' and '.join(names)}: pip install 'jitckpt[spans]'.")
        yield
    else:
        with _told(_start("spans", None, {}), directory):
            yield


def _start(what: str, listening: socket.socket | None, more: dict[str, str]) -> "subprocess.Popen[bytes]":
    environment = {name: text for name, text in os.environ.items() if name != PAGE_TOKEN.name}
    descriptors = () if listening is None else (listening.fileno(),)
    return subprocess.Popen(
        [sys.executable, "-m", "jitckpt.web.serve", what, *map(str, descriptors or (-1,))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=descriptors,
        env=environment | more,
        process_group=0,  # Ctrl-C is for the job; of the agent's session, else it would be an orphan
    )


@contextmanager
def _told(process: "subprocess.Popen[bytes]", directory: Callable[[], Path | None]) -> Iterator[None]:
    """Tell a process the directory once it is known, and end it afterwards."""
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(process, directory, over), daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join(LAST_SECONDS)
        _end(process)


def _tell(
    process: "subprocess.Popen[bytes]", directory: Callable[[], Path | None], over: threading.Event
) -> None:
    """Tell the directory once it is known: a short line, for which there is room in a pipe."""
    while (known := directory()) is None:
        if over.wait(LOOK_SECONDS):
            return
    assert process.stdin is not None
    try:
        process.stdin.write(line_of(JobDirectory(str(known))))
        process.stdin.flush()
    except OSError:
        say("what serves the job has ended; the job goes on without.")


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(OSError):  # it has ended before
        process.stdin.close()
    try:
        process.wait(LAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
