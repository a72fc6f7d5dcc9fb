"""The events of a job of any size with one failure of each kind, written as its agent would write them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class SimulatedJob:
    """Appends events to DIR/events.jsonl; `at` is the job's time, `started` the wall time of its start."""

    def __init__(self, directory: Path, *, ranks: int, shards: int, started: float) -> None:
        self.directory, self.ranks, self.shards, self.started = directory, ranks, shards, started
        self.at = 0.0
        self.restart = 0
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        self.write_all([fields | {"event": event}])

    def write_all(self, events: list[Event]) -> None:
        """Append several events of this moment."""
        common = {"time": self.started + self.at, "clock": 100.0 + self.at, "restart": self.restart}
        with open(self.directory / "events.jsonl", "a") as file:
            file.writelines(json.dumps(common | event) + "\n" for event in events)

    def each(self, event: str, **fields: Any) -> None:
        """Append an event of each rank."""
        self.write_all([{"event": event, "rank": rank} | fields for rank in range(self.ranks)])

    def progress(
        self, step: int, step_seconds: float = 1.0, memory_states: Mapping[str, str] | None = None
    ) -> None:
        """Tell how far the ranks are, as their agent does."""
        told = {
            "time": self.started + self.at,
            "restart": self.restart,
            "steps": {str(rank): step for rank in range(self.ranks)},
            "step_seconds": step_seconds,
            "memory_states": memory_states or {},
        }
        (self.directory / "progress-0.json").write_text(json.dumps(told))

    def begin(self, step: int = 0) -> None:
        """Start, or start again, until all ranks have done their first step after `step`."""
        name = "restart" if self.restart else "job_started"
        self.write(name, world_size=self.ranks, max_restarts=5)
        self.at += 3
        registered = {"world_size": self.ranks, "shards": self.shards, "pid": 1, "saver": "builtin"}
        registered |= {"checkpoint_dir": str(self.directory), "fingerprint": "00c066b4b7efb638"}
        self.write_all(
            [
                {"event": "registered", "rank": rank, "shard": rank % self.shards} | registered
                for rank in range(self.ranks)
            ]
        )
        if self.restart == 0:
            self.write_all(list(self._groups()))
        else:
            self.at += 0.5
            self.each("restored", step=step, path="/", source_rank=0, seconds=0.5)
        self.at += 1
        self.each("first_step", step=step + 1)

    def _groups(self) -> Iterator[Event]:
        for shard in range(self.shards):
            yield {"event": "group", "name": "data", "ranks": list(range(shard, self.ranks, self.shards))}
        for first in range(0, self.ranks, self.shards):
            yield {"event": "group", "name": "tensor", "ranks": list(range(first, first + self.shards))}

    def keep_in_memory(
        self,
        step: int,
        ranks_of_a_host: int = 8,
        copies: int = 2,
        in_parts: Mapping[int, list[int]] | None = None,
    ) -> None:
        """Let the memory tier have a step of all ranks, on groups of hosts; in_parts: of these on others."""
        count = self.ranks // ranks_of_a_host
        hosts = [
            {
                "host": f"host {host} (10.0.0.{host + 1})",
                "ranks": list(range(host * ranks_of_a_host, (host + 1) * ranks_of_a_host)),
                "kept_by": [
                    host,
                    *(one for one in range(host - host % copies, count)[:copies] if one != host),
                ],
            }
            | ({"kept_by": [host], "in_parts_on": in_parts[host]} if in_parts and host in in_parts else {})
            for host in range(count)
        ]
        figures = {"copied": {"idle": 1 << 28, "late": 0}, "minibatch": {"in spans": 0.5}}
        self.write("memory_safe", step=step, bytes=1 << 30, waited=0.1, **figures)
        self.write("memory_state", state="healthy", ranks=list(range(self.ranks)), step=step)
        self.write("memory_placement", hosts=hosts)

    def fail(self, rank: int, step: int, cause: str = "died") -> None:
        """Let a rank fail in the step after `step`; the others are told to save."""
        texts = {"died": f"rank {rank} was killed by SIGKILL", "hang": f"rank {rank} does not answer"}
        if cause == "hang":
            self.write("hang", rank=(rank + 1) % self.ranks, operation="ncclAllReduce", seconds=8.0)
        self.write("detected", cause=cause, text=texts[cause], first=True, ranks=[rank])
        others = [one for one in range(self.ranks) if one != rank]
        self.write("save_ordered", save_id=1, ranks=others, deadline=60)
        self.at += 0.3
        self.write_all([{"event": "save_begun", "rank": one, "save_id": 1, "step": step} for one in others])

    def save(self, rank: int, step: int) -> None:
        """Let all other ranks have saved; all are ended and will start again."""
        self.at += 1.2
        saved = {"event": "save_ended", "save_id": 1, "step": step, "path": "/", "bytes": 10**9, "seconds": 1}
        self.write_all(
            [saved | {"rank": one, "shard": one % self.shards} for one in range(self.ranks) if one != rank]
        )
        self.write("saved", step=step)
        self.write("ranks_ended", kill=list(range(self.ranks)), terminate=[])
        self.at += 0.4
        self.restart += 1

    def report_hang(self, rank: int) -> None:
        """Let the report of a hang be written, which began 8 s before it was found."""
        other = (rank + 1) % self.ranks
        report = self.directory / "hang-1-1.txt"
        report.write_text(
            f"rank {other} has waited 8.0 s in ncclAllReduce number 12 (1.14 MB) for rank {rank}.\n\n"
            f'Python stacks of rank {rank}:\n  File "train.py", line 7, in load\n    <b>lock</b>.acquire()\n'
        )
        self.write("hang_report", path=str(report))
