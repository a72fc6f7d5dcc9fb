"""A recovery with and without metrics and page, whose readers send half a request or never read.

    .venv/bin/python scripts/bench/watched_recovery.py [--runs 3] [--json]

The training and the phases are those of recovery.py, with warm spares. `watched`: the job serves metrics and
a page; 100 connections to each send half a request, and 40 streams of the page are never read.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from recovery import KILL, PHASES, TRAINING, phases
from rich.console import Console
from rich.progress import track
from rich.table import Table

HALF = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HALVES, STREAMS = 100, 40
SECONDS = 0.5  # between two tries to connect


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def pester(ports: tuple[int, int], over: threading.Event) -> None:
    """Keep the connections open, and make those again that were closed, until it is over."""
    wanted = [(port, HALF) for port in ports for _ in range(HALVES)] + [(ports[1], STREAM)] * STREAMS
    with ExitStack() as stack:
        open_: dict[int, socket.socket] = {}
        while not over.wait(SECONDS):
            for number, (port, request) in enumerate(wanted):
                if number in open_ and not is_closed(open_[number]):
                    continue
                with suppress(OSError):
                    open_[number] = stack.enter_context(socket.create_connection(("127.0.0.1", port), 1))
                    open_[number].sendall(request)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other end is; what it has sent stays unread."""
    try:
        return not connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def recover(watched: bool) -> dict[str, float]:
    """Run the training with one kill; return the seconds of each phase."""
    jitckpt = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]
    ports, over = (free_port(), free_port()), threading.Event()
    command = [*jitckpt, "run", "--standalone", "--nproc-per-node", "2", "--device", "softgpu"]
    command += ["--warm-spares", "1", "--fault", KILL]
    if watched:
        command += ["--metrics", str(ports[0]), "--page", str(ports[1])]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAINING)
        readers = threading.Thread(target=pester, args=(ports, over))
        if watched:
            readers.start()
        ended = subprocess.run(
            [*command, "train.py"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
        over.set()
        if watched:
            readers.join()
        if ended.returncode != 0:
            sys.exit(f"The training failed:\n{ended.stderr}")
        lines = Path(folder, "ckpt", "events.jsonl").read_text().splitlines()
    return phases([json.loads(line) for line in lines])


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description="Time a recovery that many watch and nobody reads.")
    parser.add_argument("--runs", type=int, default=3, help="of each kind (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"alone": [], "watched": []}
    for kind in track(list(found) * args.runs, "recovering", console=Console(stderr=True)):
        found[kind].append(recover(kind == "watched"))
    medians = {
        kind: {phase: statistics.median(run[phase] for run in runs) for phase in PHASES}
        | {"all": statistics.median(sum(run.values()) for run in runs)}
        for kind, runs in found.items()
    }
    if args.json:
        print(json.dumps(medians))
        return
    table = Table("seconds", *medians["alone"])
    for kind, values in medians.items():
        table.add_row(kind, *(f"{value:.3f}" for value in values.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
