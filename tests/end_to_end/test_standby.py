"""A host's devices are broken for good: its worker processes go on on a host that stands by."""

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest
from criu_here import criu_of_this_machine
from final_lines import finals
from launcher import JITCKPT, JITCKPT_RUN, LIMIT, Launcher, Result
from namespaces import Namespaces, namespaces
from test_broken_device import EXAMPLES, SCRIPT

from jitckpt.events import Event, read_events
from jitckpt.rehearsal.namespaces import APART, ip
from jitckpt.rehearsal.runs import lasting_shared_memory
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


def job(
    launcher: Launcher,
    hosts: Namespaces,
    faults: Sequence[str],
    standbys: int,
    *words: str,
    program: str = "",
    standby: Sequence[str] = (),
    jitckpt: Sequence[str] = JITCKPT,
    script: str = TRAINING,
    left: Sequence[str] = (),
    meet: Sequence[str] = MEET,
    begun: Sequence[int] = (0, 1),
    ranks: int = 2,
    beyond: Sequence[int] = (),
    devices: Sequence[int] = (),
    first: int = 2,
) -> list[Started]:
    """Start two hosts of so many ranks each, and hosts that stand by, with these options.

    faults: in the backward pass; of a device that is broken for good, where they name no other kind.
    program: their CRIU, if it is another. jitckpt: what that is; standby: on hosts that stand by. left: what
    comes before the command of host 1. begun: those of the two that are started now. beyond: more hosts,
    which take any place. devices: of the two, where these are not as many as ranks. first: of those that
    stand by.
    """
    program = program or str(criu_of_this_machine().program)
    command = ["env", "OMP_NUM_THREADS=1", f"SOFTGPU_DEVICES={ranks}", f"{environment.CRIU.name}={program}"]
    options = ["run", *meet, "--mode", "transparent", "--nproc-per-node", f"{ranks}", *OPTIONS]
    options += ["--broken-device", "move", *words]
    for fault in faults:
        kind = "" if "kind=" in fault else "kind=device-lost-hard"
        options += ["--fault", f"{fault} phase=backward {kind}".strip()]
    (secret := launcher.directory / "secret").write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    os.chown(secret, launcher.directory.stat().st_uid, launcher.directory.stat().st_gid)
    options += ["--secret-file", str(secret)]
    own = [["env", f"SOFTGPU_DEVICES={count}"] for count in devices or [ranks, ranks]]
    places = {
        host: [*before, *command, *own[host], *jitckpt, *options, "--node-rank", str(host)]
        for host, before in enumerate([(), left])
        if host in begun
    }
    waits = [*APART, *command, *(standby or jitckpt), *options, "--standby"]
    places |= dict.fromkeys(range(first, first + standbys), waits)
    places |= {host: [*command, *jitckpt, *options] for host in beyond}
    path = launcher.script(script)
    return [
        launcher.start(*hosts.in_network_of(host), *place, "--checkpoint-dir", f"ck{host}", path)
        for host, place in places.items()
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return of_one_host(Launcher(tmp_path_factory.mktemp("undisturbed")), 4)


def of_one_host(launcher: Launcher, ranks: int) -> list[str]:
    """Return what so many ranks end with if nothing fails."""
    (go := launcher.directory / "go").touch()
    alone = ["env", f"SOFTGPU_DEVICES={ranks}", *JITCKPT_RUN, "--nproc-per-node", f"{ranks}", *OPTIONS]
    out = launcher.succeed(*alone, launcher.script(TRAINING))
    go.unlink()
    return finals(out)


def switch_off(hosts: Namespaces, host: int) -> None:
    """From here on there is nothing of that host that could be of use."""
    assert hosts.processes(host) == []
    assert ip(f"-n {hosts.names[host]} address flush dev cable").returncode == 0


def both_go_on_elsewhere(
    launcher: Launcher,
    hosts: Namespaces,
    started: "Sequence[subprocess.Popen[str]]",
    undisturbed: list[str],
) -> tuple[list[Result], Event]:
    """The ranks of host 1 go on on host 2, which stands by; host 1 is switched off before the job ends.

    Returns what has ended, and the event of the move.
    """
    old = launcher.finish(started[1])
    switch_off(hosts, 1)
    assert [started[host].poll() for host in (0, 2)] == [None, None], "the job has ended before that"
    (launcher.directory / "go").touch()
    ended = [launcher.finish(started[0]), old, launcher.finish(started[2])]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0, 0, 0], told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert len(finals(ended[2].out)) == 2
    (moved,) = moves(launcher)
    assert (moved["host"], moved["ranks"]) == (1, [2, 3])
    return ended, moved


def moves(launcher: Launcher) -> list[Event]:
    """Return the events of moves to other hosts."""
    if not (launcher.directory / "ck0" / "events.jsonl").exists():
        return []
    return [one for one in read_events(launcher.directory / "ck0")[0] if one["event"] == "ranks_moved"]


def first_goes_on_elsewhere(
    launcher: Launcher, started: Sequence[Started], undisturbed: list[str]
) -> tuple[list[Result], Event]:
    """The ranks of host 0 go on on host 2, which stands by; host 0's launcher stays to the end.

    Returns what has ended, and the event of the move.
    """
    launcher.wait_until(lambda: moves(launcher) != [])
    assert [one.poll() for one in started] == [None] * 3, "one has ended before that"
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0, 0, 0], told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert [len(finals(one.out)) for one in ended] == [0, 2, 2], told
    assert "so the job needs it to the end" in ended[0].err
    assert "this host has the ranks of host 0, which stays without: ranks 0, 1." in ended[2].err
    (moved,) = moves(launcher)
    assert (moved["host"], moved["ranks_of"], moved["ranks"]) == (2, 0, [0, 1])
    return ended, moved


def test_both_ranks_of_a_host_go_on_on_one_that_stands_by(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    started = job(launcher, hosts, ["rank=3 step=8"], standbys=1)
    _, moved = both_go_on_elsewhere(launcher, hosts, started, undisturbed)
    assert min(moved[phase] for phase in ("bytes", "dump", "transfer", "restore")) > 0


def pids(launcher: Launcher) -> list[tuple[int, int]]:
    """Return who has said which process it is."""
    found = (line.split(":") for line in (launcher.directory / "pids").read_text().split())
    return sorted((int(rank), int(pid)) for rank, pid in found)


ITS_PID = "        with open('pids', 'a') as file: print(f'{rank}:{os.getpid()}', file=file)\n"


@pytest.mark.parametrize("broken", [0, 1])
def test_both_ranks_of_the_first_host_go_on_on_one_that_stands_by(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], broken: int
) -> None:
    """Its launcher stays, as the lead and with the ranks' store. Each step is made once, by one process."""
    before = set(os.listdir("/dev/shm"))
    (launcher.directory / "steps").unlink(missing_ok=True)
    script = TRAINING.replace(STEP, STEP + ITS_PID)
    started = job(launcher, hosts, [f"rank={broken} step=8"], standbys=1, script=script)
    ended, moved = first_goes_on_elsewhere(launcher, started, undisturbed)
    told = "".join(one.err for one in ended)
    foretold = told.index("don't switch it off before the job is over")  # and what may go along
    assert foretold < told.index("--no-state-on-device keeps it in host memory") < told.index("broken")
    assert min(moved[phase] for phase in ("bytes", "dump", "transfer", "restore")) > 0
    steps = (launcher.directory / "steps").read_text().split()
    assert len(steps) == len(set(steps)) == 4 * 14
    said = pids(launcher)
    assert [len({pid for one, pid in said if one == rank}) for rank in range(4)] == [1] * 4
    assert len(said) == 4 * 14
    assert launcher.survivors() == []
    assert lasting_shared_memory(before) == []


def test_failures_after_the_first_hosts_ranks_have_left_it_are_recovered_from(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """On both hosts that have ranks, led by the one that has none; one gets its state from the other."""
    faults = ["rank=0 step=4", "rank=0 step=7 kind=device-lost", "rank=2 step=11 kind=sticky"]
    faults += [f"rank={rank} step=9 kind=device-lost" for rank in (2, 3)]
    started = job(launcher, hosts, faults, standbys=1)
    ended, _ = first_goes_on_elsewhere(launcher, started, undisturbed)
    events = read_events(launcher.directory / "ck0")[0]
    states = [one["state"] for one in events if one["event"] == "recovered"]
    assert sorted({*states}) == [3, 6, 8, 10], ended[0].err


@pytest.mark.parametrize("then", [1, 3])
def test_another_move_follows_that_of_the_first_hosts_ranks(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], then: int
) -> None:
    """Of the same ranks, or of the other host's."""
    started = job(launcher, hosts, ["rank=0 step=4", f"rank={then} step=9"], standbys=2)
    launcher.wait_until(lambda: len(moves(launcher)) == 2)
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0] * 4, told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    has_left = then == 3
    assert [len(finals(one.out)) for one in ended[:2]] == [0, 0 if has_left else 2], told
    assert sorted(len(finals(one.out)) for one in ended[2:]) == [2 if has_left else 0, 2], told
    assert [one["ranks"] for one in moves(launcher)] == [[0, 1], [2, 3] if has_left else [0, 1]]


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


# Each rank has a log of its own, which is open from the beginning to the end.
ITS_LOG = "    own = open(f'own/log-{rank}', 'w')\n"
ITS_LINE = "        print(total, file=own, flush=True)\n"
ITS_LINES = "    print(f'lines of {rank}:', len(open(own.name).readlines()), flush=True)\n"
GROUP = "    dist.barrier()\n"
BEGIN = "    torch.manual_seed(0)\n"


def test_a_log_that_ranks_write_on_their_hosts_disk_goes_with_them(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    (launcher.directory / "go").touch()
    (own := launcher.directory / "own").mkdir()
    script = TRAINING.replace(BEGIN, ITS_LOG + BEGIN).replace(STEP, STEP + ITS_LINE)
    script = script.replace(GROUP, ITS_LINES + GROUP)
    another_disk = ["sh", "-c", 'mount -t tmpfs own "$0" && exec "$@"', str(own), *JITCKPT]
    started = job(launcher, hosts, ["rank=3 step=8"], standbys=1, script=script, standby=another_disk)
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0] * 3, told
    out = "".join(one.out for one in ended)
    assert finals(out) == undisturbed, told
    assert sorted(re.findall(r"^lines of \d: \d+$", out, re.MULTILINE)) == [
        f"lines of {rank}: 14" for rank in range(4)
    ]
    assert [len((own / f"log-{rank}").read_text().splitlines()) for rank in range(4)] == [14, 14, 7, 7]
    assert f"{own}/log-2 has come, too" in ended[2].err, told


# All ranks of a host append to one log; a thread of each, which nothing holds, does so all the time.
ONE_LOG = """
    log = open(f'own/log-of-{rank // 2}', 'MODE')
    def write():
        number = 0
        while not over:
            number += 1
            print(f'{rank}:{number}', file=log, flush=True)
            time.sleep(0.0005)
        print(f'{rank}:last:{number}', file=log, flush=True)
    threads.append(threading.Thread(target=write))
    threads[-1].start()
"""


def test_a_log_to_which_all_ranks_of_a_host_append_goes_with_them(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """No line is lost, and none is there twice, though they are not dumped in one moment."""
    (launcher.directory / "go").touch()
    (own := launcher.directory / "own").mkdir()
    (here := launcher.directory / "own-of-the-standby").mkdir()
    script = TRAINING.replace(BEGIN, ONE_LOG.replace("MODE", "a") + BEGIN)
    another_disk = ["sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(here), str(own), *JITCKPT]
    words = ["--move-wait", "60", "--max-restarts", "0"]
    started = job(launcher, hosts, ["rank=3 step=8"], 1, *words, script=script, standby=another_disk)
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0] * 3, told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    lines = (here / "log-of-1").read_text().splitlines()
    for rank in (2, 3):
        mine = [line.split(":")[1:] for line in lines if line.startswith(f"{rank}:")]
        assert mine[:-1] == [[str(number)] for number in range(1, len(mine))]
        assert mine[-1] == ["last", str(len(mine) - 1)]


def test_what_keeps_ranks_from_leaving_their_host_is_said_at_the_start(
    launcher: Launcher, hosts: Namespaces
) -> None:
    """A process made anew on its own host keeps its connections; one on another host can't."""
    (launcher.directory / "go").touch()
    connects = "import socket\noutside = socket.create_connection(('10.79.0.1', 29400))\n"
    gloo = "    of_gloo = dist.new_group([0, 2, 3], backend='gloo')\n"
    connects += "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'cable'\n"
    script = connects + TRAINING.replace(BEGIN, gloo + BEGIN)
    started = job(launcher, hosts, [], standbys=0, script=script)
    ended = [launcher.finish(one) for one in started]
    assert [one.status for one in ended] == [0, 0], "\n".join(one.err for one in ended)
    said = [line for line in ended[1].err.splitlines() if "could not be moved" in line]
    assert len(said) == 2, ended[1].err
    assert all("to another host: " in line and "10.79.0.1:29400" in line for line in said)
    assert all("has a gloo group, by which ranks are connected by TCP" in line for line in said), said
    assert ended[0].err.count("could not be moved to another host: ") == 2, ended[0].err


# Which calls jitckpt.init.
WITH_INIT = f"""
import runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
sys.argv = [{str(EXAMPLES / "train_gpt.py")!r}, "--steps", "14"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ranks_of_a_script_that_calls_init_start_again_and_that_is_said_at_the_start(
    launcher: Launcher, hosts: Namespaces
) -> None:
    """The other ranks are in the middle of a recovery, and save nothing."""
    started = job(launcher, hosts, ["rank=3 step=8"], 1, "--max-restarts", "1", script=WITH_INIT)
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0] * 3, told
    assert moves(launcher) == []
    assert all("so ranks of this host do not go on on another one: where" in one.err for one in ended[:2]), (
        told
    )
    said = ended[1].err
    assert said.index("has called jitckpt.init") < said.index("is broken: it fails with a new server, too")
    assert "The job succeeded after 1 restart." in told


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
