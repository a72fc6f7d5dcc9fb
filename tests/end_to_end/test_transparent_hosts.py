"""Transparent mode on two hosts: their ranks recover together, in the same worker processes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine
from launcher import JITCKPT, JITCKPT_RUN, Launcher
from namespaces import Namespaces, namespaces
from test_broken_device import SCRIPT
from test_state_stays import SHRINKS_ITS_PARAMETERS

from jitckpt.events import read_events
from jitckpt.wire import environment

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plain_ddp.py"
TRAINING = [str(EXAMPLE), "--steps", "16"]
MEET = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.79.0.1:29400"]
OPTIONS = ["--device", "softgpu", "--warm-spares", "0", "--checkpoint-dir", "ckpt"]
# A collective that fails on one host, and a server that dies on the other, inside of the optimizer's step.
FAULTS = [
    "rank=1 step=9 phase=allreduce kind=collective-error",
    "rank=0 step=13 phase=optimizer kind=proxy-kill",
]

STATE = {"on devices": ["--state-on-device"], "in images": ["--no-state-on-device"]}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces() as found:
        yield found


def digests(text: str) -> set[str]:
    return set(re.findall(r"rank \d: final state ([0-9a-f]{64})", text))


@pytest.mark.parametrize("state", ["on devices", "in images"])
def test_ranks_of_two_hosts_live_on(launcher: Launcher, hosts: Namespaces, state: str) -> None:
    undisturbed = launcher.run(*JITCKPT_RUN, "--nproc-per-node", "2", *OPTIONS[:4], *TRAINING)
    faults = [word for fault in FAULTS for word in ("--fault", fault)]
    options = ["--mode", "transparent", *STATE[state], "--nproc-per-node", "1", *OPTIONS, *faults]
    # As torchrun has it where a host has several ranks: sums depend on it.
    command = ["env", "OMP_NUM_THREADS=1", *JITCKPT, "run", *MEET, *options, *TRAINING]
    started = [launcher.start(*hosts.on(host), *command) for host in range(2)]
    ended = [launcher.finish(process) for process in started]
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert len(digests(undisturbed.out)) == 1
    assert digests(ended[0].out) | digests(ended[1].out) == digests(undisturbed.out)
    events, _ = read_events(launcher.directory / "ckpt")
    first_alarm, *others = (event["rank"] for event in events if event["event"] == "device_alarm")
    assert first_alarm == 1
    assert others  # whose server has died, or first the other, whose collective ends with it
    first, second = (event["state"] for event in events if event["event"] == "recovered")
    ways = [event["ways"] for event in events if event["event"] == "recovery_planned"]
    if state == "on devices":
        assert [event["replicas"] for event in events if event["event"] == "state_stays"] == [[[0, 1]]]
        assert first == 8
        assert second in (12, 13)  # the server may die before its device has begun the step
        assert ways[0] == ["in place", "in place"]
        assert ways[1][0] == "from rank 1"  # the copy goes from one host to the other
    else:
        assert first in (7, 8)
        assert second in (11, 12)
        assert ways == [["image", "image"]] * 2
    assert not [event for event in events if event["event"] == "restart"]
    assert all(hosts.listening(host) == [] for host in range(2))


def test_a_state_that_leaves_the_devices_leaves_those_of_all_hosts(
    launcher: Launcher, hosts: Namespaces
) -> None:
    """The parameters change outside of the eighth step; servers die then, and later."""
    script = launcher.directory / "train.py"
    script.write_text(SHRINKS_ITS_PARAMETERS)
    undisturbed = launcher.run(*JITCKPT_RUN, "--nproc-per-node", "2", *OPTIONS[:4], str(script))
    faults = ["rank=1 step=9 phase=backward kind=proxy-kill", "rank=0 step=11 phase=forward kind=proxy-kill"]
    options = [word for fault in faults for word in ("--fault", fault)]
    command = ["env", "OMP_NUM_THREADS=1", *JITCKPT, "run", *MEET, "--mode", "transparent"]
    command += ["--nproc-per-node", "1", *OPTIONS, *options, str(script)]
    started = [launcher.start(*hosts.on(host), *command) for host in range(2)]
    ended = [launcher.finish(process) for process in started]
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    lines = [
        line
        for one in (*ended, undisturbed)
        for line in one.out.splitlines()
        if line.startswith(("st", "ra"))
    ]
    assert len(lines) == 2 * len(set(lines)) == 2 * 13
    events, _ = read_events(launcher.directory / "ckpt")
    assert len([event for event in events if event["event"] == "state_stays"]) == 1
    ways = [event["ways"] for event in events if event["event"] == "recovery_planned"]
    assert ways[-1] == ["image", "image"]
    assert not [event for event in events if event["event"] in ("restart", "recovery_given_up")]


def test_a_worker_of_one_host_is_made_anew_and_reaches_the_store_of_the_other(
    launcher: Launcher, hosts: Namespaces
) -> None:
    """Its connection to the store crosses the network; in a get that waits all the while, and in counts."""
    program = criu_of_this_machine().program
    script = launcher.script(SCRIPT)
    undisturbed = launcher.run(*JITCKPT_RUN, "--nproc-per-node", "2", *OPTIONS[:4], script)
    fault = ["--fault", "rank=1 step=8 phase=backward kind=device-lost-hard", "--broken-device", "move"]
    options = ["--mode", "transparent", "--nproc-per-node", "1", *OPTIONS, *fault]
    command = ["env", "OMP_NUM_THREADS=1", "SOFTGPU_DEVICES=2", f"{environment.CRIU.name}={program}"]
    command += [*JITCKPT, "run", *MEET, *options, script]
    started = [launcher.start(*hosts.in_network_of(host), *command) for host in range(2)]
    ended = [launcher.finish(process) for process in started]
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    lines = sorted(re.findall(r"^rank \d: .*$", ended[0].out + ended[1].out, re.MULTILINE))
    assert lines == sorted(re.findall(r"^rank \d: .*$", undisturbed.out, re.MULTILINE))
    assert len(lines) == 2
    told = ended[0].err + ended[1].err
    assert len(re.findall("rank 1 was made anew by CRIU", told)) == 1, told
    events, _ = read_events(launcher.directory / "ckpt")
    assert not [event for event in events if event["event"] == "restart"]


def test_a_host_exchanges_its_broken_device_and_the_other_one_notices_a_pause(
    launcher: Launcher, hosts: Namespaces
) -> None:
    """The first host's agent decides, but only the other one knows that it has another device."""
    undisturbed = launcher.run(*JITCKPT_RUN, "--nproc-per-node", "2", *OPTIONS[:4], *TRAINING)
    fault = ["--fault", "rank=1 step=8 phase=backward kind=device-lost-hard", "--broken-device", "exchange"]
    options = ["--mode", "transparent", "--nproc-per-node", "1", *OPTIONS, *fault]
    command = ["env", "OMP_NUM_THREADS=1", "SOFTGPU_DEVICES=2", *JITCKPT, "run", *MEET, *options, *TRAINING]
    started = [launcher.start(*hosts.on(host), *command) for host in range(2)]
    ended = [launcher.finish(process) for process in started]
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert digests(ended[0].out) | digests(ended[1].out) == digests(undisturbed.out)
    told = "device 0 of rank 1 is broken; the rank goes on with device 1."
    assert [told in one.err for one in ended].count(True) == 1
    events, _ = read_events(launcher.directory / "ckpt")
    assert not [event for event in events if event["event"] == "restart"]
