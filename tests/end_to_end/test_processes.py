"""Nothing of a job outlives it, or its launcher, wherever it has gone; the launcher stays as it began."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from launcher import JITCKPT_RUN, Launcher, Result
from programs_of_tests import text_of

from jitckpt.system import process_tree

COLD = [*JITCKPT_RUN, "--warm-spares", "0", "--checkpoint-dir", "ckpt"]
WANDERERS = text_of("processes_wanderers")


def children(pid: int) -> list[process_tree.Process]:
    return [process for process in process_tree.everybody() if process.parent == pid]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""  # it has ended meanwhile


def guardians(agent: int) -> list[int]:
    return [
        child.pid for child in children(agent) if b"jitckpt.agent.processes.guardian" in command_of(child.pid)
    ]


def start(launcher: Launcher, text: str, *options: str) -> int:
    """Start a job of two ranks that have started processes of their own, and hang; return the launcher's."""
    script = launcher.script(WANDERERS + text + "\nfake_worker.hang()")
    process = launcher.start(*COLD, *options, "--nproc-per-node", "2", script)
    launcher.wait_until(lambda: len(list(launcher.directory.glob("there-*"))) == 2)
    return process.pid


@pytest.mark.parametrize("text", ["", "fake_worker.register(); open(f'there-{fake_worker.RANK}', 'w')"])
def test_nothing_outlives_a_killed_launcher(launcher: Launcher, text: str) -> None:
    agent = start(launcher, text, "--save-deadline", "1")
    launcher.wait_until(lambda: len(launcher.survivors()) >= 8)  # launcher, guardian, two ranks, four others
    os.kill(agent, signal.SIGKILL)
    launcher.wait_until(lambda: launcher.survivors() == [])


def test_a_killed_guardian_is_replaced(launcher: Launcher) -> None:
    agent = start(launcher, "fake_worker.register()", "--save-deadline", "1")
    (first,) = guardians(agent)
    os.kill(first, signal.SIGKILL)
    launcher.wait_until(lambda: guardians(agent) not in ([], [first]))
    os.kill(agent, signal.SIGKILL)
    launcher.wait_until(lambda: launcher.survivors() == [])


def test_what_a_worker_started_ends_with_the_job(launcher: Launcher) -> None:
    script = launcher.script(WANDERERS)
    launcher.succeed(*COLD, "--nproc-per-node", "2", script)
    assert launcher.survivors() == []


ORPHANS = text_of("processes_orphans")


def test_orphans_that_end_are_taken_note_of(launcher: Launcher) -> None:
    process = launcher.start(*COLD, launcher.script(ORPHANS))
    launcher.wait_until((launcher.directory / "there-0").exists)
    launcher.wait_until(lambda: not any(child.dead for child in children(process.pid)))
    (launcher.directory / "seen").touch()
    ended = launcher.finish(process)
    assert ended.status == 0, ended.err


SPAWNS = """
    import fake_worker
    import multiprocessing, os
    from pathlib import Path
    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=fake_worker.hang)
        child.start()
        assert queue.empty()
        locks = (queue._rlock, queue._wlock, queue._sem)
        names = ["/dev/shm/sem." + lock._semlock.name.strip("/") for lock in locks]
        assert all(map(os.path.exists, names))
        Path("names").write_text(" ".join(names))
        Path("names").rename("there-0")
        HOW
    """


@pytest.mark.parametrize("how", ["fake_worker.die()", "fake_worker.hang()"])
def test_semaphores_go_with_a_killed_worker(launcher: Launcher, how: str) -> None:
    """Python's resource tracker removes them once all that have them are gone, so it must outlive them."""
    process = launcher.start(*COLD, "--max-restarts", "0", launcher.script(SPAWNS.replace("HOW", how)))
    told = launcher.directory / "there-0"
    launcher.wait_until(told.exists)
    if "hang" in how:
        process.kill()
    assert launcher.finish(process).status != 0
    launcher.wait_until(lambda: launcher.survivors() == [])
    names = set(told.read_text().split())
    assert len(names) == 3
    assert not any(map(os.path.exists, names))


WAITS_FOR_SPARES = text_of("processes_waits_for_spares")


def spares(agent: int) -> list[int]:
    return [child.pid for child in children(agent) if b"jitckpt.worker.spare" in command_of(child.pid)]


@pytest.mark.parametrize("when", ["at once", "loaded"])
def test_stopped_spares_cost_nothing(launcher: Launcher, when: str) -> None:
    """Stopped while the template loads torch, or once there is a spare."""
    run = [*JITCKPT_RUN, "--warm-spares", "1", "--checkpoint-dir", "ckpt", "--max-restarts", "1"]
    process = launcher.start(*run, launcher.script(WAITS_FOR_SPARES))
    wanted = 1 if when == "at once" else 2
    launcher.wait_until(lambda: len(spares(process.pid)) >= wanted)
    for pid in spares(process.pid):
        os.kill(pid, signal.SIGSTOP)
    (launcher.directory / "stopped").touch()
    begun = time.monotonic()
    ended = launcher.finish(process)
    assert ended.status == 0, ended.err
    assert "cold" in ended.out
    assert time.monotonic() - begun < 110  # it was 120 s more


RESTARTS = 20
FAILS = text_of("processes_fails")


def test_a_launcher_that_restarts_often_stays_as_it_was(launcher: Launcher) -> None:
    script = launcher.script(FAILS.replace("LAST", str(RESTARTS)))
    ended: Result = launcher.run(*COLD, "--max-restarts", str(RESTARTS), script)
    assert ended.status == 0, ended.err
    facts = [json.loads(line) for line in (launcher.directory / "facts.jsonl").read_text().splitlines()]
    assert len(facts) == RESTARTS + 1
    for name in ("descriptors", "threads"):
        later = [one[name] for one in facts[5:]]
        assert max(later) - min(later) <= 2, [one[name] for one in facts]
    assert max(one["zombies"] for one in facts) <= 1
