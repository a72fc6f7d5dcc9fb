"""`jitckpt run --snapshot-every`: ranks whose processes die go back to where they were some steps ago."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine
from launcher import JITCKPT, JITCKPT_RUN, Launcher
from snapshot_job import KILL, SCRIPT, Job, in_memory
from taken_number import TAKE

from jitckpt.rehearsal.runs import lasting_shared_memory
from jitckpt.system import network_lock
from jitckpt.wire import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN = [str(EXAMPLES / "plain_ddp.py"), "--steps", "12", "--width", "16", "--layers", "1"]
TWO_HOSTS = ["--nnodes", "2", "--coordination", "etcd://127.0.0.1:1", "--rdzv-id", "job"]


@pytest.fixture(scope="module")
def program() -> str:
    return str(criu_of_this_machine().program)


@pytest.fixture
def memory(launcher: Launcher) -> Iterator[Path]:
    """Give the job's directory."""
    with in_memory(launcher.directory / "checkpoints") as folder:
        yield folder


def test_a_job_whose_workers_die_twice_ends_as_if_none_had(
    launcher: Launcher, program: str, undisturbed_job: list[str], memory: Path
) -> None:
    """With loaders; the second death comes before there is a newer snapshot."""
    before, locks = set(os.listdir("/dev/shm")), network_lock.tables()
    faults = ["--fault", KILL, "--fault", "rank=0 step=10 phase=optimizer kind=segfault"]
    job = Job(launcher, *faults, program=program, loaders=1)
    whole = job.snapshot()
    assert job.events("server_ended") == job.events("not_settled") == []  # they stay
    (folder,) = memory.glob("*snapshot-*")
    assert (folder.name, folder.stat().st_mode & 0o777) == ("snapshot-0000000008", 0o700)
    result = job.finish()
    assert result.status == 0, result.err
    assert [*job.finals, *job.logs] == undisturbed_job
    assert [event["step"] for event in job.events("gone_back")][:2] == [whole["step"]] * 2
    assert "rank 0 was killed by SIGSEGV" in result.err
    assert "all ranks go back to the snapshot after step 8" in result.err
    assert whole["bytes"] > 100e6
    pause = job.events("snapshot_pause")[0]
    assert pause["seconds"] == pytest.approx(pause["stop"] + pause["dump"] + pause["device"])
    assert min(pause["stop"], pause["dump"], pause["device"]) > 0
    assert list(memory.glob("*snapshot*")) == []
    launcher.wait_until(lambda: network_lock.tables() <= locks)
    assert lasting_shared_memory(before) == []


def test_a_snapshot_of_which_a_bit_differs_is_never_gone_back_to(
    launcher: Launcher, program: str, undisturbed_job: list[str], memory: Path
) -> None:
    """It is said, and the job begins anew."""
    job = Job(launcher, "--fault", KILL, program=program)
    job.snapshot()
    (pages,) = memory.glob("pages-of-snapshots/*")
    with pages.open("r+b") as file:
        file.seek(12345)
        byte = file.read(1)[0]
        file.seek(12345)
        file.write(bytes([byte ^ 1]))
    result = job.finish()
    assert result.status == 0, result.err
    assert "the snapshot after step 8 is of no use:" in result.err
    assert re.search(r"pages-\d+\.img is not what was written. The job begins anew.", result.err), result.err
    assert "the program goes on" not in result.err  # as after a failure; here it was a snapshot
    assert job.finals == undisturbed_job[:2]
    assert job.events("gone_back") == []


def test_a_lost_job_goes_on_where_its_numbers_are_taken(
    launcher: Launcher, program: str, undisturbed_job: list[str], memory: Path
) -> None:
    """All of its processes are killed, and a stranger has the number of one: it gets a PID namespace.

    The newest of its snapshots is damaged, so it goes on from the one before.
    """
    before = set(os.listdir("/dev/shm"))
    job = Job(launcher, program=program, loaders=1)
    first = job.snapshot()
    newest = job.wait_for("snapshot_wanted", 2)["step"]
    assert newest in (11, 12)  # the ranks may not have come to the ninth yet
    job.go_to(13)
    second = job.wait_for("snapshot", 2)
    assert second["stored"] < second["bytes"] / 2
    assert second["disk"] < first["disk"] * 1.1
    job.lose()
    own = max(memory.glob("pages-of-snapshots/*"), key=lambda path: path.stat().st_mtime_ns)
    own.write_bytes(bytes(own.stat().st_size))
    (core, *_) = memory.glob(f"snapshot-*{newest}/rank-1/core-*.img")
    number = re.sub(r"\D", "", core.name)
    with subprocess.Popen([sys.executable, "-c", TAKE, number], stdin=-1, stdout=-1, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline().strip() == number
        again = Job(launcher, program=program, loaders=1)
        result = again.finish()
        stranger.communicate()
    assert result.status == 0, result.err
    assert re.search(r"goes on from the snapshot of step 8, made at \d{4}-", result.err), result.err
    assert f"the snapshot after step {newest} is of no use:" in result.err
    assert "is not what was written. That after step 8 is tried." in result.err
    assert "it goes on in a PID namespace" in result.err
    assert [*again.finals, *again.logs] == undisturbed_job
    assert list(memory.glob("*snapshot*")) == []
    assert lasting_shared_memory(before) == []


def test_a_worker_that_dies_in_a_snapshot_goes_back_to_the_one_before(
    launcher: Launcher, program: str, undisturbed_job: list[str], memory: Path
) -> None:
    """In the first dump of the second snapshot, whose files go."""
    armed = launcher.directory / "armed"
    text = f"""#!/bin/bash
if [ "$1" = dump ] && [ -e {armed} ]; then
    rm {armed}; while [ "$1" != --tree ]; do shift; done; kill -9 $2; exit 3
fi
exec {program} "$@"
"""
    broken = Path(launcher.script(text, "criu"))
    broken.chmod(0o700)
    job = Job(launcher, program=str(broken))
    job.snapshot()
    armed.touch()
    job.wait_for("snapshot_wanted", 2)  # else all may be over before
    result = job.finish()
    assert result.status == 0, result.err
    assert not armed.exists()
    assert [*job.finals, *job.logs] == undisturbed_job
    assert job.events("gone_back")[0]["step"] == 8
    assert "it has ended with status 3" in job.events("snapshot_failed")[0]["text"]


def test_a_server_that_ends_in_a_snapshot_is_replaced_and_the_next_snapshot_is_whole(
    launcher: Launcher, program: str, undisturbed_job: list[str], memory: Path
) -> None:
    """A worker that dies afterwards goes back to the next one."""
    armed = launcher.directory / "armed"
    text = f"""#!/bin/bash
if [ "$1" = dump ] && mv {armed} {armed}.now; then kill -9 $(cat {armed}.now); fi
exec {program} "$@"
"""
    deadly = Path(launcher.script(text, "criu"))
    deadly.chmod(0o700)
    job = Job(launcher, "--fault", KILL.replace("11", "14"), program=str(deadly))
    job.go_to(5)
    job.wait_for("snapshot_wanted")
    servers = [event["pid"] for event in job.events("server_started") if event["rank"] == 1]
    armed.write_text(str(servers[0]))
    job.go_to(9)
    assert "A device's server of rank 1 has ended meanwhile" in job.wait_for("snapshot_failed")["text"]
    assert not armed.exists()
    assert [event["pid"] for event in job.events("server_ended")][:1] == servers[:1]
    job.wait_for("recovered")
    job.go_to(13)
    step = job.wait_for("snapshot")["step"]
    result = job.finish()
    assert result.status == 0, result.err
    assert [*job.finals, *job.logs] == undisturbed_job
    assert [event["step"] for event in job.events("gone_back")][:1] == [step]


def test_a_full_disk_harms_no_training(launcher: Launcher, program: str, undisturbed_job: list[str]) -> None:
    folder = launcher.directory / "checkpoints"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(folder)], check=True)
    try:
        job = Job(launcher, program=program)
        job.go_to(9)
        text = job.wait_for("snapshot_failed")["text"]
        assert re.search(r"it needs .* beside the one before, and .* are free", text), text
        result = job.finish()
        assert result.status == 0, result.err
        assert result.err.count("a snapshot could not be made") == 1
        assert [*job.finals, *job.logs] == undisturbed_job
        assert list(folder.glob("*snapshot-*")) == []
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_what_can_not_be_dumped_is_said_at_the_start(
    launcher: Launcher, program: str, undisturbed_job: list[str]
) -> None:
    script = SCRIPT.replace("\nmain()\n", '\nring = dist.TCPStore("127.0.0.1", 0, is_master=True)\nmain()\n')
    job = Job(launcher, program=program, script=script)
    result = job.finish()
    assert result.status == 0, result.err
    assert "no snapshots are made: Process" in result.err
    assert "has an io_uring" in result.err
    assert [*job.finals, *job.logs] == undisturbed_job
    assert job.events("snapshot_wanted") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mode", "user"], "--snapshot-every: only --mode transparent"),
        (["--mode", "transparent", *TWO_HOSTS, "--broken-device", "exchange"], "--snapshot-every: not yet"),
        (["--mode", "transparent", *TWO_HOSTS, "--node-rank", "2"], "--node-rank 2: with --nnodes 2 it is"),
        (["--mode", "transparent"], "--snapshot-every needs --checkpoint-dir"),
    ],
)
def test_what_snapshots_need_is_said(launcher: Launcher, words: list[str], said: str) -> None:
    command = [*JITCKPT, "run", "--device", "softgpu", "--snapshot-every", "5"]
    result = launcher.run(*command, *words, *PLAIN)
    assert result.status == 2
    assert said in result.err


def test_without_criu_no_job_begins(launcher: Launcher) -> None:
    words = ["--mode", "transparent", "--checkpoint-dir", "job", "--snapshot-every", "5"]
    nowhere = f"{environment.CRIU.name}=/nowhere/criu"
    result = launcher.run("env", nowhere, *JITCKPT_RUN, "--device", "softgpu", *words, *PLAIN)
    assert result.status != 0
    assert "--snapshot-every: /nowhere/criu can't be run" in result.err
