"""In how many seconds all hosts have the state of a job again, from memory and from a shared directory.

    sudo env PATH="$PATH" python scripts/bench/shared_directory.py [--mib 96] [--runs 3] [--megabits 400]
        [--only WAY ...] [--json]

It is REFT-load beside what it is in the place of. Hosts are network namespaces of this machine with an
agent's process each, and a rank of a state of `--mib` that is cut among them; one or two lose all. Another
one has the save of the whole, and serves it over HTTP, in the place of a file server. Every link, the
server's too, carries so many Mbit/s each way. Measured is until the last host has the whole: from the others'
memory, decoded and put together; and the files, compared with their checksums. Read over the link is each
file once; what is read again is in the host's memory, as with a network file system. Medians; the ways go by
turns. With --json a line for each number of hosts, as in docs/data/loads.jsonl.
"""

import argparse
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from memory_load import STEPS, WAYS, check_whole, cut_of, saved
from memory_parity import Agent

from jitckpt.decisions.memory_wanted import tier
from jitckpt.encoding import tensor_file
from jitckpt.hosts import connections
from jitckpt.rehearsal.namespaces import Namespaces, namespaces
from jitckpt.saves import folders, layout
from jitckpt.wire.hosts import Host

SERVER, FIRST = 0, 2  # host 1 is the switch, and nothing else
FILE_PORT, PORT = 8000, 29511
LIMIT = 600.0
TURN_SECONDS = 0.001
Span = tuple[float, float]  # when it began and ended, by a clock that all processes of the machine share


def span_of(call: Callable[[], object]) -> Span:
    began = time.monotonic()
    call()
    return began, time.monotonic()


class Member:
    """One host's process, which does what it is told on standard input, and says when that is done."""

    def __init__(self, rank: int, way: str, size: int, job: str) -> None:
        self._count, text, _ = WAYS[way]
        self._part = size // self._count
        self._agent = Agent(job, tier(text), rank, self._count, self._part)

    def listen(self, port: int) -> None:
        known = [Host(f"10.79.0.{FIRST + i + 1}", port, (i,), 0) for i in range(self._count)]
        self._agent.listen(known, connections.listen(known[self._agent.rank].address, port))

    def connect(self) -> None:
        self._agent.connect()
        self._agent.protect()

    def make(self, step: int) -> None:
        self._agent.write(step, cut_of(self._agent.rank, self._count, self._part))
        end = time.monotonic() + LIMIT
        while not self._agent.has_safe(step):
            if time.monotonic() > end or self._agent.has_lost_hosts:
                raise SystemExit(f"step {step} is not safe after {LIMIT:g} s, or a host is lost")
            self._agent.turn()
            time.sleep(TURN_SECONDS)

    def leave(self) -> None:
        self._agent.end()

    def lose(self) -> None:
        self._agent.lose()

    def get(self) -> Span:
        span = span_of(self._agent.get)
        check_whole(self._agent)
        return span

    def read(self, root: str, names: Sequence[str]) -> Span:
        """Read a save from the file server."""
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            return span_of(lambda: self._read(Path(folder), root, names))

    def _read(self, folder: Path, root: str, names: Sequence[str]) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with urlopen(f"{root}/{name}") as source, (folder / name).open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
        record = folders.look_at(folder, STEPS, "rank", 0)
        if (problem := folders.verify(record)) is not None:
            raise SystemExit(problem)
        tensor_file.read(record.path / layout.TENSORS_FILE)

    def turn(self) -> None:
        if self._agent.is_protected:
            self._agent.turn()

    def close(self) -> None:
        self._agent.close()


def obey(member: Member) -> None:
    """Do what standard input says, until it ends; others may need this host's agent meanwhile."""
    print("null", flush=True)
    with open(sys.stdin.fileno(), "rb", buffering=0) as orders:
        while True:
            while not select.select([orders], [], [], TURN_SECONDS)[0]:
                member.turn()
            if not (line := orders.readline()):
                break
            what, *arguments = json.loads(line)
            print(json.dumps(getattr(member, what)(*arguments)), flush=True)
    member.close()


class Members:
    """The processes of all hosts."""

    def __init__(self, hosts: Namespaces, stack: ExitStack, way: str, size: int, job: str) -> None:
        self._count, _, self._lost = WAYS[way]
        self._port = PORT
        self._all = [
            stack.enter_context(_started([*hosts.on(FIRST + rank), *_this("--member", rank, way, size, job)]))
            for rank in range(self._count)
        ]
        stack.callback(self._end)  # before they are waited for
        for one in self._all:
            _told(one)

    def tell(self, *order: object, only: slice = slice(None)) -> list[Any]:
        """Have hosts do something at once; return what each of them says."""
        for one in self._all[only]:
            assert one.stdin is not None
            one.stdin.write(json.dumps(order) + "\n")
            one.stdin.flush()
        return [_told(one) for one in self._all[only]]

    def meet(self) -> None:
        self._port += 1  # the one before may still be taken
        self.tell("listen", self._port)
        self.tell("connect")

    def from_memory(self) -> float:
        """Return the seconds until all have what those have lost that lose all."""
        for step in range(1, STEPS + 1):
            self.tell("make", step)
        self.tell("leave")
        self.tell("lose", only=slice(-self._lost, None))
        self.meet()
        return length(self.tell("get"))

    def from_files(self, root: str, names: Sequence[str]) -> float:
        return length(self.tell("read", root, names))

    def _end(self) -> None:
        for one in self._all:
            assert one.stdin is not None
            one.stdin.close()


def length(spans: Sequence[Span]) -> float:
    """Return the seconds from the first one's beginning to the last one's end."""
    return max(end for _, end in spans) - min(began for began, _ in spans)


def measured(way: str, size: int, runs: int, bits: int) -> dict[str, list[float]]:
    """Return the seconds of each run, from memory and from files."""
    count, _, _ = WAYS[way]
    found: dict[str, list[float]] = {"memory": [], "files": []}
    with tempfile.TemporaryDirectory() as folder, namespaces(FIRST + count) as hosts, ExitStack() as stack:
        for host in (SERVER, *range(FIRST, FIRST + count)):
            stack.enter_context(hosts.slowed(host, bits))
            stack.enter_context(hosts.slow_to_reach(host, bits))
        path = saved(Path(folder), count, size)
        names = [str(file.relative_to(folder)) for file in path.iterdir()]
        serve = [sys.executable, "-u", "-m", "http.server", "--bind", "10.79.0.1", "--directory", folder]
        server = stack.enter_context(_started([*hosts.on(SERVER), *serve, str(FILE_PORT)]))
        stack.callback(server.kill)
        assert server.stdout is not None
        server.stdout.readline()
        for run in range(runs):
            with ExitStack() as processes:
                members = Members(hosts, processes, way, size, f"{folder}/{run}")
                members.meet()
                found["memory"].append(members.from_memory())
                found["files"].append(members.from_files(f"http://10.79.0.1:{FILE_PORT}", names))
    return found


def _told(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise SystemExit("a host's process has failed")
    return json.loads(line)


def _this(*arguments: object) -> list[str]:
    return [sys.executable, __file__, *map(str, arguments)]


def _started(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if "http.server" in command else None,
        text=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=96, help="size of the state (default 96)")
    parser.add_argument("--runs", type=int, default=3, help="how often each is done (default 3)")
    parser.add_argument("--megabits", type=int, default=400, help="a second, each link (default 400)")
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        rank, way, size, job = args.member
        obey(Member(int(rank), way, int(size), job))
        return
    for way in args.only:
        load = os.getloadavg()[0]
        found = measured(way, args.mib << 20, args.runs, args.megabits * 1_000_000)
        memory, files = (statistics.median(found[what]) for what in ("memory", "files"))
        count, text, lost = WAYS[way]
        if args.json:
            one = {"hosts": count, "lost": lost, "tier": text, "mib": args.mib, "megabits": args.megabits}
            one |= {"memory": round(memory, 2), "files": round(files, 2), "runs": args.runs}
            print(json.dumps(one | {"load": round(load)}), flush=True)
        else:
            print(
                f"{way:18} from memory {memory:.2f} s, from the shared directory {files:.2f} s "
                f"({files / memory:.1f} times)",
                flush=True,
            )


if __name__ == "__main__":
    main()
