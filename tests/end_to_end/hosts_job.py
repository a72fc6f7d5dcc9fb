"""The training that goes back to snapshots, on two hosts of a rank each."""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from criu_here import criu_of_this_machine
from final_lines import finals
from launcher import JITCKPT, Launcher, Result
from namespaces import Namespaces
from snapshot_job import EVERY, SCRIPT, STEPS, Job
from test_standby import MEET

from jitckpt import events
from jitckpt.agent.migration import suspended_job
from jitckpt.events import Event
from jitckpt.rehearsal.namespaces import APART
from jitckpt.wire import environment
from jitckpt.wire.exit_statuses import SAVED

HOSTS = (0, 1)
VARIABLES = ("env", "OMP_NUM_THREADS=1")
AT_FIRST_HOST = ["--nnodes", "2", "--master-addr", "10.79.0.1"]


class HostsJob(Job):
    """Two hosts of a rank each, with directories of their own, that go as far as they are let."""

    def __init__(
        self,
        launcher: Launcher,
        hosts: Namespaces,
        memory: Path,
        *words: str,
        meet: Sequence[str] = MEET,
        held: Sequence[str] = ("--snapshot-every", str(EVERY)),
        placed: bool = True,
        program: str = "",
        ranks: int = 1,
    ) -> None:
        """placed: each host is told its place. program: the second host's CRIU, if it is another.

        ranks: of each host.
        """
        self._ranks = range(ranks * len(HOSTS))
        self.launcher, self.folder, self._memory = launcher, memory / "0", memory
        script = launcher.script(SCRIPT.replace("LOADERS", "0"))
        self.go_to(0)
        programs = [found := criu_of_this_machine().program, program or found]
        command = [*JITCKPT, "run", *meet, "--nproc-per-node", str(ranks), "--device", "softgpu"]
        command += ["--mode", "transparent", *held, "--warm-spares", "0", *words]
        self._hosts = hosts
        self._commands = [
            [
                *VARIABLES,
                f"SOFTGPU_DEVICES={ranks}",
                f"{environment.CRIU.name}={programs[host]}",
                *command,
                *(["--node-rank", str(host)] if placed else []),
                *["--checkpoint-dir", str(memory / str(host)), script],
            ]
            for host in HOSTS
        ]
        self.agents: dict[int, subprocess.Popen[str]] = {}
        for host in HOSTS:
            self.start_host(host)
        self.process = self.agents[0]
        self.results: list[Result] = []

    def start_host(self, host: int, on: int | None = None) -> None:
        """Start a host. on: another machine in its place."""
        elsewhere = [] if on is None else APART
        network = self._hosts.in_network_of(host if on is None else on)
        self.agents[host] = self.launcher.start(*network, *elsewhere, *self._commands[host])

    def lose_host(self, host: int) -> None:
        """Kill all of its processes."""
        for pid in self._hosts.processes(host):
            os.kill(pid, signal.SIGKILL)
        self.agents[host].communicate()

    def finish_all(self) -> str:
        """Let the ranks come to the end; return what the launchers have said."""
        self.go_to(STEPS)
        self.results = [self.launcher.finish(agent) for agent in self.agents.values()]
        said = "\n=====\n".join(one.err for one in self.results)
        assert [one.status for one in self.results] == [0, 0], said
        assert self.launcher.survivors() == [], said
        return said

    @property
    def finals(self) -> list[str]:
        return finals("".join(one.out for one in self.results))

    def events(self, name: str) -> list[Event]:
        if not (self.folder / events.FILE_NAME).exists():
            return []
        return [event for event in events.read_events(self.folder)[0] if event["event"] == name]

    def snapshots(self) -> list[list[str]]:
        """Return the names of those that each host has."""
        return [
            sorted(path.name for path in (self._memory / str(host)).glob("host-*/*snapshot-*"))
            for host in HOSTS
        ]


class SuspendedJob(HostsJob):
    """Two hosts of a rank each, which are suspended together."""

    def __init__(
        self,
        launcher: Launcher,
        hosts: Namespaces,
        memory: Path,
        *words: str,
        held: Sequence[str] = ("--suspendable",),
        shared: bool = False,
        meet: Sequence[str] = AT_FIRST_HOST,
        placed: bool = True,
        program: str = "",
    ) -> None:
        if shared:
            (memory / "0").mkdir()
            (memory / "1").symlink_to("0")
        super().__init__(
            launcher, hosts, memory, *words, meet=meet, held=held, placed=placed, program=program
        )

    def ask(self, host: int, *words: str) -> "subprocess.Popen[str]":
        """Have a command ask from a host."""
        return self.launcher.start(*self._hosts.in_network_of(host), *JITCKPT, *words)

    def suspend(self, *words: str, after: int, by: int = 1) -> Result:
        """Ask for it once all ranks have made so many steps, and let them make those that it takes."""
        asked, first = self.begin_suspending(*words, after=after, by=by)
        result = self.launcher.finish(asked)
        return Result(result.status, first + result.out, result.err)

    def begin_suspending(self, *words: str, after: int, by: int = 1) -> "tuple[subprocess.Popen[str], str]":
        """Ask for it, and let the ranks come to its step. Return who asks, and its first line."""
        self.go_to(after)
        self.wait_for_step(after)
        asked = self.ask(by, *(words or ("suspend", str(self._memory / str(by)))))
        assert asked.stdout is not None
        first = asked.stdout.readline()  # which step it is: who went on before might be behind it
        self.go_to(after + 9)
        return asked, first

    def left(self) -> list[list[str]]:
        """Return in which folders of each host's directory a suspended job has left its command."""
        return [
            sorted(
                path.parent.name
                for path in (self._memory / str(host)).glob(f"host-*/{suspended_job.FILE_NAME}")
            )
            for host in HOSTS
        ]

    def wait_for_step(self, step: int) -> None:
        seen = [self.launcher.directory / f"step-{rank}" for rank in (0, 1)]
        self.launcher.wait_until(
            lambda: all(one.exists() and int(one.read_text() or 0) >= step for one in seen)
        )

    def ended(self) -> str:
        """Return what all launchers have said, which have ended as of a suspended job."""
        results = [self.launcher.finish(agent) for agent in self.agents.values()]
        said = "\n=====\n".join(one.err for one in results)
        assert [one.status for one in results] == [SAVED] * 2, said
        return said

    def resume(self, *words: str, on: Sequence[int] = HOSTS) -> None:
        """Have both parts go on, on these hosts."""
        for host, where in enumerate(on):
            elsewhere = [] if where in HOSTS else APART
            command = [*VARIABLES, "SOFTGPU_DEVICES=1"]
            command += [f"{environment.CRIU.name}={criu_of_this_machine().program}", *JITCKPT, "resume"]
            command += [str(self._memory / str(host)), "--node-rank", str(host), *words]
            self.agents[host] = self.launcher.start(*self._hosts.in_network_of(where), *elsewhere, *command)
        self.process = self.agents[0]
