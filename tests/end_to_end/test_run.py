"""`jitckpt run` as a command: what it does as torchrun does, and what it does beyond."""

import errno
import json
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
from launcher import JITCKPT, JITCKPT_RUN, LIMIT, TORCHRUN, Launcher

from jitckpt.agent.control.requests import SAME_REQUEST_SECONDS
from jitckpt.cli.run_hosts import PORT_CLAIM


def without_ours(environment: dict[str, str]) -> dict[str, str]:
    # Torchrun's address is a name, which may mean several addresses; ours is the one where the store listens.
    differs = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PWD", "_"}
    ours = re.compile("JITCKPT_|SOFTGPU_|LD_PRELOAD|LD_LIBRARY_PATH")
    return {k: v for k, v in environment.items() if k not in differs and not ours.match(k)}


def test_the_workers_environment_is_torchruns(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import json, os, sys
        with open(sys.argv[1] + os.environ["RANK"], "w") as file:
            json.dump({"environment": dict(os.environ), "arguments": sys.argv[2:]}, file)
        """
    )
    environments = {}
    for name, command in (("torchrun", TORCHRUN), ("jitckpt", JITCKPT_RUN)):
        options = ["--nproc-per-node", "2", "--role", "trainer", "--max-restarts", "2"]
        launcher.succeed(*command, *options, script, str(launcher.directory / name), "--flag", "a b")
        for rank in (0, 1):
            environments[name, rank] = json.loads((launcher.directory / f"{name}{rank}").read_text())
    for rank in (0, 1):
        theirs, ours = environments["torchrun", rank], environments["jitckpt", rank]
        assert ours["arguments"] == theirs["arguments"] == ["--flag", "a b"]
        assert without_ours(ours["environment"]) == without_ours(theirs["environment"])
        assert ours["environment"]["MASTER_ADDR"] == "127.0.0.1"
        assert ours["environment"]["OMP_NUM_THREADS"] == "1"
        assert "libjitckpt.so" in ours["environment"]["LD_PRELOAD"]


def normalised(text: str) -> str:
    """Leave out what differs from run to run: times, process ids, folders."""
    block = text[text.index("torch.distributed.elastic.multiprocessing.errors.ChildFailedError") :]
    block = block[: block.rindex("====")]
    block = re.sub(r"time +: .*|\(pid: \d+\)|PID \d+", "", block)
    return re.sub(r"error_file: /.*/attempt_0", "error_file: ", block)


@pytest.mark.parametrize(
    "failure", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "raise ValueError('no')", "recorded()"]
)
def test_a_failed_jobs_status_and_words_are_torchruns(launcher: Launcher, failure: str) -> None:
    script = launcher.script(
        f"""
        import os, sys, time
        def recorded():
            from torch.distributed.elastic.multiprocessing.errors import record
            record(lambda: 1 / 0)()
        if os.environ["RANK"] == "1":
            {failure}
        time.sleep(1000)
        """
    )
    torchrun = launcher.start(*TORCHRUN, "--nproc-per-node", "2", script)
    jitckpt = launcher.start(*JITCKPT_RUN, "--nproc-per-node", "2", "--max-restarts", "0", script)
    theirs, ours = launcher.finish(torchrun), launcher.finish(jitckpt)
    assert ours.status == theirs.status == 1
    assert normalised(ours.err) == normalised(theirs.err)


def tree(root: Path) -> dict[str, list[str]]:
    """Return the lines of the files below `root`; the folder of a run has a random name.

    Only the lines of one rank have an order: in a file of several ranks whoever came first stands first.
    """
    return {
        "/".join(path.relative_to(root).parts[1:]): (
            sorted(path.read_text().splitlines())
            if path.name.startswith("filtered_")
            else path.read_text().splitlines()
        )
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "options",
    [
        ["-r", "3"],
        ["-t", "0:1,1:2"],
        ["-r", "1:3", "-t", "0:3", "--local-ranks-filter", "1"],
        ["--local-ranks-filter", "0"],
        ["-t", "3", "--duplicate-stdout-filters", "keep"],
    ],
)
def test_logs_are_torchruns(launcher: Launcher, options: list[str]) -> None:
    script = launcher.script(
        """
        import os, sys
        rank = os.environ["RANK"]
        # Whole lines at once: torchrun shows a part of a line as soon as it is there.
        for line in ("keep this", "and this"):
            sys.stdout.write(f"{line} {rank}\\n")
            sys.stderr.write(f"error: {line} {rank}\\n")
        """
    )
    logs = {name: launcher.directory / f"logs-{name}" for name in ("torchrun", "jitckpt")}
    processes = {
        name: launcher.start(
            *command, "--nproc-per-node", "2", "--log-dir", str(logs[name]), *options, script
        )
        for name, command in (("torchrun", TORCHRUN), ("jitckpt", JITCKPT_RUN))
    }
    seen = {}
    for name, process in processes.items():
        result = launcher.finish(process)
        assert result.status == 0, result.err
        errors = sorted(line for line in result.err.splitlines() if "error:" in line)
        seen[name] = (sorted(result.out.splitlines()), errors, tree(logs[name]))
    assert seen["jitckpt"] == seen["torchrun"]


def test_a_failed_job_is_restarted_with_a_fresh_store(launcher: Launcher) -> None:
    """What the workers before have left in the store must not mislead those after."""
    script = launcher.script(
        """
        import sys
        from fake_worker import *
        from torch.distributed import TCPStore
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        write_line(f"attempt {attempt} rank {RANK} {'stale' if store.check(['id']) else 'fresh'}")
        store.set(f"seen {RANK}", attempt)
        store.wait(["seen 0", "seen 1"])
        if RANK == 0:
            store.set("id", attempt)
        sys.exit(attempt != "2")
        """
    )
    out = launcher.succeed(*JITCKPT_RUN, "--nproc-per-node", "2", script)
    expected = [f"attempt {attempt} rank {rank} fresh" for attempt in range(3) for rank in (0, 1)]
    assert sorted(out.splitlines()) == expected


def test_restarts_are_counted(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os
        import torch  # before that an exit is a mistake, which is not tried more than twice
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["JITCKPT_RESTART"])
        raise SystemExit(1)
        """
    )
    assert launcher.run(*JITCKPT_RUN, "--max-restarts", "1", script).out == "attempt 0 0\nattempt 1 1\n"
    assert launcher.run(*JITCKPT_RUN, script).out.splitlines()[-1] == "attempt 3 3"


def test_modules_programs_and_run_path(launcher: Launcher) -> None:
    script = launcher.script("import sys; print(__name__, sys.argv[1:])", "a_module.py")
    for options in (["-m", "a_module"], [script], ["--run-path", script]):
        result = launcher.run(*JITCKPT_RUN, *options, "x")
        assert (result.status, result.out) == (0, "__main__ ['x']\n"), result.err
    result = launcher.run(*JITCKPT_RUN, "--no-python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert (result.status, result.out) == (0, "rank 0 of 1\n"), result.err


def test_nothing_is_left_in_the_temporary_folder(launcher: Launcher) -> None:
    script = launcher.script("import os; os._exit(os.environ['JITCKPT_RESTART'] == '0')")
    before = sorted(launcher.directory.iterdir())
    assert launcher.run(*JITCKPT_RUN, script).status == 0
    assert launcher.run(*JITCKPT_RUN, "--max-restarts", "0", script).status == 1
    assert sorted(launcher.directory.iterdir()) == before


def test_a_killed_rank_costs_a_save_and_a_restart(launcher: Launcher) -> None:
    """The whole way with ranks that only play: order, save, restart, restore, and the story in the end."""
    script = launcher.script(
        """
        from fake_worker import *
        register()
        if RESTART == 1:
            restore(7)
            say(protocol.Finished(RANK, 9))
        elif RANK == 0:
            open("there", "w")
            save(7)
        else:
            wait_for("there")
            die()
        """
    )
    result = launcher.run(*JITCKPT_RUN, "--nproc-per-node", "2", "--checkpoint-dir", "ckpt", script)
    assert result.status == 0, result.err
    last = [line for line in result.err.splitlines() if line.startswith("jitckpt: ")][-4:]
    assert last[0].endswith("rank 1 was killed by SIGKILL.")
    assert re.fullmatch(r"jitckpt: The state after step 7 was saved in .* s: 1 kB by rank 0\.", last[1])
    assert "Restart 1 went on from step 7, with at most 1 minibatch done again" in last[2]
    assert last[3] == "jitckpt: The job succeeded after 1 restart."
    events = [json.loads(line) for line in (launcher.directory / "ckpt" / "events.jsonl").open()]
    assert events[0]["event"] == "job_started"
    assert events[-1]["event"] == "job_ended"
    shown = launcher.run(*JITCKPT, "timeline", "ckpt")
    assert shown.status == 0
    assert shown.out.splitlines()[-4:] == [line.removeprefix("jitckpt: ") for line in last]


def test_a_closed_terminal_stops_no_recovery(launcher: Launcher) -> None:
    script = launcher.script(
        """
        from fake_worker import *
        if RESTART == 0 and RANK == 0:
            register()
            open("there", "w")
            save(7)
        elif RESTART == 0:
            wait_for("there")
            die()
        """
    )
    process = launcher.start(*JITCKPT_RUN, "--nproc-per-node", "2", "--checkpoint-dir", "ckpt", script)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(timeout=LIMIT) == 0
    events = (launcher.directory / "ckpt" / "events.jsonl").read_text()
    assert '"event": "saved"' in events
    assert '"outcome": "succeeded"' in events


def test_a_fault_fires_once_in_the_life_of_the_job(launcher: Launcher) -> None:
    script = launcher.script(
        """
        from fake_worker import *
        from jitckpt.faults import injection
        register()
        armed = injection.from_environment(os.environ["JITCKPT_FAULTS"], RANK)
        write_line(f"restart {RESTART} rank {RANK} {[str(fault) for fault in armed]}")
        if RANK == 1 and armed:
            report = lambda fault: say(protocol.Fault(RANK, str(fault), fault.step, fault.phase))
            injection.Injector(armed, report, print, print).on_phase(armed[0].step, armed[0].phase)
        elif RANK == 0 and RESTART < 2:
            save(7)
        """
    )
    once, twice = "rank=1 step=3 phase=forward kind=kill", "rank=1 step=5 phase=optimizer kind=exit"
    options = ["--nproc-per-node", "2", "--checkpoint-dir", "ckpt", "--fault", once, "--fault", twice]
    result = launcher.run(*JITCKPT_RUN, *options, script)
    assert result.status == 0, result.err
    assert sorted(line for line in result.out.splitlines() if "rank 1" in line) == [
        f"restart 0 rank 1 {[once, twice]}",
        f"restart 1 rank 1 {[twice]}",
        "restart 2 rank 1 []",
    ]
    assert f"(rehearsed: {once})" in result.err
    assert f"(rehearsed: {twice})" in result.err


def test_sigterm_saves_and_then_ends_with_the_status_of_run_it_again(launcher: Launcher) -> None:
    script = launcher.script("from fake_worker import *; register(); open(f'there{RANK}', 'w'); save(5)")
    process = launcher.start(*JITCKPT_RUN, "--nproc-per-node", "2", "--checkpoint-dir", "ckpt", script)
    launcher.wait_until(lambda: all((launcher.directory / f"there{rank}").exists() for rank in (0, 1)))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 75
    assert "the state after step 5 is saved" in err
    assert err.splitlines()[-2:] == [
        "jitckpt: The job was ended by SIGTERM.",
        f"jitckpt: The state after step 5 lies in {launcher.directory / 'ckpt'}; "
        "the same command goes on from there.",
    ]


def test_plain_workers_get_the_signal_itself(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import signal, sys, time
        def end(signum, frame):
            print("got", signal.Signals(signum).name, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGINT, end)
        open("there", "w")
        time.sleep(1000)
        """
    )
    process = launcher.start(*JITCKPT_RUN, script)
    launcher.wait_until((launcher.directory / "there").exists)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (1, "got SIGINT\n")


def test_a_second_signal_ends_all_at_once(launcher: Launcher) -> None:
    script = launcher.script(
        "from fake_worker import *; register(); ignore_sigterm(); open('there', 'w'); await_order(); "
        "open('ordered', 'w'); hang()"
    )
    process = launcher.start(*JITCKPT_RUN, "--checkpoint-dir", "ckpt", script)
    launcher.wait_until((launcher.directory / "there").exists)
    process.send_signal(signal.SIGINT)
    launcher.wait_until((launcher.directory / "ordered").exists)
    time.sleep(SAME_REQUEST_SECONDS)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert "The job was ended by SIGINT." in err


def test_workers_die_with_a_killed_agent_unless_they_save_by_themselves(launcher: Launcher) -> None:
    """The registered one gets the time of --save-deadline; here it hangs and is ended then."""
    script = launcher.script(
        """
        from fake_worker import *
        ignore_sigterm()
        if RANK == 0:
            register()
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
        open(f"there{RANK}", "w")
        if RANK == 0:
            AGENT.recv(1)  # the agent's death
            open("alone", "w")
        hang()
        """
    )
    process = launcher.start(
        *JITCKPT_RUN, "--nproc-per-node", "2", "--checkpoint-dir", "ckpt", "--save-deadline", "2", script
    )
    launcher.wait_until(lambda: all((launcher.directory / f"there{rank}").exists() for rank in (0, 1)))
    events = launcher.directory / "ckpt" / "events.jsonl"
    launcher.wait_until(lambda: events.exists() and "registered" in events.read_text())
    process.kill()
    launcher.wait_until((launcher.directory / "alone").exists)
    launcher.wait_until(lambda: launcher.survivors() == [])


def test_the_program_must_exist_on_every_start(launcher: Launcher) -> None:
    """A program that vanishes before the restart: an error, and no worker is left."""
    program = launcher.directory / "program"
    shutil.copy("/bin/sh", program)
    result = launcher.run(
        *JITCKPT_RUN, "--nproc-per-node", "2", "--no-python", str(program), "-c", f"rm -f {program}; exit 1"
    )
    assert result.status == 1
    assert "FileNotFoundError" in result.err


def test_without_a_free_device_a_suspect_one_ends_the_job(launcher: Launcher) -> None:
    script = launcher.script(
        """
        from fake_worker import *
        register()
        if RANK == 1:
            wait_for(f"there{RESTART}")
            die()
        open(f"there{RESTART}", "w")
        save(7 + RESTART)
        """
    )
    options = [
        "--nproc-per-node",
        "2",
        "--device",
        "softgpu",
        "--checkpoint-dir",
        "ckpt",
        "--exclude-suspect",
    ]
    result = launcher.run(*JITCKPT_RUN, *options, script)
    assert result.status == 1
    assert re.search("rank 1 has failed twice on device 1 of .*, which is suspect now", result.err), (
        result.err
    )
    reason = "2 ranks need a device each, device 1 is suspect, and 0 others are free"
    assert f"the job can't go on here: {reason} (--exclude-suspect)." in result.err
    assert "The job failed after 1 restart." in result.err
    assert "The state after step 8 lies in" in result.err


def bound(other: socket.socket, address: tuple[str, int] | str) -> bool:
    """Return whether this socket has the address from here on. A job that has it may end at any moment."""
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        other.bind(address)
        other.listen()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def test_two_jobs_on_one_host_need_no_port(launcher: Launcher) -> None:
    with socket.socket() as other:
        launcher.wait_until(lambda: bound(other, ("", 29500)))
        result = launcher.run(*JITCKPT, "run", launcher.script("print('done')"))
    assert (result.status, result.out) == (0, "done\n"), result.err
    assert "jitckpt: port 29500 is in use, perhaps by another job; this one takes a free one." in result.err


def test_of_two_jobs_that_begin_at_once_one_takes_another_port(launcher: Launcher) -> None:
    with socket.socket(socket.AF_UNIX) as other:  # has found the port free, but not taken it yet
        launcher.wait_until(lambda: bound(other, PORT_CLAIM))
        result = launcher.run(*JITCKPT, "run", launcher.script("print('done')"))
    assert (result.status, result.out) == (0, "done\n"), result.err
    assert "jitckpt: port 29500 is in use, perhaps by another job; this one takes a free one." in result.err


def test_a_port_that_was_asked_for_and_is_taken_ends_the_job_at_once(launcher: Launcher) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        command = ["run", "--master-port", str(port), launcher.script("print('done')")]
        result = launcher.run(*JITCKPT, *command)
    assert (result.status, result.out) == (1, ""), result.err
    assert "The job's store could not be started: " in result.err
    assert f"port {port}" in result.err
    assert "--standalone" in result.err
