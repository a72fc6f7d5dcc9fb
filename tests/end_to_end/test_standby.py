"""A host's devices are broken for good: its worker processes go on on a host that stands by."""

import re
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest
from criu_here import criu_of_this_machine
from launcher import JITCKPT, JITCKPT_RUN, LIMIT, Launcher
from namespaces import Namespaces, namespaces
from test_broken_device import SCRIPT

from jitckpt.events import read_events
from jitckpt.rehearsal.namespaces import APART, ip
from jitckpt.wire import environment

MEET = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.79.0.1:29400", "--rdzv-id", "job"]
OPTIONS = ["--device", "softgpu", "--warm-spares", "0"]
# It is not over before all has been looked at: before its last collective it waits for the file `go`.
WAITS = "    while not os.path.exists('go'): time.sleep(0.01)\n"
LAST = "    group = dist.new_group"
TRAINING = SCRIPT.replace("[0, 1]", "list(range(dist.get_world_size()))").replace(LAST, WAITS + LAST)
# Whoever has made a step says so: all in one file.
STEP = "        total += loss.item()\n"
TOLD = "        with open('steps', 'a') as file: print(f'{rank}:{total!r}', file=file)\n"
TRAINING = TRAINING.replace(STEP, STEP + TOLD)

Started = subprocess.Popen[str]


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with namespaces(4) as found:
        yield found


def finals(text: str) -> list[str]:
    return sorted(re.findall(r"^rank \d: .*$", text, re.MULTILINE))


def job(
    launcher: Launcher,
    hosts: Namespaces,
    faults: Sequence[str],
    standbys: int,
    *words: str,
    program: str = "",
    standby: Sequence[str] = JITCKPT,
    script: str = TRAINING,
    left: Sequence[str] = (),
) -> list[Started]:
    """Start two hosts of two ranks, and hosts that stand by, with these options.

    program: their CRIU, if it is another. standby: what `jitckpt` is on hosts that stand by. left: what comes
    before the command of host 1.
    """
    program = program or str(criu_of_this_machine().program)
    command = ["env", "OMP_NUM_THREADS=1", "SOFTGPU_DEVICES=2", f"{environment.CRIU.name}={program}"]
    options = ["run", *MEET, "--mode", "transparent", "--nproc-per-node", "2", *OPTIONS]
    options += ["--broken-device", "move", *words]
    for fault in faults:
        options += ["--fault", f"{fault} phase=backward kind=device-lost-hard"]
    (secret := launcher.directory / "secret").write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    options += ["--secret-file", str(secret)]
    places = [
        [*before, *command, *JITCKPT, *options, "--node-rank", str(host)]
        for host, before in enumerate([(), left])
    ]
    places += [[*APART, *command, *standby, *options, "--standby"]] * standbys
    path = launcher.script(script)
    return [
        launcher.start(*hosts.in_network_of(host), *place, "--checkpoint-dir", f"ck{host}", path)
        for host, place in enumerate(places)
    ]


@pytest.fixture
def undisturbed(launcher: Launcher) -> list[str]:
    (go := launcher.directory / "go").touch()
    alone = ["env", "SOFTGPU_DEVICES=4", *JITCKPT_RUN, "--nproc-per-node", "4", *OPTIONS]
    result = launcher.run(*alone, launcher.script(TRAINING))
    assert result.status == 0, result.err
    go.unlink()
    return finals(result.out)


def switch_off(hosts: Namespaces, host: int) -> None:
    """From here on there is nothing of that host that could be of use."""
    assert hosts.processes(host) == []
    assert ip(f"-n {hosts.names[host]} address flush dev cable").returncode == 0


def test_both_ranks_of_a_host_go_on_on_one_that_stands_by(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    started = job(launcher, hosts, ["rank=3 step=8"], standbys=1)
    old = launcher.finish(started[1])
    switch_off(hosts, 1)
    assert [started[host].poll() for host in (0, 2)] == [None, None], "the job has ended before that"
    (launcher.directory / "go").touch()
    ended = [launcher.finish(started[0]), old, launcher.finish(started[2])]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0, 0, 0], told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert len(finals(ended[2].out)) == 2
    (moved,) = [one for one in read_events(launcher.directory / "ck0")[0] if one["event"] == "ranks_moved"]
    assert (moved["host"], moved["ranks"]) == (1, [2, 3])
    assert min(moved[phase] for phase in ("bytes", "dump", "transfer", "restore")) > 0


def test_ranks_that_have_moved_can_move_again(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    started = job(launcher, hosts, ["rank=3 step=4", "rank=2 step=9"], standbys=2)
    old = launcher.finish(started[1])
    assert old.status == 0, old.err
    left = await_first(started[2:])
    between = launcher.finish(left)
    (launcher.directory / "go").touch()
    last = launcher.finish(next(one for one in started[2:] if one is not left))
    ended = [launcher.finish(started[0]), old, between, last]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0] * 4, told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert [len(finals(one.out)) for one in ended] == [2, 0, 0, 2], told


def test_what_keeps_ranks_from_leaving_their_host_is_said_at_the_start(
    launcher: Launcher, hosts: Namespaces
) -> None:
    """A process made anew on its own host keeps its connections; one on another host can't."""
    (launcher.directory / "go").touch()
    connects = "import socket\noutside = socket.create_connection(('10.79.0.1', 29400))\n"
    started = job(launcher, hosts, [], standbys=0, script=connects + TRAINING)
    ended = [launcher.finish(one) for one in started]
    assert [one.status for one in ended] == [0, 0], "\n".join(one.err for one in ended)
    said = [line for line in ended[1].err.splitlines() if "could not be moved" in line]
    assert len(said) == 2, ended[1].err
    assert all("to another host: " in line and "a TCP connection to 10.79.0.1:29400" in line for line in said)
    assert "could not be moved" not in ended[0].err, "the first host can't be left"


EARLIER = 200_000  # seconds
ITS_CLOCK = "        print(f'clock of {rank}: {time.monotonic():.0f}', flush=True)\n"


def test_ranks_keep_the_clock_of_a_host_that_was_started_at_another_time(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """Their servers go by it, too; and they can move on from there."""
    (launcher.directory / "go").touch()
    clock = ["--time", "--monotonic", str(EARLIER), "--boottime", str(EARLIER)]
    started = job(
        launcher,
        hosts,
        ["rank=3 step=4", "rank=2 step=9"],
        standbys=2,
        script=TRAINING.replace(STEP, ITS_CLOCK + STEP),
        left=["unshare", *clock, "--fork", "--kill-child"],
    )
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0] * 4, told
    assert "could not be moved" not in told
    out = "".join(one.out for one in ended)
    assert finals(out) == undisturbed, told
    assert sorted(len(finals(one.out)) for one in ended) == [0, 0, 2, 2], told
    for rank in range(4):
        clocks = [int(one) for one in re.findall(rf"^clock of {rank}: (\d+)$", out, re.MULTILINE)]
        assert (min(clocks) > EARLIER) == (rank in (2, 3))
        assert 0 <= max(clocks) - min(clocks) < LIMIT, f"rank {rank} has seen a jump"


# The last rank but one goes on alone, when all others are at their ends.
ALONE = 2
ITS_END = "        while not os.path.exists('alone'): time.sleep(0.01)\n"
ITS_END += "        for _ in range(1000): assert (torch.ones(4).cuda() + 1).sum().item() == 8\n"
ITS_END = f"    if rank == {ALONE}:\n{ITS_END}"
BEFORE_LAST = "    dist.destroy_process_group()\n"


def test_a_move_at_the_end_of_the_job_comes_to_that_end(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """Ranks say once that they are at their ends, to the agent of the host that is left."""
    (launcher.directory / "go").touch()
    started = job(
        launcher,
        hosts,
        [f"rank={ALONE} step=14 call=400"],
        standbys=1,
        script=TRAINING.replace(BEFORE_LAST, ITS_END + BEFORE_LAST),
    )
    launcher.wait_until(lambda: at_end(launcher) == [0, 1, 3])
    (launcher.directory / "alone").touch()
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0, 0, 0], told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert "this host has taken the place of host 1" in ended[2].err, told


def at_end(launcher: Launcher) -> list[int]:
    """Return which ranks are at their ends."""
    if not (launcher.directory / "ck0" / "events.jsonl").exists():
        return []
    events = read_events(launcher.directory / "ck0")[0]
    return sorted(event["rank"] for event in events if event["event"] == "at_end")


def await_first(processes: Sequence[Started]) -> Started:
    """Wait until one of them has ended; return it."""
    end = time.monotonic() + LIMIT
    while True:
        for process in processes:
            if process.poll() is not None:
                return process
        assert time.monotonic() < end
        time.sleep(0.1)
