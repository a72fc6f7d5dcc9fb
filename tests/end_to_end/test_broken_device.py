"""A device that no new server cures: the rank goes on with another, also in a process that is made anew."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine
from final_lines import finals
from launcher import JITCKPT_RUN, Launcher, Result
from programs_of_tests import text_of

from jitckpt.events import Event, read_events
from jitckpt.rehearsal.runs import lasting_shared_memory
from jitckpt.system import network_lock
from jitckpt.wire import environment

# Plain DDP with processes that load the data, pinned memory, and the job's store in use at every moment.
SCRIPT = text_of("broken_device")
EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN = [str(EXAMPLES / "plain_ddp.py"), "--steps", "12", "--width", "16", "--layers", "1"]
LOST = "rank=1 step=8 phase=backward kind=device-lost-hard"


@pytest.fixture(scope="module")
def program() -> str:
    return str(criu_of_this_machine().program)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the plain training ends with if nothing fails."""
    result, _ = job(Launcher(tmp_path_factory.mktemp("plain")), *PLAIN)
    assert result.status == 0, result.err
    return finals(result.out)


def job(
    launcher: Launcher, *words: str, devices: int = 3, program: str = "", restarts: int = 0
) -> tuple[Result, list[Event]]:
    """Run two ranks with `words`, options of `jitckpt run` and the script; CRIU is `program`."""
    return finished(launcher, *begun(launcher, *words, devices=devices, program=program, restarts=restarts))


def begun(
    launcher: Launcher, *words: str, devices: int, program: str, restarts: int
) -> tuple["subprocess.Popen[str]", Path]:
    folder = launcher.directory / f"ck-{len(launcher.started)}"
    variables = [f"SOFTGPU_DEVICES={devices}", f"{environment.CRIU.name}={program}"]
    command = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent"]
    command += ["--max-restarts", str(restarts), "--checkpoint-dir", str(folder), *words]
    return launcher.start("env", *(one for one in variables if not one.endswith("=")), *command), folder


def finished(
    launcher: Launcher, process: "subprocess.Popen[str]", folder: Path
) -> tuple[Result, list[Event]]:
    result = launcher.finish(process)
    assert launcher.survivors() == [], result.err
    return result, read_events(folder)[0] if folder.exists() else []


def wrapped(launcher: Launcher, program: str, what: str, act: str) -> str:
    """Return a CRIU that acts otherwise where it is asked for that, but the first time, in the trial."""
    first = launcher.directory / "first"
    text = f"[ $1 != {what} ] || mkdir {first} 2> /dev/null || {{ {act}; }}"
    path = Path(launcher.script(f'#!/bin/sh\n{text}\nexec {program} "$@"\n', "criu"))
    path.chmod(0o700)
    return str(path)


def of(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def test_another_device_of_the_host_takes_the_place_of_a_broken_one(
    launcher: Launcher, plain: list[str]
) -> None:
    result, events = job(launcher, "--broken-device", "exchange", "--fault", LOST, *PLAIN)
    assert result.status == 0, result.err
    assert finals(result.out) == plain
    (exchanged,) = of(events, "device_exchanged")
    assert (exchanged["rank"], exchanged["broken"], exchanged["device"]) == (1, "1", "2")
    assert "device 1 of rank 1 is broken; the rank goes on with device 2." in result.err
    assert "Rank 1 has device 2 in the place of device 1, which is broken." in result.err
    assert {event["restart"] for event in events} == {0}


def test_without_a_free_device_that_is_said_and_the_script_gets_its_error(launcher: Launcher) -> None:
    result, events = job(launcher, "--broken-device", "exchange", "--fault", LOST, *PLAIN, devices=2)
    assert result.status == 1
    assert (
        "device 1 of rank 1 is broken: it fails with a new server, too. No other device of this host is free."
        in result.err
    )
    assert "CUDA error: unknown error" in result.err
    assert of(events, "device_exchanged") == []


def test_a_job_that_is_to_move_workers_does_not_begin_without_criu(launcher: Launcher) -> None:
    result, _ = job(launcher, "--broken-device", "move", *PLAIN, program="/nowhere/criu")
    assert result.status == 2
    assert "/nowhere/criu can't be run" in result.err


def test_workers_that_criu_makes_anew_go_on_in_the_same_minibatch_as_often_as_needed(
    launcher: Launcher, program: str
) -> None:
    """With loaders, pinned memory, threads that wait for the store and count there; forked by a template."""
    before = set(os.listdir("/dev/shm"))
    script = launcher.script(SCRIPT)
    undisturbed, _ = job(launcher, script)
    faults = [LOST, LOST.replace("step=8 phase=backward", "step=11 phase=optimizer")]
    faults += [LOST.replace("rank=1 step=8 phase=backward", "rank=0 step=11 phase=forward")]
    result, events = job(
        launcher,
        *("--broken-device", "move", "--warm-start", *(word for one in faults for word in ("--fault", one))),
        script,
        devices=5,
        program=program,
    )
    assert result.status == 0, result.err
    assert finals(result.out) == finals(undisturbed.out)
    assert all("[b'now'] True" in line for line in finals(result.out))
    moved = of(events, "worker_moved")
    assert [event["rank"] for event in moved] in ([1, 0, 1], [1, 1, 0])
    assert all(len(event["pids"]) >= 2 and event["bytes"] > 1e8 for event in moved)
    assert {event["restart"] for event in events} == {0}
    assert len({event["pid"] for event in of(events, "proxy_connected")}) == 2
    assert len(of(events, "at_end")) == 2  # what a restored worker says is heard
    assert lasting_shared_memory(before) == []


def test_a_worker_that_was_made_anew_is_protected_as_before(launcher: Launcher, program: str) -> None:
    """Its script calls jitckpt.init. It is killed then; that is seen at once, and it goes on from a save."""
    training = [str(EXAMPLES / "train_gpt.py"), "--steps", "14"]
    undisturbed, _ = job(launcher, *training, restarts=1)
    killed = "rank=1 step=11 phase=forward kind=kill"
    result, events = job(
        launcher,
        *("--broken-device", "move", "--fault", LOST, "--fault", killed, *training),
        program=program,
        restarts=1,
    )
    assert result.status == 0, result.err
    assert len(of(events, "worker_moved")) == 1, result.err
    died = next(event for event in events if event["event"] == "detected")
    assert died["text"] == "rank 1 was killed by SIGKILL"
    assert of(events, "saved")[0]["step"] >= 10
    assert re.findall("step 14 .*", result.out) == re.findall("step 14 .*", undisturbed.out)


def test_what_keeps_a_worker_from_being_moved_is_said_at_the_start(
    launcher: Launcher, program: str, plain: list[str]
) -> None:
    script = launcher.script(
        f"""
        import runpy, sys, torch
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
        sys.argv = {PLAIN!r}
        runpy.run_path(sys.argv[0], run_name="__main__")
        """
    )
    result, events = job(launcher, "--broken-device", "move", "--fault", LOST, script, program=program)
    assert result.status == 0, result.err
    assert finals(result.out) == plain  # with another device, in the same process
    names = [event["event"] for event in events]
    assert names.count("not_movable") == 2
    assert names.index("not_movable") < names.index("fault") < names.index("move_failed")
    assert "has an io_uring (torch's TCPStore server has one" in result.err


@pytest.mark.parametrize("what", ["dump", "restore"])
def test_a_criu_that_fails(launcher: Launcher, program: str, plain: list[str], what: str) -> None:
    """A dump that fails leaves the worker as it was; after the dump it is lost, and the job starts again."""
    broken = wrapped(launcher, program, what, "exit 3")
    locks = network_lock.tables()
    result, events = job(
        launcher, "--broken-device", "move", "--fault", LOST, *PLAIN, program=broken, restarts=1
    )
    assert result.status == 0, result.err
    assert finals(result.out) == plain
    launcher.wait_until(lambda: network_lock.tables() <= locks)
    (failed,) = of(events, "move_failed")
    assert re.match(rf"criu can't {what} the process.*: it has ended with status 3\.", failed["text"])
    assert {event["restart"] for event in events} == ({0} if what == "dump" else {0, 1})
    # Nor has the next start the broken one.
    again = [event["devices"] for event in of(events, "devices")]
    assert again == ([] if what == "dump" else [["0", "2"]])


def leaves_nothing(
    launcher: Launcher,
    process: "subprocess.Popen[str]",
    seen: Path,
    before: set[str],
    locks: set[str],
) -> None:
    """Kill a launcher once CRIU is at work for it (seen). before, locks: what there was without it."""
    launcher.wait_until(seen.exists)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    launcher.wait_until(lambda: not launcher.survivors())
    launcher.wait_until(lambda: network_lock.tables() <= locks)
    assert lasting_shared_memory(before) == []


@pytest.mark.parametrize("what", ["dump", "restore"])
def test_nothing_is_left_of_a_launcher_that_is_killed_while_it_moves_a_worker(
    launcher: Launcher, program: str, what: str
) -> None:
    before, locks = set(os.listdir("/dev/shm")), network_lock.tables()
    seen = launcher.directory / "seen"
    slow = wrapped(launcher, program, what, f"touch {seen}; sleep 1")
    process, _ = begun(
        launcher,
        *("--broken-device", "move", "--fault", LOST, launcher.script(SCRIPT)),
        devices=3,
        program=slow,
        restarts=0,
    )
    leaves_nothing(launcher, process, seen, before, locks)
    assert not list(launcher.directory.glob("jitckpt-images-*"))
