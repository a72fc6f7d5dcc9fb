"""Workers that were started before they were needed are as good as new ones."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from launcher import JITCKPT_RUN, Launcher
from programs_of_tests import text_of

from jitckpt.events import FILE_NAME, Event, read_events

RUN = [*JITCKPT_RUN, "--warm-spares", "1", "--checkpoint-dir", "ckpt"]

# Fails in its first life; what it finds then and in the next life it writes down.
FAILS_ONCE = text_of("warm_spares_fails_once")


def events(launcher: Launcher) -> list[Event]:
    """Those that are there so far; of the newest a reader may see the half."""
    folder = launcher.directory / "ckpt"
    return read_events(folder)[0] if (folder / FILE_NAME).exists() else []


def seen(launcher: Launcher, restart: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((launcher.directory / f"seen-{restart}-{rank}.json").read_text())
    return found


def have_spares(launcher: Launcher) -> bool:
    return any(event["event"] == "spares_started" for event in events(launcher))


def spares(launcher: Launcher, agent: int) -> list[int]:
    """The spares, which are the agent's children, and the process that they are forked from."""
    found = []
    for pid in launcher.survivors():
        # What stands between the template and a spare may be gone by now.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and b"jitckpt.worker.spare" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def is_dead(pid: int) -> bool:
    """Whether it is a zombie, or not even that any more: then its sockets are closed."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_spare_finds_what_a_new_process_would(launcher: Launcher) -> None:
    script = launcher.script(FAILS_ONCE)
    process = launcher.start(
        *RUN, "--nproc-per-node", "2", "--log-dir", "logs", "-r", "3", script, "--an", "argument"
    )
    launcher.wait_until(lambda: have_spares(launcher))
    (launcher.directory / "both-first-steps").touch()
    result = launcher.finish(process)
    assert result.status == 0, result.err
    assert [event["rank"] for event in events(launcher) if event["event"] == "spare_used"] == [0, 1]
    for rank in (0, 1):
        cold, warm = seen(launcher, 0, rank), seen(launcher, 1, rank)
        assert (cold.pop("warm"), warm.pop("warm")) == (False, True)
        assert (cold.pop("restart"), warm.pop("restart")) == ("0", "1")
        assert (cold.pop("restart_of_ours"), warm.pop("restart_of_ours")) == ("0", "1")
        assert cold == warm
        (logs,) = launcher.directory.glob(f"logs/*/attempt_1/{rank}")
        assert (logs / "stdout.log").read_text() == "out 1\n"
        assert (logs / "stderr.log").read_text() == "err 1\n"


def test_a_spare_runs_a_module_and_ends_with_its_status(launcher: Launcher) -> None:
    launcher.script(FAILS_ONCE + "else:\n    sys.exit(7)", "trainer.py")
    launcher.script(
        """
        import runpy
        runpy.run_path("trainer.py", run_name="__main__")
        """,
        "fails_once.py",
    )
    process = launcher.start(
        *RUN, "--max-restarts", "1", "--nproc-per-node", "2", "-m", "fails_once", "--an", "argument"
    )
    launcher.wait_until(lambda: have_spares(launcher))
    (launcher.directory / "both-first-steps").touch()
    result = launcher.finish(process)
    assert result.status == 1
    assert "exitcode  : 7" in result.err
    cold, warm = seen(launcher, 0, 1), seen(launcher, 1, 1)
    assert warm["warm"]
    assert warm["argv"] == cold["argv"]


def test_with_a_warm_start_no_worker_loads_torch_itself(launcher: Launcher) -> None:
    script = launcher.script(FAILS_ONCE)
    process = launcher.start(*RUN, "--warm-spares", "0", "--warm-start", "--nproc-per-node", "2", script)
    # Who is late when the other dies is ended before it has written down what it found.
    launcher.wait_until(lambda: [event["event"] for event in events(launcher)].count("first_step") == 2)
    (launcher.directory / "both-first-steps").touch()
    result = launcher.finish(process)
    assert result.status == 0, result.err
    assert [event["rank"] for event in events(launcher) if event["event"] == "spare_used"] == [0, 1, 0, 1]
    assert all(seen(launcher, restart, rank)["warm"] for restart in (0, 1) for rank in (0, 1))


def test_a_dead_spare_does_no_harm(launcher: Launcher) -> None:
    script = launcher.script(FAILS_ONCE)
    process = launcher.start(*RUN, "--nproc-per-node", "2", script)
    launcher.wait_until(lambda: have_spares(launcher))
    launcher.wait_until(lambda: len(spares(launcher, process.pid)) == 3)
    killed = spares(launcher, process.pid)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    launcher.wait_until(lambda: all(map(is_dead, killed)))
    (launcher.directory / "both-first-steps").touch()
    result = launcher.finish(process)
    assert result.status == 0, result.err
    assert not seen(launcher, 1, 0)["warm"]
    texts = [event["text"] for event in events(launcher) if event["event"] == "warning"]
    assert any("could not be told to become a worker" in text for text in texts)


def test_spares_end_with_a_killed_agent(launcher: Launcher) -> None:
    script = launcher.script(FAILS_ONCE)
    process = launcher.start(*RUN, "--save-deadline", "1", "--nproc-per-node", "2", script)
    launcher.wait_until(lambda: have_spares(launcher))
    process.kill()
    # The ranks, which hang, have the time of --save-deadline. The fixture waits until nothing of it is left.


# As megatron-core and all that brings its own operators: it asks whether there is CUDA when it is imported.
WITH_OPERATORS = text_of("warm_spares_with_operators")


def test_a_module_that_asks_for_cuda_costs_no_restart(launcher: Launcher) -> None:
    command = [*RUN, "--device", "softgpu", "--nproc-per-node", "2", "--max-restarts", "1"]
    fault = ["--fault", "rank=1 step=8 phase=backward kind=kill"]
    launcher.succeed(*command, *fault, launcher.script(WITH_OPERATORS))
    assert sum(event["event"] == "spare_used" for event in events(launcher)) == 2
