"""A host's devices are broken for good: its worker processes go on on a host that stands by."""

import re
from collections.abc import Iterator

import pytest
from criu_here import criu_of_this_machine
from launcher import JITCKPT, JITCKPT_RUN, Launcher
from namespaces import Namespaces, namespaces
from test_broken_device import SCRIPT

from jitckpt.rehearsal.namespaces import ip
from jitckpt.wire import environment

MEET = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.79.0.1:29400", "--rdzv-id", "job"]
OPTIONS = ["--device", "softgpu", "--warm-spares", "0"]
TRAINING = SCRIPT.replace("[0, 1]", "list(range(dist.get_world_size()))")
# A host of its own, but for its files: it has none of the others' processes, and none of their shared memory.
ELSEWHERE = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--ipc"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(3) as found:
        yield found


def finals(text: str) -> list[str]:
    return sorted(re.findall(r"^rank \d: .*$", text, re.MULTILINE))


def test_both_ranks_of_a_host_go_on_on_one_that_stands_by(launcher: Launcher, hosts: Namespaces) -> None:
    program = criu_of_this_machine().program
    script = launcher.script(TRAINING)
    alone = ["env", "SOFTGPU_DEVICES=4", *JITCKPT_RUN, "--nproc-per-node", "4", *OPTIONS]
    undisturbed = launcher.run(*alone, script)
    assert undisturbed.status == 0, undisturbed.err
    lost = ["--fault", "rank=3 step=8 phase=backward kind=device-lost-hard", "--broken-device", "move"]
    command = ["env", "OMP_NUM_THREADS=1", "SOFTGPU_DEVICES=2", f"{environment.CRIU.name}={program}"]
    command += [*JITCKPT, "run", *MEET, "--mode", "transparent", "--nproc-per-node", "2", *OPTIONS, *lost]
    (secret := launcher.directory / "secret").write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    command += ["--secret-file", str(secret)]
    places = [
        [*command, "--node-rank", "0"],
        [*command, "--node-rank", "1"],
        [*ELSEWHERE, *command, "--standby"],
    ]
    started = [
        launcher.start(*hosts.in_network_of(host), *place, "--checkpoint-dir", f"ck{host}", script)
        for host, place in enumerate(places)
    ]
    old = launcher.finish(started[1])
    # From here on there is nothing of the old host that could be of use.
    assert hosts.processes(1) == []
    assert ip(f"-n {hosts.names[1]} address flush dev cable").returncode == 0
    assert [started[host].poll() for host in (0, 2)] == [None, None], "the job has ended before that"
    ended = [launcher.finish(started[0]), old, launcher.finish(started[2])]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0, 0, 0], told
    assert finals("".join(one.out for one in ended)) == finals(undisturbed.out), told
    assert len(finals(ended[2].out)) == 2
